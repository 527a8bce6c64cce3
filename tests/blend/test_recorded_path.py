"""Requests by recordings: what they ask of a device whose replays cost nothing, what they compute by replays that compute, and that
they give every slot back.
"""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeCuda, install, move
from kit import at_once, lm_of, raising, settle
from texts import make_chunks

import kvrag_kernels
from kvrag import Chunk, KVRagEngine, RepairConfig
from kvrag.blend import prefill
from kvrag.model import CausalLM, steps
from kvrag.testing.models import tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_host
from bench_ttft import orders, random_chunks

CHUNKS = make_chunks(6, words=60, seed=23)
SLOTS = 8192
FEW = 2048
"""Slots for replays that compute: their forwards go over all of them."""
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def prompt_of(question: str = "Who built the tower?", order=range(6)) -> list:
    parts = (part for at in order for part in (Chunk(CHUNKS[at]), "\n"))
    return ["Read this.\n", *parts, question]


PROMPT = prompt_of()


def replaying(compute):
    """Record a function whose replay computes."""
    compute()
    return compute


def replaying_on(fake: FakeCuda):
    """Record a function whose replay computes, and may neither wait for the device nor copy from or to the host."""

    def record(compute):
        compute()

        def replay():
            with fake.replay():
                return compute()

        return replay

    return record


def waits(fake: FakeCuda) -> list[str]:
    return [kind for kind, _ in fake.log if kind.startswith("wait") or kind.endswith("waits")]


@pytest.fixture
def engine(engine_of) -> KVRagEngine:
    made = engine_of(prefix="Read this.\n", repair=RepairConfig(recompute_ratio=0.1))
    made.precompute(CHUNKS)
    return made


# -- what a request asks of the host and of a device -------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """The engine of ``make bench-host``: 32 layers of width 64, and prompts of twelve chunks of 500 tokens in orders not seen before."""
    engine = bench_host.narrow_engine(tmp_path_factory.mktemp("narrow"))
    chunks = random_chunks(engine.tokenizer, bench_host.CHUNKS, bench_host.CHUNK_TOKENS)
    assert not engine.precompute(chunks, batch_size=4).failed
    yield engine, iter(orders(engine.prefix_text, chunks, 20))
    engine.close()


def test_what_a_request_costs_the_host(narrow, monkeypatch):
    """Budgets of calls and of launches: what was counted when they were set, and a little room. ``make bench-host`` tells where they go."""
    engine, prompts = narrow

    def ask():
        return engine.prefill(next(prompts), mode="stitch")

    def calls():
        """Count the calls of a request's own code: those of packages grow with what other tests leave in this process."""
        modules = bench_host.calls_of(ask)["modules"]
        return sum(number for name, number in modules.items() if name.startswith("kvrag/")), modules

    assert ask().repaired_tokens > 100
    on_cpu, modules = calls()
    assert on_cpu <= 14_000, modules

    fake = install(monkeypatch)
    move(engine.loaded.lm)
    with fake:
        engine.loaded.lm.record(SLOTS, record=fake.record)
        ask(), ask()
        made = len(engine.loaded.lm.recorded._made)
        fake.clear()
        ask()
        asked = bench_host.asked_of(fake)
        on_device, modules = calls()
    assert len(engine.loaded.lm.recorded._made) == made, "nothing is recorded anew"
    assert asked["launches"] <= 100, asked
    assert asked["waits"] <= 3, asked
    assert asked["kinds"]["launch: replay"] == 3, "of the probe, of the choice and of the repair"
    assert on_device <= 6_500, modules
    assert engine.loaded.lm.recorded.pool.num_taken == 0


def test_a_decode_step_of_eight_requests_is_one_replay(monkeypatch):
    lm, fake = CausalLM(tiny_model("llama")), install(monkeypatch)
    move(lm)
    with fake:
        lm.record(SLOTS, record=fake.record)
        pool = lm.recorded.pool
        extensions = [lm.extension(lm.buffer(100, run=pool.take(100)), 40) for _ in range(8)]
        abreast(lm, fake, extensions)
        fake.clear()
        abreast(lm, fake, extensions)
    assert fake.counts["launch: replay"] == 1
    assert fake.num_launches <= 4, "the replay, and copies of what it gives"
    assert not waits(fake)


def abreast(lm: CausalLM, fake: FakeCuda, extensions) -> None:
    """Let all requests ask for their next row while the model is busy."""

    def ask(extend):
        with fake:
            assert extend(torch.tensor([7])).shape[0] == 1

    with lm.lock:
        threads = [threading.Thread(target=ask, args=(extend,)) for extend in extensions]
        for thread in threads:
            thread.start()
        while len(lm.lock.pending) < len(extensions):
            pass
    for thread in threads:
        thread.join()


# -- what replays that compute give ------------------------------------------------------------------------------------

REQUESTS = {
    "default": {"mode": "stitch"},
    "full": {"mode": "full"},
    "prefix": {"mode": "prefix"},
    **{
        name: {"mode": "stitch", "repair": RepairConfig(strategy=name, recompute_ratio=0.15)}
        for name in ("first_k", "hkvd", "query", "query_gain")
    },
    "without shift": {"mode": "stitch", "repair": RepairConfig(recompute_ratio=0.1, shift=0.0)},
    "unrepaired": {"mode": "stitch", "repair": RepairConfig(strategy="none")},
    "all": {"mode": "stitch", "repair": RepairConfig(strategy="all")},
}


def told(result) -> tuple:
    return result.exactness, result.fallback_reason, result.repaired_tokens, result.computed_tokens


def assert_same(engine: KVRagEngine, requests, ask) -> None:
    """Ask launched and by recordings, each request twice; compare the first token's logits and what is told."""
    want = {name: ask(options) for name, options in requests.items()}
    launch, launched = CausalLM.launch, []
    engine.loaded.lm.record(FEW, record=replaying)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CausalLM, "launch", lambda lm, piece: launched.append(piece) or launch(lm, piece)
        )
        for name, options in [*requests.items()] * 2:
            got = ask(options)
            torch.testing.assert_close(got.logits, want[name].logits, **CLOSE, msg=name)
            assert told(got) == told(want[name])
    own = {piece.kv.start for piece in launched if not piece.rows.is_fixed}
    assert launched
    assert own <= ({0} if "hkvd" in requests else set()), "all else is recorded"
    assert engine.loaded.lm.recorded.pool.num_taken == 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_recorded_requests_are_launched_ones(engine_of, kv_dtype):
    engine = engine_of(prefix="Read this.\n", store_config={"kv_dtype": kv_dtype})
    assert not engine.precompute(CHUNKS).failed
    assert_same(engine, REQUESTS, lambda options: engine.prefill(PROMPT, **options))
    assert len(engine.loaded.lm.recorded._made) >= 4


NAMES = ["mistral", "gemma2", "gemma3_text", "qwen3", "gpt_oss", "deepseek_v3", "gpt_neox"]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_requests_of_other_models_are_launched_ones(engine_of, name):
    """With sliding windows, soft caps, sinks and latents."""
    assert lm_of(name).can_share_forwards
    engine = engine_of(name, prefix="Read this.\n", repair=RepairConfig(recompute_ratio=0.1))
    assert not engine.precompute(CHUNKS).failed
    requests = {name: REQUESTS[name] for name in ("default", "full")}
    assert_same(engine, requests, lambda options: engine.prefill(PROMPT, **options))


RECORDED = {"llama": True, "mistral": True, "gpt_oss": True}
RECORDED |= dict.fromkeys(("bloom", "llama4_text", "jetmoe", "phi3-longrope", "deepseek_v3"), False)


@pytest.mark.parametrize("name", RECORDED)
def test_which_models_have_a_pool_on_a_device(name, monkeypatch):
    """Those that share forwards, where a kernel attends in all layers; none where the pool has no share."""
    lm = lm_of(name)
    stand_in = SimpleNamespace(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        can_share_forwards=lm.can_share_forwards,
        traits=lm.traits,
    )

    def can_record(tier: str, share: str = "0.5") -> bool:
        monkeypatch.setattr(kvrag_kernels, "tier", lambda *_: tier)
        monkeypatch.setenv("KVRAG_POOL_SHARE", share)
        return steps._can_record(stand_in)

    assert can_record("mma") is RECORDED[name]
    assert not can_record("torch")
    assert not can_record("mma", "0")


def test_on_a_device_replays_neither_wait_nor_copy(engine, monkeypatch):
    """And they compute what is launched there, with layers that arrive one by one."""
    fake = install(monkeypatch)
    move(engine.loaded.lm)
    with fake:
        want = engine.prefill(PROMPT, mode="stitch")
        engine.loaded.lm.record(FEW, record=replaying_on(fake))
        for order in (range(6), (3, 1, 0, 2, 5, 4)):
            engine.prefill(prompt_of(order=order), mode="stitch")
        fake.clear()
        got = engine.prefill(PROMPT, mode="stitch")
    torch.testing.assert_close(got.logits, want.logits, **CLOSE)
    assert told(got) == told(want)
    assert fake.counts["launch: replay"] == 3 - (got.repaired_tokens == 0)
    assert len(waits(fake)) <= 3
    assert any(shape.waits for shape in engine.loaded.lm.recorded._made)


def test_recorded_answers_slide_as_launched_ones(engine, monkeypatch):
    lm = engine.loaded.lm
    monkeypatch.setattr(lm, "context_window", 96)
    options = {"max_context": "slide", "max_new_tokens": 40, "mode": "full"}
    question = "Who built the tower? " * 12
    want = engine.generate(question, **options)
    assert want.evicted_tokens
    lm.record(FEW, record=replaying)
    assert engine.generate(question, **options).token_ids == want.token_ids
    assert lm.recorded.pool.num_taken == 0


def test_answers_by_recordings_are_those_of_requests_alone(engine):
    prompts = [prompt_of(f"Who built the tower {number}?") for number in range(8)]
    want = [
        engine.generate(prompt, mode="stitch", max_new_tokens=12).token_ids for prompt in prompts
    ]
    engine.loaded.lm.record(FEW, record=replaying)
    got = {}

    def ask(number):
        got[number] = engine.generate(prompts[number], mode="stitch", max_new_tokens=12).token_ids

    at_once(*(lambda n=number: ask(n) for number in range(len(prompts))))
    assert [got[number] for number in range(len(prompts))] == want
    pool = engine.stats()["pool"]
    assert pool["taken"] == 0
    assert pool["recordings"] == len(engine.loaded.lm.recorded._made) > 0
    assert pool["recording_ms"] > 0


# -- slots ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(engine) -> KVRagEngine:
    engine.loaded.lm.record(FEW, record=replaying)
    return engine


def test_weights_that_move_are_recorded_anew(recorded):
    """Their digest stays, but a recording reads them where they were."""
    lm, seconds = recorded.loaded.lm, []
    for count in (0, 0, 1):
        for weight in [*lm.model.parameters()][:count]:
            weight.data = weight.data.clone()
        recorded.prefill(PROMPT, mode="full")
        seconds.append(lm.recorded.seconds)
    assert 0 < seconds[0] == seconds[1] < seconds[2]


@pytest.mark.parametrize("leave", ["close", "cancel", "drop"])
def test_a_stream_that_is_left_gives_its_slots_back(recorded, leave):
    pool = recorded.loaded.lm.recorded.pool
    stream = recorded.stream(PROMPT, mode="stitch", max_new_tokens=500)
    next(stream)
    assert pool.num_taken >= 500
    if leave == "drop":
        del stream
    else:
        getattr(stream, leave)()
    settle()
    assert pool.num_taken == 0


@pytest.mark.parametrize("stage", ["probe", "repair", "stitch"])
def test_a_request_that_fails_gives_its_slots_back(recorded, monkeypatch, stage):
    pool = recorded.loaded.lm.recorded.pool
    with monkeypatch.context() as patch:
        patch.setattr(prefill, stage, raising(ValueError, f"the {stage} failed"))
        with pytest.raises(ValueError, match=f"the {stage} failed"):
            recorded.generate(PROMPT, mode="stitch", max_new_tokens=4)
    assert pool.num_taken == 0
    assert recorded.generate(PROMPT, mode="stitch", max_new_tokens=4).token_ids


@pytest.mark.parametrize("stage", ["probe", "repair"])
def test_a_request_that_runs_out_of_memory_is_tried_again_in_its_slots(
    recorded, monkeypatch, stage
):
    pool = recorded.loaded.lm.recorded.pool
    want = recorded.prefill(PROMPT, mode="full")
    real, runs = getattr(prefill, stage), []

    def fail_once(model, kv, *given, **options):
        runs.append((kv.start, pool.num_taken))
        if len(runs) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, kv, *given, **options)

    monkeypatch.setattr(prefill, stage, fail_once)
    got = recorded.prefill(PROMPT, mode="stitch")
    assert got.fallback_reason == "memory ran out with reuse"
    assert len(set(runs)) == 1, "the second try takes no more slots"
    torch.testing.assert_close(got.logits, want.logits, **CLOSE)
    assert pool.num_taken == 0


def test_a_prompt_longer_than_the_pool_is_answered_in_its_own_memory(engine):
    want = engine.generate(PROMPT, mode="stitch", max_new_tokens=6).token_ids
    engine.loaded.lm.record(128, record=replaying)
    assert engine.generate(PROMPT, mode="stitch", max_new_tokens=6).token_ids == want
    assert engine.loaded.lm.recorded.pool.num_taken == 0
