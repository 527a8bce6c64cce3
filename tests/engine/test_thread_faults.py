"""What threads and switches must survive: process exit, Ctrl-C, fork, and many requests at once."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
from texts import make_chunks

import kvrag.generate.pipeline
from kvrag import KVRagEngine, RepairConfig
from kvrag.errors import KVRagError
from kvrag.generate.scheduler import MAX_RUNNING, Scheduler

CHUNKS = make_chunks(4, words=30, seed=3)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS[:3]) + "\n\nWho?"}]

FORKS = """
import os, sys, threading, time
import torch
from kvrag import KVRagEngine
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
for name, script in zip(sys.argv[2::2], sys.argv[3::2]):
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
for stream in (1, 2):
    os.dup2(os.open(f"{sys.argv[1]}/{name}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
exec(script)
"""

MAKE = """
engine = KVRagEngine.from_pretrained(tiny_model("llama"), tokenizer=tiny_tokenizer())
"""

BUSY = """
lm = engine.loaded.lm
real, begun = lm.forward, threading.Event()
def busy(*args, **options):  # a forward that is inside torch nearly all the time
    begun.set()
    for _ in range(100):
        a = torch.rand(300, 300)
        a @ a
    return real(*args, **options)
lm.forward = busy
"""

CLOSED = "stream = engine.stream('a b c', max_new_tokens=500); begun.wait(60); stream.close(); engine.close()"
ABANDONED = "next(engine.stream('a b c', max_new_tokens=500)); sys.exit(7)"

SLOW_LAYERS = """
from kvrag import runtime as threads
from kvrag.model.forward import Forward
def slow(*args, **options):
    begun.set()
    time.sleep(1)
    return update(*args, **options)
def told(*args, **options):
    try:
        return real(*args, **options)
    finally:
        print("left", flush=True)
lm.forward, update, Forward.update, threads.EXIT_WAIT_S = told, Forward.update, slow, 2
stream = engine.stream("a b c", max_new_tokens=2)
begun.wait(60)
"""

ANSWER = """
list(stream := engine.stream("a b c", max_new_tokens=3))
print(len(stream.result.token_ids))
"""

SCRIPTS = {
    "answers": MAKE + ANSWER,
    "closed": MAKE + BUSY + CLOSED,
    "abandoned": MAKE + BUSY + ABANDONED,
    "slow layers": MAKE + BUSY + SLOW_LAYERS,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run the scripts, one after the other, in forks of a process that only imported kvrag; give how each ended and what it wrote."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    folder, words = tmp_path_factory.mktemp("forks"), itertools.chain(*SCRIPTS.items())
    script = [sys.executable, "-c", FORKS, folder, *words]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    return {
        name: (int(code), *((folder / f"{name}.{stream}").read_text() for stream in (1, 2)))
        for name, code in zip(SCRIPTS, done.stdout.split(), strict=True)
    }


@pytest.mark.parametrize(("how", "code"), [("abandoned", 7), ("closed", 0)])
def test_the_process_ends_in_order_while_a_request_is_inside_torch(how, code, ended):
    found, _, told = ended[how]
    assert (found, "terminate" in told) == (code, False), told


def test_at_exit_a_forward_ends_at_its_next_layer(ended):
    """All its layers would take longer than the exit waits."""
    code, said, told = ended["slow layers"]
    assert (code, said) == (0, "left\n"), told


def test_after_a_fork_of_a_process_that_only_imported_kvrag_an_engine_works(ended):
    code, said, told = ended["answers"]
    assert (code, said) == (0, "3\n"), told


def test_ctrl_c_in_generate_stops_decoding_while_the_traceback_is_kept(engine, monkeypatch):
    real, forwards, interrupt = engine.loaded.lm.forward, [], threading.Event()

    def counted(*args, **options):
        forwards.append(1)
        if len(forwards) == 3:
            interrupt.set()
        return real(*args, **options)

    monkeypatch.setattr(engine.loaded.lm, "forward", counted)

    def press():
        interrupt.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as kept:
        engine.generate("a b c", max_new_tokens=3000)
    thread.join()
    assert kept.tb is not None
    assert _settles(forwards)


def _settles(forwards: list[int]) -> bool:
    """Whether forwards cease long before the answer would end."""
    seen = -1
    while seen != len(forwards) < 1500:
        seen = len(forwards)
        time.sleep(0.25)
    return len(forwards) < 1500


@pytest.mark.filterwarnings("ignore:This process")
@needs_fork
def test_an_engine_made_before_a_fork_says_in_the_child_where_to_make_it(engine, monkeypatch):
    """Also during a request, and so does one that the child makes: torch would wait for its parent's threads."""
    real, inside = engine.loaded.lm.forward, threading.Event()

    def slow(*args, **options):
        inside.set()
        time.sleep(0.2)
        return real(*args, **options)

    uses = [
        lambda: engine.generate(PROMPT, max_new_tokens=3),
        lambda: list(engine.stream(PROMPT)),
        lambda: engine.precompute(CHUNKS),
        lambda: engine.explain(PROMPT),
        lambda: engine.document_ids(),
        lambda: KVRagEngine(engine._options),
    ]

    def told():
        for use in uses:
            with pytest.raises(KVRagError, match=r"before .*after the fork.*gunicorn"):
                use()

    monkeypatch.setattr(engine.loaded.lm, "forward", slow)
    stream = engine.stream(PROMPT, max_new_tokens=2000)
    assert inside.wait(60)
    pid = os.fork()
    if not pid:
        try:
            threading.Timer(60, os._exit, [2]).start()
            told()
            os._exit(0)
        finally:
            os._exit(3)
    stream.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


async def test_many_requests_at_once_hold_few_buffers(engine, monkeypatch):
    num_bytes = (engine.prefill(PROMPT).prompt_tokens + 3) * engine.loaded.lm.kv_bytes_per_token
    real, alive, most = engine.loaded.lm.buffer, set[int](), [0]

    def buffer(*args, **options):
        made = real(*args, **options)
        alive.add(id(made))
        weakref.finalize(made.keys(0), alive.discard, id(made))
        most[0] = max(most[0], len(alive))
        return made

    monkeypatch.setattr(engine.loaded.lm, "buffer", buffer)
    room = Scheduler(MAX_RUNNING, 5 * num_bytes)
    monkeypatch.setattr(kvrag.generate.scheduler, "scheduler_of", lambda _: room)
    answers = await asyncio.gather(*[engine.agenerate(PROMPT, max_new_tokens=3) for _ in range(64)])
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert 1 <= most[0] <= 5
    assert room.load == (0, 0, 0)


async def test_a_request_that_is_cancelled_before_its_turn_never_runs(engine, monkeypatch):
    monkeypatch.setattr(kvrag.generate.pipeline, "prefill", lambda *_, **__: pytest.fail("it ran"))
    turns = Scheduler(1, 0)
    monkeypatch.setattr(kvrag.generate.scheduler, "scheduler_of", lambda _: turns)
    with turns.reservation(0):
        stream = engine.stream(PROMPT)
        task = asyncio.create_task(engine.agenerate(PROMPT))
        await asyncio.sleep(0.2)
        stream.cancel()
        task.cancel()
        assert list(stream) == []
        with pytest.raises(RuntimeError, match="left or cancelled before its end"):
            _ = stream.result
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("order", [(0, 1), (1,)])
def test_the_reason_why_auto_drops_reuse_is_kept_and_counted(engine, order):
    """Behind its prefix the first chunk is exact and stays; the others would cost more than they save."""
    engine.precompute(CHUNKS)
    text = "\n\n".join(CHUNKS[i] for i in order)
    result = engine.prefill(
        [{"role": "user", "content": f"{text}\n\nWho?"}], repair=RepairConfig(strategy="all")
    )
    is_dropped = len(order) > 1
    assert result.exactness == "exact"
    assert result.cached_tokens > 0
    assert ("would not pay" in str(result.fallback_reason)) == is_dropped
    assert engine.stats()["fallbacks"] == is_dropped
