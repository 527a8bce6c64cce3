"""Write-back of misses: index-time KV of retrieved chunks, after the answer; never live text, never what was erased."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from kit import raising, request_of
from texts import make_chunks

import kvrag.precompute.on_miss
import kvrag.precompute.run
from kvrag import Chunk, KVRagEngine, RepairConfig, StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, text_digest
from kvrag.store.tiers import ERASURES, Erasures, Stopped
from kvrag.testing.chunks import same_bits

CHUNKS = make_chunks(4, words=30, seed=31)
STORE = StoreConfig(on_miss="store")
PATIENT_S = 60.0


@pytest.fixture
def engine(engine_of):
    return engine_of("llama", store_config=STORE)


def given(engine: KVRagEngine, *texts: str, question: str = "Who?") -> list[str | Chunk]:
    return [
        engine.prefix_text,
        *[part for text in texts for part in (Chunk(text), "\n\n")],
        question,
    ]


def answer(engine: KVRagEngine, prompt: Any, **options: Any) -> Any:
    result = engine.generate(prompt, max_new_tokens=2, **{"mode": "stitch", **options})
    assert engine.flush_write_back(PATIENT_S)
    return result


def identities(engine: KVRagEngine, *texts: str) -> Any:
    return [
        i
        for text in texts
        for i in engine.store.identities(engine.space_of(None), text_digest(text))
    ]


class Paused:
    """Holds precompute just before it encodes chunks, until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: bool = False) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        original = kvrag.precompute.run.encode_chunks

        def encode(*args: Any) -> Any:
            kvs = original(*args) if after else None
            self.reached.set()
            assert self.go_on.wait(PATIENT_S)
            return original(*args) if kvs is None else kvs

        monkeypatch.setattr(kvrag.precompute.run, "encode_chunks", encode)


# -- what is stored --------------------------------------------------------------------------------------------------------


def test_what_is_written_back_is_what_precompute_stores(engine, engine_of, tmp_path):
    """Repair with full strength would leave its marks in KV that came from the answer."""
    engine.precompute(CHUNKS[:1])
    repair = RepairConfig(strategy="query", recompute_ratio=0.5, shift=1.0)
    result = answer(engine, given(engine, CHUNKS[0], CHUNKS[1], CHUNKS[2]), repair=repair)
    assert result.computed_tokens > 100
    assert engine.stats()["write_back"] == {
        "stored": 2,
        "skipped": 0,
        "failed": 0,
        "dropped": 0,
        "waiting": 0,
    }
    other = engine_of("llama", kv_dir=tmp_path / "other")
    other.precompute(CHUNKS, batch_size=1)
    for identity in identities(other, *CHUNKS[:3]):
        assert same_bits(engine.store.get(identity), other.store.get(identity))
    assert identities(engine, CHUNKS[3]) == []
    assert set(engine.store.catalog.keys()) < set(other.store.catalog.keys())


@pytest.mark.parametrize("is_message", [False, True])
def test_the_next_prompt_reuses_it_and_nothing_is_stored_twice(engine, is_message):
    prompt: Any = given(engine, CHUNKS[0])
    if is_message:
        prompt = [{"role": "user", "content": [Chunk(f"\n{CHUNKS[0]} "), "\nWho?"]}]
    first, again = (answer(engine, prompt) for _ in range(2))
    assert (first.exactness, again.exactness) == ("full", "exact")
    assert again.cached_tokens > 64
    assert again.token_ids == first.token_ids
    assert engine.stats()["write_back"]["stored"] == 1
    assert engine.document_ids() == []


def test_only_answers_with_reuse_write_back(engine, engine_of):
    prompt = given(engine, CHUNKS[0])
    answer(engine, prompt, mode="full")
    answer(engine, prompt, prompt_logprobs=0)
    engine.prefill(prompt, mode="stitch")
    engine.score(prompt, "x", mode="stitch")
    answer(engine, given(engine, "Too short."))
    assert engine.flush_write_back(PATIENT_S)
    assert engine.store.catalog.keys() == []
    for other in (
        engine_of("llama"),
        engine_of("gpt2", store_config=STORE),
    ):  # by default; and of a refused model
        answer(other, prompt, mode="auto")
        assert other.store.catalog.keys() == []
        assert "write_back" not in other.stats()


def test_user_turns_and_live_text_are_never_stored(engine):
    turns = [
        {"role": "system", "content": CHUNKS[0]},
        {"role": "user", "content": CHUNKS[1]},
        {"role": "assistant", "content": CHUNKS[2]},
        {"role": "user", "content": [{"type": "text", "text": CHUNKS[3]}]},
    ]
    for prompt in (turns, CHUNKS[0], [CHUNKS[1], "\n", CHUNKS[2]]):
        answer(engine, prompt)
    assert engine.store.catalog.keys() == []


def test_live_text_before_the_chunks_is_never_stored_as_a_prefix(engine):
    """The chunk is encoded behind the engine's own prefix, and only that one is stored with it."""
    answer(engine, [f"My secret question: {CHUNKS[3]}\n", Chunk(CHUNKS[0]), "\nWell?"])
    (identity,) = identities(engine, CHUNKS[0])
    prefix = request_of(engine, "x").prefixes[0]
    head = tuple(engine.loaded.encoder.live_ids(prefix, at_start=True))
    keys = set(engine.store.catalog.keys()) - {chunk_key(identity)}
    assert len(keys) == 1
    records = [engine.store.catalog.get(key) for key in keys]
    assert [record.num_tokens for record in records if record] == [len(head)]


def test_live_text_that_begins_like_a_chunk_is_not_stored_either(engine, monkeypatch):
    """Even where the chunk's KV goes away between two looks at the store, and its part is computed."""
    engine.precompute(CHUNKS[:1])
    before = sorted(engine.store.catalog.keys())
    prompt = [{"role": "user", "content": f"{CHUNKS[0][:150]}, is what I said\n\nWho?"}]
    answer(engine, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(engine.store, "known", lambda keys: set())
        patch.setattr(engine.store.catalog, "variants", lambda content: [])
        assert not any(span.hit for span in engine.explain(prompt).spans)
        assert any(span.kind == "chunk" for span in engine.explain(prompt).spans)
        answer(engine, prompt)
    assert sorted(engine.store.catalog.keys()) == before
    assert sum(engine.stats()["write_back"].values()) == 0


def test_a_prefix_that_was_precomputed_with_is_kept_to(engine):
    engine.precompute(CHUNKS[3:], prefix="Notes of the archive:\n")
    result = answer(engine, ["Notes of the archive:\n", Chunk(CHUNKS[0]), "\nWho?"])
    assert result.computed_tokens > 64
    assert (
        answer(engine, ["Notes of the archive:\n", Chunk(CHUNKS[0]), "\nWho?"]).exactness == "exact"
    )


def test_registered_texts_without_kv_come_back(engine):
    """What a budget pushed out, or another model has stored: found by scanning, and known to the index."""
    engine.precompute(CHUNKS[:1], ids=["doc"])
    identity = identities(engine, CHUNKS[0])[0]
    engine.store.delete([chunk_key(identity)])
    prompt = [{"role": "user", "content": f"{CHUNKS[0]}\n\nWho?"}]
    answer(engine, prompt)
    assert identities(engine, CHUNKS[0]) == [identity]
    assert engine.delete(["doc"]) == 1
    assert identities(engine, CHUNKS[0]) == []


# -- when it is stored -----------------------------------------------------------------------------------------------------


def test_it_waits_until_no_request_runs(engine, monkeypatch):
    write_back = engine._answering.write_back
    assert write_back is not None
    paused = Paused(monkeypatch)
    paused.go_on.set()
    with write_back.request():
        engine.generate(given(engine, CHUNKS[0]), max_new_tokens=2, mode="stitch")
        assert not engine.flush_write_back(0.2)
        assert not paused.reached.is_set()
    assert engine.flush_write_back(PATIENT_S)
    assert engine.stats()["write_back"]["stored"] == 1


def test_the_answer_does_not_wait_for_it(engine, monkeypatch):
    paused = Paused(monkeypatch)
    first, again = (
        engine.generate(given(engine, CHUNKS[0]), max_new_tokens=2, mode="stitch") for _ in range(2)
    )
    assert paused.reached.wait(PATIENT_S)
    assert first.token_ids == again.token_ids
    assert not engine.flush_write_back(0.0)
    paused.go_on.set()
    assert engine.flush_write_back(PATIENT_S)
    assert engine.stats()["write_back"]["stored"] == 1


@pytest.mark.parametrize("what", ["room", "thread"])
def test_without_room_or_a_thread_chunks_are_dropped_and_counted(what, engine, monkeypatch):
    with monkeypatch.context() as patch:
        if what == "room":
            patch.setattr(kvrag.precompute.on_miss, "MAX_WAITING", 1)
        else:
            patch.setattr(
                kvrag.precompute.on_miss,
                "POOL",
                SimpleNamespace(submit=raising(RuntimeError, "can't start new thread")),
            )
        answer(engine, given(engine, CHUNKS[0], CHUNKS[1]))
    assert engine.stats()["write_back"] == {
        "stored": 0,
        "skipped": 0,
        "failed": 0,
        "dropped": 2,
        "waiting": 0,
    }
    answer(engine, given(engine, CHUNKS[0]))
    assert engine.stats()["write_back"]["stored"] == 1


def test_faults_are_counted_and_logged_and_the_engine_goes_on(engine, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(engine.store, "put_all", raising(StoreError, "the disk is full"))
        answer(engine, given(engine, CHUNKS[0]))
    assert "the disk is full" in caplog.text
    assert engine.stats()["write_back"]["failed"] == 1
    answer(engine, given(engine, CHUNKS[1]))
    assert engine.stats()["write_back"]["dropped"] == 1, (
        "not again right away: each try costs a forward"
    )
    monkeypatch.setattr(kvrag.precompute.on_miss, "RETRY_S", 0.0)
    write_back = engine._answering.write_back
    assert write_back is not None
    write_back._not_before = 0.0

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(kvrag.precompute.run, "encode_chunks", raising(ValueError, "a bug"))
        answer(engine, given(engine, CHUNKS[1]))
    assert "a bug" in caplog.text
    assert engine.stats()["write_back"]["failed"] == 2
    answer(engine, given(engine, CHUNKS[1]))
    assert engine.stats()["write_back"]["stored"] == 1


# -- erasing and closing ---------------------------------------------------------------------------------------------------


def unstored(engine: KVRagEngine) -> None:
    """Register a document whose text has no KV any more."""
    engine.precompute(CHUNKS[:1], ids=["doc"])
    engine.store.delete([chunk_key(identities(engine, CHUNKS[0])[0])])


def paused_at_a_miss(
    engine: KVRagEngine, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> Paused:
    """Answer a prompt with such a document, and hold its write-back up."""
    unstored(engine)
    paused = Paused(monkeypatch, after=after)
    engine.generate(given(engine, CHUNKS[0]), max_new_tokens=2, mode="stitch")
    assert paused.reached.wait(PATIENT_S)
    return paused


@pytest.mark.parametrize("after", [False, True], ids=["before its forward", "after its forward"])
@pytest.mark.parametrize("by", ["the engine", "another engine"])
def test_what_is_deleted_meanwhile_does_not_come_back(after, by, engine, engine_of, monkeypatch):
    deleting = engine if by == "the engine" else engine_of("llama", store_config=STORE)
    paused = paused_at_a_miss(engine, monkeypatch, after=after)
    deleting.delete(["doc"])
    paused.go_on.set()
    assert engine.flush_write_back(PATIENT_S)
    assert identities(engine, CHUNKS[0]) == []
    assert engine.stats()["write_back"]["dropped"] == 1


def test_what_is_deleted_while_the_answer_is_made_does_not_come_back(engine):
    unstored(engine)
    stream = engine.stream(given(engine, CHUNKS[0]), max_new_tokens=200, mode="stitch")
    next(stream)
    engine.delete(["doc"])
    stream.cancel()
    list(stream)
    assert engine.flush_write_back(PATIENT_S)
    assert identities(engine, CHUNKS[0]) == []


def test_a_deleted_text_that_a_prompt_still_quotes_does_not_come_back(engine):
    engine.precompute(CHUNKS[:1], ids=["doc"])
    prompt = [{"role": "user", "content": f"{CHUNKS[0]}\n\nWho?"}]
    answer(engine, prompt)
    engine.delete(["doc"])
    answer(engine, prompt)
    assert identities(engine, CHUNKS[0]) == []
    assert engine.stats()["write_back"]["skipped"] == 1


def test_a_text_that_another_process_erased_meanwhile_does_not_come_back(engine, monkeypatch):
    paused = paused_at_a_miss(engine, monkeypatch, after=True)
    engine.store.forget(engine.space_of(None), "doc")
    paused.go_on.set()
    assert engine.flush_write_back(PATIENT_S)
    assert identities(engine, CHUNKS[0]) == []
    assert engine.stats()["write_back"]["failed"] == 1


def test_a_delete_waits_for_what_is_being_written_and_erases_it(engine, monkeypatch):
    unstored(engine)
    writing, original = threading.Event(), engine.store.put_all

    def put(*args, **options):
        writing.set()
        time.sleep(0.2)
        return original(*args, **options)

    monkeypatch.setattr(engine.store, "put_all", put)
    engine.generate(given(engine, CHUNKS[0]), max_new_tokens=2, mode="stitch")
    assert writing.wait(PATIENT_S)
    engine.delete(["doc"])
    assert engine.flush_write_back(PATIENT_S)
    assert identities(engine, CHUNKS[0]) == []


def test_closing_does_not_wait_and_stores_nothing_more(engine, engine_of, monkeypatch, caplog):
    paused = paused_at_a_miss(engine, monkeypatch, after=True)
    write_back = engine._answering.write_back
    assert write_back is not None
    with caplog.at_level(logging.WARNING):
        loaded = weakref.ref(engine.loaded)
        engine.close()
        assert not paused.go_on.is_set()
        paused.go_on.set()
        assert write_back.flush(PATIENT_S)
    assert write_back.stats()["dropped"] == 1
    assert "not stored" not in caplog.text
    del write_back
    gc.collect()
    assert loaded() is None, "a closed engine releases the model"
    other = engine_of("llama", store_config=STORE)
    assert identities(other, CHUNKS[0]) == []


def test_a_process_that_ends_right_after_its_answer_ends_in_order(tiny_dir, tmp_path):
    code = f"""
from kvrag import Chunk, KVRagEngine, StoreConfig
engine = KVRagEngine.from_pretrained({tiny_dir!r}, kv_dir={str(tmp_path)!r}, store_config=StoreConfig(on_miss="store"))
engine.generate([engine.prefix_text, Chunk({CHUNKS[0]!r}), "Who?"], max_new_tokens=2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Fatal" in done.stderr, "Traceback" in done.stderr) == (
        0,
        False,
        False,
    ), done.stderr


def test_a_forked_child_does_not_wait_for_an_erasure_of_its_parent():
    with ERASURES.erasing("space"):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            with ERASURES.erasing("space"):
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_stored_while_documents_are_erased():
    """A prompt that is seen while documents go still finds the later ones registered."""
    erasures, done = Erasures(), threading.Event()

    def store():
        with suppress(Stopped), erasures.unless_any_since("space", erasures.count("space")):
            done.set()

    with erasures.erasing("space"):
        thread = threading.Thread(target=store)
        thread.start()
        assert not done.wait(0.2)
    thread.join(10)
    assert done.is_set()
