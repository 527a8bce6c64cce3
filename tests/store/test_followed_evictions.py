"""What it costs to follow the evictions of others: few marks for many chunks, few statements for each, and no erasure is missed."""

import pytest
from kvrag.store.batch_index import BatchIndex
from kvrag.store.cache import CacheRows
from kvrag.store.sqlite import SqliteRows

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, WriteBehind, batch_index
from kvrag.store.rows import erasures_of, row_of
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

CONFIG = StoreConfig(min_free_bytes=0)
IDENTITIES = [make_identity(number) for number in range(8)]
KEYS = [chunk_key(identity) for identity in IDENTITIES]
SIZE = make_kv(IDENTITIES[0]).num_bytes


@pytest.fixture(params=[False, True], ids=["through", "back"])
def tiers(root, request):
    """Memory that holds eight chunks, above a disk, and another process on that disk."""
    host, disk, other = MemoryStore(2**20), DiskStore(root, CONFIG), DiskStore(root, CONFIG)
    store = TieredStore(host, WriteBehind(disk) if request.param else disk)
    for number, identity in enumerate(IDENTITIES):
        store.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=str(number))
    store.flush()
    assert all(store.get_many(IDENTITIES, timeout_s=60))
    yield host, store, other
    store.close()
    other.close()


@pytest.fixture
def looks(monkeypatch):
    """How many keys each look at what is in memory was about."""
    found, real = [], BatchIndex.known
    monkeypatch.setattr(BatchIndex, "known", lambda index, keys: (found.append(len(keys)), real(index, keys))[1])
    return found


@pytest.mark.parametrize(("chunks", "marks"), [(1, 1), (2, 2), (6, 2)])
def test_a_pass_is_marked_at_its_first_and_its_last_chunk(tiers, chunks, marks):
    _, _, other = tiers
    before, seen = other.rows.erasure_mark(), []
    real = other.rows.mark_eviction
    other.rows.mark_eviction = lambda: (real(), seen.append((other.rows.totals()[0], other.rows.erasure_mark())))
    assert other._evictor.evict(chunks * SIZE) == chunks
    assert [left for left, _ in seen] == [7, 8 - chunks][:marks]
    values = [before, *(mark for _, mark in seen)]
    assert len(set(values)) == marks + 1
    assert len({erasures_of(mark) for mark in values}) == 1


def test_who_reads_all_the_while_looks_twice_and_has_nothing_too_much(tiers, looks):
    host, store, other = tiers
    real = other._evictor._removed

    def removed(key):
        real(key)
        store.get(make_identity(99))

    other._evictor._removed = removed
    assert other._evictor.evict(6 * SIZE) == 6
    store.get(make_identity(99))
    assert len(looks) == 2
    assert sorted(host.keys()) == sorted(other.rows.keys())
    assert len(host.keys()) == 2


def test_an_eviction_that_can_not_be_marked_is_one_all_the_same(tiers, monkeypatch):
    _, _, other = tiers

    def full():
        raise OSError("no space left")

    monkeypatch.setattr(other.rows, "mark_eviction", full)
    assert other._evictor.evict(3 * SIZE) == 3


@pytest.mark.parametrize(
    "erase",
    [
        lambda store: [store.forget(NAMESPACE, str(number)) for number in range(8)],
        lambda store: store.delete(KEYS),
        lambda store: [store.delete(store.index.unlink_text(NAMESPACE, make_text(str(n)).digest)) for n in range(8)],
        lambda store: store.clear(),
        lambda store: store.clear(NAMESPACE),
    ],
    ids=["forget", "delete", "text", "clear", "clear a namespace"],
)
def test_what_a_killed_pass_has_not_marked_is_erased_too(tiers, erase, monkeypatch):
    host, store, other = tiers
    monkeypatch.setattr(other.rows, "mark_eviction", lambda: None)
    assert other._evictor.evict(5 * SIZE) == 5
    assert same_bits(store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert len(host.keys()) == 8, "nobody was told"
    erase(other)
    assert store.get_many(IDENTITIES, timeout_s=60) == [None] * 8
    assert host.keys() == []


@pytest.mark.parametrize("keys", [{}, {"encryption_key": lambda: bytes(range(32))}], ids=["plain", "encrypted"])
@pytest.mark.parametrize(("kind", "rows"), [("diskcache", CacheRows), ("sqlite", SqliteRows)])
def test_many_chunks_are_looked_for_with_few_statements(root, monkeypatch, kind, rows, keys):
    monkeypatch.setattr(batch_index, "BATCH", 3)
    asked, real = [], rows.fetch_many
    monkeypatch.setattr(rows, "fetch_many", lambda self, names: (asked.append(len(names)), real(self, names))[1])
    store = DiskStore(root, StoreConfig(min_free_bytes=0, index=kind, **keys))
    for identity in IDENTITIES[:5]:
        store.put(identity, make_kv(identity), text=None)
    with store.rows.batch():
        store.rows._write(row_of("key", KEYS[4]), {"content": 1})  # is none of ours
    monkeypatch.setattr(rows, "fetch", lambda *_: pytest.fail("one by one"))
    assert store.rows.known(KEYS) == set(KEYS[:4])
    assert asked == [3, 3, 2]
    assert store.rows.known([]) == set()
    store.close()
    assert store.rows.known(KEYS) == set()


def test_a_stack_asks_the_store_below_and_above_one_that_nobody_shares_all_is_known(tiers, monkeypatch):
    _, store, _ = tiers
    other = TieredStore(MemoryStore(2**20), MemoryStore(2**20, name="disk"))
    assert other.known(KEYS) == set(KEYS)
    above = TieredStore(MemoryStore(2**20), store)
    assert above.known(KEYS) == {key for key in KEYS if above.is_known(key)}
    monkeypatch.setattr(store, "known", lambda keys: set(keys[:1]))
    assert above.known(KEYS) == {KEYS[0]}
