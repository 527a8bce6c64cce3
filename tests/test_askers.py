"""The threads that ask the store: they are kept, nobody waits behind one that hangs, and no answer needs one."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from texts import make_chunks

from kvrag import KVRagEngine, deadline
from kvrag.store import DiskStore, MemoryStore, TieredStore
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.threads import MOST_IDLE, Askers, Deadline

CHUNKS = make_chunks(1, words=30, seed=5)
WAIT_S = 60.0


@pytest.fixture
def askers(monkeypatch: pytest.MonkeyPatch) -> Askers:
    """A process that has asked nothing yet."""
    fresh = Askers()
    monkeypatch.setattr(deadline, "ASKERS", fresh)
    return fresh


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, askers: Askers) -> list[str]:
    """Names of the threads that were started."""
    names: list[str] = []
    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (names.append(thread.name), real(thread))[1])
    return names


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """What hangs goes on at the end."""
    event = threading.Event()
    yield event
    event.set()


def test_one_thread_answers_one_question_after_the_other(started: list[str]) -> None:
    for number in range(20):
        assert Deadline(WAIT_S).ask(lambda number=number: number, None, what="it") == number
        assert Deadline(WAIT_S).ask(lambda: 1 / 0, -1, what="it") == -1
    assert started == ["kvrag-ask"]


def test_nobody_waits_behind_what_hangs(started: list[str], go_on: threading.Event) -> None:
    assert Deadline(WAIT_S).ask(lambda: 1, 0, what="it") == 1
    assert Deadline(0.05).ask(lambda: go_on.wait(WAIT_S), "late", what="it") == "late"
    for _ in range(5):
        assert Deadline(WAIT_S).ask(lambda: 2, 0, what="it") == 2
    assert started == ["kvrag-ask"] * 2


def test_no_more_threads_stay_than_are_of_use(askers: Askers, started: list[str]) -> None:
    leave = [threading.Event() for _ in range(3 * MOST_IDLE)]
    overs = [askers.begin(lambda event=event: event.wait(WAIT_S)) for event in leave]
    for event, over in zip(leave, overs, strict=True):
        event.set()
        assert over.acquire(timeout=WAIT_S)
    assert len(started) == 3 * MOST_IDLE
    assert len(askers._idle) == MOST_IDLE
    assert Deadline(WAIT_S).ask(lambda: 1, 0, what="it") == 1
    assert len(started) == 3 * MOST_IDLE


def test_a_thread_that_ends_is_not_asked_again(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: is_over.set())

    def leave() -> None:
        raise SystemExit

    assert Deadline(WAIT_S).ask(leave, "none", what="it") == "none"
    assert is_over.wait(WAIT_S)
    assert Deadline(WAIT_S).ask(lambda: 1, 0, what="it") == 1
    assert len(started) == 2


def test_a_thread_that_waits_holds_nothing_of_the_last_question(askers: Askers) -> None:
    class Chunk:
        pass

    chunk = Chunk()
    held = weakref.ref(chunk)
    action = [lambda chunk=chunk: None]
    assert askers.begin(action.pop()).acquire(timeout=WAIT_S)
    del chunk
    assert held() is None


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_asks_with_threads_of_its_own(askers: Askers) -> None:
    assert Deadline(WAIT_S).ask(lambda: 1, 0, what="it") == 1
    assert askers._idle
    pid = os.fork()
    if not pid:
        os._exit(0 if Deadline(20.0).ask(lambda: 1, 0, what="it") == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_where_no_thread_can_be_started_the_answer_is_computed(
    engine_of: Callable[..., KVRagEngine], askers: Askers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS)
    question = [{"role": "user", "content": f"{CHUNKS[0]}\n\nWho?"}]
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "kvrag-ask":
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        askers._idle.clear()
        result = engine.prefill(question)
    assert result.exactness == "full"
    assert result.fallback_reason == "the store could not be asked (can't start new thread)"
    assert engine.prefill(question).exactness != "full"


def test_nobody_is_asked_about_what_memory_does_not_hold(tmp_path: Path, started: list[str]) -> None:
    store = TieredStore(MemoryStore(2**20), DiskStore(tmp_path), keeps_puts=False)
    one, two, absent = map(make_identity, range(3))
    for identity in (one, two):
        store.put(identity, make_kv(identity), text=None)
    assert same_bits(store.get_many([one], timeout_s=WAIT_S)[0], make_kv(one))
    assert store.get_many([absent], timeout_s=WAIT_S) == [None]
    assert "kvrag-ask" not in started
    assert (store.stats()["host"].hits, store.stats()["host"].misses) == (0, 2)
    started.clear()
    for _ in range(5):
        assert same_bits(store.get_many([one], timeout_s=WAIT_S)[0], make_kv(one))
    assert started == ["kvrag-ask"]
    assert all(store.get_many([one, two], timeout_s=WAIT_S))
    assert (store.stats()["host"].hits, store.stats()["host"].misses) == (6, 3)
    store.close()
