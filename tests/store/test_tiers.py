"""Budgets, promotion and demotion through the accelerator's memory (the host's stands in), the host's, and the disk."""

import threading

import pytest
import torch
from kvrag.store.events import Events

from kvrag.config import StoreConfig
from kvrag.errors import ConfigError, StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import (
    DiskStore,
    MemoryStore,
    Retention,
    TieredStore,
    on_accelerator,
    open_store,
    sizes,
    tiered_reads,
    usage,
)
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(8)]
KEYS = [chunk_key(identity) for identity in IDENTITIES]
SIZE = make_kv(IDENTITIES[0]).num_bytes


def put(store, number, priority=None, **options):
    retention = None if priority is None else Retention(priority)
    return store.put(IDENTITIES[number], make_kv(IDENTITIES[number]), text=None, retention=retention, **options)


def held(memory):
    return [number for number, key in enumerate(KEYS) if memory.contains(key)]


class Tiers:
    """Three tiers, with room for ``gpu`` and ``host`` chunks, and what they report."""

    def __init__(self, root, gpu=2, host=4, **options):
        self.log = []
        events = Events(self.log.append)
        self.gpu = MemoryStore(gpu * SIZE, name="gpu", events=events)
        self.host = MemoryStore(host * SIZE, events=events)
        self.disk = DiskStore(root, StoreConfig(on_event=self.log.append))
        self.below = TieredStore(self.host, self.disk, **options)
        self.store = TieredStore(self.gpu, self.below, keeps_puts=False)

    def events(self, number):
        return [(e.medium, e.type, e.reason) for e in self.log if KEYS[number] in e.block_hashes]


@pytest.fixture
def tiers(root):
    made = []

    def make(**options):
        made.append(Tiers(root, **options))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


def test_a_hit_promotes_to_every_tier_above(tiers):
    one = tiers()
    put(one.store, 0)
    one.host.delete(KEYS[:1])
    assert (held(one.gpu), held(one.host)) == ([], [])
    assert same_bits(one.store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert (held(one.gpu), held(one.host)) == ([0], [0])
    assert one.events(0)[-2:] == [("host", "BlockStored", "promoted"), ("gpu", "BlockStored", "promoted")]
    one.store.get(IDENTITIES[0])
    assert (one.store.stats()["gpu"].hits, one.store.stats()["disk"].hits) == (1, 1)


def test_what_is_pushed_out_goes_one_tier_down_and_no_further_than_where_it_is(tiers):
    one = tiers(gpu=1, host=4)
    for number in range(2):
        put(one.store, number)
    one.store.get(IDENTITIES[0])
    one.host.delete(KEYS[:1])
    one.store.get(IDENTITIES[1])
    assert (held(one.gpu), held(one.host)) == ([1], [0, 1])
    assert one.events(0)[-2:] == [("gpu", "BlockRemoved", "evicted"), ("host", "BlockStored", "demoted")]
    assert same_bits(one.host.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    before = len(one.log)
    one.store.get(IDENTITIES[0])  # pushes 1 out, which the host has
    assert [e.reason for e in one.log[before:]] == ["promoted", "evicted"]


def test_what_is_worth_too_little_is_not_demoted(tiers):
    one = tiers(gpu=1, host=4, min_priority=40)
    put(one.store, 0)
    put(one.store, 1, priority=40)
    put(one.store, 2, priority=41)
    for number, kept in ((0, False), (1, True)):
        one.store.get(IDENTITIES[number])
        one.host.delete([KEYS[number]])
        one.store.get(IDENTITIES[2 if number else 1])
        assert one.host.contains(KEYS[number]) == kept
    assert same_bits(one.store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))


def test_the_lowest_priority_leaves_memory_first_and_then_the_least_recently_used(root):
    store = MemoryStore(3 * SIZE)
    for number, priority in ((0, 80), (1, 20), (2, 80)):
        put(store, number, priority)
    put(store, 3, 80)
    assert held(store) == [0, 2, 3]
    put(store, 4, 80)
    assert held(store) == [2, 3, 4]
    with pytest.raises(StoreError, match="nothing more may leave"):
        put(store, 5, 20)
    assert held(store) == [2, 3, 4]


def test_a_priority_survives_promotion(tiers):
    one = tiers(gpu=4, host=2)
    put(one.store, 0, priority=90)
    one.host.delete(KEYS[:1])
    one.store.get(IDENTITIES[0])
    for number in range(1, 5):
        put(one.store, number)
    assert 0 in held(one.host)


def test_a_priority_that_is_over_is_the_default_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kvrag.store.usage.since_boot", lambda: now[0])
    store = MemoryStore(2 * SIZE)
    identity = IDENTITIES[0]
    store.put(identity, make_kv(identity), text=None, retention=Retention(90, duration_s=10))
    put(store, 1, 50)
    now[0] = 11.0
    put(store, 2, 50)
    assert held(store) == [1, 2]


def test_what_a_request_pins_stays(tiers):
    one = tiers(gpu=2, host=2)
    for number in range(4):
        put(one.store, number)
    with one.store.pinned(KEYS[:2]):
        for number in (0, 1, 2, 3):
            one.store.get(IDENTITIES[number])
        assert held(one.gpu) == held(one.host) == [0, 1]
    one.store.get(IDENTITIES[3])
    assert 3 in held(one.gpu)


def test_a_request_of_more_than_the_tier_holds_does_not_push_out_its_own(tiers):
    one = tiers(gpu=2, host=8)
    for number in range(4):
        put(one.store, number)
    got = one.store.get_many(IDENTITIES[:4], timeout_s=30)
    assert all(same_bits(kv, make_kv(identity)) for kv, identity in zip(got, IDENTITIES[:4], strict=True))
    assert len(held(one.gpu)) == 2
    assert ("gpu", "evicted") not in [(e.medium, e.reason) for e in one.log]


def test_the_budgets_hold_whatever_is_read(tiers):
    one = tiers(gpu=2, host=3)
    for step in range(40):
        number = step * 5 % 8
        put(one.store, number, priority=(20, 35, 80)[step % 3])
        read = IDENTITIES[step * 3 % 8]
        assert same_bits(one.store.get(read), make_kv(read)) or not one.store.contains(chunk_key(read))
        stats = one.store.stats()
        assert stats["gpu"].num_bytes <= 2 * SIZE
        assert stats["host"].num_bytes <= 3 * SIZE
        assert stats["gpu"].num_bytes == SIZE * stats["gpu"].chunks == SIZE * len(held(one.gpu))


def test_erasures_reach_every_tier(tiers):
    one = tiers()
    identity = IDENTITIES[0]
    for wipe in (lambda: one.store.delete(KEYS[:1]), lambda: one.store.forget(NAMESPACE, "doc")):
        one.store.put(identity, make_kv(identity), text=make_text("a"), doc_id="doc")
        one.store.get(identity)
        assert wipe() == 1
        assert (held(one.gpu), held(one.host), one.store.get(identity)) == ([], [], None)


def test_what_is_erased_while_it_is_demoted_does_not_come_back(tiers):
    one = tiers(gpu=1, host=4)
    put(one.store, 0)
    kv = one.store.get(IDENTITIES[0])
    one.store.delete(KEYS[:1])
    one.below.demote(IDENTITIES[0], kv, Retention())  # as by a thread that had taken it out before
    assert held(one.host) == []


def test_a_duration_goes_along_to_every_tier(tiers, monkeypatch):
    """A pin that is over must not hold memory: what was promoted or demoted forgets it when the disk does."""
    one = tiers(gpu=1, host=1)
    one.disk.put(IDENTITIES[0], make_kv(IDENTITIES[0]), text=None, retention=Retention(99, 60, cost_ms=7.0))
    one.store.get(IDENTITIES[0])
    assert [round(one.gpu.retention(KEYS[0]).duration_s), one.host.retention(KEYS[0]).cost_ms] == [60, 7.0]
    one.host.delete(KEYS[:1])
    one.gpu.keep(IDENTITIES[7], make_kv(IDENTITIES[7]), retention=Retention(99))  # pushes the first one down
    assert (held(one.gpu), held(one.host), one.events(0)[-1][2]) == ([7], [0], "demoted")
    put(one.store, 1)
    assert held(one.host) == [0]
    now = usage.since_boot()
    monkeypatch.setattr(usage, "since_boot", lambda: now + 61)
    assert one.host.retention(KEYS[0]) == Retention(cost_ms=7.0)
    put(one.store, 3)
    assert held(one.host) == [3], "newcomers find room again"


def test_a_priority_in_memory_alone_is_told_and_promoted(tiers):
    one = tiers(lower_min_priority=30)
    put(one.store, 0, priority=20)
    one.store.get(IDENTITIES[0])
    assert held(one.gpu) == [0]
    told = one.store.retention(KEYS[0]), one.gpu.retention(KEYS[0]), one.store.priority(KEYS[0])
    assert told == (Retention(20), Retention(20), 20)


def test_worth_is_said_anew_in_every_tier(tiers):
    one = tiers(lower_min_priority=30)
    put(one.store, 0, priority=90)
    put(one.store, 1, priority=20)  # in the host's memory alone
    for number in (0, 1):
        one.store.get(IDENTITIES[number])
    assert (held(one.gpu), held(one.host), one.disk.files()) == ([0, 1], [0, 1], {KEYS[0]})
    assert one.store.retain(KEYS[:3], Retention(50)) == 2
    for tier in (one.gpu, one.host, one.store):
        assert [tier.retention(key) for key in KEYS[:3]] == [Retention(50), Retention(50), None]
    assert one.disk.files() == {KEYS[0]}, "where a chunk lies stays as it is"


def test_a_read_that_began_before_does_not_bring_the_worth_of_then(tiers, monkeypatch):
    one = tiers()
    put(one.store, 0, priority=99)
    one.host.delete(KEYS[:1])
    real = one.below.retention

    def slow(key):
        found = real(key)
        one.store.retain([key], Retention(1))
        return found

    monkeypatch.setattr(one.below, "retention", slow)
    one.store.get(IDENTITIES[0])
    monkeypatch.undo()
    assert (held(one.gpu), held(one.host)) == ([], [])
    one.store.get(IDENTITIES[0])
    assert one.gpu.retention(KEYS[0]) == one.host.retention(KEYS[0]) == Retention(1)


def test_low_priorities_stay_off_the_disk_until_they_are_pushed_out(root):
    disk = DiskStore(root)
    host = MemoryStore(2 * SIZE)
    store = TieredStore(host, disk, lower_min_priority=30)
    identity, text = IDENTITIES[0], make_text("a")
    assert store.put(identity, make_kv(identity), text=text, doc_id="one", retention=Retention(29)) == SIZE
    assert store.put(identity, make_kv(identity), text=text, doc_id="two", retention=Retention(29)) == 0
    put(store, 1, priority=30)
    assert disk.files() == {KEYS[1]}
    assert store.contains(KEYS[0])
    assert store.index.texts(NAMESPACE, 0)[0] == [text]
    assert same_bits(store.get(identity), make_kv(identity))
    assert store.forget(NAMESPACE, "one") == 0
    assert store.contains(KEYS[0])
    put(store, 2)
    assert not store.contains(KEYS[0])
    assert store.index.get(KEYS[0]) is None
    assert store.get(identity) is None
    with pytest.raises(StoreError, match="too low a priority"):  # what is there is worth more
        put(store, 0, priority=0)
    store.close()


def test_a_low_priority_is_erased_with_its_document(root):
    store = TieredStore(MemoryStore(2 * SIZE), DiskStore(root), lower_min_priority=30)
    identity = IDENTITIES[0]
    store.put(identity, make_kv(identity), text=make_text("a"), doc_id="one", retention=Retention(1))
    assert store.forget(NAMESPACE, "one") == 1
    assert store.get(identity) is None
    assert store.index.keys() == []
    full = TieredStore(MemoryStore(SIZE - 1), DiskStore(root), lower_min_priority=30)
    with pytest.raises(StoreError, match="disk_min_priority"):
        put(full, 0, priority=1)
    assert full.index.keys() == []
    store.close()
    full.close()


def test_an_accelerator_without_memory_gives_its_tier_up_and_answers(tiers, monkeypatch):
    one = tiers()
    for number in range(2):
        put(one.store, number)
    one.store.get(IDENTITIES[0])

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tiered_reads, "_is_on", lambda kv, device: False)
    monkeypatch.setattr(tiered_reads, "copy_kv", full)
    assert same_bits(one.store.get(IDENTITIES[1]), make_kv(IDENTITIES[1]))
    assert held(one.gpu) == []
    assert one.store.stats()["gpu"].num_bytes == 0


def test_tensors_are_where_their_tier_is(root):
    below = TieredStore(MemoryStore(2**20), DiskStore(root))
    store = on_accelerator(below, torch.device("meta"), StoreConfig(gpu_bytes=2**20, gpu_fraction=1.0))
    put(store, 0)
    assert store.get(IDENTITIES[0]).layers[0].keys.device.type == "meta"
    assert store.get_many(IDENTITIES[:1], timeout_s=30)[0].layers[1].values.device.type == "meta"
    assert same_bits(below.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert list(store.stats()) == ["gpu", "host", "disk"]
    store.close()


def test_there_is_no_tier_for_a_model_on_the_cpu_nor_without_a_budget(root):
    below = MemoryStore(2**20)
    assert on_accelerator(below, torch.device("cpu"), StoreConfig(gpu_bytes=2**30)) is below
    for config in (StoreConfig(), StoreConfig(gpu_bytes=0), StoreConfig(gpu_bytes=2**20, gpu_fraction=0)):
        assert on_accelerator(below, torch.device("meta"), config) is below


@pytest.mark.parametrize("kind", ["mps", "xpu", "meta"])
def test_a_device_that_does_not_say_how_much_memory_it_has_takes_bytes(kind, caplog):
    device = torch.device(kind)
    store = on_accelerator(MemoryStore(2**20), device, StoreConfig(gpu_bytes=2**20))
    assert isinstance(store, TieredStore)
    assert store._memory.max_bytes == 2**20
    assert store._memory.device == device
    assert not caplog.records
    below = MemoryStore(2**20)
    for fraction in (0.1, 1.0):
        assert on_accelerator(below, device, StoreConfig(gpu_bytes=None, gpu_fraction=fraction)) is below
        assert f"how much memory {kind} has; set StoreConfig.gpu_bytes" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("limit", "fraction", "expected"), [(None, 1, None), (50, 1, 50), (50, 0.2, 20), (10, 0.2, 10), (None, 0.5, 50)]
)
def test_the_lesser_budget_wins(limit, fraction, expected):
    assert sizes.lesser(limit, fraction, lambda: 100) == expected


def test_a_total_that_nobody_knows_limits_nothing():
    def unknown():
        raise OSError("no such file system")

    assert sizes.lesser(7, 0.5, unknown) == 7


def test_fractions_are_of_what_there_is(root, monkeypatch, tmp_path):
    assert 2**20 < sizes.host_memory() < 2**50
    limit = tmp_path / "memory.max"
    limit.write_text("4096\n")
    monkeypatch.setattr(sizes, "CGROUP_LIMITS", (str(tmp_path / "absent"), str(limit)))
    assert sizes.host_memory() == 4096
    assert open_store(None, StoreConfig(ram_fraction=0.5)).max_bytes == 2048
    assert open_store(None, StoreConfig(ram_bytes=100)).max_bytes == 100
    assert sizes.file_system(root / "not" / "yet") == sizes.file_system(tmp_path)
    monkeypatch.setattr("kvrag.store.disk_reads.file_system", lambda path: 2 * SIZE)
    store = open_store(root, StoreConfig(disk_fraction=0.9, min_free_bytes=0))
    with pytest.raises(StoreError, match="don't fit"):
        store.put(make_identity(9, tokens=9), make_kv(make_identity(9, tokens=9)), text=None)
    store.close()


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_bytes": -1},
        {"gpu_fraction": 1.1},
        {"ram_fraction": -0.1},
        {"disk_fraction": "half"},
        {"host_min_priority": 101},
        {"disk_min_priority": 1.5},
        {"write_policy": "around"},
        {"prefetch": "eager"},
    ],
)
def test_an_impossible_option_is_named(options):
    with pytest.raises(ConfigError, match=f"StoreConfig.{next(iter(options))}"):
        StoreConfig(**options)


def test_threads_read_and_erase_at_once_and_the_accounts_stay_right(tiers):
    one = tiers(gpu=2, host=3)
    wrong = []

    def work(offset):
        try:
            for step in range(30):
                number = (step + offset) % 8
                put(one.store, number)
                kv = one.store.get_many([IDENTITIES[number]], timeout_s=30)[0]
                if kv is not None and not same_bits(kv, make_kv(IDENTITIES[number])):
                    wrong.append(number)
                if step % 7 == 0:
                    one.store.delete([KEYS[number]])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for name, memory in (("gpu", one.gpu), ("host", one.host)):
        assert one.store.stats()[name].num_bytes == SIZE * len(held(memory))
    one.store.delete(KEYS)
    assert [one.store.get(identity) for identity in IDENTITIES] == [None] * 8
    assert (held(one.gpu), held(one.host)) == ([], [])
