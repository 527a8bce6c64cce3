"""What leaves memory: by priority, then by the computing that a byte of it saves, as on the disk."""

import pytest
from kvrag.store.retention import Worth
from kvrag.store.usage import HALF_LIFE

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, Retention, TieredStore, WriteBehind, shelf
from kvrag.testing.chunks import make_identity, make_kv

IDENTITIES = [make_identity(number) for number in range(8)]
KEY = chunk_key(IDENTITIES[0])
SIZE = make_kv(IDENTITIES[0]).num_bytes


def put(store, number, *, priority=35, cost_ms=None, tokens=3):
    identity = make_identity(number, tokens=tokens)
    store.put(identity, make_kv(identity), text=None, retention=Retention(priority, None, cost_ms))


def held(memory):
    return [number for number, identity in enumerate(IDENTITIES) if memory.contains(chunk_key(identity))]


def test_what_was_dear_to_compute_stays():
    store = MemoryStore(2 * SIZE)
    put(store, 0, cost_ms=100.0)
    put(store, 1, cost_ms=10.0)
    put(store, 2, cost_ms=50.0)  # by age alone, 0 would leave
    assert held(store) == [0, 2]
    put(store, 3, cost_ms=1.0)  # comes all the same: it is what is asked for now
    assert held(store) == [0, 3]


def test_what_is_hit_often_stays():
    store = MemoryStore(2 * SIZE)
    put(store, 0)
    for _ in range(3):
        store.get(IDENTITIES[0])
    put(store, 1)
    store.get(IDENTITIES[1])
    put(store, 2)
    assert held(store) == [0, 2]


def test_hits_outweigh_cost_only_as_far_as_they_go():
    store = MemoryStore(2 * SIZE)
    put(store, 0, cost_ms=10.0)
    put(store, 1, cost_ms=35.0)
    for _ in range(2):
        store.get(IDENTITIES[0])  # 10 × (1 + 2) is less than 35
    put(store, 2, cost_ms=99.0)
    assert held(store) == [1, 2]


def test_what_takes_more_bytes_for_the_same_leaves():
    store = MemoryStore(4 * SIZE)
    big = make_identity(5, tokens=6)
    put(store, 0, cost_ms=10.0)
    put(store, 5, tokens=6, cost_ms=15.0)
    put(store, 1, cost_ms=10.0)
    put(store, 2, cost_ms=10.0)
    assert held(store) == [0, 1, 2]
    assert not store.contains(chunk_key(big))


def test_a_priority_goes_before_all_that():
    store = MemoryStore(2 * SIZE)
    put(store, 0, priority=60, cost_ms=1.0)
    put(store, 1, priority=50, cost_ms=1000.0)
    for _ in range(5):
        store.get(IDENTITIES[1])
    put(store, 2, priority=50)
    assert held(store) == [0, 2]


def test_what_nobody_measured_counts_as_average():
    store = MemoryStore(3 * SIZE)
    put(store, 0, cost_ms=2.0)
    put(store, 1)
    put(store, 2, cost_ms=20.0)
    put(store, 3, cost_ms=20.0)
    put(store, 4, cost_ms=20.0)
    assert held(store) == [2, 3, 4]


def test_hits_of_long_ago_count_less():
    store = MemoryStore(2 * SIZE)
    put(store, 0)
    for _ in range(7):
        store.get(IDENTITIES[0])
    store._shelf.now += 3 * HALF_LIFE  # 7 hits are worth less than one now
    put(store, 1)
    store.get(IDENTITIES[1])
    put(store, 2)
    assert held(store) == [1, 2]


def test_a_chunk_that_comes_again_keeps_its_hits():
    store = MemoryStore(2 * SIZE)
    put(store, 0)
    for _ in range(3):
        store.get(IDENTITIES[0])
    assert store.keep(IDENTITIES[0], make_kv(IDENTITIES[0]))
    put(store, 1)
    store.get(IDENTITIES[1])
    put(store, 2)
    assert held(store) == [0, 2]
    assert store.stats()["host"].num_bytes == 2 * SIZE


@pytest.mark.parametrize("behind", [False, True], ids=["through", "back"])
def test_a_chunk_brings_the_hits_that_it_had_elsewhere(root, behind):
    disk = DiskStore(root, StoreConfig(min_free_bytes=0))
    host, gpu = MemoryStore(2 * SIZE), MemoryStore(2 * SIZE, name="gpu")
    below = TieredStore(host, WriteBehind(disk) if behind else disk)
    store = TieredStore(gpu, below, keeps_puts=False)
    for number in range(3):
        put(disk, number)
    for _ in range(4):
        disk.get(IDENTITIES[0])
    for number in (0, 1, 2):
        store.get(IDENTITIES[number])
    assert held(gpu) == [0, 2]
    assert 0 in held(host)
    disk._flush_hits()
    assert store.worth(chunk_key(IDENTITIES[0])).hits == pytest.approx(5, rel=0.01)
    gpu.delete([chunk_key(IDENTITIES[0])])
    host.delete([chunk_key(IDENTITIES[0])])
    for number in (0, 1, 2):
        store.get(IDENTITIES[number])
    assert held(gpu) == [0, 2]
    assert 0 in held(host)
    store.close()


def test_what_is_asked_for_now_takes_the_place_of_what_was_asked_for_before(root):
    """Hits that are counted only while a chunk is in memory would keep new ones out for ever."""
    host = MemoryStore(2 * SIZE)
    store = TieredStore(host, DiskStore(root, StoreConfig(min_free_bytes=0)), keeps_puts=False)
    for number in range(4):
        put(store, number)
    for _ in range(5):
        store.get_many(IDENTITIES[:2], timeout_s=30)
    assert held(host) == [0, 1]
    for _ in range(8):
        for number in (2, 3):
            store.get(IDENTITIES[number])
    assert held(host) == [2, 3]
    store.close()


def test_above_a_tier_that_counts_no_hits_they_begin_anew():
    store = TieredStore(MemoryStore(SIZE, name="gpu"), MemoryStore(2**20), keeps_puts=False)
    put(store, 0)
    assert store.get(IDENTITIES[0]) is not None
    assert store.worth(chunk_key(IDENTITIES[0])) == Worth()


def test_a_chunk_brings_its_cost_when_it_is_promoted_and_when_it_is_demoted(root):
    host, gpu = MemoryStore(2 * SIZE), MemoryStore(SIZE, name="gpu")
    disk = DiskStore(root, StoreConfig(min_free_bytes=0))
    below = TieredStore(host, disk, keeps_puts=False)
    store = TieredStore(gpu, below, keeps_puts=False)
    for number, cost in ((0, 100.0), (1, 1.0), (2, 50.0)):
        put(store, number, cost_ms=cost)
    for number in (0, 1, 2):
        below.get(IDENTITIES[number])
    assert held(host) == [0, 2]  # by age, or by hits, 0 would have left
    gpu.keep(IDENTITIES[0], make_kv(IDENTITIES[0]))
    host.delete([chunk_key(IDENTITIES[0])])
    gpu.keep(IDENTITIES[1], make_kv(IDENTITIES[1]))  # 0 is demoted
    assert held(host) == [0, 2]
    below.get(IDENTITIES[1])
    assert held(host) == [0, 1]
    store.close()


@pytest.fixture
def three(root):
    """The accelerator's memory, the host's and a disk: a chunk that only the first has is on its way to the second."""
    gpu, host = MemoryStore(2**20, name="gpu"), MemoryStore(2**20)
    below = TieredStore(host, DiskStore(root, StoreConfig(min_free_bytes=0)), min_priority=20)
    store = TieredStore(gpu, below, keeps_puts=False)
    store.put(IDENTITIES[0], make_kv(IDENTITIES[0]), text=None, retention=Retention(60))
    assert store.get(IDENTITIES[0]) is not None
    host.drop([KEY])
    yield gpu, host, below, store
    store.close()


@pytest.mark.parametrize(
    "said", [Retention(90), Retention(), Retention(90, None, 5.0)], ids=["more", "nothing", "cost"]
)
def test_what_was_said_since_a_chunk_was_pushed_out_goes_before_what_it_brings(three, said):
    gpu, host, below, store = three
    kv = gpu.get(IDENTITIES[0])
    gpu.drop([KEY])
    assert store.retain([KEY], said) == 1
    below.demote(IDENTITIES[0], kv, Retention(60))
    assert host.contains(KEY)
    assert host.retention(KEY) == below.retention(KEY)


def test_what_is_worth_too_little_by_now_is_not_demoted(three):
    gpu, host, below, store = three
    kv = gpu.get(IDENTITIES[0])
    assert store.retain([KEY], Retention(10)) == 1
    below.demote(IDENTITIES[0], kv, Retention(60))
    assert not host.contains(KEY)


def test_what_is_said_while_a_chunk_is_demoted_holds(three, monkeypatch):
    gpu, host, below, store = three
    kv, real = gpu.get(IDENTITIES[0]), below.retention

    def retention(key):
        before = real(key)
        store.retain([KEY], Retention(90))  # by another thread, just when this one has looked
        return before

    monkeypatch.setattr(below, "retention", retention)
    below.demote(IDENTITIES[0], kv, Retention(60))
    assert host.retention(KEY) in (None, Retention(90)), "it is not here, or is worth what was said last"


def test_above_a_tier_that_is_nobody_elses_a_chunk_brings_its_worth():
    host = MemoryStore(2**20)
    TieredStore(host, MemoryStore(2**20, name="disk")).demote(IDENTITIES[0], make_kv(IDENTITIES[0]), Retention(60))
    assert host.retention(KEY) == Retention(60)


def many(number):
    return make_identity(number)


def filled(count):
    """A full store of chunks that were the dearer to compute the later they came."""
    store = MemoryStore(count * SIZE)
    for number in range(count):
        identity = many(number)
        store.keep(identity, make_kv(identity), retention=Retention(35, None, 1.0 + number))
    return store


def leaves(store, number, **retention):
    """Numbers of what leaves when one more chunk comes."""
    before = set(store.keys())
    store.keep(many(number), make_kv(many(number)), retention=Retention(**retention))
    return [n for n in range(number + 1) if chunk_key(many(n)) in before - set(store.keys())]


def test_many_chunks_leave_by_one_ranking_and_it_is_the_right_one(monkeypatch):
    store = filled(64)
    rankings = []
    real = shelf.order
    monkeypatch.setattr(shelf, "order", lambda *args: rankings.append(args) or real(*args))
    for number in range(12):
        assert leaves(store, 100 + number, cost_ms=1000.0) == [number]
    assert len(rankings) == 3  # one for four chunks of sixty-four


def test_what_is_used_after_a_ranking_stays():
    store = filled(64)
    assert leaves(store, 100, cost_ms=1000.0) == [0]
    store.get(many(1))
    store.delete([chunk_key(many(2))])
    store.keep(many(200), make_kv(many(200)), retention=Retention(cost_ms=1000.0))
    assert leaves(store, 101, cost_ms=1000.0) == [3]
    assert store.contains(chunk_key(many(1)))


def test_a_lower_priority_that_comes_after_a_ranking_leaves_first():
    store = filled(64)
    assert leaves(store, 100, priority=35, cost_ms=1000.0) == [0]
    store.delete([chunk_key(many(1))])
    store.keep(many(200), make_kv(many(200)), retention=Retention(10, None, 1000.0))
    assert leaves(store, 201, priority=35, cost_ms=1000.0) == [200]


def test_more_may_leave_than_one_ranking_has_noted():
    store = filled(64)
    assert leaves(store, 100, cost_ms=1000.0) == [0]
    big = make_identity(300, tokens=3 * 6)
    assert store.keep(big, make_kv(big), retention=Retention(cost_ms=1.0))
    assert [store.contains(chunk_key(many(number))) for number in range(1, 8)] == [False] * 6 + [True]
    with store.pinned(map(chunk_key, map(many, range(300)))):
        assert leaves(store, 301, priority=20) == []
        assert not store.contains(chunk_key(many(301)))
