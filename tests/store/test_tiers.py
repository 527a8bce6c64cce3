"""Memory above the disk: hits are kept in every tier above, budgets hold, and what is worth least leaves memory first."""

import time
from dataclasses import replace

import pytest
import torch
from stores import CHUNKS, KEYS, KVS, PATIENT_S, SIZE, fill, held, put

from kvrag.store import MemoryTier, Retention, memory, on_accelerator
from kvrag.store.eviction import Usage
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.types import ChunkKV, LayerKV


@pytest.fixture
def tiers(handle):
    """Opens three tiers, with room for so many chunks, and gives the store, its memory tiers and its events."""

    def make(gpu=2, host=4, **options):
        log = []
        store = handle(gpu=gpu * SIZE, ram=host * SIZE, on_event=log.append, **options)
        return store, *store.tiers, log

    return make


def of(log, number):
    """Events of one chunk."""
    return [(e.medium, e.type, e.reason) for e in log if KEYS[number] in e.block_hashes]


def keep(tier, number, *, priority=35, cost_ms=None, tokens=3, hits=0.0):
    """Give a tier a chunk, as a read does."""
    identity = make_identity(number, tokens=tokens)
    usage = Usage(hits=hits).retained(Retention(priority, None, cost_ms))
    tier.keep(identity, make_kv(identity), usage, epoch=tier.epoch)


def test_a_hit_is_kept_in_every_tier_above(tiers):
    store, gpu, host, log = tiers()
    fill(store, 0)
    assert (held(gpu), held(host)) == ([], [0]), "what is put is kept on the host at once"
    host.release()
    assert same_bits(store.get(CHUNKS[0]), KVS[0])
    assert (held(gpu), held(host)) == ([0], [0])
    assert of(log, 0)[-2:] == [
        ("host", "BlockStored", "promoted"),
        ("gpu", "BlockStored", "promoted"),
    ]
    store.get(CHUNKS[0])
    assert (store.stats()["gpu"].hits, store.stats()["disk"].hits) == (1, 1)
    assert list(store.stats()) == ["gpu", "host", "disk"]


def test_what_is_pushed_out_is_a_copy_and_goes_nowhere(tiers):
    store, gpu, host, log = tiers(gpu=1, host=4)
    fill(store, 0, 1)
    store.get(CHUNKS[0])
    host.release()
    log.clear()
    store.get(CHUNKS[1])
    assert (held(gpu), held(host)) == ([1], [1])
    assert of(log, 0) == [("gpu", "BlockRemoved", "evicted")]
    assert same_bits(store.get(CHUNKS[0]), KVS[0])


def test_a_priority_a_duration_and_a_cost_go_along_to_every_tier(tiers, monkeypatch):
    store, gpu, host, _ = tiers(gpu=1, host=2)
    put(store, 0, retention=Retention(99, 60, cost_ms=7.0))
    host.release()
    store.get(CHUNKS[0])
    for number in (1, 2, 3):
        put(store, number)
        store.get(CHUNKS[number])
    assert (held(gpu), 0 in held(host)) == ([0], True)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    for number in (4, 5, 6):
        put(store, number)
        store.get(CHUNKS[number])
    assert (0 in held(gpu), 0 in held(host)) == (False, False), (
        "a priority that is over must not hold memory"
    )


def test_retention_is_updated_in_every_tier(tiers):
    store, gpu, host, _ = tiers(gpu=2, host=2)
    for number in (0, 1):
        put(store, number, retention=Retention(90))
        store.get(CHUNKS[number])
    assert store.retain(KEYS[:1], Retention(10)) == 1
    put(store, 2)
    store.get(CHUNKS[2])
    assert (held(gpu), held(host)) == ([1, 2], [1, 2])


def test_a_read_that_began_before_does_not_bring_the_retention_of_then(tiers, monkeypatch):
    store, gpu, host, _ = tiers()
    put(store, 0, retention=Retention(99))
    host.release()
    real = store.catalog.stored_row

    def slow(key):
        found = real(key)
        store.retain([key], Retention(1))
        return found

    monkeypatch.setattr(store.catalog, "stored_row", slow)
    assert same_bits(store.get(CHUNKS[0]), KVS[0])
    assert (held(gpu), held(host)) == ([], [])


def test_the_budgets_hold_whatever_is_read(tiers):
    store, gpu, host, _ = tiers(gpu=2, host=3)
    for step in range(40):
        put(store, step * 5 % 8, retention=Retention((20, 35, 80)[step % 3]))
        kv = store.get(CHUNKS[step * 3 % 8])
        assert kv is None or same_bits(kv, KVS[step * 3 % 8])
        for tier, most in ((gpu, 2), (host, 3)):
            assert (
                tier.stats().num_bytes
                == SIZE * tier.stats().chunks
                == SIZE * len(held(tier))
                <= most * SIZE
            )


def test_the_uppermost_tier_is_given_up_for_its_memory(tiers):
    store, gpu, host, log = tiers()
    fill(store, 0, 1)
    store.get_many(CHUNKS[:2], timeout_s=PATIENT_S)
    assert store.release() == 2 * SIZE
    assert (held(gpu), held(host)) == ([], [0, 1])
    assert of(log, 0)[-1] == ("gpu", "BlockRemoved", "evicted")
    assert same_bits(store.get(CHUNKS[0]), KVS[0])


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no room")]
)
@pytest.mark.parametrize("where", ["read", "put"])
def test_a_tier_without_memory_costs_no_answer(tiers, monkeypatch, error, where):
    store, gpu, *_ = tiers()

    def full(*args, **options):
        raise error

    if where == "read":
        fill(store, 0)
        gpu.device = torch.device("meta")
    monkeypatch.setattr(memory, "own_kv", full)
    assert where == "read" or put(store, 0) == SIZE
    assert same_bits(store.get(CHUNKS[0]), KVS[0])
    assert held(gpu) == ([0] if where == "put" else [])


def test_tensors_are_where_their_tier_is(opened, root):
    below, store = opened(), fill(opened(), 0)
    on_accelerator(store, torch.device("meta"), store_config(store))
    assert store.get(CHUNKS[0]).layers[0].keys.device.type == "meta"
    assert store.get_many(CHUNKS[:1], timeout_s=PATIENT_S)[0].layers[1].values.device.type == "meta"
    assert same_bits(below.get(CHUNKS[0]), KVS[0])
    assert list(store.stats()) == ["gpu", "host", "disk"]


def store_config(store, **options):
    """Config with some memory of an accelerator."""
    return replace(store.config, **{"gpu_bytes": 2**20, "gpu_fraction": 1.0, **options})


def test_there_is_no_tier_for_a_model_on_the_cpu_nor_without_a_budget(opened):
    store = opened()
    on_accelerator(store, torch.device("cpu"), store_config(store))
    for options in ({"gpu_bytes": 0}, {"gpu_fraction": 0}):
        on_accelerator(store, torch.device("meta"), store_config(store, **options))
    assert len(store.tiers) == 1


@pytest.mark.parametrize("kind", ["mps", "xpu", "meta"])
def test_a_device_that_does_not_say_how_much_memory_it_has_takes_bytes(opened, kind, caplog):
    store, device = opened(), torch.device(kind)
    for fraction in (0.1, 1.0):
        on_accelerator(store, device, store_config(store, gpu_bytes=None, gpu_fraction=fraction))
        assert len(store.tiers) == 1
        assert f"no memory tier on {kind}" in caplog.messages[-1]
    caplog.clear()
    on_accelerator(store, device, store_config(store))
    assert (store.tiers[0].max_bytes, store.tiers[0].device) == (2**20, device)
    assert not caplog.records


def test_stores_of_one_directory_share_their_tiers_and_their_catalog(opened, tmp_path):
    """However many engines there are: one memory tier, one catalog, released with the last of them."""
    one, two, elsewhere = fill(opened(), 0), opened(), opened(tmp_path / "other")
    (host,) = one.tiers
    assert two.tiers == (host,) != elsewhere.tiers
    assert one.catalog is two.catalog
    for store in (one, elsewhere, third := opened()):
        on_accelerator(store, torch.device("meta"), store_config(store))
    assert one.tiers == third.tiers != elsewhere.tiers
    assert two.tiers == (host,), "a store without an accelerator has the host's memory alone"
    one.close()
    assert one.tiers == ()
    assert same_bits(two.get(CHUNKS[0]), KVS[0])
    two.close()
    assert opened().tiers == (host,), "the third one is open"
    for store in (third, opened()):
        store.close()
    assert opened(read_only=True).tiers != (host,)


# -- what leaves memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comes", "stays"),
    [
        ([{"cost_ms": 100.0}, {"cost_ms": 10.0}, {"cost_ms": 50.0}], [0, 2]),
        ([{"hits": 3.0}, {}, {}], [0, 2]),
        ([{"cost_ms": 10.0, "hits": 2.0}, {"cost_ms": 35.0}, {"cost_ms": 99.0}], [1, 2]),
        (
            [
                {"priority": 60, "cost_ms": 1.0},
                {"priority": 50, "cost_ms": 1e3, "hits": 5.0},
                {"priority": 50},
            ],
            [0, 2],
        ),
        ([{"priority": 60}, {"priority": 60}, {"priority": 50, "cost_ms": 1e9}], [0, 1]),
        ([{"cost_ms": 2.0}, {}, {"cost_ms": 20.0}], [1, 2]),
        ([{}, {}, {}], [1, 2]),
    ],
    ids=[
        "dear",
        "hit often",
        "hits times cost",
        "priority",
        "higher priorities",
        "average for unknown",
        "recent",
    ],
)
def test_what_is_worth_least_leaves(comes, stays):
    tier = MemoryTier(2 * SIZE)
    for number, options in enumerate(comes):
        keep(tier, number, **options)
    assert held(tier) == stays
    assert tier.stats().num_bytes == 2 * SIZE


def test_what_takes_more_bytes_for_the_same_leaves():
    tier = MemoryTier(4 * SIZE)
    keep(tier, 0, cost_ms=10.0)
    keep(tier, 20, tokens=6, cost_ms=12.0)
    keep(tier, 1, cost_ms=10.0)
    keep(tier, 2, cost_ms=10.0)
    assert held(tier) == [0, 1, 2]
    assert tier.stats().num_bytes == 3 * SIZE


def test_hits_of_long_ago_count_less_and_come_back_with_the_chunk():
    tier = MemoryTier(2 * SIZE)
    keep(tier, 0)
    for _ in range(7):
        tier.get(KEYS[0], CHUNKS[0])
    keep(tier, 0)
    keep(tier, 1)
    keep(tier, 2)
    assert held(tier) == [0, 2]
    tier._now += 30  # 7 hits of then are worth less than one now
    tier.get(KEYS[2], CHUNKS[2])
    keep(tier, 3)
    assert held(tier) == [2, 3]


def test_what_is_asked_for_now_takes_the_place_of_what_was_asked_for_before(handle):
    """Hits that are counted only while a chunk is in memory would keep new ones out for ever."""
    store = handle(ram=2 * SIZE)
    fill(store, *range(4))
    for _ in range(5):
        store.get_many(CHUNKS[:2], timeout_s=PATIENT_S)
    assert held(store.tiers[0]) == [0, 1]
    for _ in range(20):
        for number in (2, 3):
            store.catalog.flush()
            store.get(CHUNKS[number])
    assert held(store.tiers[0]) == [2, 3]


def test_many_chunks_leave_by_few_rankings(monkeypatch):
    tier, rankings, real = MemoryTier(64 * SIZE), [], memory.leaving
    for number in range(64):
        keep(tier, number, cost_ms=1.0 + number)
    monkeypatch.setattr(
        memory, "leaving", lambda *args, **how: rankings.append(args) or real(*args, **how)
    )
    for number in range(100, 112):
        keep(tier, number, cost_ms=1000.0)
    assert len(rankings) == 3, "one for four chunks of sixty-four"
    assert held(tier) == []
    assert tier.stats().chunks == 64


def test_a_chunk_that_finds_no_room_pushes_nothing_out_and_is_given_all_the_same():
    tier = MemoryTier(2 * SIZE)
    keep(tier, 0)
    keep(tier, 1)
    big = make_identity(30, tokens=9)
    kv = tier.keep(big, make_kv(big), Usage(), epoch=tier.epoch)
    assert same_bits(kv, make_kv(big))
    assert held(tier) == [0, 1]
    assert isinstance(tier.get(KEYS[0], CHUNKS[0]), ChunkKV)


def test_a_slice_does_not_keep_the_batch_alive(handle):
    store, wide = handle(), torch.zeros(2, 300, 64)
    store.put(CHUNKS[0], ChunkKV((LayerKV(wide[:, :3], wide[:, 3:6]),)), text=None)
    kv = store.get(CHUNKS[0])
    for tensor in kv.layers[0].tensors:
        assert tensor.untyped_storage().nbytes() == kv.num_bytes
