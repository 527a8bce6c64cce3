"""What tests share: models that are only looked at, functions that fail, calls that are noted, threads and who works in them."""

import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from texts import make_chunks

import kvrag.engine
from kvrag import Chunk, KVRagEngine, RepairConfig, runtime
from kvrag.generate.request import PrefillRequest, Request
from kvrag.kv.layers import layer_of
from kvrag.model import CausalLM
from kvrag.prompt.planner import PromptPlanner
from kvrag.testing.models import tiny_model
from kvrag.types import ChunkKV

HEEDED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def heed_signals() -> None:
    """Heed signals that a job in a shell's background, nohup and some CI ignore.

    Tests and their children that are sent one would wait for ever.
    """
    for number, handler in HEEDED.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def mapped(kv: ChunkKV, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkKV:
    """The chunk with a change applied to every tensor."""
    layers = (layer_of(layer.dtype, [*map(change, layer.tensors)]) for layer in kv.layers)
    return ChunkKV(tuple(layers))


@cache
def lm_of(name: str = "llama") -> CausalLM:
    """A tiny model that nobody changes, made once."""
    return CausalLM(tiny_model(name))


def all_answers_are_right(patch: pytest.MonkeyPatch) -> None:
    """Let any answer to a planted fact count as right: a random model knows none."""
    for module in ("answers", "calibrate"):
        patch.setattr(f"kvrag.evaluate.{module}.IS_RIGHT", 0.0)


def raising(kind: type[Exception], *words: object) -> Callable[..., Any]:
    """Return a function that takes anything and raises this error."""

    def fail(*_: Any, **__: Any) -> Any:
        raise kind(*words)

    return fail


def request_of(engine: KVRagEngine, prompt: Any, **options: Any) -> Request:
    """Return the request that an engine makes of a prompt and its options."""
    return engine._resolved(PrefillRequest(prompt=prompt, **options))


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Note what a function returns, at each of its calls from now on."""
    returned: list[Any] = []
    real = getattr(owner, name)

    def noting(*args: Any, **options: Any) -> Any:
        returned.append(real(*args, **options))
        return returned[-1]

    patch.setattr(owner, name, noting)
    return returned


def at_once(*actions: Callable[[], object]) -> None:
    """Run actions in threads of their own until all are over."""
    running = [threading.Thread(target=action) for action in actions]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


OWN = ("kvrag-generate", "kvrag-prefetch")


def settle(timeout_s: float = 30.0) -> None:
    """Wait until no thread of kvrag has work."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        is_busy = any(pool._jobs or any(pool._threads.values()) for pool in list(runtime._pools))
        if not is_busy and not any(thread.name in OWN for thread in threading.enumerate()):
            return
        time.sleep(0.005)
    raise AssertionError("kvrag's threads are still at work")


def working_threads(monkeypatch: Any) -> set[int]:
    """Return the threads that load a model, or compute with one, from now on."""
    seen: set[int] = set()

    def noting(original: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.add(threading.get_ident())
            return original(*args, **kwargs)

        return noted

    monkeypatch.setattr(kvrag.engine, "load", noting(kvrag.engine.load))
    monkeypatch.setattr(CausalLM, "forward", noting(CausalLM.forward))
    return seen


def kept(llm: Any, chunks: list[str]) -> list[int]:
    """Which of the chunks have KV."""
    return [i for i, chunk in enumerate(chunks) if llm.explain(f"{chunk}\n\n?").hits]


def assert_reuse_is_exact(engine: KVRagEngine, tolerance: float = 1e-3) -> None:
    """Promises 1 and 2: all rows repaired, or one chunk behind its prefix, is a full prefill; and requests change no fingerprint."""
    chunks, before = make_chunks(3, words=30), engine.loaded.fingerprint
    engine.precompute(chunks)
    moved = [
        engine.prefix_text,
        Chunk(chunks[2]),
        "\n\n",
        Chunk(chunks[0]),
        "\n\nWho keeps the ledger?",
    ]
    alone = [engine.prefix_text, Chunk(chunks[1]), "\n\nWho keeps the ledger?"]
    for prompt, strategy in ((moved, "all"), (alone, "none")):
        reused = engine.prefill(prompt, mode="stitch", repair=RepairConfig(strategy=strategy))
        assert reused.exactness == "exact"
        assert reused.cached_tokens + reused.repaired_tokens > 30
        assert (
            float((reused.logits - engine.prefill(prompt, mode="full").logits).abs().max())
            < tolerance
        )
    assert engine.loaded.fingerprint == before


class Forwards:
    """Counts forwards of the model, and may slow them down or let them fail."""

    def __init__(
        self, monkeypatch: Any, *, seconds: float = 0.0, error: Exception | None = None
    ) -> None:
        self.count = 0
        lock, original = threading.Lock(), CausalLM.forward

        def forward(model: CausalLM, *args: Any, **kwargs: Any) -> Any:
            with lock:
                self.count += 1
            time.sleep(seconds)
            if error is not None:
                raise error
            return original(model, *args, **kwargs)

        monkeypatch.setattr(CausalLM, "forward", forward)

    def settled(self) -> int:
        """Wait until nothing decodes, and return the number of forwards."""
        settle()
        return self.count


def scripted(patch: pytest.MonkeyPatch, engine: KVRagEngine, *answers: str) -> None:
    """Let the model's own head choose the tokens of these answers, one for each prompt that is planned from now on, and then its end.

    The last answer is given to all further prompts.
    """
    encoder, head, texts = (
        engine.loaded.encoder,
        engine.loaded.lm.model.lm_head,
        chain(answers, repeat(answers[-1])),
    )
    ids: Iterator[int] = iter(())
    plan = PromptPlanner.plan

    def next_answer(self: PromptPlanner, *args: Any) -> Any:
        nonlocal ids
        ids = chain(encoder.live_ids(next(texts)), repeat(encoder.tokenizer.eos_token_id))
        return plan(self, *args)

    def say(module: Any, args: Any, logits: Any) -> Any:
        logits = logits.clone()
        logits[..., -1, next(ids)] += 1e4
        return logits

    patch.setattr(PromptPlanner, "plan", next_answer)
    patch.setattr(head, "_forward_hooks", OrderedDict({0: say}))
