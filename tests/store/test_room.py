"""Making room: nothing leaves where it would not help, and no put looks through the whole store for itself alone."""

import pytest
from kvrag.store.directory import Directory
from kvrag.store.index import DiskIndex
from kvrag.store.usage import TOKEN_MS, Usage, token_ms

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, Retention, evict
from kvrag.testing.chunks import make_identity, make_kv

CHUNKS = [make_identity(number) for number in range(60)]
SIZE = make_kv(CHUNKS[0]).num_bytes
FILE = 4096 + SIZE
GIGABYTE = 10**9


def put(store, number, priority=35, **retention):
    return store.put(
        CHUNKS[number], make_kv(CHUNKS[number]), text=None, retention=Retention(priority=priority, **retention)
    )


def present(store):
    return [number for number, chunk in enumerate(CHUNKS) if store.contains(chunk_key(chunk))]


@pytest.fixture
def fill(root):
    """Make a store of so many chunks, put while there was room, and open it again with a budget."""
    stores = []

    def fill(chunks, priority=35, **options):
        with_room = DiskStore(root, StoreConfig(min_free_bytes=0))
        for number in range(chunks):
            put(with_room, number, priority)
        with_room.close()
        stores.append(DiskStore(root, StoreConfig(**{"min_free_bytes": 0, **options})))
        return stores[-1]

    yield fill
    for store in stores:
        store.close()


@pytest.fixture
def free(monkeypatch):
    """Free bytes of the file system: what this holds, less than that by each file where ``counts`` is set."""

    class Free:
        bytes, counts = 0, True

    def free_bytes(directory):
        files = len(list((directory.root / "objects").glob("*/*.safetensors")))
        return Free.bytes - FILE * files * Free.counts

    monkeypatch.setattr(Directory, "free_bytes", free_bytes)
    return Free


@pytest.fixture
def scans(monkeypatch):
    """One entry for each time that all rows were read."""
    found, real = [], DiskIndex.usage
    monkeypatch.setattr(DiskIndex, "usage", lambda index: (found.append(1), real(index))[1])
    return found


def test_nothing_leaves_where_all_of_it_would_not_be_enough(fill, free):
    store = fill(20, min_free_bytes=GIGABYTE)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"nothing more may leave.*min_free_bytes"):
            put(store, 50)
    assert len(present(store)) == 20


def test_nothing_leaves_where_a_higher_priority_holds_the_budget(fill):
    store = fill(18, priority=80, disk_bytes=20 * SIZE)
    put(store, 18)
    big = make_identity(99, tokens=9)  # three times the size; one may leave
    with pytest.raises(StoreError, match=r"nothing more may leave.*disk_bytes"):
        store.put(big, make_kv(big), text=None)
    assert present(store) == list(range(19))
    put(store, 50)
    assert set(range(18)) < set(present(store))


def test_a_low_watermark_that_can_not_be_reached_does_not_take_all(fill):
    store = fill(16, priority=80, disk_bytes=20 * SIZE, high_watermark=0.9, low_watermark=0.1)
    put(store, 16)
    for number in range(17, 22):
        put(store, number)
        left = present(store)
        assert left[:16] == list(range(16)), "a higher priority stays"
        assert left[-1] == number
        assert 18 <= len(left) <= 20


def test_eviction_that_frees_nothing_ends_soon_and_is_not_repeated(fill, free, monkeypatch):
    """Snapshots and open files keep the space of what is erased; so does a file system that frees late."""
    now = [1000.0]
    monkeypatch.setattr(evict.time, "monotonic", lambda: now[0])
    store = fill(40, min_free_bytes=GIGABYTE)
    free.bytes, free.counts = GIGABYTE - 10 * FILE, False
    for _ in range(3):
        with pytest.raises(StoreError, match=r"freed no space.*min_free_bytes"):
            put(store, 50)
        assert len(present(store)) == 40 - evict.PROBE
    now[0] += evict.RETRY_S + 1
    with pytest.raises(StoreError, match="freed no space"):
        put(store, 50)
    assert len(present(store)) == 40 - 2 * evict.PROBE
    free.bytes += 2 * FILE  # half of what left last: it comes late, and so it comes
    with pytest.raises(StoreError, match="freed no space"):
        put(store, 50)
    assert len(present(store)) == 40 - 3 * evict.PROBE
    free.bytes = 2 * GIGABYTE
    assert put(store, 50) == SIZE


def test_one_chunk_that_frees_nothing_counts_too(fill, free):
    store = fill(3, min_free_bytes=GIGABYTE, high_watermark=1.0, low_watermark=1.0)
    free.bytes, free.counts = GIGABYTE, False
    for _ in range(2):
        with pytest.raises(StoreError, match="freed no space"):
            put(store, 50)
    assert len(present(store)) == 2


def test_puts_at_the_limit_of_free_space_do_not_scan_each_time(fill, free, scans):
    store = fill(40, min_free_bytes=GIGABYTE)
    free.bytes = GIGABYTE + 40 * FILE
    for number in range(40, 52):
        put(store, number)
        assert number in present(store)
        assert len(present(store)) <= 40
    assert 1 <= len(scans) <= 4
    assert len(present(store)) >= 40 - 1 - 4, "a tenth of the store, no more"


def test_chunks_of_unknown_cost_are_taken_for_average_ones(fill):
    """Measured costs of one machine say nothing about an assumed one: those without must not all leave, or all stay."""
    assert token_ms([]) == TOKEN_MS
    for mean in (0.01, 100.0):
        store = fill(1, disk_bytes=3 * SIZE, high_watermark=1.0, low_watermark=1.0)
        put(store, 1, cost_ms=3 * mean * 0.5)
        put(store, 2, cost_ms=3 * mean * 1.5)
        assert token_ms(store.rows.usage()[1]) == pytest.approx(mean)
        put(store, 3, cost_ms=3 * mean * 1.2)
        assert present(store) == [0, 2, 3]
        store.clear()


def test_a_cost_of_nothing_is_known():
    assert token_ms([(fake(3), Usage(cost_ms=0.0)), (fake(3), Usage(cost_ms=6.0)), (fake(100), Usage())]) == 1.0


def fake(tokens):
    class Row:
        num_tokens = tokens

    return Row()
