"""The host's memory for KV: used again, never more of it than allowed, and page-locked where there is a CUDA device."""

import gc
import os

import pytest
import torch
from fake_driver import Driver
from kit import mapped

from kvrag import StoreConfig
from kvrag.kv.buffers import copy_stream
from kvrag.model.rows import KVBuffer, LayerShape
from kvrag.store import MemoryTier, open_store
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.types import ChunkKV

pytestmark = pytest.mark.usefixtures("few_objects")
KEY = b"k" * 32
"""Of an encrypted store."""
LONG = make_identity(50, tokens=9000)


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


def test_pages_are_locked_once_and_again(monkeypatch, buffers, driver, caplog):
    """Idle buffers stay locked; those that leave are unlocked, and their addresses are free for others."""
    monkeypatch.setattr("kvrag.kv.buffers.IDLE_BYTES", 250_000)
    for _ in range(5):
        views = [buffers.take(100_000) for _ in range(4)]
        assert len(driver.locked) == 4
        assert all(driver.holds(torch.frombuffer(view, dtype=torch.uint8)) for view in views)
        del views
        gc.collect()
        assert len(driver.locked) == 2
    assert not driver.refused
    assert not caplog.records


def test_pages_that_stay_locked_stay_mapped(monkeypatch, buffers, driver):
    """Else the next memory lies where they lay, and the driver takes it for locked: cudaErrorAlreadyMapped."""
    monkeypatch.setattr("kvrag.kv.buffers.IDLE_BYTES", 0)
    stuck = list[object]()
    monkeypatch.setattr("kvrag.kv.buffers._stuck", stuck)
    driver.keeps_locks = True
    for number in range(1, 4):
        view = buffers.take(100_000)
        assert driver.holds(torch.frombuffer(view, dtype=torch.uint8))
        del view
        gc.collect()
        assert driver.refused == [900] * number
        assert not driver.error, "the refusal fails no later launch"
    assert len(stuck) == 3


@pytest.mark.parametrize(("mapped", "is_locked"), [(1, True), (2, True), (3, False)])
def test_other_addresses_are_tried_where_something_is_mapped(buffers, driver, mapped, is_locked):
    driver.mapped = mapped
    view = buffers.take(100_000)
    view[:] = bytes(100_000)
    assert driver.holds(torch.frombuffer(view, dtype=torch.uint8)) == is_locked
    assert driver.refused == [208] * mapped
    assert not driver.error
    assert len(driver.locked) == is_locked


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_leaves_locked_pages_to_its_parent(monkeypatch, driver):
    """It has no driver, and shares the pages: what it writes there would be in its parent's KV."""
    from kvrag.kv.buffers import BUFFERS

    monkeypatch.setattr("kvrag.kv.buffers.IDLE_BYTES", 2**30)
    kept, gone = BUFFERS.take(5_000_000), BUFFERS.take(5_000_000)
    del gone
    gc.collect()
    locked = dict(driver.locked)
    kept[:] = gone = bytes(range(250)) * 20_000
    child = os.fork()
    if not child:  # pragma: no cover - another process
        status = 1
        try:
            del kept
            gc.collect()
            own = [BUFFERS.take(5_000_000) for _ in range(3)]
            for view in own:
                view[:] = b"x" * 5_000_000
            status = 2 * (driver.locked != locked) + 4 * bool(driver.refused)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    again = BUFFERS.take(5_000_000)
    assert bytes(kept) == gone
    assert driver.locked == locked
    assert b"x" not in bytes(again[:1000])
    del again, kept
    gc.collect()
    BUFFERS._idle.clear()
    gc.collect()
    assert not driver.locked


def test_two_engines_share_locked_pages(tmp_path, buffers, driver):
    """Of two stores, each chunk's memory is locked once, and stays so while either store is open."""
    config = StoreConfig(min_free_bytes=0)
    stores = [open_store(tmp_path / name, config) for name in ("one", "two")]
    for store in stores:
        store.put(LONG, make_kv(LONG), text=None)
    found = [store.get(LONG) for store in stores]
    stores.pop().close()
    gc.collect()
    again = open_store(tmp_path / "two", config)
    assert all(all_locked(driver, kv) for kv in [*found, again.get(LONG)])
    assert not driver.refused
    for store in (*stores, again):
        store.close()
    del stores, store, again, found
    gc.collect()
    idle = sum(size * len(owners) for size, owners in buffers._idle.items())
    assert sum(driver.locked.values()) == idle


# -- on a device, by `make gpu-check` -----------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@on_cuda
def test_cuda_copies_late_what_was_stored(tmp_path):
    """A second behind; each chunk's memory would be the next one's long before."""
    device = torch.device("cuda", 0)
    chunks = [make_identity(number, tokens=9000) for number in range(50, 56)]
    store = open_store(tmp_path / "kv", StoreConfig(ram_bytes=0, min_free_bytes=0))
    for chunk in chunks:
        store.put(chunk, make_kv(chunk), text=None)
    store.memory.put_above(MemoryTier(2**30, name="gpu", device=device))
    for stream in (torch.cuda.current_stream(device), copy_stream(device)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2 * 10**9)
    found = [store.get(chunk) for chunk in chunks]
    for kv, chunk in zip(found, chunks, strict=True):
        assert kv is not None
        assert same_bits(mapped(kv, torch.Tensor.cpu), make_kv(chunk))
    store.close()


@pytest.mark.gpu
@on_cuda
def test_cuda_locks_pages_again_and_again(monkeypatch, buffers, caplog):
    monkeypatch.setattr("kvrag.kv.buffers.IDLE_BYTES", 0)
    for _ in range(10):
        views = [buffers.take(30_000_000) for _ in range(3)]
        assert all(torch.frombuffer(view, dtype=torch.uint8).is_pinned() for view in views)
        child = os.fork()
        if not child:
            status = 1
            try:
                del views
                buffers.take(30_000_000)[:] = bytes(30_000_000)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del views
        gc.collect()
    assert not caplog.records
    assert torch.ones(1, device="cuda").item() == 1
