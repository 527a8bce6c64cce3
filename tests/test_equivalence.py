"""The promises of exactness, float32, on tiny random models of every accepted architecture. docs/promises.md lists them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, RepairConfig
from kvrag.attention import RowPlan
from kvrag.prefill import Clock, Prefilled, prefill
from kvrag.testing.models import TINY

ARCHITECTURES = sorted(TINY)
STRATEGIES = ("none", "all", "random", "first_k", "boundary", "hkvd", "query", "query_hkvd")
TOLERANCE = 1e-3

CHUNKS = make_chunks(4, words=30)
CHUNKS.append(CHUNKS[3].replace(":", ";", 1))  # chunk 4 is chunk 3 with another early token
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0), (1, 0, 1, 3, 1)]  # the last two repeat a chunk

MakeEngine = Callable[..., KVRagEngine]


def ask(order: tuple[int, ...], question: str = "Who keeps the ledger?") -> list[dict[str, str]]:
    """A chat prompt with chunks in this order and then a question."""
    text = "\n\n".join(CHUNKS[i] for i in order)
    return [{"role": "user", "content": f"{text}\n\nQuestion: {question}"}]


def distance(engine: KVRagEngine, prompt: Any, **options: Any) -> float:
    """Largest difference of first-token logits between reuse and full prefill of the same ids."""
    reused, full = engine.prefill(prompt, **options), engine.prefill(prompt, mode="full")
    assert reused.prompt_ids == full.prompt_ids
    assert reused.cached_tokens + reused.repaired_tokens > 0, "nothing was reused: the comparison would prove nothing"
    return float((reused.logits - full.logits).abs().max())


def run_stages(engine: KVRagEngine, prompt: Any, repair: RepairConfig) -> Prefilled:
    """Prefill and keep the buffer, to look at the KV itself."""
    plan = engine._answering.plan(engine._request(prompt, "stitch", repair, None))
    return prefill(
        engine.loaded.lm,
        engine.store,
        plan,
        mode="stitch",
        config=repair,
        max_new_tokens=1,
        load_timeout_s=10.0,
        clock=Clock(),
    )


@pytest.mark.parametrize("batch_size", [1, 4], ids=["single", "padded-batch"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_repairing_every_row_equals_full_prefill(name: str, batch_size: int, engine_of: MakeEngine) -> None:
    engine = engine_of(name)
    engine.precompute(CHUNKS, batch_size=batch_size)
    for order in ORDERS:
        assert distance(engine, ask(order), mode="stitch", repair=RepairConfig(strategy="all")) < TOLERANCE


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "none"])
def test_ratio_one_equals_full_prefill_for_every_strategy(strategy: str, engine_of: MakeEngine) -> None:
    engine = engine_of("llama")
    engine.precompute(CHUNKS)
    repair = RepairConfig(strategy=strategy, recompute_ratio=1.0)
    result = engine.prefill(ask((3, 1, 0, 2)), mode="stitch", repair=repair)
    assert result.exactness == "exact"
    assert distance(engine, ask((3, 1, 0, 2)), mode="stitch", repair=repair) < TOLERANCE


@pytest.mark.parametrize("batch_size", [1, 4], ids=["single", "padded-batch"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_chunk_behind_its_own_prefix_equals_full_prefill(name: str, batch_size: int, engine_of: MakeEngine) -> None:
    engine = engine_of(name)
    engine.precompute(CHUNKS, batch_size=batch_size)
    for index in range(len(CHUNKS)):
        prompt = ask((index,))
        result = engine.prefill(prompt, mode="stitch", repair=RepairConfig(strategy="none"))
        assert (result.exactness, result.repaired_tokens) == ("exact", 0)
        assert distance(engine, prompt, mode="stitch", repair=RepairConfig(strategy="none")) < TOLERANCE
        assert distance(engine, ask((index, 0, 1)), mode="prefix") < TOLERANCE


def largest_change_before_the_difference(engine: KVRagEngine) -> float:
    """Two prompts that differ in one token of the last chunk: how far apart is the KV of all rows before it?

    Without the residual shift: its mean is over a chunk's repaired rows, so within one chunk it is not causal by design.
    """
    engine.precompute(CHUNKS)
    repair = RepairConfig(strategy="random", recompute_ratio=0.3, shift=0.0)
    one, two = (run_stages(engine, ask((2, 0, last)), repair) for last in (3, 4))
    assert one.num_repaired > 20
    common = next(i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=True)) if a != b)
    assert common > 150
    return max(
        float((getattr(one.buffer, read)(layer) - getattr(two.buffer, read)(layer))[:, :, :common].abs().max())
        for layer in range(engine.loaded.lm.num_layers)
        for read in ("keys", "values")
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_repaired_rows_never_see_the_future(name: str, engine_of: MakeEngine) -> None:
    assert largest_change_before_the_difference(engine_of(name)) < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_chunk_row_depends_on_the_question_but_by_selection(name: str, engine_of: MakeEngine) -> None:
    engine = engine_of(name)
    engine.precompute(CHUNKS)
    repair = RepairConfig(strategy="random", recompute_ratio=0.3, shift=0.5)
    one, two = (run_stages(engine, ask((2, 0, 3), question), repair) for question in ("Who?", "Why, and when?"))
    common = next(i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=False)) if a != b)
    for layer in range(engine.loaded.lm.num_layers):
        first, second = one.buffer.values(layer), two.buffer.values(layer)
        assert torch.allclose(first[:, :, :common], second[:, :, :common], atol=1e-5, rtol=0)


def test_a_mask_aligned_bottom_right_would_see_the_future(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask of CacheBlend's and LMCache's code, on the same inputs: the test above must be able to fail."""

    def bottom_right(self: RowPlan) -> None:
        rows = len(self.hi)
        if 1 < rows < self.num_keys:
            self.hi = torch.arange(self.num_keys - rows, self.num_keys)
        self._is_whole = rows == self.num_keys

    monkeypatch.setattr(RowPlan, "__post_init__", bottom_right)
    assert largest_change_before_the_difference(engine_of("llama")) > 1e-2


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("mode", ["auto", "full", "prefix", "stitch"])
def test_an_empty_store_answers_like_plain_transformers(name: str, mode: str, engine_of: MakeEngine) -> None:
    engine = engine_of(name)
    answer = engine.generate(ask((0, 1, 2, 3)), mode=mode, max_new_tokens=24)
    prompt = torch.tensor([answer.prompt_ids])
    plain = engine.loaded.lm.model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert answer.token_ids == plain[0, prompt.shape[1] :].tolist()
    assert (answer.exactness, answer.cached_tokens) == ("full", 0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_exact_answer_is_plain_transformers_answer(name: str, engine_of: MakeEngine) -> None:
    """Decoding goes on from stitched KV: every token after the first depends on it too."""
    engine = engine_of(name)
    engine.precompute(CHUNKS)
    answer = engine.generate(ask((2, 0, 1)), mode="stitch", repair=RepairConfig(strategy="all"), max_new_tokens=24)
    prompt = torch.tensor([answer.prompt_ids])
    plain = engine.loaded.lm.model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert answer.token_ids == plain[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_more_repair_is_closer_to_full_prefill(name: str, engine_of: MakeEngine) -> None:
    engine = engine_of(name)
    engine.precompute(CHUNKS)
    means = []
    for ratio in (0.0, 0.5, 1.0):
        repair = RepairConfig(strategy="hkvd", recompute_ratio=ratio, shift=0.0)
        kls = []
        for order in itertools.permutations(range(4), 3):
            prompt = ask(order)
            full = torch.log_softmax(engine.prefill(prompt, mode="full").logits, -1)
            reused = torch.log_softmax(engine.prefill(prompt, mode="stitch", repair=repair).logits, -1)
            kls.append(float((full.exp() * (full - reused)).sum()))
        means.append(sum(kls) / len(kls))
    assert means[0] > means[1] > means[2]
    assert means[2] < 1e-6


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_with_and_without_shift(strategy: str, shift: float, engine_of: MakeEngine) -> None:
    engine = engine_of("gemma2")
    engine.precompute(CHUNKS)
    repair = RepairConfig(strategy=strategy, recompute_ratio=0.2, shift=shift)
    result = engine.prefill(ask((3, 0, 2)), mode="stitch", repair=repair)
    assert torch.isfinite(result.logits).all()
    total = result.cached_tokens + result.repaired_tokens + result.computed_tokens
    assert total == result.prompt_tokens == len(result.prompt_ids)
    assert (result.repaired_tokens == 0) == (strategy == "none")


def test_shift_changes_only_rows_that_are_left_alone(engine_of: MakeEngine) -> None:
    engine = engine_of("llama")
    engine.precompute(CHUNKS)
    plain = run_stages(engine, ask((3, 0, 2)), RepairConfig(strategy="random", recompute_ratio=0.2, shift=0.0))
    shifted = run_stages(engine, ask((3, 0, 2)), RepairConfig(strategy="random", recompute_ratio=0.2, shift=1.0))
    changed = (plain.buffer.values(1) - shifted.buffer.values(1)).abs().amax(dim=(0, 1, 3))[
        : len(plain.token_ids)
    ] > 1e-6
    assert int(changed.sum()) == len(plain.token_ids) - plain.num_live - plain.num_repaired - _num_exact(
        engine, (3, 0, 2)
    )


def _num_exact(engine: KVRagEngine, order: tuple[int, ...]) -> int:
    return sum(s.stop - s.start for s in engine.explain(ask(order), mode="stitch").spans if s.exact)


def test_a_chunk_moved_by_more_than_a_thousand_rows_is_exact_after_full_repair(engine_of: MakeEngine) -> None:
    for name in ("llama", "mistral", "gemma2", "llama-yarn"):
        engine = engine_of(name)
        far = make_chunks(10, words=36, seed=7)
        engine.precompute([*far, CHUNKS[0]])
        prompt = [engine.prefix_text + "\n\n".join(far) + "\n\n", Chunk(CHUNKS[0]), "\n\nWhere?"]
        assert distance(engine, prompt, mode="stitch", repair=RepairConfig(strategy="all")) < TOLERANCE
        starts = [s.start for s in engine.explain(prompt, mode="stitch").spans if s.kind == "chunk"]
        assert starts[-1] > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cuda_equals_full_prefill(name: str, dtype: torch.dtype, engine_of: MakeEngine, tokenizer: Any) -> None:
    from kvrag.testing.models import tiny_model

    engine = KVRagEngine.from_pretrained(tiny_model(name, dtype=dtype).cuda(), tokenizer=tokenizer)
    engine.precompute(CHUNKS)
    reference = engine_of(name).prefill(ask((3, 1, 0, 2)), mode="full").logits
    full = engine.prefill(ask((3, 1, 0, 2)), mode="full").logits
    all_rows = engine.prefill(ask((3, 1, 0, 2)), mode="stitch", repair=RepairConfig(strategy="all")).logits
    # torch's own error in this dtype, against float32 on the CPU, bounds ours
    bound = max(TOLERANCE, 3 * float((full - reference).abs().max()))
    assert float((all_rows - full).abs().max()) < bound
