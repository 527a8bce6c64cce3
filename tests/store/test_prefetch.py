"""Reading ahead: each chunk once, in bounded threads and bytes, and a request does what the policy says about what is not over."""

import threading
import time

import pytest

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, prefetch
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(8)]
KEYS = [chunk_key(identity) for identity in IDENTITIES]
SIZE = make_kv(IDENTITIES[0]).num_bytes


class SlowDisk(DiskStore):
    """A disk whose reads wait for :attr:`go_on`, and are counted."""

    def __init__(self, root):
        super().__init__(root)
        self.go_on = threading.Event()
        self.reading, self.reads, self.at_once = threading.Semaphore(0), [], 0

    def _get(self, identity, *, is_helped):
        self.reads.append(identity)
        self.at_once = max(self.at_once, len(self.reads))
        self.reading.release()
        self.go_on.wait(30)
        return super()._get(identity, is_helped=is_helped)


@pytest.fixture
def slow(root):
    """Tiers above a slow disk with six chunks, none of them in memory."""
    made = []

    def make(policy="timeout", room=8):
        disk = SlowDisk(root)
        store = TieredStore(MemoryStore(room * SIZE), disk, prefetch=policy)
        for identity in IDENTITIES[:6]:
            disk.put(identity, make_kv(identity), text=None)
        made.append((store, disk))
        return made[-1]

    yield make
    for store, disk in made:
        disk.go_on.set()
        store.close()


def running(disk, count):
    for _ in range(count):
        assert disk.reading.acquire(timeout=30)


def test_what_was_prefetched_is_in_memory(slow):
    store, disk = slow()
    disk.go_on.set()
    handle = store.prefetch([*IDENTITIES[:3], IDENTITIES[7]])
    assert (handle.found, handle.reads) == (3, 3)
    assert handle.wait(30)
    assert handle.is_over
    disk.go_on.clear()  # a read would hang
    assert same_bits(store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert [kv is not None for kv in store.get_many(IDENTITIES[:3], timeout_s=30)] == [True] * 3
    assert store.prefetch(IDENTITIES[:3]).wait(0)  # nothing to read
    assert len(disk.reads) == 3


def test_it_returns_at_once_and_few_threads_read(slow):
    store, disk = slow()
    handle = store.prefetch(IDENTITIES[:6])
    running(disk, prefetch.THREADS)
    time.sleep(0.05)
    assert len(disk.reads) == prefetch.THREADS
    assert not handle.wait(0.01)
    disk.go_on.set()
    assert handle.wait(30)
    assert sorted(map(chunk_key, disk.reads)) == sorted(KEYS[:6])


def test_keys_do_as_well_as_identities(slow):
    store, disk = slow()
    disk.go_on.set()
    handle = store.prefetch([*KEYS[:2], IDENTITIES[0], KEYS[7]])
    assert handle.wait(30)
    assert (handle.found, handle.reads) == (2, 2)
    assert set(disk.reads) == set(IDENTITIES[:2])
    assert len(disk.reads) == 2
    assert store.stats()["host"].chunks == 2


def test_nothing_is_read_twice(slow):
    store, disk = slow()
    first, second = store.prefetch(IDENTITIES[:2]), store.prefetch(IDENTITIES[:2])
    assert (first.reads, second.reads) == (2, 2)
    running(disk, 2)
    got = []
    thread = threading.Thread(target=lambda: got.extend(store.get_many(IDENTITIES[:2], timeout_s=30)))
    thread.start()
    disk.go_on.set()
    thread.join(30)
    assert all(same_bits(kv, make_kv(identity)) for kv, identity in zip(got, IDENTITIES[:2], strict=True))
    assert len(got) == len(disk.reads) == 2
    assert first.wait(30)
    assert second.wait(30)


def test_with_a_deadline_a_request_reads_what_nobody_has_begun_and_leaves_in_time(slow):
    store, disk = slow("timeout")
    store.prefetch(IDENTITIES[:6])
    running(disk, prefetch.THREADS)
    start = time.monotonic()
    assert store.get_many([IDENTITIES[0], IDENTITIES[5]], timeout_s=0.2) == [None, None]
    assert time.monotonic() - start < 10
    assert IDENTITIES[5] in disk.reads  # by the request itself
    assert disk.reads.count(IDENTITIES[0]) == 1
    disk.go_on.set()
    assert all(store.get_many(IDENTITIES[:6], timeout_s=30))


def test_best_effort_waits_for_no_read_of_the_prefetch(slow):
    store, disk = slow("best_effort")
    handle = store.prefetch(IDENTITIES[:4])
    running(disk, prefetch.THREADS)
    assert store.get_many(IDENTITIES[:4], timeout_s=1000) == [None] * 4
    disk.go_on.set()
    assert handle.wait(30)
    assert all(store.get_many(IDENTITIES[:5], timeout_s=30))  # the fifth is read by the request, as without a prefetch


def test_wait_waits_beyond_the_deadline(slow):
    store, disk = slow("wait")
    store.prefetch(IDENTITIES[:4])
    running(disk, prefetch.THREADS)
    threading.Timer(0.2, disk.go_on.set).start()
    got = store.get_many(IDENTITIES[:4], timeout_s=0.01)
    assert all(same_bits(kv, make_kv(identity)) for kv, identity in zip(got, IDENTITIES[:4], strict=True))


def test_what_nobody_has_begun_can_be_cancelled_unless_another_wants_it(slow):
    store, disk = slow()
    first = store.prefetch(IDENTITIES[:5])
    running(disk, prefetch.THREADS)
    second = store.prefetch(IDENTITIES[4:5])
    assert first.cancel() == 5 - prefetch.THREADS - 1
    assert first.cancel() == 0
    disk.go_on.set()
    assert second.wait(30)
    assert first.wait(30)
    assert sorted(map(chunk_key, disk.reads)) == sorted(KEYS[number] for number in (0, 1, 4))


def test_no_more_is_read_ahead_than_the_tier_holds(slow):
    store, disk = slow(room=3)
    handle = store.prefetch(IDENTITIES[:6])
    assert (handle.found, handle.reads) == (6, 3)
    disk.go_on.set()
    assert handle.wait(30)
    assert store.stats()["host"].chunks == 3
    assert store.prefetch(IDENTITIES[3:6]).reads == 3  # there is room for reads again


def test_what_is_erased_while_it_is_read_ahead_does_not_come_back(slow):
    store, disk = slow()
    store.put(IDENTITIES[6], make_kv(IDENTITIES[6]), text=make_text("a"), doc_id="doc")
    store.release()
    handle = store.prefetch(IDENTITIES[6:7])
    running(disk, 1)
    real = disk.objects.read
    read, erased = threading.Event(), threading.Event()

    def then_wait(*args, **kwargs):
        found = real(*args, **kwargs)
        read.set()
        erased.wait(30)
        return found

    disk.objects.read = then_wait
    disk.go_on.set()
    assert read.wait(30)
    store.delete(KEYS[6:7])
    erased.set()
    assert handle.wait(30)
    assert store.stats()["host"].chunks == 0
    assert store.get(IDENTITIES[6]) is None


def test_a_read_that_fails_is_logged_and_over(slow, monkeypatch, caplog):
    store, disk = slow()

    def hang_up(*args, **kwargs):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(disk, "get", hang_up)
    assert store.prefetch(IDENTITIES[:1]).wait(30)
    assert "could not be prefetched" in caplog.text


def test_without_threads_nothing_is_read_ahead_and_nobody_waits(slow, monkeypatch):
    store, disk = slow("wait")

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert store.prefetch(IDENTITIES[:3]).wait(0)
    disk.go_on.set()
    assert all(store.get_many(IDENTITIES[:3], timeout_s=30))


def test_closing_withdraws_what_nobody_has_begun(slow):
    store, disk = slow()
    handle = store.prefetch(IDENTITIES[:5])
    running(disk, prefetch.THREADS)
    threading.Timer(0.1, disk.go_on.set).start()
    store.close()
    assert handle.wait(30)
    assert len(disk.reads) == prefetch.THREADS
