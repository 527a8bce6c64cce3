"""Prompts of token ids: chunks are found in ids that were tokenised as a whole, and only equal ids are reused."""

from bisect import bisect_right
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import noted, raising, request_of
from test_tokenizers import KINDS, LOSSLESS
from texts import make_chunks
from tokenizers import AddedToken

from kvrag import KVRagEngine, StoreConfig
from kvrag.identity.fingerprint import chunk_key, ids_digest
from kvrag.model.load import refuse
from kvrag.prompt.plan import NO_PREFIX, OTHER_CONTEXT, OTHER_PREFIX, OTHER_TEXT, Plan, PlannedPiece
from kvrag.prompt.plan_ids import DecodedIds, Place
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import VOCAB_SIZE, tiny_tokenizer

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
    plan = engine._answering.plan(request_of(engine, ids, **options))
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


@pytest.mark.parametrize("text", ["qqqqqqqq", "日日日日日日"])
def test_rows_behind_a_character_that_differs_stay_at_their_characters(text, engines):
    """Its first tokens are the same, so the ids part inside of it."""
    encoder = engines("byte-level").loaded.encoder
    one, other = (encoder.chunk_ids(f"A key: {sign}{text}") for sign in "🗝🗞")
    prompt, chunk = DecodedIds(one, encoder), DecodedIds(other, encoder)
    shared = list(prompt.shared(Place(0, len(prompt.text), other)))
    assert len(shared) == 2
    for rows in shared:
        count = rows.stop - rows.start
        starts = chunk.starts[rows.offset : rows.offset + count]
        assert prompt.starts[rows.start : rows.stop] == starts


@pytest.mark.parametrize("count", [1, 5, 700])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_bytes_that_are_no_characters_end(count, num_bytes, engine, monkeypatch):
    encoder = engine.loaded.encoder
    ids = list(encoder.chunk_ids("🗝")[:num_bytes]) * count
    calls = noted(monkeypatch, encoder, "_decoded")
    texts = encoder.token_texts(ids)
    assert "".join(texts) == encoder.tokenizer.decode(ids)
    assert len(calls) < 20
    assert plan_of(engine, ids).identities == []


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


# -- the same as with text -------------------------------------------------------------------------------------------------


def told(plan: Plan) -> list[tuple[Any, ...]]:
    return [
        (p.ids, p.piece.kind, p.identity, p.is_exact, p.is_mismatched, p.offset, p.reason)
        for p in plan.pieces
    ]


HEADS = [PREFIX, "", PREFIX + "And this:\n", "Another head.\n"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("order", [(0,), (1, 2, 1), (4, 3), ()])
def test_ids_of_segments_are_planned_as_their_text(kind, head, order, engines):
    engine = engines(kind)
    text = "".join([head, *[CHUNKS[i] + "\n\n" for i in order], "Who keeps it?"])
    by_text = engine._answering.plan(request_of(engine, text))
    plan = plan_of(engine, by_text.token_ids)
    unknown = engine.tokenizer.unk_token_id
    if unknown is None or unknown not in plan.token_ids:  # which has no text
        assert told(plan) == told(by_text)


# -- what is exact, and what is not ----------------------------------------------------------------------------------------


def bits(plan: Plan) -> list[tuple[bool, bool, int]]:
    return [(p.is_exact, p.is_mismatched, p.offset) for p in chunks_of(plan)]


def test_a_chunk_right_behind_its_prefix_is_exact(engine):
    plan = plan_of(engine, whole(engine, f"{PREFIX}{CHUNKS[0]}\nWho?"))
    head, chunk = plan.pieces[:2]
    assert (head.is_exact, head.piece.text) == (True, PREFIX)
    assert (chunk.is_exact, chunk.offset, chunk.reason) == (True, 0, None)


def test_a_chunk_whose_first_token_was_merged_is_not_exact(tmp_path):
    """The dot that ends the prefix, and the line break that begins the chunk's line, are a token of their own or of both."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(":Note", special=False)])
    engine = engine_for(tokenizer, tmp_path, prefix="Read:")
    engine.precompute(CHUNKS[:1])
    plan = plan_of(engine, whole(engine, f"Read:{CHUNKS[0]}\nWho?"))
    (chunk,) = chunks_of(plan)
    assert (chunk.is_exact, chunk.is_mismatched) == (False, False)
    assert chunk.offset > 0
    assert chunk.reason
    assert chunk.reason.startswith(f"tokens {chunk.offset + 1} to ")
    assert chunk.reason.endswith(f"of a stored chunk; {OTHER_TEXT}")
    engine.close()


def test_a_context_between_prefix_and_chunk_is_told(tmp_path):
    engine = engine_for(tiny_tokenizer(), tmp_path, context="Some text that stands before it all.")
    engine.precompute(CHUNKS[:1])
    plan = plan_of(engine, whole(engine, f"{PREFIX}{CHUNKS[0]}\nWho?"))
    assert [p.reason for p in chunks_of(plan)] == [OTHER_CONTEXT]
    engine.close()


@pytest.mark.parametrize(
    ("start", "reason", "exact_head"),
    [
        (f"{PREFIX}And this:\n", OTHER_TEXT, True),
        (f"{PREFIX[:-1]} first:\n", OTHER_PREFIX, True),  # as far as it goes
        ("Another head stands here.\n", OTHER_PREFIX, False),
        ("", OTHER_PREFIX, False),
        (f"And. {PREFIX}", OTHER_PREFIX, False),
    ],
)
def test_the_rows_before_a_chunk_decide(start, reason, exact_head, engine):
    plan = plan_of(engine, whole(engine, f"{start}{CHUNKS[0]}\nWho?"))
    assert [p.reason for p in chunks_of(plan)] == [reason]
    assert plan.has_mismatch == (reason == OTHER_PREFIX)
    assert plan.pieces[0].is_exact == exact_head
    assert plan.pieces[0].reason == (None if exact_head else NO_PREFIX)


def test_a_prompt_may_begin_inside_the_prefix(engine):
    ids = whole(engine, f"{PREFIX}{CHUNKS[0]}\nWho?")
    for cut in (1, 5):  # the first without BOS
        plan = plan_of(engine, ids[cut:])
        assert bits(plan) == [(False, True, 0)]
        assert plan.pieces[0].identity is None


def test_few_rows_of_a_prefix_are_not_worth_loading_it(engine):
    first = whole(engine, PREFIX)
    plan = plan_of(engine, [*first[: LEAST - 1], 7, *whole(engine, f"x{CHUNKS[0]}\nWho?")])
    assert plan.pieces[0].identity is None
    plan = plan_of(engine, [*first[:LEAST], 7, *whole(engine, f"x{CHUNKS[0]}\nWho?")])
    assert len(plan.pieces[0].ids) == LEAST
    assert plan.pieces[0].is_exact


def test_prompts_without_chunks(engine):
    prefix = whole(engine, PREFIX)
    plan = plan_of(engine, prefix)
    assert [len(p.ids) for p in plan.pieces if p.is_exact] == [len(prefix)]
    for ids in (prefix[:1], [9], [*prefix, 9], [0, 1, 2, 3]):
        assert chunks_of(plan_of(engine, ids)) == []


def test_a_chunk_may_stand_twice_and_in_parts(engine):
    text = CHUNKS[0]
    plan = plan_of(engine, whole(engine, f"{PREFIX}{text}\n{text}\n{text[:90]}…\n{text[9:]}\nWho?"))
    assert len(plan.identities) == 2  # of the prefix and of the chunk
    assert bits(plan) == [(True, False, 0), (False, False, 0), (False, False, 0)]
    assert 80 <= len(chunks_of(plan)[-1].piece.text) <= 90


def test_a_chunk_inside_the_prefix_belongs_to_it(tmp_path):
    engine = engine_for(tiny_tokenizer(), tmp_path, prefix=f"Read: {CHUNKS[1]}\n")
    engine.precompute(CHUNKS)
    plan = plan_of(engine, whole(engine, f"Read: {CHUNKS[1]}\n{CHUNKS[0]}\nWho?"))
    assert [p.piece.text for p in chunks_of(plan)] == [CHUNKS[0]]
    assert bits(plan) == [(True, False, 0)]
    engine.close()


def test_a_chunk_that_begins_inside_the_prefix_goes_on_behind_it(tmp_path):
    prefix = f"Read: {CHUNKS[1][: CHUNKS[1].index(' ', 60)]}"
    with closing(engine_for(tiny_tokenizer(), tmp_path, prefix=prefix)) as engine:
        engine.precompute(CHUNKS)
        plan = plan_of(engine, whole(engine, f"Read: {CHUNKS[1]}\nWho?"))
        assert [p.piece.text for p in plan.pieces if p.is_exact] == [prefix]
        assert [p.offset > 10 for p in chunks_of(plan)] == [True]


def test_a_prefix_in_other_ids_is_another_prefix(tmp_path):
    prefix = "Read.\n<|im_start|>system\nAnswer.<|im_end|>\n"
    with closing(engine_for(tiny_tokenizer(add_bos=False), tmp_path, prefix=prefix)) as engine:
        engine.precompute(CHUNKS[:1])
        encoder = engine.loaded.encoder
        spelled = list(encoder.document_ids(f"{prefix}And.\n{CHUNKS[0]}\nWho?"))
        assert bits(plan_of(engine, spelled)) == [(False, True, 0)]
        right = whole(engine, f"{prefix}And.\n{CHUNKS[0]}\nWho?")
        assert bits(plan_of(engine, right)) == [(False, False, 0)]


def test_a_control_token_in_a_document_is_computed(engine):
    """Tokenised with the rest, the text of a control token has become the token: only the rows around it are the chunk's."""
    ids = whole(engine, f"{PREFIX}{CONTROL}\nWho?")
    at = ids.index(engine.tokenizer.convert_tokens_to_ids("<|im_end|>"))
    stops = np.cumsum([len(p.ids) for p in plan_of(engine, ids).pieces]).tolist()
    piece = plan_of(engine, ids).pieces[bisect_right(stops, at)]
    assert piece.identity is None


# -- rounded, late, lost, and not for this model -----------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["store", "catalog"])
def test_a_store_that_fails_costs_time(failing, tmp_path, monkeypatch):
    engine = engine_for(tiny_tokenizer(), tmp_path)
    engine.precompute(CHUNKS)
    ids = whole(engine, f"{PREFIX}{CHUNKS[0]}\nWho?")
    assert chunks_of(plan_of(engine, ids))
    if failing == "store":
        monkeypatch.setattr(engine.store, "known", raising(OSError, "lost"))
    else:
        monkeypatch.setattr(engine.store.catalog, "texts", raising(OSError, "lost"))
    plan = plan_of(engine, ids)
    assert plan.identities == []
    assert "lost" in str(plan.fault)
    assert engine.prefill(ids).exactness == "full"
    engine.close()


def test_kv_of_another_type_is_told(tmp_path):
    with closing(engine_for(tiny_tokenizer(), tmp_path)) as engine:
        engine.precompute(CHUNKS[:1])
    config = StoreConfig(min_chunk_tokens=LEAST, kv_dtype="int8")
    with closing(engine_for(tiny_tokenizer(), tmp_path, store_config=config)) as engine:
        plan = plan_of(engine, whole(engine, f"{PREFIX}{CHUNKS[0]}\nWho?"))
        (chunk,) = [p for p in plan.pieces if p.piece.kind == "chunk"]
        assert chunk.identity is None
        assert "kept with kv_dtype='auto', and 'int8' is asked for" in str(chunk.reason)


@pytest.mark.parametrize("prefix", [PREFIX, "Other notes to be read first:\n"])
def test_a_known_text_without_kv_is_missed_and_stored_again(prefix, tmp_path):
    config = StoreConfig(min_chunk_tokens=LEAST, on_miss="store")
    with closing(engine_for(tiny_tokenizer(), tmp_path, store_config=config)) as engine:
        engine.precompute(CHUNKS[:2], ids=["a", "b"], prefix=prefix)
        ids = whole(engine, f"{prefix}{CHUNKS[0]}\n{CHUNKS[1]}\nWho?")
        plan = plan_of(engine, ids)
        engine.store.delete([chunk_key(plan.identities[1])])
        missed = plan_of(engine, ids).missed
        assert [m.text for m in missed] == CHUNKS[:1]
        engine.generate(ids, max_new_tokens=1)
        assert engine.flush_write_back(30)
        assert told(plan_of(engine, ids)) == told(plan)


def test_a_model_that_can_not_reuse_says_so(tmp_path):
    with closing(engine_for(tiny_tokenizer(), tmp_path)) as engine:
        engine.precompute(CHUNKS[:1])
        refused = refuse(engine.loaded.lm.model, "for a test")
        engine._loaded = replace(engine.loaded, lm=refused)
        engine._answering.loaded = engine._loaded
        ids = whole(engine, f"{PREFIX}{CHUNKS[0]}\nWho?")
        plan = plan_of(engine, ids)
        assert (plan.identities, plan.reason) == ([], refused.refusal)
        assert engine.generate(ids, max_new_tokens=2).fallback_reason == refused.refusal
