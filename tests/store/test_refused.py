"""A chunk that memory has no room for is refused at once: nothing is ranked for it, however much is there."""

import random

import pytest
from kvrag.store.shelf import Entry, Shelf
from kvrag.store.usage import Usage

from kvrag.store import MemoryStore, Retention, shelf, usage
from kvrag.testing.chunks import make_identity, make_kv

SIZE = make_kv(make_identity(0)).num_bytes
LONG, SHORT = 1e6, 10.0


@pytest.fixture
def rankings(monkeypatch):
    found, real = [], shelf.order
    monkeypatch.setattr(shelf, "order", lambda *args: found.append(1) or real(*args))
    return found


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start of the machine."""
    now = [1000.0]
    monkeypatch.setattr(usage, "since_boot", lambda: now[0])
    return now


def keep(store, number, priority=35, duration_s=None, tokens=3):
    identity = make_identity(number, tokens=tokens)
    return store.keep(identity, make_kv(identity), retention=Retention(priority, duration_s))


@pytest.mark.parametrize("duration_s", [None, LONG], ids=["for ever", "for a while"])
def test_nothing_is_ranked_for_what_is_refused(rankings, duration_s):
    store = MemoryStore(32 * SIZE)
    assert all(keep(store, number, 60, duration_s) for number in range(32))
    for number in range(100, 110):
        assert not keep(store, number, 35)
    assert rankings == []
    assert keep(store, 110, 60)
    assert rankings == [1]


def test_priorities_that_only_few_chunks_look_at(rankings, monkeypatch):
    store = MemoryStore(32 * SIZE)
    assert all(keep(store, number, 60) for number in range(32))
    asked, real = [], Usage.priority_now
    monkeypatch.setattr(Usage, "priority_now", lambda use: asked.append(1) or real(use))
    assert not keep(store, 100, 35)
    assert len(asked) == 1, "that of the new one"


def test_what_is_pinned_or_comes_again_makes_no_room(rankings):
    store = MemoryStore(4 * SIZE)
    identities = [make_identity(number) for number in range(4)]
    assert all(keep(store, number, 60 if number else 20) for number in range(4))
    with store.pinned([shelf.record_for(identities[0], SIZE, None).key]):
        assert not keep(store, 100, 35)
    assert keep(store, 0, 20), "in its own place"
    assert rankings == []
    assert not keep(store, 100, 35, tokens=6)
    assert rankings == []
    assert keep(store, 100, 35)
    assert rankings == [1]


def test_a_priority_that_ends_or_is_said_anew_makes_room(clock):
    store = MemoryStore(2 * SIZE)
    assert keep(store, 0, 90, SHORT)
    assert keep(store, 1, 90)
    assert not keep(store, 2, 35)
    clock[0] += 2 * SHORT
    assert keep(store, 2, 35)
    assert not store.peek(make_identity(0))
    assert store.retain([shelf.record_for(make_identity(2), SIZE, None).key], Retention(90)) == 1
    assert not keep(store, 3, 35)
    assert store.retain([shelf.record_for(make_identity(1), SIZE, None).key], Retention(10)) == 1
    assert keep(store, 3, 35)
    assert not store.peek(make_identity(1))


@pytest.mark.parametrize("seed", range(5))
def test_what_may_leave_is_counted_as_if_all_were_looked_at(seed, clock):
    rng, kv = random.Random(seed), {n: make_kv(make_identity(0, tokens=n)) for n in (3, 6, 9)}
    full = Shelf(12 * SIZE)
    names = [str(number) for number in range(20)]
    for _ in range(600):
        key, said = rng.choice(names), Retention(rng.choice([0, 35, 60, 100]), rng.choice([None, SHORT, LONG]))
        what = rng.choice(["take", "take", "take", "use", "drop", "retain", "pin", "time", "clear"])
        if what == "take":
            full.take(key, Entry(make_identity(0), kv[rng.choice([3, 6, 9])], Usage().retained(said)))
        elif what == "use" and key in full.chunks:
            full.use(key)
        elif what == "drop":
            full.drop(key)
        elif what == "retain":
            full.retain(key, said)
        elif what == "pin":
            full.pins[key] = rng.choice([0, 0, 1])
        elif what == "time":
            clock[0] += SHORT / 4
        elif what == "clear" and rng.random() < 0.1:
            full.clear()
        assert full.num_bytes == sum(entry.num_bytes for entry in full.chunks.values()) <= full.max_bytes
        for priority in (0, 35, 60, 100):
            assert full._may_leave(key, priority) == sum(
                entry.num_bytes
                for other, entry in full.chunks.items()
                if other != key and not full.pins[other] and entry.usage.priority_now() <= priority
            )
