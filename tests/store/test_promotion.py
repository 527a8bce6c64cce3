"""Chunks on their way to the accelerator's tier: what a copy reads stays as it is until the copy has run, and nobody waits."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, install
from kit import mapped
from torch.overrides import TorchFunctionMode

from kvrag import StoreConfig
from kvrag.kv.buffers import copy_stream, held, let_go
from kvrag.kv.quantise import unpack
from kvrag.store import MemoryTier, open_store
from kvrag.store.eviction import Usage
from kvrag.store.tiers import TieredStore
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.types import ChunkKV, LayerKV

pytestmark = pytest.mark.usefixtures("few_objects")
ONE, TWO, THREE = CHUNKS = [make_identity(number, tokens=900) for number in range(50, 53)]
SIZE = make_kv(ONE).num_bytes


@pytest.fixture
def device(monkeypatch, driver) -> FakeCuda:
    """A device that copies late."""
    made = install(monkeypatch)
    made.late = driver
    return made


@pytest.fixture
def store(tmp_path, device) -> Iterator[TieredStore]:
    """A store of three chunks, whose memory is the device's alone."""
    made = open_store(tmp_path / "kv", StoreConfig(ram_bytes=0, min_free_bytes=0))
    for chunk in CHUNKS:
        made.put(chunk, make_kv(chunk), text=None)
    made.memory.put_above(MemoryTier(2**30, name="gpu", device=CUDA))
    yield made
    made.close()


def is_whole(kv: ChunkKV | None, chunk: object) -> bool:
    assert kv is not None
    assert all(x.is_cuda for layer in kv.layers for x in layer.tensors)
    return same_bits(mapped(kv, lambda x: x.as_subclass(torch.Tensor)), make_kv(chunk))


def test_a_promoted_chunk_is_what_was_stored(store, device):
    """Its bytes came from a buffer that would be the next chunk's before the device has read them."""
    with device:
        found = [store.get(chunk) for chunk in CHUNKS]
        assert device.copies
        device.run()
        again = [store.get(chunk) for chunk in CHUNKS]
    assert not device.spoilt
    for kvs in (found, again):
        assert all(is_whole(kv, chunk) for kv, chunk in zip(kvs, CHUNKS, strict=True))
    assert store.stats()["gpu"].hits == 3


def test_nobody_waits_for_a_promotion_but_its_reader_s_stream(store, device):
    """Not the host, nor the copies for what the device computes."""
    with device:
        store.get(ONE)
        kinds = list(device.counts)
        assert not [kind for kind in kinds if "wait" in kind]
        assert [kind for kind in kinds if kind.startswith("order")] == ["order: main after copies"]
        assert [kind for kind in kinds if kind.startswith("copy")] == ["copy on copies"]
        assert device.counts["kept for main"] == 4
        device.run()


def test_what_is_evicted_before_it_has_come_spoils_nothing(store, device):
    (tier,) = (tier for tier in store.tiers if tier.name == "gpu")
    tier.max_bytes = SIZE
    with device:
        store.get(ONE)
        store.get(TWO)
        tier.release()
        assert not tier.keys()
        kv = store.get(THREE)
        store.close()
        del tier
        gc.collect()
        device.run()
    assert not device.spoilt
    assert is_whole(kv, THREE)


def test_a_promotion_that_fails_half_way_spoils_nothing(device, buffers):
    """Memory of the device is short for the second of two shapes; the first is on its way."""
    with device:
        layers = [*make_kv(ONE).layers, LayerKV(*(torch.zeros(1, 5000, 8) for _ in range(2)))]
        kv = ChunkKV(
            tuple(
                LayerKV(
                    *(
                        torch.frombuffer(view(buffers, x), dtype=x.dtype).view(x.shape)
                        for x in y.tensors
                    )
                )
                for y in layers
            )
        )
        tier = MemoryTier(2**30, name="gpu", device=CUDA)
        device.room = 1
        assert tier.keep(ONE, kv, Usage(), epoch=tier.epoch) is kv
        assert device.copies
        del kv
        taken = [buffers.take(100_000) for _ in range(4)]
        for each in taken:
            each[:] = bytes(100_000)
        device.run()
    assert not device.spoilt
    assert not tier.keys()


def view(buffers, x: torch.Tensor) -> memoryview:
    """The bytes of a tensor in page-locked memory."""
    own = buffers.take(max(x.nbytes, 2**16))[: x.nbytes]
    own[:] = x.numpy().tobytes()
    return own


def test_memory_is_used_again_when_its_copies_have_run(store, device, driver, buffers):
    """By the next who takes memory; nobody waits for that."""
    sizes = list[int]()
    with device:
        for chunk, runs in ((ONE, True), (TWO, False), (THREE, True)):
            store.get(chunk)
            sizes.append(sum(driver.locked.values()))
            if runs:
                device.run()
        assert sizes[0] == sizes[1] < sizes[2] <= 2 * sizes[0]
        let_go()
        gc.collect()
    assert sum(size * len(idle) for size, idle in buffers._idle.items()) == sizes[2]
    assert not [kind for kind in device.counts if "wait" in kind]


def test_two_threads_copy_on_one_stream(monkeypatch):
    """The second asks while the first makes it."""
    both = threading.Barrier(2)

    def made(device: torch.device) -> object:
        both.wait(30)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr("kvrag.kv.buffers._streams", {})
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(copy_stream, [CUDA, CUDA])
    assert one is other is copy_stream(CUDA)


def test_a_copy_that_fails_holds_what_others_read(device):
    with device:
        with (
            pytest.raises(ValueError, match="between two copies"),
            held(object(), torch.cuda.Stream(CUDA)),
        ):
            raise ValueError("between two copies")
        assert [kind.split(" on ")[1] for kind in device.counts] == ["copies"]


class Asked(TorchFunctionMode):
    """Notes which copies to a device need not be done when they return."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if kwargs and "non_blocking" in kwargs:
            self.non_blocking.append(kwargs["non_blocking"])
        return func(*args, **(kwargs or {}))


def test_other_accelerators_wait_for_their_copies():
    """There is no event by which to hold what they read."""
    tier = MemoryTier(2**30, device="meta")
    with Asked() as asked:
        kept = tier.keep(ONE, make_kv(ONE), Usage(), epoch=tier.epoch)
        unpack(make_kv(ONE).layers[0], 900, device=torch.device("meta"), dtype=torch.float32)
    assert kept.layers[0].keys.is_meta
    assert tier.keys()
    assert asked.non_blocking
    assert not any(asked.non_blocking)
