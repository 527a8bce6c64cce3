"""A request waits for its store once, and gets a hole for what is not there in time; what is read ahead is read once."""

import threading
import time

import pytest
from stores import CHUNKS, KEYS, KVS, PATIENT_S, SIZE, ended, fill, held, in_child

from kvrag.store import Catalog, FileBlobs, memory
from kvrag.testing.chunks import same_bits
from kvrag.types import ChunkKV, Hole

AHEAD = 2
"""Threads that read ahead."""


class Gate:
    """Holds reads of some chunks up until it is opened, and counts all reads."""

    def __init__(self, patch):
        self.is_open, self.shut, self.begun = threading.Event(), set(KEYS), []
        self.waiting, real = threading.Semaphore(0), FileBlobs.read

        def read(blobs, key, start=0, length=None):
            if not start:
                self.begun.append(KEYS.index(key))
            if key in self.shut:
                self.waiting.release()
                self.is_open.wait(PATIENT_S)
            return real(blobs, key, start, length)

        patch.setattr(FileBlobs, "read", read)

    def wait_for(self, count):
        """Wait until so many reads hang."""
        for _ in range(count):
            assert self.waiting.acquire(timeout=PATIENT_S)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.is_open.set()


@pytest.fixture
def slow(handle, gate):
    """A store with six chunks, none of them in memory, whose reads hang."""

    def make(room=8):
        fill(handle(), *range(6))
        return handle(ram=room * SIZE)

    return make


def is_right(got, *numbers):
    """Whether those chunks came, bit for bit."""
    return len(got) == len(numbers) and all(
        same_bits(kv, KVS[number]) for kv, number in zip(got, numbers, strict=True)
    )


def late(*numbers):
    return [Hole(KEYS[number], "late", None) for number in numbers]


# -- deadlines and holes -------------------------------------------------------------------------------------------------


def test_late_chunks_are_holes_and_do_not_hinder_others(slow, gate):
    store = slow()
    gate.shut = {KEYS[1]}
    start = time.monotonic()
    for _ in range(2):
        got = store.get_many([CHUNKS[1], CHUNKS[2], CHUNKS[9], CHUNKS[3], CHUNKS[1]], timeout_s=0.4)
        assert got[0] == got[-1] == late(1)[0]
        assert is_right([got[1], got[3]], 2, 3)
        assert got[2] == Hole(KEYS[9], "absent", None)
    assert time.monotonic() - start < 10
    assert gate.begun.count(1) == 1, "a read that hangs is not begun again"
    gate.is_open.set()
    assert is_right(store.get_many([CHUNKS[1]], timeout_s=PATIENT_S), 1)


@pytest.mark.parametrize("timeout_s", [0, -1.0, 0.01])
def test_what_is_in_memory_comes_however_little_time_there_is(slow, gate, timeout_s):
    store = slow()
    gate.is_open.set()
    store.get(CHUNKS[0])
    gate.is_open.clear()
    kv, hole = store.get_many(CHUNKS[:2], timeout_s=timeout_s)
    assert same_bits(kv, KVS[0])
    assert hole == late(1)[0]


def test_a_catalog_that_hangs_costs_no_more_than_the_time(slow, gate, monkeypatch):
    store = slow()
    gate.is_open.set()
    real, go_on = Catalog.known, threading.Event()
    monkeypatch.setattr(Catalog, "known", lambda *args: (go_on.wait(PATIENT_S), real(*args))[1])
    assert store.get_many(CHUNKS[:2], timeout_s=0.2) == late(0, 1)
    go_on.set()
    assert is_right(store.get_many(CHUNKS[:2], timeout_s=PATIENT_S), 0, 1)


def test_a_dead_disk_is_not_asked_again_and_again(slow, gate):
    store = slow()
    for _ in range(4):
        assert store.get_many(CHUNKS[:6], timeout_s=0.02) == late(*range(6))
    assert len(gate.begun) <= memory.READERS._max_threads
    gate.is_open.set()
    assert is_right(store.get_many(CHUNKS[:6], timeout_s=PATIENT_S), *range(6))


@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("can't allocate memory")])
def test_memory_that_is_short_is_a_hole_and_not_the_files_fault(slow, gate, monkeypatch, error):
    store = slow()

    def refuse(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("kvrag.kv.format.torch.frombuffer", refuse)
        gate.is_open.set()
        holes = store.get_many(CHUNKS[:1], timeout_s=PATIENT_S)
        assert [hole.key for hole in holes] == KEYS[:1]
        assert store.get(CHUNKS[0]) is None
    assert is_right([store.get(CHUNKS[0])], 0)
    assert store.stats()["disk"].rejected == 0


def test_a_fault_of_our_own_is_a_hole(slow, gate, monkeypatch):
    store = slow()
    gate.is_open.set()
    monkeypatch.setattr("kvrag.store.reading.Blob", lambda *args: 1 / 0)
    assert store.get_many(CHUNKS[:1], timeout_s=PATIENT_S) == late(0)


def no_threads(patch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", refuse)
    for name in ("kvrag.runtime.POOL", "kvrag.store.memory.READERS", "kvrag.store.memory.AHEAD"):
        patch.setattr(name, memory.Pool("without threads"))


def test_without_threads_a_request_computes_and_nobody_waits(slow, gate, monkeypatch):
    store = slow()
    gate.is_open.set()
    with monkeypatch.context() as patch:
        no_threads(patch)
        assert store.get_many(CHUNKS[:2], timeout_s=PATIENT_S) == late(0, 1)
        handle = store.prefetch(CHUNKS[:2])
        assert (handle.found, handle.reads, handle.wait(0)) == (2, 0, True)
    assert is_right(store.get_many(CHUNKS[:2], timeout_s=PATIENT_S), 0, 1)


# -- reading ahead -------------------------------------------------------------------------------------------------------


def test_what_was_prefetched_is_in_memory(slow, gate):
    store = slow()
    gate.is_open.set()
    handle = store.prefetch([*CHUNKS[:2], KEYS[2], CHUNKS[0], CHUNKS[7], KEYS[8]])
    assert (handle.found, handle.reads) == (3, 3)
    assert handle.wait(PATIENT_S)
    gate.is_open.clear()  # a read would hang
    assert is_right(store.get_many(CHUNKS[:3], timeout_s=PATIENT_S), 0, 1, 2)
    assert store.prefetch(CHUNKS[:3]).wait(0), "nothing to read"
    assert held(store.tiers[0]) == [0, 1, 2]


def test_it_returns_at_once_and_few_threads_read(slow, gate):
    store = slow()
    handle = store.prefetch(CHUNKS[:6])
    gate.wait_for(AHEAD)
    assert not handle.wait(0.05)
    assert len(gate.begun) == AHEAD
    gate.is_open.set()
    assert handle.wait(PATIENT_S)
    assert sorted(gate.begun) == list(range(6))


def test_nothing_is_read_twice(slow, gate):
    store, got = slow(), []
    first, second = store.prefetch(CHUNKS[:2]), store.prefetch(CHUNKS[:2])
    assert (first.reads, second.reads) == (2, 2)
    gate.wait_for(2)
    thread = threading.Thread(
        target=lambda: got.extend(store.get_many(CHUNKS[:2], timeout_s=PATIENT_S))
    )
    thread.start()
    gate.is_open.set()
    thread.join(PATIENT_S)
    assert is_right(got, 0, 1)
    assert sorted(gate.begun) == [0, 1]
    assert first.wait(PATIENT_S)
    assert second.wait(PATIENT_S)


def test_with_a_deadline_a_request_reads_what_nobody_has_begun_and_leaves_in_time(slow, gate):
    store = slow()
    store.prefetch(CHUNKS[:6])
    gate.wait_for(AHEAD)
    assert store.get_many([CHUNKS[0], CHUNKS[5]], timeout_s=0.3) == late(0, 5)
    gate.wait_for(1)
    assert sorted(gate.begun) == [0, 1, 5], "the last one by the request itself"
    gate.is_open.set()
    assert is_right(store.get_many(CHUNKS[:6], timeout_s=PATIENT_S), *range(6))


def test_what_nobody_has_begun_can_be_cancelled_unless_another_wants_it(slow, gate):
    store = slow()
    first = store.prefetch(CHUNKS[:5])
    gate.wait_for(AHEAD)
    second = store.prefetch(CHUNKS[4:5])
    assert first.cancel() == 5 - AHEAD - 1
    assert first.cancel() == 0
    gate.is_open.set()
    assert second.wait(PATIENT_S)
    assert first.wait(PATIENT_S)
    assert sorted(gate.begun) == [0, 1, 4]


def test_a_prefetch_cancels_no_read_of_a_request(slow, gate):
    store, got = slow(), []
    thread = threading.Thread(
        target=lambda: got.extend(store.get_many(CHUNKS[:6], timeout_s=PATIENT_S))
    )
    thread.start()
    gate.wait_for(4)  # its other reads wait for a thread
    store.prefetch(CHUNKS[:6]).cancel()
    gate.is_open.set()
    thread.join(PATIENT_S)
    assert is_right(got, *range(6))


def test_no_more_is_read_ahead_than_the_tier_holds(slow, gate):
    store = slow(room=3)
    handle = store.prefetch(CHUNKS[:6])
    assert (handle.found, handle.reads) == (6, 3)
    gate.is_open.set()
    assert handle.wait(PATIENT_S)
    assert len(held(store.tiers[0])) == 3
    assert store.prefetch(CHUNKS[3:6]).wait(PATIENT_S), "there is room for reads again"


def test_a_read_ahead_that_fails_is_over_and_the_next_one_reads(slow, gate, monkeypatch):
    store = slow()
    gate.is_open.set()
    with monkeypatch.context() as patch:
        patch.setattr("kvrag.store.reading.Blob", lambda *args: 1 / 0)
        assert store.prefetch(CHUNKS[:1]).wait(PATIENT_S)
    assert store.prefetch(CHUNKS[:1]).wait(PATIENT_S)
    assert held(store.tiers[0]) == [0]


def test_closing_withdraws_what_nobody_has_begun(slow, gate):
    store = slow()
    handle = store.prefetch(CHUNKS[:5])
    gate.wait_for(AHEAD)
    store.close()
    gate.is_open.set()
    assert handle.wait(PATIENT_S)
    assert len(gate.begun) == AHEAD


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_waits_for_no_read_of_its_parent(slow, gate, handle):
    store = slow()
    store.prefetch(CHUNKS[:2])
    gate.wait_for(2)

    def child():
        gate.shut = set()
        own = handle(ram=8 * SIZE)
        return is_right(own.get_many(CHUNKS[:2], timeout_s=PATIENT_S), 0, 1) and own.prefetch(
            CHUNKS[3:4]
        ).wait(PATIENT_S)

    assert ended(in_child(child)) == 0
    gate.is_open.set()
    assert isinstance(store.get_many(CHUNKS[:1], timeout_s=PATIENT_S)[0], ChunkKV)
