"""Prompts of token ids: chunks are found in ids that were tokenised as a whole, and only equal ids are reused."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tokenizers import KINDS, LOSSLESS
from texts import make_chunks

from kvrag import KVRagEngine, StoreConfig
from kvrag.identity.fingerprint import ids_digest
from kvrag.prompt.plan import Plan, PlannedPiece
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import VOCAB_SIZE

PREFIX = "Read this with care, and answer from it:\n"
LEAST = 12
FOREIGN = "Émile's 日本語 notes, 🗝️ and 👩‍👩‍👧: a key of the archive, naïve and long enough, 鍵と価値は前に立つものに依る。"
CONTROL = "The page says <s>[INST] and </s> and <|im_end|> and <tool_call> as text, not as tokens, and goes on for a while."
CHUNKS = [*make_chunks(3, words=20, seed=8), FOREIGN, CONTROL]
SEAMS = ["", " ", "\n", "\n\n", ".", "\n\n---\n\n", ". ", "é", "日", " <s>", "\n- "]
SETTINGS = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def engine_for(tokenizer: Any, folder: Any, **options: Any) -> KVRagEngine:
    model = tiny_model()
    model.resize_token_embeddings(2 * VOCAB_SIZE, mean_resizing=False)
    made = {
        "prefix": PREFIX,
        "context": None,
        "prove": "off",
        "store_config": StoreConfig(min_chunk_tokens=LEAST),
    }
    return KVRagEngine.from_pretrained(
        model, tokenizer=tokenizer, kv_dir=folder, **{**made, **options}
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """An engine per kind of tokenizer, made when it is asked for, with the chunks stored."""
    made: dict[str, KVRagEngine] = {}

    def of(kind: str) -> KVRagEngine:
        if kind not in made:
            made[kind] = engine_for(KINDS[kind](), tmp_path_factory.mktemp("kv"))
            assert made[kind].precompute(CHUNKS).stored == len(CHUNKS)
        return made[kind]

    yield of
    for engine in made.values():
        engine.close()


@pytest.fixture
def engine(engines):
    return engines("byte-level")


def whole(engine: KVRagEngine, text: str) -> list[int]:
    """The ids of a text that is tokenised at once, as clients of a server do."""
    return engine.loaded.encoder.live_ids(text, at_start=True)


def plan_of(engine: KVRagEngine, ids: list[int], **options: Any) -> Plan:
    plan = engine._answering.plan(engine._request(ids, **options))
    assert_honest(plan, ids)
    return plan


def assert_honest(plan: Plan, ids: list[int]) -> None:
    """The ids are used unchanged, what is reused has the same ids, and what is called exact is."""
    assert plan.token_ids == ids
    row = 0
    for piece in plan.pieces:
        if piece.identity is not None:
            stop = piece.offset + len(piece.ids)
            assert piece.ids == piece.identity.token_ids[piece.offset : stop]
            assert piece.is_exact == (
                piece.offset == 0
                and piece.identity.prefix == ids_digest(ids[:row])
                and not piece.identity.context
            )
        assert not (piece.is_exact and piece.identity is None)
        row += len(piece.ids)


def chunks_of(plan: Plan) -> list[PlannedPiece]:
    return [p for p in plan.pieces if p.identity is not None and p.piece.kind == "chunk"]


def num_reused(plan: Plan) -> int:
    return sum([len(piece.ids) for piece in chunks_of(plan)])


# -- every kind of tokenizer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_tokens_are_the_text(kind, engines):
    encoder = engines(kind).loaded.encoder
    for text in [
        *CHUNKS,
        "日本語" * 30,
        "🗝️👩‍👩‍👧" * 9,
        "a\ufffdb \ufffd\ufffd c",
        "a   b  \n\n   c",
    ]:
        ids = list(encoder.chunk_ids(text))
        texts = encoder.token_texts(ids)
        assert len(texts) == len(ids)
        decoded = encoder.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert "".join(texts).strip() == decoded.strip()


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece, never", "Llama"])
def test_characters_of_several_tokens_begin_at_their_first(kind, engines):
    """A run of them is no single place: else a chunk of Japanese would have none that two prompts share."""
    encoder = engines(kind).loaded.encoder
    texts = encoder.token_texts(encoder.chunk_ids("日本語の鍵"))
    assert [text for text in texts if text] == [*"日本語の鍵"]


def test_bytes_that_are_no_characters_end(engine):
    encoder = engine.loaded.encoder
    (token,) = encoder.chunk_ids("é")[:1]
    for count in (1, 5, 700):
        texts = encoder.token_texts([token] * count)
        assert "".join(texts) == encoder.decode([token] * count)
    assert plan_of(engine, [token] * 700).identities == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_costs_its_own_rows(kind, seam, engines):
    engine = engines(kind)
    shown = [CHUNKS[i] for i in (2, 0, 1, 0)]
    ids = whole(engine, PREFIX + seam.join([*shown, "Who keeps it?"]))
    plan = plan_of(engine, ids)
    stored = [engine.loaded.encoder.chunk_ids(text) for text in shown]
    assert num_reused(plan) >= sum(map(len, stored)) - 6 * len(shown)
    assert {p.identity.token_ids for p in chunks_of(plan) if p.identity} == set(stored)


@pytest.mark.parametrize("kind", KINDS)
@SETTINGS
@given(
    order=st.lists(st.integers(0, len(CHUNKS) - 1), max_size=5),
    seams=st.lists(st.sampled_from(SEAMS), min_size=5, max_size=5),
    head=st.sampled_from([PREFIX, "", PREFIX[:20], PREFIX + "And:\n", "Another head.\n"]),
    cut=st.integers(0, 400),
    end=st.integers(1, 400),
)
def test_equal_ids_alone_are_reused(kind, order, seams, head, cut, end, engines):
    text = head + "".join([CHUNKS[i] + seam for i, seam in zip(order, seams, strict=False)])
    ids = whole(engines(kind), f"{text}Who?")
    plan_of(engines(kind), ids)
    plan_of(engines(kind), ids[min(cut, len(ids) - 1) :])
    plan_of(engines(kind), ids[:end])


@SETTINGS
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60))
def test_any_ids_have_a_plan(ids, engine):
    chunk = list(engine.loaded.encoder.chunk_ids(CHUNKS[1]))
    plan_of(engine, ids)
    plan_of(engine, [*ids, *chunk, *ids, *chunk[3:]])


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", [FOREIGN, CONTROL], ids=["foreign", "control"])
def test_texts_of_many_bytes_and_of_control_tokens_are_found(kind, text, engines):
    engine = engines(kind)
    encoder = engine.loaded.encoder
    stored = encoder.chunk_ids(text)
    ids = whole(engine, f"{PREFIX}{CHUNKS[0]}\n\n{text}\n\nWho?")
    plan = plan_of(engine, ids)
    found = sum(
        [len(p.ids) for p in chunks_of(plan) if p.identity and p.identity.token_ids == stored]
    )
    # some write a space behind a control token, and some have no token for a letter
    is_shown = text in "".join(encoder.token_texts(ids))
    assert found >= len(stored) // 2 * is_shown
    assert is_shown or kind.startswith(("SentencePiece", "Llama", "slow")) or "space" in kind
