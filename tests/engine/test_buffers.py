"""The host's memory for KV: used again, never more of it than allowed, and page-locked where there is a CUDA device."""

import ctypes
import gc

import pytest
import torch

from kvrag import StoreConfig
from kvrag.kv.buffers import Buffers
from kvrag.model.rows import KVBuffer, LayerShape
from kvrag.store import open_store
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.types import ChunkKV

KEY = b"k" * 32
"""Of an encrypted store."""
LONG = make_identity(50, tokens=9000)


@pytest.fixture
def buffers(monkeypatch):
    """Buffers that nothing else has used."""
    fresh = Buffers()
    for place in ("kvrag.kv.buffers", "kvrag.store.blobs", "kvrag.kv.crypto"):
        monkeypatch.setattr(f"{place}.BUFFERS", fresh)
    return fresh


class Driver:
    """Stands for the CUDA runtime: locks pages, up to a limit, and refuses to lock what is locked.

    The next launch of a kernel raises the error of a refusal.
    """

    def __init__(self, limit=2**40):
        self.locked, self.limit, self.error = {}, limit, 0

    def cudaHostRegister(self, address, num_bytes, flags):
        overlaps = any(
            start < address + num_bytes and address < start + size
            for start, size in self.locked.items()
        )
        if overlaps or sum(self.locked.values()) + num_bytes > self.limit:
            self.error = 2
            return self.error
        assert address % 4096 == 0
        assert flags == 1
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        ctypes.string_at(address, self.locked.pop(address))  # a crash, if it were unmapped by now
        return 0

    def ones(self, size, device=None):
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return torch.zeros(size).add_(1)

    def holds(self, x: torch.Tensor) -> bool:
        start = x.data_ptr()
        return any(a <= start and start + x.nbytes <= a + size for a, size in self.locked.items())


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "ones", driver.ones)
    return driver


def test_memory_that_nobody_has_written_is_poisoned_in_tests(buffers):
    """By a fixture for all tests; else those that read it pass or fail by what ran before."""
    shape = LayerShape(num_heads=1, key_dim=4, value_dim=4)
    made = [torch.empty(5), torch.ones(2, 2).new_empty(3), torch.empty_like(torch.ones(7))]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made += KVBuffer.empty([shape], 9, dtype=dtype, device=torch.device("cpu")).layers[0]
    assert all(x.isnan().all() for x in made)
    assert (torch.empty(5, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    for size in (100, 100_000):
        for _ in range(2):
            view = buffers.take(size)
            assert bytes(view) == b"\xff" * size
            view[:] = bytes(size)
            held = torch.frombuffer(view, dtype=torch.uint8)
            del view, held
            gc.collect()
    assert all(bool((x == 0xFF).all()) for idle in buffers._idle.values() for x in idle)


def test_a_buffer_is_used_again_when_its_last_tensor_is_gone(tmp_path, buffers):
    store = open_store(tmp_path / "kv", StoreConfig(ram_bytes=0, min_free_bytes=0))
    store.put(LONG, make_kv(LONG), text=None)
    first = store.get(LONG).layers[0].keys
    second = store.get(LONG)
    assert first.untyped_storage().data_ptr() != second.layers[0].keys.untyped_storage().data_ptr()
    place, view = first.untyped_storage().data_ptr(), first[:, 1:2]
    del first
    gc.collect()
    assert not any(buffers._idle.values()), "a view of it is alive"
    del view
    gc.collect()
    assert store.get(LONG).layers[0].keys.untyped_storage().data_ptr() == place
    assert same_bits(second, make_kv(LONG))
    store.close()


def test_buffers_keep_no_more_than_they_may(monkeypatch, buffers):
    monkeypatch.setattr("kvrag.kv.buffers.IDLE_BYTES", 300_000)
    taken = [buffers.take(100_000) for _ in range(6)]
    assert all(len(view) == 100_000 and not view.readonly for view in taken)
    del taken
    gc.collect()
    idle = sum(len(owners) * size for size, owners in buffers._idle.items())
    assert 0 < idle <= 300_000
    assert torch.frombuffer(buffers.take(10), dtype=torch.uint8).numel() == 10
    with pytest.raises(MemoryError, match="allocate memory"):
        buffers.take(2**62)


def all_locked(driver: Driver, kv: ChunkKV | None) -> bool:
    return kv is not None and all(driver.holds(x) for layer in kv.layers for x in layer.tensors)


@pytest.mark.parametrize("options", [{}, {"encryption_key": lambda: KEY}, {"ram_bytes": 0}])
@pytest.mark.usefixtures("buffers")
def test_every_byte_of_the_hosts_tier_is_page_locked(tmp_path, driver, options):
    """KV that was put, that was read, and that was decrypted is all locked."""
    config = StoreConfig(min_free_bytes=0, **options)
    store = open_store(tmp_path / "kv", config)
    store.put(LONG, make_kv(LONG), text=None)
    assert all_locked(driver, store.get(LONG))
    store.close()
    store = open_store(tmp_path / "kv", config)
    found = store.get(LONG)
    assert all_locked(driver, found)
    assert same_bits(found, make_kv(LONG))
    locked = sum(driver.locked.values())
    assert locked < 2.5 * 1.07 * make_kv(LONG).num_bytes, "two copies at most, and little waste"
    store.close()


@pytest.mark.usefixtures("driver")
def test_locked_pages_come_back(monkeypatch, buffers, driver):
    monkeypatch.setattr("kvrag.kv.buffers.IDLE_BYTES", 0)
    view = buffers.take(100_000)
    assert len(driver.locked) == 1
    assert next(iter(driver.locked.values())) < 1.07 * 100_000
    del view
    gc.collect()
    assert driver.locked == {}


def test_where_no_more_can_be_locked_memory_is_pageable(buffers, driver):
    driver.limit = 150_000
    taken = [buffers.take(100_000) for _ in range(2)]
    assert len(driver.locked) == 1
    for view in taken:
        view[:] = bytes(100_000)
    assert not driver.error, "the refusal fails no later launch"
