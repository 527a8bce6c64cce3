"""Rounded KV in an engine: never labelled exact, never mixed up with what was computed, and refused where a model does not tolerate it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import raising
from texts import make_chunks

import kvrag.precompute.quantise_check
from kvrag import Chunk, ConfigError, KVRagEngine, RepairConfig, StoreConfig
from kvrag.evaluate.estimate import kept_bytes_per_token, shape_from_config
from kvrag.identity.fingerprint import chunk_key, ids_digest, namespace_digest
from kvrag.metrics import MIN_TOP1, kl_divergence
from kvrag.model.load import has_passed
from kvrag.precompute.quantise_check import (
    QuantiseCheck,
    Verdict,
    _same_top,
    draw_parts,
    judge,
)
from kvrag.testing.models import tiny_model
from kvrag.types import ChunkIdentity

LOSSY = ("int8", "int4", "fp8")
CHUNKS = make_chunks(4, words=30, seed=5)
PROMPT = [
    "Read this.\n",
    Chunk(CHUNKS[2]),
    "\n",
    Chunk(CHUNKS[0]),
    "\n",
    Chunk(CHUNKS[3]),
    "\nWho?",
]
HEAD = ["Read this.\n", Chunk(CHUNKS[1]), "\nWho?"]
EXACT_HERE = RepairConfig(strategy="none")
MakeEngine = Callable[..., KVRagEngine]


def make(engine_of: MakeEngine, name: str = "llama", **options: Any) -> KVRagEngine:
    config = {key: options.pop(key) for key in ("kv_dtype", "ram_bytes") if key in options}
    return engine_of(name, prefix="Read this.\n", store_config=StoreConfig(**config), **options)


@pytest.fixture(params=LOSSY)
def kv_dtype(request):
    return str(request.param)


# -- labels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "minicpm3"])
def test_an_answer_from_rounded_kv_is_never_exact(engine_of, kv_dtype, name):
    """Neither from three chunks nor from one behind its own prefix."""
    engine = make(engine_of, name, kv_dtype=kv_dtype)
    assert engine.precompute(CHUNKS).stored == 4
    for prompt in (PROMPT, HEAD):
        for repair in (EXACT_HERE, RepairConfig(strategy="all"), RepairConfig()):
            result = engine.prefill(prompt, mode="stitch", repair=repair)
            assert result.cached_tokens > 0
            assert (result.exactness, result.kv_dtype, result.fallback_reason) == (
                "repaired",
                kv_dtype,
                None,
            )
        full = engine.prefill(prompt, mode="full")
        assert (full.exactness, full.kv_dtype) == ("full", "auto")


def test_without_rounding_the_same_prompts_are_exact(engine_of, monkeypatch):
    monkeypatch.setattr(
        kvrag.precompute.quantise_check,
        "judge",
        lambda *_: pytest.fail("there is nothing to judge"),
    )
    for kv_dtype, is_exact in (("auto", True), ("int8", False)):
        engine = make(engine_of, kv_dtype=kv_dtype)
        if not is_exact:
            monkeypatch.undo()
        engine.precompute(CHUNKS)
        for prompt, repair in ((HEAD, EXACT_HERE), (PROMPT, RepairConfig(strategy="all"))):
            result = engine.prefill(prompt, mode="stitch", repair=repair)
            assert (result.exactness == "exact") is is_exact
        found = engine.explain(HEAD, mode="stitch")
        assert [span.exact for span in found.spans if span.hit] == [is_exact, is_exact]
        assert found.mode == ("prefix" if is_exact else "stitch")
        assert any("rounded to int8" in note for note in found.notes) != is_exact


def test_where_every_row_was_computed_nothing_rounded_is_left(engine_of):
    """Without the prefix's KV no reused row is kept as stored, so the label is that of a full prefill's KV, and true."""
    engine = make(engine_of, kv_dtype="int4")
    engine.precompute(CHUNKS)
    ids = engine.loaded.encoder.live_ids("Read this.\n", at_start=True)
    identity = ChunkIdentity(
        engine.loaded.fingerprint,
        namespace_digest("default"),
        ids_digest(()),
        tuple(ids),
        kv_dtype="int4",
    )
    assert engine.store.delete([chunk_key(identity)]) == 1
    prompt = ["Read this.\n", "And this.\n", *PROMPT[1:]]
    result = engine.prefill(
        prompt, mode="stitch", repair=RepairConfig(strategy="all", mismatch_ratio=1.0)
    )
    assert result.repaired_tokens > 0
    assert (result.cached_tokens, result.exactness, result.kv_dtype) == (0, "exact", "auto")
    assert float((result.logits - engine.prefill(prompt, mode="full").logits).abs().max()) < 1e-3


def test_mode_prefix_takes_exact_kv_only(engine_of, kv_dtype):
    engine = make(engine_of, kv_dtype=kv_dtype)
    engine.precompute(CHUNKS)
    result = engine.prefill(PROMPT, mode="prefix")
    assert (result.exactness, result.loaded_bytes) == ("full", 0)
    assert (
        result.fallback_reason
        == f"mode 'prefix' reuses exact KV only, and this store's is rounded to {kv_dtype}"
    )
    explained = engine.explain(PROMPT, mode="prefix")
    assert (explained.mode, explained.notes[0]) == ("full", result.fallback_reason)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3", "gptj", "bloom"])
def test_rounded_reuse_is_close_to_reuse(engine_of, name):
    """Each architecture's own way of turning keys comes after the codes are read."""
    exact = make(engine_of, name)
    exact.precompute(CHUNKS)
    reference = exact.prefill(PROMPT, mode="stitch", repair=EXACT_HERE)
    distances = {}
    for kv_dtype in LOSSY:
        engine = make(engine_of, name, kv_dtype=kv_dtype)
        report = engine.precompute(CHUNKS)
        assert (report.stored, report.failed) == (4, [])
        result = engine.prefill(PROMPT, mode="stitch", repair=EXACT_HERE)
        assert result.cached_tokens == reference.cached_tokens
        assert result.loaded_bytes < reference.loaded_bytes / 2
        distances[kv_dtype] = float((result.logits - reference.logits).abs().max())
    spread = float(reference.logits.std())
    assert distances["int8"] < 0.1 * spread
    assert distances["int8"] < min(distances["int4"], distances["fp8"])
    assert max(distances.values()) < spread


# -- what is asked for is what is read -----------------------------------------------------------------------------------


def test_kv_of_another_type_is_not_used_and_explained(engine_of):
    make(engine_of, kv_dtype="int8").precompute(CHUNKS)
    for asked in ("auto", "fp8"):
        engine = make(engine_of, kv_dtype=asked)
        assert engine.prefill(PROMPT, mode="stitch").exactness == "full"
        reasons = [span.reason for span in engine.explain(PROMPT).spans if span.kind == "chunk"]
        assert len(reasons) == 3
        assert all(
            r is not None and r.startswith(f"kept with kv_dtype='int8', and {asked!r} is asked for")
            for r in reasons
        )
    assert make(engine_of, kv_dtype="int8").prefill(PROMPT, mode="stitch").kv_dtype == "int8"


def test_a_directory_may_hold_both(engine_of):
    for kv_dtype in ("auto", "int4"):
        engine = make(engine_of, kv_dtype=kv_dtype)
        assert engine.precompute(CHUNKS, ids=["a", "b", "c", "d"]).stored == 4
        assert engine.precompute(CHUNKS, ids=["a", "b", "c", "d"]).skipped == 4
    assert make(engine_of).prefill(HEAD, mode="stitch", repair=EXACT_HERE).exactness == "exact"
    engine = make(engine_of, kv_dtype="int4")
    assert engine.prefill(HEAD, mode="stitch").kv_dtype == "int4"
    assert engine.delete(["b"]) == 2
    assert not any(span.hit for span in make(engine_of).explain(HEAD).spans if span.kind == "chunk")


def test_every_tier_gives_the_same_answer(engine_of, kv_dtype):
    make(engine_of, kv_dtype=kv_dtype).precompute(CHUNKS)
    engine = make(engine_of, kv_dtype=kv_dtype)
    from_disk, from_memory = (engine.prefill(PROMPT, mode="stitch") for _ in range(2))
    uncached = make(engine_of, kv_dtype=kv_dtype, ram_bytes=0).prefill(PROMPT, mode="stitch")
    assert torch.equal(from_disk.logits, from_memory.logits)
    assert torch.equal(from_disk.logits, uncached.logits)
    assert from_memory.kv_dtype == kv_dtype


def test_a_chunk_that_can_not_be_rounded_is_reported(engine_of, monkeypatch):
    monkeypatch.setattr(QuantiseCheck, "admit", lambda self, loaded: None)
    engine = make(engine_of, kv_dtype="int4")
    encode = kvrag.precompute.run.encode_chunks

    def with_a_huge_value(*args):
        found = encode(*args)
        with torch.inference_mode():
            found[0].layers[1].values[0, 0, 0] = 1e9
        return found

    monkeypatch.setattr("kvrag.precompute.run.encode_chunks", with_a_huge_value)
    report = engine.precompute(CHUNKS)
    assert report.stored == 3
    assert "too large for int4" in report.failed[0][1]


# -- the gate ------------------------------------------------------------------------------------------------------------


def sensitive() -> Any:
    """A model whose attention turns on differences that rounding takes away: queries a thousand times larger."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1000)
        model.lm_head.weight.mul_(30)
    return model


def test_a_model_that_does_not_tolerate_a_type_is_refused(tokenizer, tmp_path, monkeypatch):
    engine = KVRagEngine.from_pretrained(
        sensitive(),
        tokenizer=tokenizer,
        kv_dir=tmp_path / "kv",
        store_config=StoreConfig(kv_dtype="int4"),
        prove="off",
    )
    verdict = judge(engine.loaded, engine.loaded.reusable, "int4")
    assert verdict.mean_kl > 0.1
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not tolerate KV rounded to int4") as raised:
            engine.precompute(CHUNKS)
        assert f"KL {verdict.mean_kl:.3g} nats" in str(raised.value)
        assert "at most 0.1 is allowed" in str(raised.value)
        assert "kv_dtype='int8'" in str(raised.value)
        with pytest.raises(ConfigError, match="does not tolerate"):
            engine.generate(PROMPT, max_new_tokens=1)
    assert engine.store.catalog.keys() == []
    engine.close()
    plain = KVRagEngine.from_pretrained(
        sensitive(), tokenizer=tokenizer, kv_dir=tmp_path / "kv", prove="off"
    )
    assert plain.precompute(CHUNKS).stored == 4
    plain.close()
    monkeypatch.setattr(kvrag.precompute.quantise_check, "MAX_MEAN_KL", 1e9)
    in_memory = KVRagEngine.from_pretrained(
        sensitive(), tokenizer=tokenizer, store_config=StoreConfig(kv_dtype="int4"), prove="off"
    )
    assert verdict.top1 < MIN_TOP1
    with pytest.raises(ConfigError, match=rf"for {verdict.top1:.0%} \(at least 80% is needed\)"):
        in_memory.precompute(CHUNKS)
    in_memory.close()


def test_another_best_token_counts_where_it_was_about_as_likely():
    # Half as likely: 0.69 less.
    logits = torch.tensor([[2.0, 1.9, 0.0], [2.0, 1.4, 0.0], [2.0, 1.2, 0.0], [2.0, 1.9, 0.0]])
    other = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert _same_top(logits, other) == 0.75
    assert not Verdict(0.0, 0.79, 32).passed
    assert Verdict(0.0, 0.8, 32).passed


def test_a_verdict_is_kept_and_a_damaged_one_made_again(engine_of, cache_of_the_run, monkeypatch):
    calls: list[str] = []

    def counting(loaded, lm, kv_dtype):
        calls.append(kv_dtype)
        return judge(loaded, lm, kv_dtype)

    monkeypatch.setattr(kvrag.precompute.quantise_check, "judge", counting)
    monkeypatch.setenv("KVRAG_CACHE_DIR", str(cache_of_the_run / "verdicts here"))
    make(engine_of, kv_dtype="int8").precompute(CHUNKS)
    make(engine_of, kv_dtype="int8").precompute(CHUNKS)
    assert calls == ["int8"]
    make(engine_of, kv_dtype="fp8").precompute(CHUNKS)
    assert calls == ["int8", "fp8"], "each type by itself"
    for damage in (
        "{",
        "[]",
        '{"mean_kl": 3.0, "top1": 1, "tokens": 1}',
        '{"mean_kl": 0, "top1": 0.5, "tokens": 1}',
        '{"mean_kl": NaN, "top1": 1, "tokens": 1}',
        '{"mean_kl": "0", "top1": 1, "tokens": 1}',
        '{"mean_kl": 0}',
    ):
        for file in (cache_of_the_run / "verdicts here" / "verdicts").iterdir():
            file.write_text(damage)
            assert not has_passed(Verdict, file)
        calls.clear()
        make(engine_of, kv_dtype="int8").precompute(CHUNKS)
        assert calls == ["int8"]


def test_a_model_that_changed_is_judged_anew(engine_of):
    """Weights that were changed in place, or another adapter, are another model to the gate as to the store."""
    engine = make(engine_of, kv_dtype="int4", prove="off")
    engine.precompute(CHUNKS[:1])
    lm = engine.loaded.reusable
    with torch.no_grad():
        for layer in lm.model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1000)
        lm.model.lm_head.weight.mul_(30)
    with pytest.raises(ConfigError, match="does not tolerate"):
        engine.precompute(CHUNKS[1:])


def test_a_head_dim_that_int4_can_not_hold_is_said_at_once(engine_of, monkeypatch):
    monkeypatch.setattr(
        kvrag.precompute.quantise_check,
        "pack",
        raising(kvrag.StoreError, "the head dim 63 is odd; use int8"),
    )
    with pytest.raises(ConfigError, match="can't be kept as int4: the head dim 63 is odd"):
        make(engine_of, "mistral", kv_dtype="int4", namespace="n").precompute(CHUNKS)
    plain = make(engine_of, "gpt2", kv_dtype="int4")
    assert plain.generate("Who?", max_new_tokens=2).exactness == "full", "nothing is stored for it"


def test_the_gates_prompt_fits_a_small_window(engine_of, monkeypatch):
    engine = make(engine_of)
    monkeypatch.setattr(engine.loaded.reusable, "reuse_window", 40)
    parts = draw_parts(engine.loaded, engine.loaded.reusable)
    assert all(parts)
    assert sum(map(len, parts)) < 40
    assert judge(engine.loaded, engine.loaded.reusable, "int8").tokens == len(parts[-1])


def test_the_gate_measures_what_reuse_shows(engine_of):
    """Its KL is that of rounding alone: none without, and less the more bits there are."""
    engine = make(engine_of)
    loaded, lm = engine.loaded, engine.loaded.reusable
    verdicts = {d: judge(loaded, lm, d) for d in ("auto", "int8", "int4")}
    assert verdicts["auto"].mean_kl == 0.0
    assert verdicts["auto"].top1 == 1.0
    assert 0 < verdicts["int8"].mean_kl < verdicts["int4"].mean_kl / 10


# -- configuration and arithmetic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma4-key-values"])
def test_estimates_are_what_is_kept(engine_of, name, kv_dtype):
    engine = make(engine_of, name, kv_dtype=kv_dtype)
    engine.precompute(CHUNKS[:1])
    shape = shape_from_config(engine.loaded.lm.config.to_dict())
    tokens = len(engine.loaded.encoder.chunk_ids(CHUNKS[0]))
    records = map(engine.store.catalog.get, engine.store.catalog.keys())
    (record,) = [r for r in records if r is not None and r.num_tokens == tokens]
    assert record.num_bytes == kept_bytes_per_token(shape, kv_dtype, chunk_tokens=tokens) * tokens


def test_verify_passes_with_rounded_kv(engine_of, caplog):
    with caplog.at_level(logging.INFO, "kvrag.precompute.quantise_check"):
        engine = make(engine_of, "qwen3", kv_dtype="int8", seed=7)
        engine.precompute(CHUNKS)
    assert "KV rounded to int8 moves this model by" in caplog.text
    report = engine.verify([HEAD], repair=EXACT_HERE)
    assert report.passed
    assert 0 < report.mean_kl < 0.01
    assert report.rows[0].exactness == "repaired"
    reference = engine.prefill(HEAD, mode="full").logits
    rounded = engine.prefill(HEAD, mode="stitch", repair=EXACT_HERE).logits
    assert float(kl_divergence(reference, rounded)) == report.mean_kl
