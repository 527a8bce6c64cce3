"""One budget of time for all that a request asks of the store, and what is said when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import asking, make_chunks

from kvrag import Chunk, KVRagEngine, RepairConfig, StoreConfig, runtime
from kvrag.blend.reuse import in_words
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.reading import Reader
from kvrag.types import ChunkKey, Hole

CHUNKS = make_chunks(3, words=30, seed=5)
ask = partial(asking, CHUNKS)
STORE_DOCS = Path(__file__).parents[2] / "docs" / "store.md"
MakeEngine = Callable[..., KVRagEngine]


@pytest.mark.parametrize("what", ["known", "texts", "variants"])
def test_an_index_that_hangs_is_said_to_hang(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event, what: str
) -> None:
    engine = engine_of(store_config=StoreConfig(load_timeout_s=0.3))
    engine.precompute(CHUNKS)
    prompt = [engine.prefix_text if what != "variants" else "Other: ", Chunk(CHUNKS[0]), " Who?"]
    full = engine.prefill(prompt, mode="full")
    owner = engine.store if what == "known" else engine.store.catalog
    monkeypatch.setattr(owner, what, lambda *_, **__: go_on.wait(20))
    start = time.monotonic()
    result = engine.prefill(prompt, mode="stitch")
    assert time.monotonic() - start < 5
    assert torch.allclose(result.logits, full.logits, atol=1e-4)
    assert (result.exactness, result.holes) == ("full", ())
    assert result.fallback_reason == "the store did not answer within 0.3 s"
    told = engine.explain(prompt)
    assert told.notes == ["the store did not answer within 0.3 s"]
    assert [s.reason for s in told.spans if s.kind == "chunk"] == [
        "the store did not answer within 0.3 s"
    ]
    assert engine.prefill(prompt, mode="full").fallback_reason is None


def test_advice_does_not_wait_for_texts_that_are_decoded_too_slowly(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    engine = engine_of(store_config=StoreConfig(load_timeout_s=0.3))
    engine.precompute(CHUNKS)
    decoders = set[int]()

    def decode(_: object) -> str:
        decoders.add(threading.get_ident())
        go_on.wait(20)
        return ""

    monkeypatch.setattr(engine.loaded.encoder, "decode", decode)
    told = engine.explain("Who is it, of whom nothing is said here?")
    assert "no known chunk text" in told.notes[-1]
    assert decoders
    assert threading.get_ident() not in decoders


def test_an_index_that_fails_is_said_to_fail(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS)
    monkeypatch.setattr(engine.store, "known", lambda keys: 1 / 0)
    assert (
        engine.prefill(ask(0), mode="stitch").fallback_reason
        == "the store failed (division by zero)"
    )


@pytest.mark.parametrize("mode", ["stitch", "prefix", "auto"])
def test_holes_are_the_reason_when_nothing_else_is_there_to_reuse(
    engine_of: MakeEngine, tmp_path: Path, mode: Any
) -> None:
    engine = engine_of(store_config=StoreConfig(ram_bytes=0))
    engine.precompute(CHUNKS[:1])
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    result = engine.prefill(ask(0), mode=mode)
    assert result.exactness == "full"
    assert [hole.reason for hole in result.holes] == ["damaged"] * 2  # the prefix and the chunk
    assert result.fallback_reason == in_words(result.holes)
    assert "damaged at layer 3" in str(result.fallback_reason)
    assert engine.prefill(ask(0), mode=mode).fallback_reason in (
        "no stored KV for this prompt",
        "no stored KV for the head of this prompt",
    )


def test_holes_come_first_where_the_rest_does_not_pay(engine_of: MakeEngine) -> None:
    engine = engine_of(store_config=StoreConfig(ram_bytes=0))
    engine.precompute(CHUNKS)
    real, config = engine.store.get_many, RepairConfig(strategy="none")
    assert engine.prefill(ask(0, 1, 2), repair=config).fallback_reason is None
    engine.store.get_many = lambda ids, **kw: [
        *real(ids, **kw)[:-1],
        Hole(chunk_key(ids[-1]), "late", None),
    ]  # type: ignore[method-assign]
    result = engine.prefill(ask(0, 1, 2), repair=config)
    assert len(result.holes) == 1
    first, second = str(result.fallback_reason).split("; estimated: ")
    assert first.startswith(str(in_words(result.holes)))
    assert "full prefill" in second


def test_the_docs_show_the_sentence_that_is_printed() -> None:
    hole = Hole(ChunkKey("1f0c5a7be2d4" + "0" * 52), "late", 12)
    assert f"`{in_words([hole])}`" in STORE_DOCS.read_text()
    assert in_words([]) is None


@pytest.fixture
def timeouts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What tiers are told about the time that is left for a load."""
    told: list[float] = []
    real = Reader.get_many

    def get_many(self: Any, identities: Any, *, timeout_s: float) -> Any:
        told.append(timeout_s)
        return real(self, identities, timeout_s=timeout_s)

    monkeypatch.setattr(Reader, "get_many", get_many)
    return told


def test_planning_and_loading_share_one_budget(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, timeouts: list[float]
) -> None:
    engine = engine_of(store_config=StoreConfig(load_timeout_s=60.0))
    engine.precompute(CHUNKS)
    real, asked = engine.store.known, []

    def slow(keys: Collection[ChunkKey]) -> set[ChunkKey]:
        asked.append(len(keys))
        time.sleep(0.1)
        return real(keys)

    monkeypatch.setattr(engine.store, "known", slow)
    result = engine.prefill(ask(0, 1), mode="stitch")
    assert (result.exactness, result.fallback_reason) == ("repaired", None)
    assert asked == [3], "the prefix and both chunks are asked for at once"
    (left,) = timeouts
    assert 0 < left <= 60 - 0.1


def test_a_budget_that_planning_has_spent_is_not_given_again_to_loading(
    engine_of: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    timeouts: list[float],
    go_on: threading.Event,
) -> None:
    engine = engine_of(store_config=StoreConfig(load_timeout_s=0.5))
    engine.precompute(CHUNKS)
    real = engine.store.catalog.texts
    monkeypatch.setattr(
        engine.store.catalog, "texts", lambda *args: (time.sleep(0.3), real(*args))[1]
    )
    monkeypatch.setattr(engine.store.catalog, "variants", lambda _: go_on.wait(20))
    prompt = [engine.prefix_text, Chunk(CHUNKS[0]), Chunk("not stored " * 30), "Who?"]
    result = engine.prefill(prompt, mode="stitch")
    assert timeouts == [0.0]
    assert str(result.fallback_reason).endswith("the store did not answer within 0.5 s")


def kept_chats(make: MakeEngine, **options: Any) -> KVRagEngine:
    """An engine that keeps requests' KV, as ``kvrag serve`` does."""
    config = StoreConfig(load_timeout_s=0.3, history_bytes=2**24, **options)
    engine = make(store_config=config)
    engine.precompute(CHUNKS)
    return engine


def test_what_was_erased_is_asked_once_in_time_and_without_a_lock(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    """A look that hangs holds up neither its own answer nor other requests."""
    engine = kept_chats(engine_of)
    expected = engine.generate(ask(0), mode="full", max_new_tokens=4).token_ids
    asked = []

    def hang(namespace: str) -> None:
        asked.append(namespace)
        go_on.wait(60)

    monkeypatch.setattr(engine.store.catalog, "erased", hang)
    start = time.monotonic()
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(engine.generate(ask(0), max_new_tokens=4).token_ids)
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 20  # not 60
    assert found == [expected] * 4
    assert len(asked) == 4


def test_chats_are_not_continued_where_the_store_does_not_tell_what_was_erased(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kept_chats(engine_of)
    engine.generate(ask(0), max_new_tokens=4)
    assert engine.generate(ask(0), max_new_tokens=4).history_tokens > 0
    monkeypatch.setattr(engine.store.catalog, "erased", lambda _: 1 / 0)
    assert engine.generate(ask(0), max_new_tokens=4).history_tokens == 0


def test_a_chat_of_before_an_erasure_elsewhere_leaves_memory_with_the_next_request(
    engine_of: MakeEngine,
) -> None:
    engine = kept_chats(engine_of)
    engine.generate(ask(0), max_new_tokens=4)
    before = engine._answering.histories.stats()["tokens"]
    engine.store.clear(engine.space_of(None))  # as another process does: no engine is told
    made = engine.generate("Who?", max_new_tokens=1)
    assert made.history_tokens == 0
    assert engine._answering.histories.stats()["tokens"] <= made.prompt_tokens < before


def test_a_store_that_hangs_takes_a_bounded_number_of_threads(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    """After some late looks the store is not asked any more, until they end."""
    engine = kept_chats(engine_of)
    asked = []

    def hang(*_: Any, **__: Any) -> None:
        asked.append(threading.get_ident())
        go_on.wait(60)

    monkeypatch.setattr(runtime, "LATE_AT_ONCE", 3)
    monkeypatch.setattr(engine.store.catalog, "texts", hang)
    monkeypatch.setattr(engine.store.catalog, "erased", hang)
    answers = [engine.prefill(ask(0), mode="stitch") for _ in range(8)]
    assert len(asked) == 3
    assert {answer.exactness for answer in answers} == {"full"}
    assert "has not answered" in str(answers[-1].fallback_reason)
    monkeypatch.undo()
    go_on.set()
    end = time.monotonic() + 20
    while engine.prefill(ask(0), mode="stitch").exactness == "full":
        assert time.monotonic() < end
