"""Budgets hold; what is worth least leaves first; events tell."""

import json
import stat
import threading
import time

import pytest
from kvrag.store.directory import Directory
from kvrag.store.usage import Usage

from kvrag.config import StoreConfig
from kvrag.errors import ConfigError, StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, Retention, TieredStore, usage
from kvrag.store.base import Record
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

CHUNKS = [make_identity(number) for number in range(12)]
SIZE = make_kv(CHUNKS[0]).num_bytes
FILE = 4096 + SIZE


@pytest.fixture
def events():
    return []


@pytest.fixture
def make(root, events):
    stores = []

    def make(chunks=4, **options):
        options = {
            "disk_bytes": chunks * SIZE,
            "min_free_bytes": 0,
            "high_watermark": 1.0,
            "low_watermark": 1.0,
            **options,
        }
        stores.append(DiskStore(root, StoreConfig(on_event=events.append, **options)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def put(store, number, **retention):
    chunk = CHUNKS[number]
    keep = Retention(**retention) if retention else None
    return store.put(chunk, make_kv(chunk), text=make_text(str(number)), doc_id=f"doc {number}", retention=keep)


def present(store):
    return [number for number, chunk in enumerate(CHUNKS) if store.contains(chunk_key(chunk))]


def test_the_budget_holds(make):
    store = make()
    for number in range(12):
        put(store, number)
        assert store.stats()["disk"].num_bytes <= 4 * SIZE
        assert number in present(store), "what was just stored must not leave"
    assert len(present(store)) == 4
    assert sorted(store.index.keys()) == sorted(chunk_key(CHUNKS[number]) for number in present(store))


def test_what_is_used_stays(make):
    store = make()
    for number in range(4):
        put(store, number)
    for _ in range(3):
        assert same_bits(store.get(CHUNKS[0]), make_kv(CHUNKS[0]))
    for number in range(4, 8):
        put(store, number)
    assert 0 in present(store)


def test_hits_in_memory_count_on_the_disk(make):
    disk = make()
    store = TieredStore(MemoryStore(2**20), disk)
    for number in range(4):
        put(store, number)
        store.get(CHUNKS[1])
    for number in range(4, 8):
        put(store, number)
    assert 1 in present(disk)


def test_less_priority_leaves_first(make):
    store = make()
    for number, priority in enumerate((90, 20, 90, 60)):
        put(store, number, priority=priority)
    for _ in range(20):
        store.get(CHUNKS[1])
    put(store, 4, priority=80)
    assert present(store) == [0, 2, 3, 4]


def test_more_priority_does_not_make_room_for_less(make):
    store = make()
    for number in range(4):
        put(store, number, priority=50)
    with pytest.raises(StoreError, match="nothing more may leave"):
        put(store, 4)
    assert present(store) == [0, 1, 2, 3]
    assert store.index.documents(NAMESPACE) == [f"doc {number}" for number in range(4)]


def test_a_priority_may_be_changed_and_ends_with_its_duration(make, monkeypatch):
    store = make()
    for number in range(4):
        put(store, number, priority=50)
    put_on = [chunk_key(CHUNKS[0])]
    store.retain(put_on, Retention(priority=90, duration_s=5))
    now = usage.since_boot()
    monkeypatch.setattr(usage, "since_boot", lambda: now + 1000)
    put(store, 4, priority=40)
    assert present(store) == [1, 2, 3, 4]


def test_a_priority_lasts_anew_after_a_restart(monkeypatch):
    kept = Usage().retained(Retention(priority=90, duration_s=60))
    now = usage.since_boot()
    monkeypatch.setattr(usage, "boot_id", lambda: "another")
    monkeypatch.setattr(usage, "since_boot", lambda: now + 10_000)
    assert kept.priority_now() == 90


def test_a_clock_that_jumps_changes_nothing(make, monkeypatch):
    store = make()
    for number in range(4):
        put(store, number, priority=50 if number else 90, duration_s=3600)
    for jump in (10, -10):
        real = time.time()
        monkeypatch.setattr(time, "time", lambda real=real, jump=jump: real + jump * 365 * 86400)
        assert len(present(store)) == 4
        put(store, 4 + (jump > 0), priority=60)
        assert 0 in present(store)


def test_what_costs_more_per_byte_stays(make):
    store = make()
    for number in range(4):
        put(store, number, cost_ms=1.0 if number == 2 else 1000.0)
    put(store, 4, cost_ms=1000.0)
    assert present(store) == [0, 1, 3, 4]


def test_pinned_chunks_stay(make):
    store = make()
    for number in range(4):
        put(store, number)
    with store.pinned([chunk_key(CHUNKS[0]), chunk_key(CHUNKS[1])]), store.pinned([chunk_key(CHUNKS[0])]):
        put(store, 4)
        put(store, 5)
        assert {0, 1} <= set(present(store))
    put(store, 6)
    assert not {0, 1} <= set(present(store))


def test_eviction_goes_from_the_high_to_the_low_watermark(make):
    store = make(chunks=10, high_watermark=0.9, low_watermark=0.3)
    counts = [put(store, number) and len(present(store)) for number in range(12)]
    assert max(counts) <= 10
    assert min(counts[counts.index(max(counts)) :]) <= 4


def test_a_chunk_larger_than_the_budget_is_refused_and_evicts_nothing(make):
    store = make(chunks=4)
    put(store, 0)
    big = make_identity(50, tokens=3000)
    with pytest.raises(StoreError, match="disk_bytes"):
        store.put(big, make_kv(big), text=None)
    assert present(store) == [0]


def test_free_space_is_left_to_others(make, monkeypatch):
    store = make(disk_bytes=None, min_free_bytes=10**6)
    free = 10**6 + 2 * FILE + SIZE
    monkeypatch.setattr(
        Directory, "free_bytes", lambda self: free - FILE * len(list((self.root / "objects").glob("*/*.safetensors")))
    )
    for number in range(8):
        put(store, number)
        assert len(present(store)) <= 3
        assert number in present(store)
    free, left = 0, present(store)
    with pytest.raises(StoreError, match="min_free_bytes"):
        put(store, 9)
    assert present(store) == left, "nothing leaves in vain"


def test_an_evicted_document_keeps_its_claim(make):
    store = make()
    for number in range(6):
        put(store, number)
    gone = next(number for number in range(6) if number not in present(store))
    assert f"doc {gone}" in store.index.documents(NAMESPACE)
    put(store, gone)
    assert store.forget(NAMESPACE, f"doc {gone}") == 1


def test_events_are_named_after_vllms(make, events, root, tmp_path):
    begin, store = time.time(), make(event_log=str(tmp_path / "events.jsonl"))
    for number in range(6):
        put(store, number)
    store.delete([chunk_key(CHUNKS[5])])
    path = root / "objects" / chunk_key(CHUNKS[4])[:2] / f"{chunk_key(CHUNKS[4])}.safetensors"
    path.write_bytes(b"x")
    store.get(CHUNKS[4])
    store.clear()
    kinds = [(event.type, event.reason) for event in events]
    assert kinds.count(("BlockStored", "put")) == 6
    for kind in (("BlockRemoved", "evicted"), ("BlockRemoved", "deleted"), ("BlockRemoved", "rejected")):
        assert kind in kinds
    assert kinds[-1] == ("AllBlocksCleared", "cleared")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["type"], line["reason"]) for line in lines] == kinds
    key = chunk_key(CHUNKS[0])
    stored = {"type": "BlockStored", "medium": "disk", "block_hashes": [key], "reason": "put", "block_size": 3}
    times = [line.pop("ts") for line in lines]
    assert lines[0] == {**stored, "num_bytes": SIZE}
    assert all(begin - 1 < moment < time.time() + 1 for moment in times)  # clocks may be set back a little
    assert times == [event.ts for event in events]
    assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == 0o600


def test_a_listener_that_fails_costs_nothing_but_a_warning(root, caplog, tmp_path):
    def refuse(event):
        raise RuntimeError("no")

    store = DiskStore(root, StoreConfig(on_event=refuse, event_log=str(tmp_path), min_free_bytes=0))
    assert put(store, 0) > 0
    assert put(store, 1) > 0
    assert len(caplog.records) == 1
    store.close()


def test_threads_that_put_at_once_keep_to_the_budget(make):
    store = make(chunks=5)
    threads = [threading.Thread(target=lambda n=n: [put(store, m) for m in range(n, 12, 3)]) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.make_room()
    assert store.stats()["disk"].num_bytes <= 5 * SIZE
    assert store.stats()["disk"].chunks == len(present(store))


def test_hits_fade():
    record = Record(chunk_key(CHUNKS[0]), "c", "m", "n", "p", 3, SIZE, None)
    once = Usage().touched(1, now=10)
    assert once.worth(record, 10) == pytest.approx(2 * Usage().worth(record, 10))
    assert once.recent_hits(10 + usage.HALF_LIFE) == pytest.approx(0.5)
    assert once.worth(record, 10**9) == pytest.approx(Usage().worth(record, 0))


@pytest.mark.parametrize(
    "row",
    [
        *(None, [], [1] * 7, [35, "", -1.0, -1.0, float("nan"), 0, -1.0], [35, "", -1.0, -1.0, 1e300, 0, -1.0]),
        *(
            [101, "", -1.0, -1.0, 0.0, 0, -1.0],
            [-1, "", -1.0, -1.0, 0.0, 0, -1.0],
            [10**9, "", -1.0, -1.0, 0.0, 0, -1.0],
        ),
        *([35, "", -1.0, -1.0, -1.0, 0, -1.0], [35, "", -1.0, -1.0, 0.0, -1, -1.0]),
    ],
)
def test_a_planted_row_counts_as_none(row):
    assert Usage.of(row) == Usage()
    assert Usage.of(Usage(priority=3).row()) == Usage(priority=3)


@pytest.mark.parametrize(
    "options", [{"priority": 101}, {"priority": -1}, {"priority": 1.0}, {"duration_s": -1}, {"cost_ms": float("nan")}]
)
def test_a_retention_out_of_range_is_named(options):
    with pytest.raises(ConfigError, match=r"Retention\."):
        Retention(**options)
