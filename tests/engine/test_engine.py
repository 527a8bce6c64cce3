"""The facade: fields, modes, errors, streams. Exactness has its own file."""

import asyncio
import gc
import os
import re
import shutil
import threading
import warnings
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Forwards, at_once, mapped, raising
from texts import asking, make_chunks

import kvrag.blend.prefill
import kvrag.generate.pipeline
import kvrag.precompute.run
from kvrag import (
    Chunk,
    ConfigError,
    ContextLengthError,
    InputError,
    KVRagEngine,
    KVRagError,
    ModelError,
    OutOfMemoryError,
    RepairConfig,
    StoreConfig,
    StoreError,
    StoreFormatError,
)
from kvrag.engine import MAX_KEPT
from kvrag.identity.fingerprint import chunk_key, text_digest
from kvrag.kv.quantise import pack, unpack
from kvrag.prompt.template import PromptEncoder
from kvrag.runtime import POOL
from kvrag.testing.models import save_tiny_model, tiny_model
from kvrag.types import ChunkIdentity, ChunkKV, Hole, LayerKV

CHUNKS = make_chunks(5, words=30, seed=3)
ask = partial(asking, CHUNKS)


# -- accounting and modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "exactness"),
    [("full", "full"), ("prefix", "exact"), ("stitch", "repaired"), ("auto", "repaired")],
)
def test_every_token_is_accounted_for_once(engine, mode, exactness):
    engine.precompute(CHUNKS)
    result = engine.generate(ask(0, 1, 2, 3, 4), mode=mode, max_new_tokens=3)
    assert result.exactness == exactness
    assert (
        result.cached_tokens + result.repaired_tokens + result.computed_tokens
        == result.prompt_tokens
    )
    assert result.prompt_tokens == len(result.prompt_ids)
    assert result.kv_reuse_ratio == result.cached_tokens / result.prompt_tokens
    assert (result.kv_reuse_ratio > 0) == (mode != "full")
    assert len(result.token_ids) == 3
    assert result.finish_reason == "length"
    assert 0 < result.ttft_ms <= result.total_ms
    assert {"plan", "decode"} < set(result.timings_ms)


def test_auto_prefills_short_prompts_in_full_and_says_why(engine):
    prompt = ["Context: ", Chunk(CHUNKS[1]), " Who?"]
    nothing = engine.prefill(prompt)
    assert (nothing.exactness, nothing.fallback_reason) == ("full", "no stored KV for this prompt")
    engine.precompute(CHUNKS)
    result = engine.prefill(prompt)
    assert result.exactness == "full"
    assert "would not pay" in str(result.fallback_reason)
    assert engine.prefill(prompt, mode="stitch").exactness == "repaired"


def test_ratio_zero_with_query_repairs_only_heads(engine):
    engine.precompute(CHUNKS)
    result = engine.prefill(
        ask(0, 1, 2), mode="stitch", repair=RepairConfig(recompute_ratio=0.0, first_k=4)
    )
    assert result.repaired_tokens == 8


def test_a_prompt_may_be_text_messages_or_segments(engine):
    engine.precompute(CHUNKS)
    text = engine.loaded.encoder.render(ask(0, 1))
    messages = engine.prefill(ask(0, 1), mode="stitch")
    assert engine.prefill(text, mode="stitch").prompt_ids == messages.prompt_ids
    head, tail = text.split(CHUNKS[0])[0], text.split(CHUNKS[1])[1]
    segments = [head, Chunk(f"{CHUNKS[0]}\n\n"), Chunk(CHUNKS[1]), tail]
    assert engine.prefill(segments, mode="stitch").prompt_ids == messages.prompt_ids
    parts = [{"type": "text", "text": "Read: "}, Chunk(CHUNKS[0]), " Who?"]
    assert engine.prefill([{"role": "user", "content": parts}], mode="stitch").cached_tokens > 0


def test_a_prompt_may_end_with_a_chunk(engine):
    engine.precompute(CHUNKS)
    prompt = [engine.prefix_text, Chunk(CHUNKS[0])]
    full, reused = engine.prefill(prompt, mode="full"), engine.prefill(prompt, mode="stitch")
    assert (reused.exactness, reused.computed_tokens) == ("exact", 1)
    assert torch.allclose(full.logits, reused.logits, atol=1e-4)


def test_a_second_engine_starts_warm_from_disk(tiny_dir, tmp_path):
    first = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path)
    assert first.precompute(CHUNKS).stored == len(CHUNKS)
    before = first.prefill(ask(2, 0), mode="stitch")
    first.close()
    second = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path)
    after = second.prefill(ask(2, 0), mode="stitch")
    assert torch.equal(before.logits, after.logits)
    assert second.precompute(CHUNKS).skipped == len(CHUNKS)
    assert second.stats()["store"]["disk"].hits > 0
    second.close()


def test_score_matches_plain_transformers(engine):
    engine.precompute(CHUNKS)
    score = engine.score(
        ask(1, 2), "the keeper brings it", mode="stitch", repair=RepairConfig(strategy="all")
    )
    ids = score.prompt_ids + score.continuation_ids
    with torch.inference_mode():
        plain = engine.loaded.lm.model(torch.tensor([ids])).logits[0, score.prompt_tokens - 1 : -1]
    assert torch.allclose(score.logits, plain, atol=1e-3)
    expected = torch.nn.functional.cross_entropy(plain, torch.tensor(score.continuation_ids))
    assert score.loss == pytest.approx(float(expected), abs=1e-4)
    assert engine.score(ask(1), score.continuation_ids[:1]).logits.shape == (1, plain.shape[1])


def test_verify_passes_exact_reuse_and_fails_a_threshold(engine):
    assert not engine.verify([ask(0)], max_new_tokens=1).passed, "nothing was reused"
    engine.precompute(CHUNKS)
    report = engine.verify([ask(0, 1), ask(3)], repair=RepairConfig(strategy="all"))
    assert report.passed
    assert (report.top1_agreement, report.greedy_agreement, len(report.rows)) == (1.0, 1.0, 2)
    assert report.mean_kl < 1e-6
    assert "mean_kl of at most 0.1 nats and top1_agreement of at least 0.8" in repr(report)
    assert not engine.verify(
        [ask(3, 1, 0)], repair=RepairConfig(strategy="none"), max_mean_kl=1e-9
    ).passed
    with pytest.raises(InputError, match="at least one prompt"):
        engine.verify([])


def test_stats_add_up(engine):
    engine.precompute(CHUNKS)
    results = [engine.prefill(ask(0, 1, 2, 3)), engine.generate(ask(1), max_new_tokens=1)]
    stats = engine.stats()
    assert stats["requests"] == 2
    assert stats["prompt_tokens"] == sum(r.prompt_tokens for r in results)
    assert stats["cached_tokens"] == sum(r.cached_tokens for r in results)


# -- prefix --------------------------------------------------------------------------------------------------------------


def test_another_live_prefix_is_labelled_warned_about_once_and_repaired_more(engine):
    engine.precompute(CHUNKS)
    prompt = [{"role": "system", "content": "Be brief."}, *ask(0, 1, 2)]
    assert not engine.prefill(prompt, mode="full").has_other_prefix
    assert not engine.prefill(ask(0, 1, 2), mode="stitch").has_other_prefix
    with pytest.warns(UserWarning, match="another prefix.*prefix="):
        result = engine.prefill(prompt, mode="stitch", repair=RepairConfig(recompute_ratio=0.03))
    assert result.has_other_prefix
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.prefill(prompt, mode="stitch")
    assert result.exactness == "repaired"
    candidates = sum(len(engine.loaded.encoder.chunk_ids(c)) for c in CHUNKS[:3])
    assert result.repaired_tokens == round(0.2 * candidates)
    assert "another prefix" in str(engine.explain(prompt))


def test_the_prefix_may_be_given_as_messages(engine_of, recwarn):
    engine = engine_of(prefix=[{"role": "system", "content": "Be brief."}])
    engine.precompute(CHUNKS)
    result = engine.prefill([{"role": "system", "content": "Be brief."}, *ask(0)], mode="stitch")
    assert result.exactness == "exact"
    assert not [w for w in recwarn if "another prefix" in str(w.message)]


def test_glue_after_the_prefix_costs_exactness_but_no_warning(engine, recwarn):
    engine.precompute(CHUNKS)
    prompt = [{"role": "user", "content": f"file: notes.md\n\n{CHUNKS[0]}\n\nWho?"}]
    result = engine.prefill(prompt, mode="stitch")
    assert result.exactness == "repaired"
    assert not [w for w in recwarn if "another prefix" in str(w.message)]


# -- index time ----------------------------------------------------------------------------------------------------------


def test_precompute_skips_what_is_there_and_merges_equal_texts(engine):
    report = engine.precompute([CHUNKS[0], f"  {CHUNKS[0]}\n", CHUNKS[1]])
    assert (report.stored, report.skipped, report.failed) == (2, 0, [])
    assert report.stored_bytes > 0
    again = engine.precompute(CHUNKS[:3])
    assert (again.stored, again.skipped) == (1, 2)


def test_precompute_goes_on_after_a_kill(tiny_dir, tmp_path, monkeypatch):
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path)
    real, calls = kvrag.precompute.run.encode_chunks, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(kvrag.precompute.run, "encode_chunks", killed)
    with pytest.raises(KeyboardInterrupt):
        engine.precompute(CHUNKS, batch_size=2)
    engine.close()
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path)
    report = engine.precompute(CHUNKS, batch_size=2)
    assert (report.stored, report.skipped) == (3, 2)
    engine.close()


def test_a_batch_is_written_while_the_next_one_is_computed(engine, monkeypatch):
    encode, put_all = kvrag.precompute.run.encode_chunks, engine.store.put_all
    computing, calls, waited = threading.Event(), [], []

    def encode_chunks(*args):
        calls.append(1)
        if len(calls) == 2:
            computing.set()
        return encode(*args)

    def wait_and_put(chunks, **options):
        if chunks[0].text is not None:  # not the prefix
            waited.append(computing.wait(30))
        return put_all(chunks, **options)

    monkeypatch.setattr(kvrag.precompute.run, "encode_chunks", encode_chunks)
    monkeypatch.setattr(engine.store, "put_all", wait_and_put)
    assert engine.precompute(CHUNKS[:4], batch_size=2).stored == 4
    assert waited == [True] * 2

    monkeypatch.setattr(
        kvrag.precompute.run.POOL, "submit", raising(RuntimeError, "can't start new thread")
    )
    assert engine.precompute(CHUNKS[4:]).stored == 1, "written in the same thread"


def test_kv_whose_catalog_was_lost_is_adopted_without_a_forward(tiny_dir, tmp_path, monkeypatch):
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path)
    engine.precompute(CHUNKS, ids=list("abcde"))
    before = engine.prefill(ask(2, 0), mode="stitch").logits
    engine.close()
    shutil.rmtree(tmp_path / "catalog")
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path)
    monkeypatch.setattr(kvrag.precompute.run, "encode_chunks", None)
    report = engine.precompute(CHUNKS, ids=list("abcde"))
    assert (report.stored, report.skipped, report.failed) == (0, 5, [])
    assert engine.document_ids() == list("abcde")
    assert engine.prefill(ask(2, 0), mode="stitch").cached_tokens > 64
    assert torch.allclose(engine.prefill(ask(2, 0), mode="stitch").logits, before, atol=1e-3)
    engine.close()


def test_short_chunks_stay_live_and_long_ones_are_reported(engine):
    report = engine.precompute(
        ["a short note about the archive", "word " * 5000], ids=["short", "long"]
    )
    assert (report.stored, report.skipped, report.short[0][0]) == (0, 0, "short")
    assert report.failed[0][0] == "long"
    assert "context window" in report.failed[0][1]


def test_precompute_halves_its_batch_when_memory_runs_out(engine, monkeypatch):
    real = kvrag.precompute.run.encode_chunks

    def small(lm, prefix, chunks):
        if len(chunks) > 1:
            raise torch.OutOfMemoryError("no room")
        return real(lm, prefix, chunks)

    monkeypatch.setattr(kvrag.precompute.run, "encode_chunks", small)
    assert engine.precompute(CHUNKS, batch_size=4).stored == len(CHUNKS)


@pytest.mark.parametrize(
    "fault", [OSError(28, "No space left on device"), RuntimeError("No space left on device")]
)
def test_a_store_that_can_not_write_is_reported_and_the_rest_goes_on(engine, monkeypatch, fault):
    """Chunks of one batch, of which one can't be written."""
    real, calls = engine.store.blobs.write, []

    def full(key, parts):
        calls.append(key)
        if len(calls) == 3:  # after the prefix and a chunk
            raise fault
        return real(key, parts)

    monkeypatch.setattr(engine.store.blobs, "write", full)
    report = engine.precompute(CHUNKS[:3], ids=["a", "b", "c"])
    assert report.stored == 2
    [(failed, why)] = report.failed
    assert "No space left on device" in why
    assert engine.store.blobs.keys() == set(calls) - {calls[2]}
    assert engine.document_ids() == sorted({"a", "b", "c"} - {failed})


def test_deleting_the_last_document_erases_the_kv(engine):
    engine.precompute([CHUNKS[0], CHUNKS[0], CHUNKS[1]], ids=["a", "b", "c"])
    assert engine.document_ids() == ["a", "b", "c"]
    assert engine.delete(["a"]) == 0
    assert (
        engine.prefill(ask(0), mode="stitch").cached_tokens
        > len(engine.loaded.encoder.chunk_ids(CHUNKS[0])) - 1
    )
    assert engine.delete(["b", "unknown"]) == 1
    assert engine.explain(ask(0, 1)).hits == 1


# -- explain -------------------------------------------------------------------------------------------------------------


def test_explain_tells_hits_and_misses(engine):
    engine.precompute(CHUNKS[:2])
    explanation = engine.explain(
        [
            engine.prefix_text,
            Chunk(CHUNKS[0]),
            "\n\n",
            Chunk(CHUNKS[4]),
            "\n\n",
            Chunk("tiny"),
            " ?",
        ]
    )
    chunks = [s for s in explanation.spans if s.kind == "chunk"]
    assert [(s.hit, s.exact) for s in chunks] == [(True, True), (False, False), (False, False)]
    assert "not precomputed" in str(chunks[1].reason)
    assert "min_chunk_tokens" in str(chunks[2].reason)
    assert explanation.hits == 1
    assert "1 chunk(s) with KV" in str(explanation)
    assert "rewritten" in str(engine.explain("nothing known here"))


def test_a_store_made_by_another_model_is_all_misses(tiny_dir, tmp_path):
    first = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv")
    first.precompute(CHUNKS)
    other = KVRagEngine.from_pretrained(
        save_tiny_model(tmp_path / "other", seed=1), kv_dir=tmp_path / "kv"
    )
    assert other.prefill(ask(0, 1), mode="stitch").exactness == "full"
    assert "no KV of this model" in str(other.explain(ask(0, 1)))
    first.close()
    other.close()


# -- a store that is slow or broken --------------------------------------------------------------------------------------


def hole(identity: ChunkIdentity) -> Hole:
    return Hole(chunk_key(identity), "late", None)


def _break(engine: KVRagEngine, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    fail = raising(OSError, "the disk is gone")

    if how == "get":
        monkeypatch.setattr(engine.store, "get_many", fail)
    elif how == "known":
        monkeypatch.setattr(engine.store, "known", fail)
        monkeypatch.setattr(engine.store.catalog, "variants", fail)
    elif how == "texts":
        monkeypatch.setattr(engine.store.catalog, "texts", fail)
    else:
        monkeypatch.setattr(
            engine.store, "get_many", lambda identities, **_: [hole(i) for i in identities]
        )


@pytest.mark.parametrize("how", ["get", "known", "texts", "late"])
def test_a_broken_or_late_store_gives_the_full_prefills_answer(how, engine, monkeypatch):
    engine.precompute(CHUNKS)
    engine.explain(ask(0, 1, 2))
    _break(engine, monkeypatch, how)
    full = engine.generate(ask(0, 1, 2), mode="full", max_new_tokens=8)
    answer = engine.generate(ask(0, 1, 2), mode="stitch", max_new_tokens=8)
    assert answer.exactness == "full"
    assert answer.token_ids == full.token_ids
    assert answer.fallback_reason


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("lie", ["layers", "width", "heads", "type"])
def test_kv_that_is_not_the_models_is_computed(engine_of, kv_dtype, lie):
    """A planted file may be in order, say that it is this model's, and hold something else."""
    engine = engine_of(store_config=StoreConfig(ram_bytes=0, kv_dtype=kv_dtype))
    engine.precompute(CHUNKS, ids=list("abcde"))
    full = engine.prefill(ask(0, 1, 2), mode="full")
    real = engine.store.get_many

    def other(kv):
        if lie == "layers":
            return replace(kv, layers=kv.layers[:-1])
        read = [
            unpack(x, kv.num_tokens, device=torch.device("cpu"), dtype=torch.float32)
            for x in kv.layers
        ]
        exact = ChunkKV(tuple(LayerKV(*pair) for pair in read))
        if lie == "type":
            return pack(exact, "int8" if kv_dtype == "auto" else "auto")
        return pack(
            mapped(
                exact, lambda x: x[..., : x.shape[-1] // 2] if lie == "width" else x.repeat(2, 1, 1)
            ),
            kv_dtype,
        )

    engine.store.get_many = lambda ids, **kw: [other(kv) for kv in real(ids, **kw)]
    result = engine.prefill(ask(0, 1, 2), mode="stitch", repair=RepairConfig(strategy="all"))
    assert (result.exactness, result.cached_tokens) == ("full", 0)
    assert {hole.reason for hole in result.holes} == {"damaged"}
    assert torch.allclose(result.logits, full.logits, atol=1e-4)


# -- bad input -----------------------------------------------------------------------------------------------------------


def test_prompt_and_answer_must_fit_the_context_window(engine):
    with pytest.raises(ContextLengthError, match=r"4096.*fewer chunks"):
        engine.generate("word " * 5000)
    with pytest.raises(ContextLengthError, match="may take 4096"):
        engine.generate("hello", max_new_tokens=4096)


@pytest.mark.parametrize("texts", [[""], ["ok " * 20, "  "], [None], [3]])
def test_an_impossible_chunk_is_named_and_nothing_is_stored(texts, engine):
    with pytest.raises(InputError, match=f"chunk {len(texts) - 1}"):
        engine.precompute(texts)
    assert engine.store.catalog.keys() == []


def test_a_character_that_cannot_be_stored_is_named_by_its_place_in_the_text(engine):
    [(name, reason)] = engine.precompute([CHUNKS[0], "  a \ud800 b"]).failed
    assert name == "text 1"
    assert "'\\ud800' at character 4" in reason


def test_a_text_is_hashed_once_on_its_way_to_the_store(engine, monkeypatch):
    hashed = []
    monkeypatch.setattr(
        "kvrag.prompt.spans.text_digest", lambda text: hashed.append(text) or text_digest(text)
    )
    for texts in (CHUNKS[:3], [CHUNKS[0], CHUNKS[3], CHUNKS[2]]):
        hashed.clear()
        engine.precompute(texts, ids=["a", "b", "c"])
        assert hashed == texts


def test_ids_must_fit_the_texts(engine):
    with pytest.raises(InputError, match="two different texts"):
        engine.precompute(CHUNKS[:2], ids=["a", "a"])
    with pytest.raises(InputError, match="2 texts came with 1 ids"):
        engine.precompute(CHUNKS[:2], ids=["a"])
    with pytest.raises(InputError, match="must be strings"):
        engine.precompute(CHUNKS[:1], ids=[7])
    with pytest.raises(ConfigError, match="batch_size"):
        engine.precompute(CHUNKS[:1], batch_size=0)
    assert engine.precompute([CHUNKS[0], CHUNKS[0]], ids=["a", "a"]).stored == 1
    with pytest.raises(ConfigError):
        engine.precompute([CHUNKS[1]], ids=["a"], batch_size=0)
    assert engine.explain(ask(0)).hits == 1, "nothing is lost when a call is refused"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "auto, full, prefix, stitch"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": [""]}, "non-empty"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"beams": 4}, "no option 'beams'"),
        ({"repair": "hkvd"}, "RepairConfig"),
    ],
)
def test_an_impossible_option_is_refused_by_name(options, message, engine):
    with pytest.raises(ConfigError, match=message):
        engine.generate("hello", **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "no-such-model"}, ModelError, "no-such-model"),
        ({"model": "x.gguf"}, ModelError, "GGUF file 'x.gguf' of the model does not exist"),
        ({"model": tiny_model()}, ConfigError, "tokenizer"),
        ({"namespace": ""}, ConfigError, "namespace"),
        ({"dtype": "int8"}, ConfigError, "dtype"),
        ({"kv_dirr": "x"}, ConfigError, "did you mean 'kv_dir'"),
        ({"repair": "query"}, ConfigError, "RepairConfig"),
        ({"device": "toaster"}, ConfigError, "device"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, ConfigError, "CUDA")]),
    ],
)
def test_impossible_engines_are_refused(options, error, message, tiny_dir):
    with pytest.raises(error, match=message):
        KVRagEngine.from_pretrained(**{"model": tiny_dir, **options})


def test_impossible_store_directories_are_refused(tiny_dir, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        with pytest.raises(StoreError, match="file"):
            KVRagEngine.from_pretrained(tiny_dir, kv_dir=path)
    made = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv")
    made.close()
    form = tmp_path / "kv" / "format.json"
    form.write_text(re.sub(r"\d+", "999", form.read_text()))
    with pytest.raises(StoreFormatError, match="999"):
        KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv")


def test_out_of_memory_retries_without_reuse_then_gives_up_with_a_sentence(engine, monkeypatch):
    engine.precompute(CHUNKS)
    real, modes = kvrag.generate.pipeline.prefill, []

    def tight(*args, mode, **kwargs):
        modes.append(mode)
        if mode != "full":
            raise torch.OutOfMemoryError("no room")
        return real(*args, mode=mode, **kwargs)

    monkeypatch.setattr(kvrag.generate.pipeline, "prefill", tight)
    assert engine.generate(ask(0, 1), mode="stitch", max_new_tokens=2).exactness == "full"
    assert modes == ["stitch", "full"]

    monkeypatch.setattr(
        kvrag.generate.pipeline,
        "prefill",
        raising(RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
    )
    with pytest.raises(OutOfMemoryError, match="fewer chunks"):
        engine.generate(ask(0, 1))


def test_memory_of_a_failed_attempt_is_free_before_the_next(engine, monkeypatch):
    engine.precompute(CHUNKS)
    real, buffers = engine.loaded.lm.buffer, []

    def buffer(capacity, **kwargs):
        assert not [b for b in buffers if b() is not None], (
            "the failed attempt's buffer is still there"
        )
        made = real(capacity, **kwargs)
        buffers.append(weakref.ref(made))
        return made

    monkeypatch.setattr(engine.loaded.lm, "buffer", buffer)
    monkeypatch.setattr(kvrag.blend.prefill, "stitch", raising(torch.OutOfMemoryError, "no room"))
    result = engine.prefill(ask(0, 1), mode="stitch")
    assert (result.exactness, len(buffers)) == ("full", 2)
    assert "memory ran out" in str(result.fallback_reason)


def test_the_last_engine_frees_the_weights(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir, namespace="to-be-freed", revision="main")
    model = weakref.ref(engine.loaded.lm.model)
    engine.close()
    del engine
    gc.collect()
    assert model() is None


def test_one_model_in_two_engines_takes_turns(tokenizer):
    model = tiny_model()
    engines = [KVRagEngine.from_pretrained(model, tokenizer=tokenizer, namespace=n) for n in "ab"]
    at_once(
        *(lambda e=e: [e.generate(ask(0, 1), max_new_tokens=3) for _ in range(8)] for e in engines)
    )
    assert model.config._attn_implementation == "sdpa"


def test_a_known_chunk_inside_the_prefix_is_part_of_the_prefix(engine_of):
    engine = engine_of(prefix=f"House rules:\n{CHUNKS[0]}\n\nContext:\n")
    engine.precompute(CHUNKS)
    prompt = f"House rules:\n{CHUNKS[0]}\n\nContext:\n{CHUNKS[1]}\n\nWho?"
    result = engine.prefill(prompt, mode="stitch")
    assert (result.exactness, result.has_other_prefix) == ("exact", False)
    assert torch.allclose(result.logits, engine.prefill(prompt, mode="full").logits, atol=1e-3)


def test_prefix_mode_reads_no_more_than_it_uses(engine_of):
    engine = engine_of(store_config=StoreConfig(ram_bytes=0))
    engine.precompute(CHUNKS)
    prefix, stitched = (engine.prefill(ask(0, 1, 2, 3, 4), mode=m) for m in ("prefix", "stitch"))
    assert 0 < prefix.loaded_bytes < stitched.loaded_bytes / 3


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (
            {"kv_dir": None, "store_config": StoreConfig(ram_bytes=250_000)},
            "ram_bytes or ram_fraction, or pass kv_dir",
        ),
        ({"store_config": StoreConfig(disk_bytes=250_000)}, "disk_bytes or disk_fraction"),
    ],
    ids=["memory", "disk"],
)
def test_chunks_that_later_ones_evict_are_reported_with_the_budget_that_is_too_small(
    options, remedy, engine_of
):
    report = engine_of(**options).precompute(CHUNKS)
    assert report.stored + len(report.failed) == len(CHUNKS)
    assert report.failed
    for _, reason in report.failed:
        assert "evicted by later chunks" in reason
        assert f"raise StoreConfig.{remedy}" in reason


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.prefill("a \ud800 b"),
        lambda e: e.precompute(None),
        lambda e: e.precompute({"a": 1}),
        lambda e: e.score("hello", [99999]),
        lambda e: e.score("hello", 5),
        lambda e: e.score("hello", ["a"]),
        lambda e: e.prefill("hello", namespace=5),
        lambda e: e.prefill("hello", namespace=""),
        lambda e: e.precompute(CHUNKS[:1], prefix=b"x"),
        lambda e: e.precompute(CHUNKS[:1], prefix=[3]),
        lambda e: e.generate("hello", temperature=-1e-42),
        lambda e: e.generate("hello", seed=2**64),
        lambda e: KVRagEngine.from_pretrained(None),
        lambda e: KVRagEngine.from_pretrained(e.source.model, store_config=3),
        lambda e: KVRagEngine.from_pretrained(e.source.model, kv_dir=3),
        lambda e: KVRagEngine.from_pretrained(e.source.model, kv_dir="\0"),
        lambda e: KVRagEngine.from_pretrained(e.source.model, device="mps"),
        lambda e: KVRagEngine.get(e.source.model, repair=["x"]),
    ],
)
def test_impossible_arguments_are_kvrag_errors(call, engine):
    with pytest.raises(KVRagError):
        call(engine)


# -- sharing, threads, streams -------------------------------------------------------------------------------------------


def test_get_shares_one_engine_and_engines_share_weights(tiny_dir, tmp_path):
    one = KVRagEngine.get(tiny_dir, kv_dir=tmp_path)
    assert KVRagEngine.get(Path(tiny_dir) / ".", kv_dir=str(tmp_path), dtype="auto") is one
    other = KVRagEngine.get(tiny_dir, kv_dir=tmp_path, namespace="x")
    assert other is not one
    assert other.loaded is one.loaded
    one.close()
    assert KVRagEngine.get(tiny_dir, kv_dir=tmp_path) is not one
    assert other.precompute(CHUNKS[:1]).stored == 1, (
        "the store is open as long as one engine uses it"
    )


def test_an_engine_per_namespace_costs_no_files_and_the_oldest_are_freed(tiny_dir, tmp_path):
    used = KVRagEngine.get(tiny_dir, kv_dir=tmp_path, namespace="used")
    made, files = [], []
    for number in range(MAX_KEPT + 4):
        engine = KVRagEngine.get(
            tiny_dir, kv_dir=tmp_path, namespace=f"tenant-{number}", prefix=f"Notes {number}:"
        )
        made.append(weakref.ref(engine))
        assert engine.store.catalog is used.store.catalog
        del engine
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    assert [ref() is not None for ref in made] == [False] * 4 + [True] * MAX_KEPT
    assert files[-1] <= files[0]
    assert KVRagEngine.get(tiny_dir, kv_dir=tmp_path, namespace="used") is used, (
        "what is in use is shared, however old"
    )


def test_an_engine_that_is_garbage_closes_its_store(tiny_dir, tmp_path):
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path)
    store = engine.store
    stream = engine.stream("Who?", max_new_tokens=2)
    del engine
    gc.collect()
    list(stream)
    assert stream.result.token_ids, "a request keeps its engine"
    del stream
    gc.collect()
    with pytest.raises(StoreError, match="closed"):
        store.clear()


def test_a_models_own_attention_is_untouched_elsewhere(engine_of):
    model = tiny_model().train()
    engine = engine_of(model)
    before = model.config._attn_implementation
    ids = torch.arange(1, 50)[None]
    plain = model(ids).logits
    engine.precompute(CHUNKS)
    engine.generate(ask(0, 1), mode="stitch", max_new_tokens=2)
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, plain)
    assert not any(m._forward_hooks for m in model.modules())
    assert model.training


def test_a_stream_gives_the_same_text_and_then_the_result(engine):
    engine.precompute(CHUNKS)
    whole = engine.generate(ask(0, 1), max_new_tokens=12)
    stream = engine.stream(ask(0, 1), max_new_tokens=12)
    assert "".join(stream) == whole.text
    assert stream.result.token_ids == whole.token_ids
    assert list(stream) == []
    stream = engine.stream(ask(0, 1), max_new_tokens=500)
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = stream.result
    with stream:
        next(stream)
    with pytest.raises(RuntimeError, match="left or cancelled before its end"):
        _ = stream.result
    stream = engine.stream("word " * 5000)
    for read in (list, lambda failed: failed.result):
        with pytest.raises(ContextLengthError):
            read(stream)


async def test_async_gives_the_same_and_never_blocks_the_loop(engine):
    whole = engine.generate(ask(0, 1), max_new_tokens=40)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticker = asyncio.create_task(tick())
    stream = engine.astream(ask(0, 1), max_new_tokens=40)
    assert "".join([piece async for piece in stream]) == whole.text
    assert (await engine.agenerate(ask(0, 1), max_new_tokens=40)).token_ids == whole.token_ids
    ticker.cancel()
    assert ticks > 5


async def test_errors_reach_the_caller(engine):
    with pytest.raises(InputError):
        list(engine.stream(""))
    with pytest.raises(InputError):
        async for _ in engine.astream(""):
            pass
    with pytest.raises(InputError):
        await engine.agenerate("")


@pytest.mark.parametrize("leave", ["close", "cancel", "drop"])
def test_leaving_a_stream_stops_decoding(leave, engine, monkeypatch):
    forwards = Forwards(monkeypatch, seconds=0.002)
    stream = engine.stream(ask(0, 1), max_new_tokens=2000)
    next(stream)
    if leave == "cancel":
        stream.cancel()
        list(stream)
        assert stream.result.finish_reason == "cancelled"
    elif leave == "close":
        stream.close()
    del stream
    gc.collect()
    assert forwards.settled() < 1000


async def test_cancelling_a_task_stops_decoding(engine):
    task = asyncio.create_task(engine.agenerate(ask(0, 1), max_new_tokens=3000))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.3)
    assert not [job for job in POOL._threads.values() if job is not None]


def test_requests_from_several_threads_don_t_mix(engine):
    engine.precompute(CHUNKS)
    prompts = [ask(*((i + j) % 5 for j in range(4))) for i in range(5)]
    alone = [engine.generate(p, mode="stitch", max_new_tokens=10).token_ids for p in prompts]
    together: list[Any] = [None] * 5

    def run(i):
        together[i] = engine.generate(prompts[i], mode="stitch", max_new_tokens=10).token_ids

    at_once(*(partial(run, i) for i in range(5)))
    assert together == alone


def test_precompute_beside_requests_stores_the_same_kv(engine_of):
    """Hooks that capture keys must not see the forwards of requests."""
    busy, quiet = engine_of(kv_dir=None), engine_of(kv_dir=None, namespace="quiet")
    assert busy.loaded is not quiet.loaded
    quiet.precompute(CHUNKS)
    is_over = threading.Event()

    def requests():
        while not is_over.is_set():
            busy.generate("what the keeper wrote about <|im_end|> the harbour", max_new_tokens=4)

    def precompute():
        for text in CHUNKS:
            busy.precompute([text])
        is_over.set()

    at_once(precompute, *[requests] * 3)
    for order in ((0, 1, 2), (4, 3, 2)):
        one, two = (
            e.prefill(ask(*order), mode="stitch", repair=RepairConfig(strategy="none"))
            for e in (busy, quiet)
        )
        assert one.prompt_ids == two.prompt_ids
        assert torch.allclose(one.logits, two.logits, atol=1e-4)


def test_tokenising_in_several_threads_keeps_control_tokens_apart(tokenizer):
    encoder = PromptEncoder(tokenizer)
    live, chunk = encoder.live_ids("a <|im_end|> b"), encoder.document_ids("a <|im_end|> b")
    wrong: list[object] = []

    def check(encode, expected):
        wrong.extend(1 for _ in range(2000) if encode("a <|im_end|> b") != expected)

    at_once(
        *[partial(check, encoder.live_ids, live), partial(check, encoder.document_ids, chunk)] * 2
    )
    assert not wrong


def test_sampling_is_repeatable_by_seed(engine):
    options = {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.2,
        "max_new_tokens": 12,
    }
    one, two, three = (engine.generate(ask(0), seed=s, **options).token_ids for s in (1, 1, 2))
    assert one == two != three
    assert engine.generate(ask(0), temperature=1.0, max_new_tokens=4).token_ids
