"""Budgets of the disk hold; what is worth least leaves first, and nothing leaves in vain; events tell."""

import threading
import time

import pytest
from pydantic import TypeAdapter, ValidationError
from stores import CHUNKS, KEYS, KVS, SIZE, fill, present, put

from kvrag.errors import ConfigError, StoreError
from kvrag.store import Catalog, FileBlobs, Retention
from kvrag.store.eviction import PROBE, RETRY_S, SHARE, TOKEN_MS, Sized, Usage, leaving, token_ms
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, same_bits

GIGABYTE = 10**9


@pytest.fixture
def make(opened):
    """Opens stores with room for so many chunks on the disk, and none in memory."""

    def make(chunks=4, **options):
        return opened(**{"disk_bytes": chunks and chunks * SIZE, "ram_bytes": 0, **options})

    return make


@pytest.fixture
def free(monkeypatch):
    """Free bytes of the file system: what this holds, less than that by each file where ``counts`` is set."""

    class Free:
        bytes, counts = 0, True

    monkeypatch.setattr(
        FileBlobs, "free_bytes", lambda blobs: Free.bytes - SIZE * len(blobs.keys()) * Free.counts
    )
    return Free


def keep(store, number, priority=35, **retention):
    return put(store, number, retention=Retention(priority, **retention))


def test_the_budget_holds(make):
    store = make()
    for number in range(12):
        put(store, number)
        assert store.stats()["disk"].num_bytes <= 4 * SIZE
        assert number in present(store), "what was just stored must not leave"
    assert len(present(store)) == 4
    assert store.blobs.keys() == set(store.catalog.keys())


def test_of_two_alike_the_least_recently_used_leaves(make):
    store = fill(make(), *range(4))
    for number in (0, 1, 3):
        store.get(CHUNKS[number])
    put(store, 4)
    assert present(store) == [0, 1, 3, 4]


@pytest.mark.parametrize("ram_bytes", [0, 2**20])
def test_hits_of_every_tier_count(make, ram_bytes):
    store = fill(make(ram_bytes=ram_bytes), *range(4))
    for _ in range(3):
        assert same_bits(store.get(CHUNKS[0]), KVS[0])
    fill(store, *range(4, 8))
    assert 0 in present(store)


def test_less_priority_leaves_first(make):
    store = make()
    for number, priority in enumerate((90, 20, 90, 60)):
        keep(store, number, priority)
    for _ in range(20):
        store.get(CHUNKS[1])
    keep(store, 4, 80)
    assert present(store) == [0, 2, 3, 4]


def test_more_priority_does_not_make_room_for_less(make):
    store = make()
    for number in range(4):
        keep(store, number, 50)
    with pytest.raises(StoreError, match="nothing more may leave"):
        put(store, 4)
    assert present(store) == [0, 1, 2, 3]
    assert store.catalog.documents(NAMESPACE) == [f"doc {number}" for number in range(4)]
    assert store.catalog.keys(pending=True) == []


def test_a_priority_may_be_changed_and_ends_with_its_duration(make, monkeypatch):
    store = make()
    for number in range(4):
        keep(store, number, 50)
    assert store.retain(KEYS[:1], Retention(90, duration_s=500)) == 1
    keep(store, 4, 50)
    assert present(store) == [0, 2, 3, 4]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1000)
    keep(store, 5, 40)
    assert present(store) == [2, 3, 4, 5]


@pytest.mark.parametrize("mean", [0.01, 100.0])
def test_chunks_of_unknown_cost_are_taken_for_average_ones(make, mean):
    """Measured costs of one machine say nothing about an assumed one: those without must not all leave, or all stay."""
    store = make(3)
    put(store, 0)
    keep(store, 1, cost_ms=3 * mean * 0.5)
    keep(store, 2, cost_ms=3 * mean * 1.5)
    assert token_ms(store.catalog.usages()[1]) == pytest.approx(mean)
    keep(store, 3, cost_ms=3 * mean * 1.2)
    assert present(store) == [0, 2, 3]


def sized(usage=None, *, key="key", tokens=3, num_bytes=10):
    return Sized(key, tokens, num_bytes, usage or Usage())


def test_hits_fade_and_a_cost_of_nothing_is_known():
    once = Usage().touched(1, now=10)
    assert sized(once).worth(10) == pytest.approx(2 * sized(Usage(last=10)).worth(10))
    assert sized(once).worth(10 + 9) == pytest.approx(sized(once).worth(10) / 10)
    often = Usage().touched(100, now=10)
    assert sized(often).worth(10 + 200) < sized(once).worth(10)
    assert sized(once).worth(0) == sized(once).worth(10), "a clock that was lost"
    assert token_ms([sized(Usage(cost_ms=0.0)), sized(Usage(cost_ms=6.0)), sized()]) == 1.0
    assert token_ms([]) == TOKEN_MS


@pytest.mark.parametrize(
    ("must", "share", "going"),
    [
        (1, 0, "c"),
        (10, 0, "c"),
        (11, 0, "ca"),
        (10, 19, "c"),
        (10, 20, "ca"),
        (10, 40, "ca"),
        (21, 20, "cab"),
        (40, 0, "cabe"),
        (41, 0, None),
    ],
)
def test_as_much_leaves_as_must_or_a_share_of_at_most_half_of_what_may(must, share, going):
    """Of 40 bytes that may: c is worth least, then a, b and e; d has a higher priority."""
    last = {"a": 2, "b": 3, "c": 1, "e": 4}
    usages = {name: Usage(last=access) for name, access in last.items()} | {"d": Usage(50)}
    chunks = [sized(usage, key=key) for key, usage in usages.items()]
    found = leaving(chunks, 4, priority=35, must=must, share=share)
    assert (None if found is None else "".join(chunk.key for chunk in found)) == going


def test_a_write_over_the_budget_evicts_a_share_of_the_store_and_gc_just_what_must(make):
    store = make(2 * SHARE)
    for number in range(2 * SHARE + 1):
        identity = make_identity(number)
        store.put(identity, make_kv(identity), text=None)
    assert len(store.blobs.keys()) == 2 * SHARE - 1
    store.close()
    store = make(SHARE)
    store.make_room()
    assert len(store.blobs.keys()) == SHARE


def test_few_chunks_of_low_priority_do_not_all_leave(make):
    store = make(3 * SHARE)
    for number in range(3 * SHARE):
        identity = make_identity(number)
        retention = Retention(80 if number >= 4 else 35)
        store.put(identity, make_kv(identity), text=None, retention=retention)
    store.put(make_identity(99), make_kv(make_identity(99)), text=None)
    assert len(store.blobs.keys()) == 3 * SHARE - 1


@pytest.mark.parametrize("tokens", [9, 3000])
def test_nothing_leaves_where_all_of_it_would_not_be_enough(make, tokens):
    """A chunk larger than what may leave, or than the whole budget."""
    store = make(6)
    for number in range(4):
        keep(store, number, 80)
    put(store, 4)
    big = make_identity(99, tokens=tokens)
    with pytest.raises(StoreError, match=r"(nothing more may leave|whole budget).*disk_bytes"):
        store.put(big, make_kv(big), text=None)
    assert present(store) == [0, 1, 2, 3, 4]


def test_free_space_is_left_to_others(make, free):
    store = make(None, min_free_bytes=GIGABYTE)
    free.bytes = GIGABYTE + 2 * SIZE + SIZE
    for number in range(8):
        put(store, number)
        assert len(present(store)) <= 3
        assert number in present(store)
    free.bytes, left = 0, present(store)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"nothing more may leave.*min_free_bytes"):
            put(store, 9)
        assert present(store) == left, "nothing leaves in vain"


def test_eviction_that_frees_nothing_ends_soon_and_is_not_repeated(make, free, monkeypatch):
    """Snapshots and open files keep the space of what is erased; so does a file system that frees late."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    free.bytes = 2 * GIGABYTE
    store = fill(make(None, min_free_bytes=GIGABYTE), *range(11))
    free.bytes, free.counts = GIGABYTE - 5 * SIZE, False
    for _ in range(3):
        with pytest.raises(StoreError, match=r"freed no space.*min_free_bytes"):
            put(store, 11)
        assert len(present(store)) == 11 - PROBE
    now[0] += RETRY_S + 1
    with pytest.raises(StoreError, match="freed no space"):
        put(store, 11)
    assert len(present(store)) == 11 - 2 * PROBE
    free.bytes = 2 * GIGABYTE
    assert put(store, 11) == SIZE


def test_puts_at_the_limit_do_not_look_at_all_rows_each_time(make, free, monkeypatch):
    looks, real = [], Catalog.usages
    monkeypatch.setattr(Catalog, "usages", lambda catalog: (looks.append(1), real(catalog))[1])
    free.bytes = GIGABYTE + 50 * SIZE
    store = make(None, min_free_bytes=GIGABYTE)
    for number in range(100):
        identity = make_identity(number)
        store.put(identity, make_kv(identity), text=None)
        assert len(store.blobs.keys()) <= 50
    assert 1 <= len(looks) <= 50 / (50 // SHARE) + 1


def test_threads_that_put_at_once_keep_to_the_budget(make):
    store, faults = make(5), []

    def work(first):
        try:
            for number in range(first, 12, 3):
                put(store, number)
        except StoreError as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    store.make_room()
    assert store.stats()["disk"].num_bytes <= 5 * SIZE
    assert store.stats()["disk"].chunks == len(present(store))


def test_hits_reach_other_processes_and_outlive_this_one(make, handle):
    store = fill(make(8), *range(8))
    for _ in range(40):
        store.get(CHUNKS[1])
    store.close()
    other = handle()
    assert other.catalog.usage(KEYS[1]).hits == 40
    assert other.catalog.usage(KEYS[2]).hits == 0


# -- what is told of worth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        *(
            None,
            [1] * 7,
            [35, -1.0, float("nan"), 0, -1.0],
            [35, -1.0, 1e300, 0, -1.0],
            [35, 1e300, 0.0, 0, -1.0],
        ),
        *([101, -1.0, 0.0, 0, -1.0], [-1, -1.0, 0.0, 0, -1.0], [10**9, -1.0, 0.0, 0, -1.0]),
        *([35, -1.0, -1.0, 0, -1.0], [35, -1.0, 0.0, -1, -1.0], [35, -1.0, 0.0, 0, -2.0]),
    ],
)
def test_a_planted_usage_is_not_believed(row):
    """A row from elsewhere must not make a chunk one that never leaves."""
    form = TypeAdapter(Usage)
    with pytest.raises(ValidationError):
        form.validate_python(row)
    for usage in (Usage(3), Usage().retained(Retention(3, 1e15, 1e15))):
        assert form.validate_json(form.dump_json(usage)) == usage
        assert usage.retention().priority == 3


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 101},
        {"priority": -1},
        {"priority": 1.0},
        {"duration_s": -1},
        {"cost_ms": float("nan")},
        {"duration_s": 1e300},
    ],
)
def test_a_retention_out_of_range_is_named(options):
    with pytest.raises(ConfigError, match=r"Retention\."):
        Retention(**options)
