"""Chunks that are encoded behind a context, too: what is stored is what a prompt with that text before the chunk has there."""

import pytest
from kit import request_of
from test_equivalence import TOLERANCE
from texts import make_chunks

from kvrag import Chunk, ConfigError, KVRagEngine, RepairConfig
from kvrag.identity.fingerprint import context_digest
from kvrag.precompute.encode import CONTEXT_TOKENS, DEFAULT_TOKENS, context_ids, shipped
from kvrag.types import ChunkIdentity, ChunkKV

CHUNKS = make_chunks(4, words=30, seed=3)
OWN = "The bridge was closed in winter.\n\nNobody kept count of the barges."
NO_REPAIR, ALL = RepairConfig(strategy="none"), RepairConfig(strategy="all")
KINDS = [
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "qwen2_moe",
    "phi3",
    "gptj",
    "bloom",
    "smollm3",
]


def stored(engine: KVRagEngine) -> dict[str, ChunkKV]:
    """All KV of an engine's store by the token ids that it stands for."""
    return {str(identity.token_ids): engine.store.get(identity) for identity in identities(engine)}


def identities(engine: KVRagEngine) -> list[ChunkIdentity]:
    """Whose KV an engine's store has."""
    keys = engine.store.catalog.keys()
    return [engine.store.identity(key) for key in keys]


def question(engine: KVRagEngine, *before: str | Chunk) -> list[str | Chunk]:
    return [engine.prefix_text, *before, "\n\nWho keeps the ledger?"]


@pytest.mark.parametrize("name", KINDS)
def test_kv_is_that_of_a_prompt_with_the_context_before_the_chunk(engine_of, name):
    """The proof that a context is encoded rightly: put into the prompt, it makes unrepaired reuse equal to a full prefill."""
    engine = engine_of(name, context=OWN)
    engine.precompute(CHUNKS, batch_size=3)
    prompt = question(engine, f"{OWN}\n\n", Chunk(CHUNKS[1]))
    reused = engine.prefill(prompt, mode="stitch", repair=NO_REPAIR)
    full = engine.prefill(prompt, mode="full")
    ids = list(engine.context_ids)
    start = len(engine.tokenizer(engine.prefix_text, add_special_tokens=False)["input_ids"])
    assert (
        ids == reused.prompt_ids[start : start + len(ids)]
        or ids == reused.prompt_ids[start + 1 : start + 1 + len(ids)]
    )
    assert reused.cached_tokens > 20
    assert (reused.logits - full.logits).abs().max() < TOLERANCE


def test_it_is_said_that_no_chunk_is_exact_and_full_repair_is(engine_of):
    engine = engine_of("llama", context="default")
    engine.precompute(CHUNKS)
    prompt = question(engine, Chunk(CHUNKS[0]), "\n", Chunk(CHUNKS[1]))
    spans = [span for span in engine.explain(prompt).spans if span.kind == "chunk"]
    assert [(span.hit, span.exact) for span in spans] == [(True, False)] * 2
    assert "behind a context" in spans[0].reason
    assert engine.prefill(prompt, mode="stitch", repair=NO_REPAIR).exactness == "repaired"
    full, repaired = (
        engine.prefill(prompt, mode="full"),
        engine.prefill(prompt, mode="stitch", repair=ALL),
    )
    assert (repaired.logits - full.logits).abs().max() < TOLERANCE


def test_prefixes_are_encoded_without_it(engine_of, tmp_path):
    with_context, without = (
        engine_of("llama", context=context, kv_dir=None) for context in (OWN, None)
    )
    for engine in (with_context, without):
        engine.precompute(CHUNKS[:1])
    ids = str(tuple(with_context.loaded.encoder.live_ids(with_context.prefix_text, at_start=True)))
    for one, other in zip(
        stored(with_context)[ids].layers, stored(without)[ids].layers, strict=True
    ):
        assert (one.keys - other.keys).abs().max() < 1e-5
        assert (one.values - other.values).abs().max() < 1e-5


def test_each_context_has_keys_of_its_own_and_another_one_is_used_where_there_is_no_better(
    engine_of, tmp_path
):
    """A change of the context never answers with KV as if it were the other's; what is there is reused all the same."""
    first, second = (
        engine_of("llama", context=context, kv_dir=tmp_path) for context in (OWN, "default")
    )
    assert first.precompute(CHUNKS[:2]).stored == 2
    prompt = question(second, Chunk(CHUNKS[0]))
    assert second.prefill(prompt, mode="stitch", repair=NO_REPAIR).cached_tokens > 20
    assert second.precompute(CHUNKS[:2]).stored == 2
    assert second.precompute(CHUNKS[:2]).skipped == 2
    used = {
        identity.context
        for identity in second._answering.plan(request_of(second, prompt)).identities
    }
    assert used == {"", context_digest(second.context_ids)}  # the prefix has none


@pytest.mark.parametrize(
    "context", ["", " \n", 7, b"text", ["default"], "corpus", "defualt", "default:many", "none"]
)
def test_a_wrong_context_is_refused(tiny_dir, context):
    with pytest.raises(ConfigError, match="context is"):
        KVRagEngine.from_pretrained(tiny_dir, context=context)
    with pytest.raises(ConfigError, match="context is"):
        KVRagEngine.get(tiny_dir, context=context)


def test_text_without_spaces_is_a_context(engine_of):
    assert engine_of("llama", context="カササギは冬に巣を作り、春に卵を産む。").context_ids


def test_the_default_is_the_text_that_ships_cut_to_a_share_of_the_window(engine_of, tokenizer):
    engine = engine_of("llama", context="default")
    encoder = engine.loaded.encoder
    whole = tuple(encoder.chunk_ids(shipped().strip()))
    seam = tuple(encoder.live_ids("\n\n"))

    def cut(tokens):
        return whole[: tokens - len(seam)] + seam

    assert engine.context_ids == cut(DEFAULT_TOKENS)
    assert engine_of("llama", context="default:1000").context_ids == cut(CONTEXT_TOKENS)
    assert context_ids("default", encoder, 400) == cut(100)
    assert context_ids("default:30", encoder, 400) == cut(30)
    assert context_ids("default:9999", encoder, 8000) == cut(CONTEXT_TOKENS)
    own = tuple(encoder.chunk_ids("default: a text"))
    assert context_ids("default: a text", encoder, 400) == own + seam
    assert context_ids(None, encoder, 400) == ()
    assert shipped().isascii()


@pytest.mark.parametrize("context", ["default", "default:1", "default:0", OWN])
def test_a_context_ends_with_a_blank_line_and_keeps_its_bound(engine_of, context):
    encoder = engine_of("llama").loaded.encoder
    for window in (0, 3, 4, 8, 40, 4000):
        ids = context_ids(context, encoder, window)
        assert len(ids) <= window // 4
        assert encoder.decode(list(ids[-2:])).endswith("\n\n"[: len(ids)])


def test_misses_are_stored_behind_it(engine_of):
    engine = engine_of("llama", context=OWN, store_config={"on_miss": "store"})
    prompt = question(engine, Chunk(CHUNKS[2]))
    engine.generate(prompt, max_new_tokens=1)
    assert engine.flush_write_back(60)
    assert {identity.context for identity in identities(engine)} == {
        "",
        context_digest(engine.context_ids),
    }


def test_shared_engines_differ_by_context(tiny_dir):
    one, other = KVRagEngine.get(tiny_dir), KVRagEngine.get(tiny_dir, context=None)
    assert one is not other
    assert KVRagEngine.get(tiny_dir, context="default") is one


def test_a_chunk_that_does_not_fit_behind_it_is_reported(engine_of):
    engine = engine_of("llama", context="default")
    window = engine.loaded.lm.reuse_window
    long = "ledger " * window
    report = engine.precompute([long])
    assert report.stored == 0
    assert f"{len(engine.context_ids)}"[0] in report.failed[0][1]
    assert "prefix and context" in report.failed[0][1]


def test_prefix_and_context_are_encoded_once_for_an_index_that_grows(engine_of, monkeypatch):
    from kvrag.precompute import run

    engine, calls = engine_of("llama", context=OWN), []
    encode = run.encode_prefix
    monkeypatch.setattr(run, "encode_prefix", lambda *args: calls.append(args) or encode(*args))
    for text in CHUNKS[:2]:
        assert engine.precompute([text]).stored == 1
    assert len(calls) == 1
    engine.precompute(CHUNKS[2:3], prefix="Others: ")
    assert len(calls) == 2
    other = engine_of("llama", seed=1, context=OWN)
    other.precompute(CHUNKS[:1])
    assert len(calls) == 3
