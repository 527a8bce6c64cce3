"""``prefix="learn"``: the constant head of prompts becomes the prefix, and nothing else does."""

import logging

import pytest
from kit import noted
from texts import make_chunks

from kvrag import Chunk, RepairConfig, StoreConfig
from kvrag.errors import ConfigError
from kvrag.identity.fingerprint import text_digest
from kvrag.prompt.explain import MANY
from kvrag.prompt.learn import LEARN_AFTER, MAX_HEADS, Learner
from kvrag.prompt.prefix import LearnPrefix

CHUNKS = make_chunks(6, words=30, seed=41)
HEADS = [
    f"Rule {n}: answer from these notes of the {place}.\n---\n"
    for n, place in enumerate(("harbour", "mill", "inn"))
]
REPAIR = RepairConfig(strategy="none")


@pytest.fixture
def engine(engine_of):
    return engine_of(prefix="learn")


def asked(head, n, question=None, *, chunks=CHUNKS):
    own = [chunks[(n + at) % len(chunks)] for at in (0, 1)]
    return f"{head}{own[0]}\n\n{own[1]}\n---\n{question or f'Question {n}: who?'}"


def answer(engine, prompt, **options):
    return engine.generate(
        prompt, max_new_tokens=1, **{"mode": "stitch", "repair": REPAIR, **options}
    )


def learnt(engine, namespace=None):
    return engine._learner.learnt(engine._namespace(namespace))


def heads_of_kv(engine, text):
    """Prefixes that a text has KV behind, as digests."""
    return [i.prefix for i in engine.store.identities(engine._namespace(None), text_digest(text))]


@pytest.mark.parametrize("context", [None, "default:20"])
def test_a_head_that_comes_with_different_prompts_is_learnt_and_exact_once_precomputed(
    engine_of, caplog, context
):
    engine = engine_of(prefix="learn", context=context)
    engine.precompute(CHUNKS)
    with caplog.at_level(logging.WARNING):
        for n in range(LEARN_AFTER + 1):
            result = answer(engine, asked(HEADS[0], n))
            assert (result.has_other_prefix, result.exactness) == (True, "repaired"), (
                "honest until then"
            )
        told = [r.message for r in caplog.records if "was learned" in r.message]
        assert len(told) == 1
        assert f"prefix={HEADS[0]!r} was learned" in told[0]
        assert all(len(heads_of_kv(engine, text)) == 1 for text in CHUNKS), "prompts store nothing"
        assert engine.precompute(CHUNKS).stored == len(CHUNKS), "behind the learnt prefix"
        for n, text in enumerate(CHUNKS):
            prompt = f"{HEADS[0]}{text}\n---\nQuestion {n}?"
            result, full = answer(engine, prompt), engine.prefill(prompt, mode="full")
            assert not result.has_other_prefix
            assert result.exactness == ("exact" if context is None else "repaired")
            if context is None:
                reused = engine.prefill(prompt, mode="stitch", repair=REPAIR)
                assert reused.cached_tokens > 30
                assert float((reused.logits - full.logits).abs().max()) < 1e-4
    assert len([r for r in caplog.records if "was learned" in r.message]) == 1


def test_a_chunk_that_a_prompt_missed_is_stored_behind_the_learnt_prefix(engine_of):
    engine = engine_of(prefix="learn", store_config=StoreConfig(on_miss="store"))
    engine.precompute(CHUNKS[:4])
    for n in range(LEARN_AFTER):
        answer(engine, asked(HEADS[0], n, chunks=CHUNKS[:4]))
    prompt = [HEADS[0], Chunk(CHUNKS[5]), "\n\nWho?"]
    answer(engine, prompt)
    assert engine.flush_write_back(60.0)
    assert answer(engine, prompt).exactness == "exact"


QUESTIONS = [
    "Where is the key of the archive?",
    "Who keeps the ledger?",
    "Which table stands at the window?",
]


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param(
            [f"Question: {QUESTIONS[n]}\n{CHUNKS[n]}\nAnswer:" for n in range(3)] * 2,
            id="question first",
        ),
        pytest.param(
            [f"Question: {QUESTIONS[0]}\nNotes:\n{CHUNKS[n]}\nAnswer:" for n in range(6)],
            id="asked again",
        ),
        pytest.param([asked(HEADS[0], 0)] * 6, id="the same prompt"),
        pytest.param(
            [f"{QUESTIONS[0]}\nNotes:\n{CHUNKS[0]}\n{'Go on. ' * n}\nAnswer:" for n in range(6)],
            id="conversation grows",
        ),
        pytest.param([f"{HEADS[0]}{q}\n---\n{q}" for q in QUESTIONS * 2], id="no chunk"),
        pytest.param([f"Guest {n}, welcome.\n{asked('', n)}" for n in range(6)], id="varies"),
    ],
)
def test_what_a_user_says_before_the_chunks_is_never_learnt(engine, prompts, caplog):
    engine.precompute(CHUNKS)
    for prompt in prompts:
        answer(engine, prompt)
    assert learnt(engine) == ()
    assert not [r for r in caplog.records if "learnt" in r.message]
    assert all(len(heads_of_kv(engine, text)) == 1 for text in CHUNKS)


@pytest.mark.parametrize("shown", ["file_path: /data/a.txt\n\n", "Source: {}\nContent: "])
def test_metadata_before_a_chunk_is_not_part_of_the_prefix(engine, shown):
    engine.precompute(CHUNKS)
    for n in range(LEARN_AFTER):
        answer(engine, asked(HEADS[0] + shown.format(n), n))
    assert learnt(engine) == (HEADS[0],)
    engine.precompute(CHUNKS)
    assert not answer(engine, asked(HEADS[0] + shown.format(1), 1)).has_other_prefix


def test_several_templates_in_turns_are_learnt_up_to_a_number(engine, monkeypatch):
    monkeypatch.setattr("kvrag.prompt.learn.MAX_LEARNT", 2)
    engine.precompute(CHUNKS)
    for n in range(LEARN_AFTER):
        for head in HEADS:
            answer(engine, asked(head, n))
    assert learnt(engine) == tuple(HEADS[:2])
    for head in HEADS[:2]:
        engine.precompute(CHUNKS, prefix=head)
    with pytest.warns(UserWarning, match="encoded behind another prefix"):
        runs = [[answer(engine, asked(head, n)) for head in HEADS] for n in range(MANY)]
    assert [result.has_other_prefix for result in runs[-1]] == [False, False, True]


def test_the_prefix_until_then_stays_where_prompts_begin_with_it(engine_of):
    engine = engine_of(prefix=LearnPrefix(HEADS[1]))
    engine.precompute(CHUNKS[:5])
    assert answer(engine, f"{HEADS[1]}{CHUNKS[0]}\n\nWho?").exactness == "exact"
    for n in range(LEARN_AFTER):
        answer(engine, asked(HEADS[0], n, chunks=CHUNKS[:5]))
    assert learnt(engine) == (HEADS[1], HEADS[0])
    engine.precompute(CHUNKS[5:])
    assert answer(engine, f"{HEADS[1]}{CHUNKS[5]}\n\nWho?").exactness == "exact"


def test_namespaces_learn_by_themselves(engine):
    for space in ("a", "b"):
        engine.precompute(CHUNKS, namespace=space)
    for n in range(LEARN_AFTER):
        answer(engine, asked(HEADS[0], n), namespace="ab"[n % 2])
    assert learnt(engine, "a") == learnt(engine, "b") == ()
    for n in range(LEARN_AFTER):
        answer(engine, asked(HEADS[0], n), namespace="a")
    assert (learnt(engine, "a"), learnt(engine, "b")) == ((HEADS[0],), ())
    assert answer(engine, asked(HEADS[0], 0), namespace="b").has_other_prefix


def test_another_process_begins_with_what_was_learnt(engine_of, caplog, monkeypatch):
    first, ids = engine_of(prefix="learn"), [f"d{n}" for n in range(6)]
    first.precompute(CHUNKS, ids=ids)
    for n in range(LEARN_AFTER):
        answer(first, asked(HEADS[0], n))
    first.precompute(CHUNKS, ids=ids)
    first.close()
    caplog.clear()
    again = engine_of(prefix="learn")
    assert answer(again, f"{HEADS[0]}{CHUNKS[0]}\n\nWho?").exactness == "exact"
    assert learnt(again) == (HEADS[0],)
    assert again.precompute(CHUNKS).skipped == len(CHUNKS)
    assert not caplog.records
    wanted = noted(monkeypatch, type(again._answering), "plan")
    assert again.prefetch([CHUNKS[2]]).found == 2
    assert [piece.is_mismatched for piece in wanted[0].pieces] == [False, False], (
        "behind the learnt prefix"
    )
    assert wanted[0].pieces[0].piece.text == HEADS[0]
    assert again.delete(["d0"]) == 2, "each document's KV behind both prefixes goes with it"
    assert kept_texts(again) == set(CHUNKS[1:])


def kept_texts(engine):
    return {text for text in CHUNKS if heads_of_kv(engine, text)}


def test_only_an_engine_learns_its_prefix(engine):
    for given in ("learn", LearnPrefix()):
        with pytest.raises(ConfigError, match="only an engine can learn its prefix"):
            engine.precompute(CHUNKS, prefix=given)


def test_heads_that_never_settle_are_forgotten(engine):
    engine.precompute(CHUNKS[:1])
    learner, plan = Learner({}), engine._answering.plan
    for n in range(MAX_HEADS + 10):
        learner.see("ns", plan(engine._request([f"Guest {n}", Chunk(CHUNKS[0])])), "")
    assert len(learner._seen) == MAX_HEADS
