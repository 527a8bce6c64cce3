"""Prompts of token ids that reuse chunks: rows from the middle of a chunk come to the right places, and exact means exact."""

from contextlib import closing
from typing import Any

import pytest
import torch
from kit import noted, request_of
from texts import make_chunks
from tokenizers_kit import tiny_sentencepiece_tokenizer

import kvrag.blend.prefill
import kvrag.blend.stitch
import kvrag.generate.pipeline
from kvrag import KVRagEngine, RepairConfig, StoreConfig
from kvrag.blend.layout import lay_out
from kvrag.blend.stitch import stitch
from kvrag.kv.quantise import unpack
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

CHUNKS = [f"the {text}" for text in make_chunks(4, words=24, seed=5)]
PREFIX = "Read:\n"
TOLERANCE = 1e-3
EVERYTHING = RepairConfig(strategy="all")
NOTHING = RepairConfig(strategy="none")
ARCHITECTURES = [
    "llama",
    "llama-yarn",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "phi3",
    "cohere2",
    "gptj",
    "bloom",
    "llama4_text",
    "deepseek_v3",
]


def merged(engine: KVRagEngine, *parts: str | int) -> list[int]:
    """Ids of texts, and of chunks behind a space: a chunk's first token is then another one, which begins before it."""
    shown = [part if isinstance(part, str) else f" {CHUNKS[part]}" for part in parts]
    return engine.loaded.encoder.live_ids(PREFIX + "".join(shown), at_start=True)


def distance(engine: KVRagEngine, ids: list[int], **options: Any) -> float:
    reused, full = engine.prefill(ids, **options), engine.prefill(ids, mode="full")
    assert reused.prompt_ids == full.prompt_ids == ids
    return float((reused.logits - full.logits).abs().max())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_row_repaired_is_a_full_prefill(name, engine_of):
    engine = engine_of(name, prefix=PREFIX, prove="off")
    engine.precompute(CHUNKS)
    for ids in (
        merged(engine, 2, "\n\n", 0, 0, " and ", 1, "\n\nWho keeps it?"),
        merged(engine, CHUNKS[1], "\n", 3, "Who?"),
    ):
        result = engine.prefill(ids, mode="stitch", repair=EVERYTHING)
        assert result.exactness == "exact"
        assert result.repaired_tokens > 50
        assert distance(engine, ids, mode="stitch", repair=EVERYTHING) < TOLERANCE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_chunk_behind_its_prefix_is_exact_without_repair(name, engine_of):
    engine = engine_of(name, prefix=PREFIX, prove="off")
    engine.precompute(CHUNKS)
    for end in ("\n\nWho?", "ers and more"):  # the last token may be merged
        ids = engine.loaded.encoder.live_ids(f"{PREFIX}{CHUNKS[0]}{end}", at_start=True)
        for mode in ("prefix", "stitch"):
            result = engine.prefill(ids, mode=mode, repair=NOTHING)
            assert (result.exactness, result.repaired_tokens) == ("exact", 0)
            assert result.cached_tokens > 50
            assert distance(engine, ids, mode=mode, repair=NOTHING) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gptj", "gemma3_text"])
def test_rows_from_the_middle_of_a_chunk_have_the_keys_of_their_places(name, engine_of):
    """Layer 0 knows no other tokens, so there a reused row equals a forward's; a wrong offset or angle would show."""
    engine = engine_of(name, prefix=PREFIX, prove="off")
    engine.precompute(CHUNKS)
    ids = merged(engine, 1, "\n\n", 0, "\n\nWho?")
    with pytest.MonkeyPatch.context() as patch:
        made = noted(patch, kvrag.blend.prefill, "prefill")
        patch.setattr(kvrag.generate.pipeline, "prefill", kvrag.blend.prefill.prefill)
        patch.setattr(kvrag.blend.prefill.Prefilled, "release", lambda self: None)
        for mode, repair in (("stitch", NOTHING), ("full", NOTHING)):
            engine.prefill(ids, mode=mode, repair=repair)
    stitched, full = made
    assert (stitched.num_rows("repaired"), stitched.num_rows("computed") < 20) == (0, True)
    for one, other in zip(stitched.buffer.layers[0], full.buffer.layers[0], strict=True):
        torch.testing.assert_close(
            one[..., : len(ids), :], other[..., : len(ids), :], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("by_op", [False, True])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4", "fp8"])
def test_rows_from_the_middle_are_read_as_they_are_stored(kv_dtype, by_op, engine_of, monkeypatch):
    """By torch, and by the op as on a CUDA device: it is given the rows of a group apart from whole groups."""
    if by_op:
        monkeypatch.setattr(kvrag.blend.stitch, "_has_kernel", lambda *_: True)
    config = StoreConfig(kv_dtype=kv_dtype)
    engine = engine_of("llama", prefix=PREFIX, prove="off", store_config=config)
    engine.precompute(CHUNKS)
    ids = merged(engine, 1, "\n\n", 0, "\n\nWho?")
    plan = engine._answering.plan(request_of(engine, ids))
    layout = lay_out(plan)
    model = engine.loaded.lm
    kvs = engine.store.get_many(plan.identities, timeout_s=9.0)
    buffer = model.buffer(layout.num_tokens)
    rotary = model.rotary(layout.num_tokens)
    stitch(buffer, layout, kvs, rotary)
    assert [s.offset for s in layout.reused] == [0, 2, 2]
    for segment in layout.reused:
        kv = kvs[segment.source]
        rows = slice(segment.offset, segment.offset + segment.num_rows)
        place = slice(segment.start, segment.stop)
        for layer in range(model.num_layers):
            keys, values = unpack(
                kv.layers[layer], kv.num_tokens, device=torch.device("cpu"), dtype=torch.float32
            )
            turned = rotary[layer].rotate(keys[:, rows], place)
            torch.testing.assert_close(buffer.keys(layer)[0][:, place], turned)
            torch.testing.assert_close(buffer.values(layer)[0][:, place], values[:, rows])
    assert engine.prefill(ids, mode="stitch").kv_dtype == kv_dtype
    assert distance(engine, ids, mode="stitch", repair=EVERYTHING) < 0.1


def test_an_answers_accounting_says_where_rows_are_from(engine_of):
    engine = engine_of("llama", prefix=PREFIX, prove="off")
    engine.precompute(CHUNKS)
    ids = merged(engine, CHUNKS[0], "\n", 1, "\n", "Who?")
    result = engine.prefill(ids, mode="stitch", repair=NOTHING)
    encoder = engine.loaded.encoder
    num_exact = len(encoder.head_ids(PREFIX)) + len(encoder.chunk_ids(CHUNKS[0]))
    num_reused = len(encoder.chunk_ids(CHUNKS[1])) - 2
    exact, glue, reused, rest = result.sources
    assert (exact, reused) == (("exact", num_exact), ("reused", num_reused))
    assert glue[0] == rest[0] == "computed"
    assert result.computed_tokens == glue[1] + rest[1] == len(ids) - num_exact - num_reused
    assert not result.has_other_prefix


@pytest.mark.parametrize("prepend", ["normalizer", "always", "first", "never"])
def test_text_and_its_ids_have_the_same_answer(prepend, tmp_path):
    engine = KVRagEngine.from_pretrained(
        tiny_model(),
        tokenizer=tiny_sentencepiece_tokenizer(prepend),
        kv_dir=tmp_path,
        prefix=PREFIX,
    )
    with closing(engine):
        engine.precompute(CHUNKS)
        text = f"{PREFIX}{CHUNKS[2]}\n{CHUNKS[0]}\nWho keeps it?"
        asked = engine.generate(text, mode="stitch", max_new_tokens=8)
        given = engine.generate(asked.prompt_ids, mode="stitch", max_new_tokens=8)
        assert given.token_ids == asked.token_ids
        assert given.repaired_tokens == asked.repaired_tokens > 0


def test_a_scored_prompt_of_ids_is_computed_in_full(engine_of):
    engine = engine_of("llama", prefix=PREFIX, prove="off")
    engine.precompute(CHUNKS)
    ids = merged(engine, 1, "\n\nWho?")
    scored = engine.generate(ids, max_new_tokens=2, prompt_logprobs=1)
    assert (scored.exactness, scored.cached_tokens) == ("full", 0)
    assert scored.prompt_ids == ids
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(ids)
    full = engine.generate(ids, max_new_tokens=2, mode="full")
    assert scored.token_ids == full.token_ids


def test_earlier_requests_of_ids_are_gone_on_with(engine_of):
    engine = engine_of(
        "llama", prefix=PREFIX, prove="off", store_config=StoreConfig(history_bytes=1 << 24)
    )
    engine.precompute(CHUNKS)
    ids = merged(engine, 1, "\n\n", 0, "\n\nWho?")
    first = engine.generate(ids, mode="stitch", max_new_tokens=4)
    more = [*ids, *first.token_ids, *merged(engine, 2, "\n\nAnd who?")]
    second = engine.prefill(more, mode="stitch")
    assert second.history_tokens >= len(ids)
    assert second.cached_tokens > second.history_tokens + 40
    assert distance(engine, more, mode="stitch", repair=EVERYTHING) < TOLERANCE


def test_an_encrypted_store_and_a_deleted_document(tmp_path):
    config = StoreConfig(encryption_key=lambda: bytes(range(32)))
    with closing(
        KVRagEngine.from_pretrained(
            tiny_model(),
            tokenizer=tiny_tokenizer(),
            kv_dir=tmp_path,
            prefix=PREFIX,
            store_config=config,
        )
    ) as engine:
        engine.precompute(CHUNKS, ids=[*"abcd"])
        ids = merged(engine, 1, "\n\n", 0, "\n\nWho?")
        assert engine.prefill(ids, mode="stitch").cached_tokens > 100
        engine.delete(["b"])
        texts = [s.text for s in engine.explain(ids).spans if s.hit and s.kind == "chunk"]
        assert len(texts) == 1
        assert texts[0] in CHUNKS[0]
