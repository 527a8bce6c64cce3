"""One budget of time for all that a request asks of the store, and what is said when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvrag.store.holes import in_words
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, RepairConfig, StoreConfig, deadline
from kvrag.store import DiskStore, MemoryStore, TieredStore, tiered_reads
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.threads import Deadline
from kvrag.types import ChunkKey, Hole

CHUNKS = make_chunks(3, words=30, seed=5)
STORE_DOCS = Path(__file__).parents[1] / "docs" / "store.md"
MakeEngine = Callable[..., KVRagEngine]


def ask(*order: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join(CHUNKS[i] for i in order) + "\n\nWho?"}]


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """What hangs goes on at the end."""
    event = threading.Event()
    yield event
    event.set()


def test_what_the_asker_does_between_its_questions_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    budget = Deadline(200.0)

    def takes(seconds: float) -> int:
        clock[0] += seconds
        return 1

    takes(50.0)
    assert budget.ask(lambda: 1, 0, what="it") == 1
    assert budget.left_s == 200.0
    assert budget.ask(lambda: takes(5.0), 0, what="it") == 1
    assert budget.left_s == 195.0
    assert budget.fault is None


def test_a_late_answer_ends_the_budget_and_a_failure_does_not(go_on: threading.Event) -> None:
    budget = Deadline(0.1)
    assert budget.ask(lambda: go_on.wait(20), "default", what="it") == "default"
    assert (budget.fault, budget.left_s) == ("the store did not answer within 0.1 s", 0)
    assert budget.ask(lambda: "never asked", "default", what="it") == "default"
    broken = Deadline(10)
    assert broken.ask(lambda: 1 / 0, 7, what="it") == 7
    assert broken.fault == "the store failed (division by zero)"
    assert broken.left_s > 0
    assert broken.ask(lambda: 1, 7, what="it") == 7


def test_a_budget_may_be_longer_than_threads_can_wait() -> None:
    assert Deadline(1e300).ask(lambda: 1, 0, what="it") == 1


@pytest.mark.parametrize("what", ["contains", "texts", "variants"])
def test_an_index_that_hangs_is_said_to_hang(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event, what: str
) -> None:
    engine = engine_of(store_config=StoreConfig(load_timeout_s=0.3))
    engine.precompute(CHUNKS)
    prompt = [engine.prefix_text if what != "variants" else "Other: ", Chunk(CHUNKS[0]), " Who?"]
    full = engine.prefill(prompt, mode="full")
    owner = engine.store if what == "contains" else engine.store.index
    monkeypatch.setattr(owner, what, lambda *_, **__: go_on.wait(20))
    result = engine.prefill(prompt, mode="stitch")
    assert torch.allclose(result.logits, full.logits, atol=1e-4)
    assert (result.exactness, result.holes) == ("full", ())
    assert result.fallback_reason == "the store did not answer within 0.3 s"
    told = engine.explain(prompt)
    assert told.notes == ["the store did not answer within 0.3 s"]
    assert [s.reason for s in told.spans if s.kind == "chunk"] == ["the store did not answer within 0.3 s"]
    assert engine.prefill(prompt, mode="full").fallback_reason is None


def test_an_index_that_fails_is_said_to_fail(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS)
    monkeypatch.setattr(engine.store, "contains", lambda key: 1 / 0)
    assert engine.prefill(ask(0), mode="stitch").fallback_reason == "the store failed (division by zero)"


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
    assert "damaged from layer 3 of 4 on" in str(result.fallback_reason)
    assert engine.prefill(ask(0), mode=mode).fallback_reason in (
        "no stored KV for this prompt",
        "no stored KV for the head of this prompt",
    )


def test_holes_come_first_where_the_rest_does_not_pay(engine_of: MakeEngine) -> None:
    engine = engine_of(store_config=StoreConfig(ram_bytes=0))
    engine.precompute(CHUNKS)
    real, config = engine.store.get_many, RepairConfig(strategy="none")
    assert engine.prefill(ask(0, 1, 2), repair=config).fallback_reason is None
    engine.store.get_many = lambda ids, **kw: [*real(ids, **kw)[:-1], None]  # type: ignore[method-assign]
    result = engine.prefill(ask(0, 1, 2), repair=config)
    assert len(result.holes) == 1
    first, second = str(result.fallback_reason).split("; reuse would cost ")
    assert first == in_words(result.holes)
    assert "tokens" in second


def test_the_docs_show_the_sentence_that_is_printed() -> None:
    hole = Hole(ChunkKey("1f0c5a7be2d4" + "0" * 52), "late", 12)
    assert f"`{in_words([hole])}`" in STORE_DOCS.read_text()
    assert in_words([]) is None


@pytest.fixture
def timeouts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What tiers are told about the time that is left for a load."""
    told: list[float] = []
    real = TieredStore.get_many

    def get_many(self: Any, identities: Any, *, timeout_s: float) -> Any:
        told.append(timeout_s)
        return real(self, identities, timeout_s=timeout_s)

    monkeypatch.setattr(TieredStore, "get_many", get_many)
    return told


def test_planning_and_loading_share_one_budget(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, timeouts: list[float]
) -> None:
    engine = engine_of(store_config=StoreConfig(load_timeout_s=60.0))
    engine.precompute(CHUNKS)
    real, asked = engine.store.contains, []

    def slow(key: ChunkKey) -> bool:
        asked.append(key)
        time.sleep(0.1)
        return real(key)

    monkeypatch.setattr(engine.store, "contains", slow)
    result = engine.prefill(ask(0, 1), mode="stitch")
    assert (result.exactness, result.fallback_reason) == ("repaired", None)
    assert len(asked) >= 3
    (left,) = timeouts
    assert 0 < left <= 60 - 0.1 * len(asked)


def test_a_budget_that_planning_has_spent_is_not_given_again_to_loading(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, timeouts: list[float], go_on: threading.Event
) -> None:
    engine = engine_of(store_config=StoreConfig(load_timeout_s=0.5))
    engine.precompute(CHUNKS)
    real = engine.store.contains
    answers = iter([real])  # for the prefix; then it hangs
    monkeypatch.setattr(engine.store, "contains", lambda key: next(answers, lambda _: go_on.wait(20))(key))
    result = engine.prefill(ask(0, 1), mode="stitch")
    assert all(left == 0 for left in timeouts)
    assert str(result.fallback_reason).endswith("the store did not answer within 0.5 s")


def test_memory_that_nobody_can_ask_about_is_late_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    store = TieredStore(MemoryStore(2**20), DiskStore(tmp_path))
    identity = make_identity(1)
    store.put(identity, make_kv(identity), text=None)
    with monkeypatch.context() as patch:
        patch.setattr(tiered_reads, "LOOK_S", 60.0)  # what memory is given where there is no time at all
        assert same_bits(store.get_many([identity], timeout_s=0)[0], make_kv(identity))
    with monkeypatch.context() as patch:
        for look in ("erasure_mark", "is_known"):
            patch.setattr(store, look, lambda *_: go_on.wait(20))
        start = time.monotonic()
        assert store.get_many([identity], timeout_s=0.1) == [None]
        assert time.monotonic() - start < 10
    go_on.set()
    assert same_bits(store.get_many([identity], timeout_s=30)[0], make_kv(identity))
    store.close()
