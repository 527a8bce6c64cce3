"""The promises of exactness, float32, on tiny random models of every accepted architecture. docs/promises.md lists them.

Promises 1 to 4 are tested for every row of TINY; what doesn't depend on how a model rotates its keys, for one row of each kind.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import request_of
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, RepairConfig, StoreConfig
from kvrag.blend.prefill import Clock, Prefilled, prefill
from kvrag.config import STRATEGIES
from kvrag.metrics import kl_divergence
from kvrag.model.rows import Limits
from kvrag.testing.models import TINY, tiny_model

ARCHITECTURES = sorted(TINY)
_KINDS = """
llama llama-yarn mistral qwen2_moe qwen3 gemma2 gemma3_text phi3 gpt_neox cohere2 glm smollm3
gpt_oss llama4_text gptj falcon-new bloom olmo deepseek_v2-yarn deepseek_v3 longcat_flash
gemma3n_text gemma4_text gemma4-key-values
"""
KINDS = _KINDS.split()
"""One of each way to rotate keys, to read them, to mask them and to attend."""

TOLERANCE = 1e-3

CHUNKS = make_chunks(4, words=30)
CHUNKS.append(CHUNKS[3].replace(":", ";", 1))  # chunk 4 is chunk 3 with another early token
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0), (1, 0, 1, 3, 1)]  # the last two repeat a chunk

FAR = make_chunks(10, words=36, seed=7)  # more than a thousand tokens

MakeEngine = Callable[..., KVRagEngine]


@contextmanager
def engines(
    tokenizer: Any, folders: pytest.TempPathFactory, chunks: list[str]
) -> Iterator[MakeEngine]:
    """Engines by architecture, with all chunks stored: made once, and only asked."""
    made: dict[tuple[str, int, str], KVRagEngine] = {}

    def get(name: str, batch_size: int = 4, kv_dtype: Any = "auto") -> KVRagEngine:
        key = name, batch_size, kv_dtype
        if key not in made:
            options: dict[str, Any] = {
                "kv_dir": folders.mktemp("kv"),
                "store_config": StoreConfig(kv_dtype=kv_dtype),
            }
            options |= {"tokenizer": tokenizer, "prove": "off", "context": None}
            made[key] = KVRagEngine.from_pretrained(tiny_model(name), **options)
            made[key].precompute(chunks, batch_size=batch_size)
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def stored(tokenizer, tmp_path_factory):
    with engines(tokenizer, tmp_path_factory, CHUNKS) as get:
        yield get


def every_kind_singly(names: list[str]) -> list[Any]:
    """Chunks encoded in padded batches for every architecture, and one at a time for one of each kind, most of them slow."""
    singly = (
        pytest.param(name, 1, id=f"{name}-single", marks=pytest.mark.slow if number % 5 else ())
        for number, name in enumerate(KINDS)
    )
    return [*(pytest.param(name, 4, id=f"{name}-batch") for name in names), *singly]


def ask(order: tuple[int, ...], question: str = "Who keeps the ledger?") -> list[dict[str, str]]:
    """A chat prompt with chunks in this order and then a question."""
    text = "\n\n".join(CHUNKS[i] for i in order)
    return [{"role": "user", "content": f"{text}\n\nQuestion: {question}"}]


def distance(engine: KVRagEngine, prompt: Any, **options: Any) -> float:
    """Largest difference of first-token logits between reuse and full prefill of the same ids."""
    reused, full = engine.prefill(prompt, **options), engine.prefill(prompt, mode="full")
    assert reused.prompt_ids == full.prompt_ids
    assert reused.cached_tokens + reused.repaired_tokens > 0, (
        "nothing was reused: the comparison would prove nothing"
    )
    return float((reused.logits - full.logits).abs().max())


@contextmanager
def own_attention(engine: KVRagEngine) -> Iterator[Any]:
    """The model with transformers' own attention, of which some releases have one only that applies a soft cap."""
    model = engine.loaded.lm.text_model
    before = model.config._attn_implementation
    if getattr(model.config, "attn_logit_softcapping", None):
        model.config._attn_implementation = "eager"
    with torch.inference_mode():
        yield model
    model.config._attn_implementation = before


def plain_answer(
    engine: KVRagEngine, prompt_ids: list[int], count: int, *, use_cache: bool = True
) -> list[int]:
    """What transformers' own ``generate`` answers, greedily."""
    prompt = torch.tensor([prompt_ids])
    options = {
        "max_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
        "use_cache": use_cache,
    }
    with own_attention(engine) as model:
        plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return plain[0, prompt.shape[1] :].tolist()


def run_stages(engine: KVRagEngine, prompt: Any, repair: RepairConfig) -> Prefilled:
    """Prefill and keep the buffer, to look at the KV itself."""
    plan = engine._answering.plan(request_of(engine, prompt, mode="stitch", repair=repair))
    return prefill(
        engine.loaded.lm,
        engine.store,
        plan,
        mode="stitch",
        config=repair,
        costs=engine._answering.costs,
        max_new_tokens=1,
        load_timeout_s=10.0,
        clock=Clock(),
    )


@pytest.mark.parametrize(("name", "batch_size"), every_kind_singly(ARCHITECTURES))
def test_repairing_every_row_equals_full_prefill(name, batch_size, stored):
    engine = stored(name, batch_size)
    for order in ORDERS:
        assert (
            distance(engine, ask(order), mode="stitch", repair=RepairConfig(strategy="all"))
            < TOLERANCE
        )


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "none"])
def test_ratio_one_equals_full_prefill_for_every_strategy(strategy, engine_of):
    engine = engine_of("llama")
    engine.precompute(CHUNKS)
    repair = RepairConfig(strategy=strategy, recompute_ratio=1.0)
    result = engine.prefill(ask((3, 1, 0, 2)), mode="stitch", repair=repair)
    assert result.exactness == "exact"
    assert distance(engine, ask((3, 1, 0, 2)), mode="stitch", repair=repair) < TOLERANCE


@pytest.mark.parametrize(("name", "batch_size"), every_kind_singly(ARCHITECTURES))
def test_one_chunk_behind_its_own_prefix_equals_full_prefill(name, batch_size, stored):
    engine = stored(name, batch_size)
    for index in (0, 3):
        prompt = ask((index,))
        result = engine.prefill(prompt, mode="stitch", repair=RepairConfig(strategy="none"))
        assert (result.exactness, result.repaired_tokens) == ("exact", 0)
        assert (
            distance(engine, prompt, mode="stitch", repair=RepairConfig(strategy="none"))
            < TOLERANCE
        )
        assert distance(engine, ask((index, 0, 1)), mode="prefix") < TOLERANCE


def largest_change_before_the_difference(engine: KVRagEngine) -> float:
    """Two prompts that differ in one token of the last chunk: how far apart is the KV of all rows before it?

    Without the residual shift: its mean is over a chunk's repaired rows, so within one chunk it is not causal by design.
    """
    repair = RepairConfig(strategy="random", recompute_ratio=0.3, shift=0.0)
    one, two = (run_stages(engine, ask((2, 0, last)), repair) for last in (3, 4))
    assert one.num_rows("repaired") > 20
    common = next(
        i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=True)) if a != b
    )
    assert common > 150
    return max(
        float(
            (getattr(one.buffer, read)(layer) - getattr(two.buffer, read)(layer))[:, :, :common]
            .abs()
            .max()
        )
        for layer in range(engine.loaded.lm.num_layers)
        for read in ("keys", "values")
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_repaired_rows_never_see_the_future(name, stored):
    assert largest_change_before_the_difference(stored(name)) < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_no_chunk_row_depends_on_the_question_but_by_selection(name, stored):
    engine = stored(name)
    repair = RepairConfig(strategy="random", recompute_ratio=0.3, shift=0.5)
    one, two = (
        run_stages(engine, ask((2, 0, 3), question), repair)
        for question in ("Who?", "Why, and when?")
    )
    common = next(
        i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=False)) if a != b
    )
    for layer in range(engine.loaded.lm.num_layers):
        first, second = one.buffer.values(layer), two.buffer.values(layer)
        assert torch.allclose(first[:, :, :common], second[:, :, :common], atol=1e-5, rtol=0)


def test_a_mask_aligned_bottom_right_would_see_the_future(stored, monkeypatch):
    """The mask of CacheBlend's and LMCache's code, on the same inputs: the test above must be able to fail."""

    def bottom_right(self):
        rows = len(self.hi)
        if 1 < rows < self.num_keys:
            self.hi = torch.arange(self.num_keys - rows, self.num_keys)
        self.padding = 0 if rows == self.num_keys else None

    engine = stored("llama")
    monkeypatch.setattr(Limits, "__post_init__", bottom_right)
    assert largest_change_before_the_difference(engine) > 1e-2


MODES = ("auto", "full", "prefix", "stitch")


@pytest.mark.parametrize(
    ("name", "mode"),
    [*(("llama", mode) for mode in MODES), *zip(KINDS[1:], itertools.cycle(MODES), strict=False)],
)
def test_an_empty_store_answers_like_plain_transformers(name, mode, engine_of):
    engine = engine_of(name)
    answer = engine.generate(ask((0, 1, 2, 3)), mode=mode, max_new_tokens=24)
    assert answer.token_ids == plain_answer(engine, answer.prompt_ids, 24)
    assert (answer.exactness, answer.cached_tokens) == ("full", 0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_exact_answer_is_plain_transformers_answer(name, stored):
    """Decoding goes on from stitched KV: every token after the first depends on it too."""
    engine = stored(name)
    answer = engine.generate(
        ask((2, 0, 1)), mode="stitch", repair=RepairConfig(strategy="all"), max_new_tokens=12
    )
    assert answer.cached_tokens + answer.repaired_tokens > 0
    assert answer.token_ids == plain_answer(engine, answer.prompt_ids, 12)


@pytest.mark.parametrize("name", KINDS)
def test_more_repair_is_closer_to_full_prefill(name, stored):
    engine = stored(name)
    totals = dict.fromkeys((0.0, 0.5, 1.0), 0.0)
    for prompt in map(ask, list(itertools.permutations(range(4), 3))[::2]):
        full = engine.prefill(prompt, mode="full").logits
        for ratio in totals:
            repair = RepairConfig(strategy="hkvd", recompute_ratio=ratio, shift=0.0)
            reused = engine.prefill(prompt, mode="stitch", repair=repair).logits
            totals[ratio] += float(kl_divergence(full, reused))
    assert totals[0.0] > totals[0.5] > totals[1.0]
    assert totals[1.0] < 1e-5


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_with_and_without_shift(strategy, shift, engine_of):
    engine = engine_of("gemma2")
    engine.precompute(CHUNKS)
    repair = RepairConfig(strategy=strategy, recompute_ratio=0.2, shift=shift)
    result = engine.prefill(ask((3, 0, 2)), mode="stitch", repair=repair)
    assert torch.isfinite(result.logits).all()
    total = result.cached_tokens + result.repaired_tokens + result.computed_tokens
    assert total == result.prompt_tokens == len(result.prompt_ids)
    assert (result.repaired_tokens == 0) == (strategy == "none")


def test_shift_changes_only_rows_that_are_left_alone(engine_of):
    engine = engine_of("llama")
    engine.precompute(CHUNKS)
    # Heads are never shifted.
    repair = RepairConfig(strategy="random", recompute_ratio=0.2, first_k=4)
    plain = run_stages(engine, ask((3, 0, 2)), replace(repair, shift=0.0))
    shifted = run_stages(engine, ask((3, 0, 2)), replace(repair, shift=1.0))
    assert_shift_left_computed_rows_alone(engine, ask((3, 0, 2)), plain, shifted)


def assert_shift_left_computed_rows_alone(
    engine: KVRagEngine, prompt: Any, plain: Prefilled, shifted: Prefilled
) -> None:
    moved = (plain.buffer.values(1) - shifted.buffer.values(1)).abs().amax(dim=(0, 1, 3))[
        : len(plain.token_ids)
    ] > 1e-6
    exact = sum(s.stop - s.start for s in engine.explain(prompt, mode="stitch").spans if s.exact)
    assert int(moved.sum()) == sum(plain.num_rows(kind) for kind in ("reused", "exact")) - exact


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunks_moved_by_more_than_a_thousand_rows_are_exact_after_full_repair(name, stored):
    """Moved by more than any window or chunk of attention, too; in two orders, one of them with a repetition."""
    engine = stored(name)
    engine.precompute(FAR)
    for before, moved in ((FAR, CHUNKS[:1]), (FAR[::-1], [FAR[9], CHUNKS[1], CHUNKS[1]])):
        parts: list[Any] = [engine.prefix_text + "\n\n".join(before)]
        parts += [piece for text in moved for piece in ("\n\n", Chunk(text))]
        prompt = [*parts, "\n\nWhere?"]
        starts = [s.start for s in engine.explain(prompt, mode="stitch").spans if s.kind == "chunk"]
        assert sum(start > 1000 for start in starts) >= len(moved)
        reused = engine.prefill(prompt, mode="stitch", repair=RepairConfig(strategy="all"))
        assert reused.repaired_tokens > 1000
        with own_attention(
            engine
        ) as model:  # not our full prefill, which would share a mistake about windows
            plain = model(torch.tensor([reused.prompt_ids]), logits_to_keep=1).logits[0, -1]
        assert float((reused.logits - plain).abs().max()) < TOLERANCE


def test_longrope_reuses_within_one_regime_and_computes_beyond_it(stored):
    """Beyond its original context a longrope model rotates by other angles: stored KV would be wrong there even behind its own prefix."""
    engine = stored("phi3-longrope")
    limit = engine.loaded.lm.reuse_window
    assert limit == 3000 < engine.loaded.lm.context_window
    short = ask((1, 0))
    assert engine.prefill(short, mode="stitch").cached_tokens > 0
    long = [*short, {"role": "user", "content": "\n".join(make_chunks(24, seed=9))}]
    result = engine.prefill(long, mode="stitch")
    assert result.prompt_tokens > limit
    assert (result.exactness, result.cached_tokens) == ("full", 0)
    assert "RoPE scaling changes" in str(result.fallback_reason)
    assert "RoPE scaling changes" in str(engine.explain(long, mode="stitch"))


def test_an_answer_that_outgrows_longropes_regime_is_plain_transformers_answer(stored):
    """Everything is computed anew at the crossing. Compared without a cache: transformers 5.17 loses the prompt there."""
    engine = stored("phi3-longrope")
    limit = engine.loaded.lm.reuse_window
    words = make_chunks(1, words=1200, seed=3)[0]
    start = words[:5890]
    size = engine.prefill(start, mode="full").prompt_tokens
    answer = engine.generate(start, mode="stitch", max_new_tokens=limit - size + 8)
    assert answer.prompt_tokens < limit < answer.prompt_tokens + len(answer.token_ids)
    assert answer.token_ids == plain_answer(
        engine, answer.prompt_ids, len(answer.token_ids), use_cache=False
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_cuda_equals_full_prefill(name, dtype, engine_of, tokenizer):
    engine = KVRagEngine.from_pretrained(tiny_model(name, dtype=dtype).cuda(), tokenizer=tokenizer)
    engine.precompute(CHUNKS)
    reference = engine_of(name).prefill(ask((3, 1, 0, 2)), mode="full").logits
    full = engine.prefill(ask((3, 1, 0, 2)), mode="full").logits
    all_rows = engine.prefill(
        ask((3, 1, 0, 2)), mode="stitch", repair=RepairConfig(strategy="all")
    ).logits
    # torch's own error in this dtype, against float32 on the CPU, bounds ours
    bound = max(TOLERANCE, 3 * float((full - reference).abs().max()))
    assert float((all_rows - full).abs().max()) < bound
