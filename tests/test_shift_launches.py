"""The residual shift by one stitch launch a layer gives what the chain of torch ops gives, and every promise holds with it."""

import pytest
import torch
from test_equivalence import (
    CHUNKS,
    STRATEGIES,
    TOLERANCE,
    ask,
    assert_shift_left_computed_rows_alone,
    distance,
    engines,
    run_stages,
)
from test_equivalence import largest_change_before_the_difference as change_before

import kvrag.blend.stitch as stitching
import kvrag_kernels
from kvrag import KVRagEngine, RepairConfig, StoreConfig
from kvrag.blend.layout import Layout, place
from kvrag.blend.prefill import Prefilled
from kvrag.blend.repair import may_shift
from kvrag.blend.stitch import Stitcher
from kvrag.testing.models import tiny_model

NAMES = [
    *("llama", "llama-yarn", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "gptj", "glm", "cohere2"),
    *("smollm3", "gpt_oss", "nanochat"),
]
"""One of each way to turn in pairs: with a magnitude, a part of the head, neighbours, some layers, the other way round."""

PROMPT = ask((3, 0, 2))
Launches = list[tuple[int, bool, int]]


@pytest.fixture(scope="module")
def stored(tokenizer, tmp_path_factory):
    with engines(tokenizer, tmp_path_factory, CHUNKS) as get:
        yield get


@pytest.fixture
def noted(monkeypatch):
    """Layers, whether residuals were added, and rows left out, of each launch."""
    launches: Launches = []
    real = kvrag_kernels.stitch

    def noting(*given, **options):
        skip = options["skip"]
        launches.append((len(given[2]), "key_residuals" in options, 0 if skip is None else int(skip.sum())))
        real(*given, **options)

    monkeypatch.setattr(kvrag_kernels, "stitch", noting)
    return launches


@pytest.fixture
def launches(noted, monkeypatch):
    """Let the op stitch, as on a CUDA device; here its torch path computes."""
    monkeypatch.setattr(stitching, "_has_kernel", lambda *_: True)
    return noted


def by_launches(engine: KVRagEngine, launches: Launches, repair: RepairConfig) -> Prefilled:
    launches.clear()  # what the proof at the model's load has launched
    return run_stages(engine, PROMPT, repair)


def by_torch(engine: KVRagEngine, repair: RepairConfig) -> Prefilled:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stitching, "_has_kernel", lambda *_: False)
        return run_stages(engine, PROMPT, repair)


def largest_difference(engine: KVRagEngine, one: Prefilled, other: Prefilled) -> float:
    """Of the KV of all rows in all layers, and of the logits."""
    assert one.num_repaired == other.num_repaired
    rows = slice(0, len(one.token_ids))
    return max(
        float((one.logits - other.logits).abs().max()),
        *(
            float((getattr(one.buffer, read)(i) - getattr(other.buffer, read)(i))[:, :, rows].abs().max())
            for i in range(engine.loaded.lm.num_layers)
            for read in ("keys", "values")
        ),
    )


@pytest.mark.parametrize("shift", [0.5, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_launches_shift_as_the_torch_ops_do(name, shift, stored, launches):
    engine, repair = stored(name), RepairConfig(recompute_ratio=0.3, shift=shift)
    one = by_launches(engine, launches, repair)
    other = by_torch(engine, repair)
    plain = by_torch(engine, RepairConfig(recompute_ratio=0.3, shift=0.0))
    assert largest_difference(engine, one, plain) > 1e-2, "nothing was shifted: the comparison would prove nothing"
    assert largest_difference(engine, one, other) < 1e-4
    layers = engine.loaded.lm.num_layers
    computed = one.num_repaired + one.num_live
    assert launches == [(layers, False, 0), *[(1, True, computed)] * (layers - 1)], "one launch for each layer's shift"


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gptj", "gpt_neox"])
def test_rounded_kv_is_shifted_from_its_codes(name, kv_dtype, stored, launches):
    engine, repair = stored(name, kv_dtype=kv_dtype), RepairConfig(recompute_ratio=0.3, shift=1.0)
    one = by_launches(engine, launches, repair)
    assert sum(has_residual for _, has_residual, _ in launches) == engine.loaded.lm.num_layers - 1
    assert largest_difference(engine, one, by_torch(engine, repair)) < 1e-4


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_same_both_ways(strategy, shift, stored, launches):
    """Also those that have measured deviation: rows of the layers up to it are fresh by then, and must stay so."""
    engine = stored("llama")
    repair = RepairConfig(strategy, recompute_ratio=0.3, shift=shift, check_layer=2)
    one = by_launches(engine, launches, repair)
    assert largest_difference(engine, one, by_torch(engine, repair)) < 1e-4
    needs_probe, left_out = "query" in strategy or "hkvd" in strategy, launches[0][2]
    is_known = not needs_probe and (shift == 0 or strategy == "all")
    assert left_out == (one.num_repaired if is_known else 0)
    shifted = sum(has_residual for _, has_residual, _ in launches)
    fresh = 3 if "hkvd" in strategy else 1
    assert shifted == (0 if shift == 0 or strategy in ("none", "all") else engine.loaded.lm.num_layers - fresh)


def test_fresh_rows_would_be_lost_if_they_were_placed_again(stored, launches, monkeypatch):
    """The test above must be able to fail."""
    engine, repair = stored("llama"), RepairConfig("hkvd", recompute_ratio=0.3, shift=1.0, check_layer=2)
    monkeypatch.setattr(Stitcher, "forget", lambda *_: None)
    one = by_launches(engine, launches, repair)
    assert largest_difference(engine, one, by_torch(engine, repair)) > 1e-2


def test_what_does_not_fit_beside_the_prompt_is_shifted_by_torch(stored, launches, monkeypatch):
    engine, repair = stored("llama"), RepairConfig(recompute_ratio=0.3, shift=1.0)
    monkeypatch.setattr(stitching, "_has_room", lambda *_: False)
    one = by_launches(engine, launches, repair)
    assert launches == [(engine.loaded.lm.num_layers, False, 0)]
    assert largest_difference(engine, one, by_torch(engine, repair)) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_promises_hold_with_launches(name, stored, launches):
    engine = stored(name)
    for order in ((3, 1, 0, 2), (2, 2, 0)):
        assert distance(engine, ask(order), mode="stitch", repair=RepairConfig(strategy="all")) < TOLERANCE
    assert distance(engine, ask((1,)), mode="stitch", repair=RepairConfig(strategy="none")) < TOLERANCE
    assert change_before(engine) < 1e-5
    assert launches


def test_shift_changes_only_rows_that_are_left_alone(stored, launches):
    engine = stored("llama")
    plain, shifted = (
        by_launches(engine, launches, RepairConfig(strategy="random", recompute_ratio=0.2, shift=s)) for s in (0.0, 1.0)
    )
    assert_shift_left_computed_rows_alone(engine, PROMPT, plain, shifted)


def chunks_of(*lengths: int) -> Layout:
    return place([*((n, "chunk", False, i, False) for i, n in enumerate(lengths)), (1, "live", False, -1, False)])


@pytest.mark.parametrize(
    ("selected", "strength", "expected"),
    [(None, 0.5, True), (None, 0.0, False), (0, 0.5, False), (3, 0.5, True), (9, 0.5, False), (3, 0.0, False)],
)
def test_rows_may_be_shifted_where_some_are_repaired_and_some_are_not(selected, strength, expected):
    rows = None if selected is None else torch.arange(selected)
    assert may_shift(chunks_of(4, 5), rows, strength) is expected
    assert not may_shift(chunks_of(), rows, strength)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_shifts_by_launches(dtype, kv_dtype, tokenizer, noted):
    engine = KVRagEngine.from_pretrained(
        tiny_model(dtype=dtype).cuda(), tokenizer=tokenizer, store_config=StoreConfig(kv_dtype=kv_dtype)
    )
    engine.precompute(CHUNKS)
    repair = RepairConfig("random", recompute_ratio=0.3, shift=1.0)
    one = by_launches(engine, noted, repair)
    assert [has_residual for _, has_residual, _ in noted] == [False, *[True] * (engine.loaded.lm.num_layers - 1)]
    other, rows = by_torch(engine, repair), slice(0, len(one.token_ids))
    for read in ("keys", "values"):  # layer 1 is the first that is shifted; later ones see other roundings
        found, expected = (getattr(x.buffer, read)(1)[:, :, rows].float() for x in (one, other))
        bound = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
        assert float((found - expected).abs().max()) < bound
    engine.close()
