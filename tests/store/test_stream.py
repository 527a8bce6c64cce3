"""Layers come one by one, layer 0 first, each proven; buffers are used again."""

import gc
import os
import threading

import pytest
import torch

from kvrag.fingerprint import chunk_key
from kvrag.store import blob, reader
from kvrag.store.buffers import MIN_BYTES, Buffers, rounded
from kvrag.store.helpers import Helpers
from kvrag.store.objects import place_of
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.types import ChunkKV, LayerKV

ME = make_identity(1)
LAYERS = 6


@pytest.fixture(params=[0, 1, 3])
def filled(disk, monkeypatch, request):
    """A store with one chunk, and so many helpers for the readers of its layers."""
    monkeypatch.setattr(reader, "HELPED_BYTES", 0)
    monkeypatch.setattr(reader, "HELPERS", Helpers(request.param))
    disk.put(ME, make_kv(ME, layers=LAYERS), text=None)
    return disk


def damage(root, layer):
    path = root.joinpath(*place_of(chunk_key(ME)))
    kv = make_kv(ME, layers=LAYERS)
    with path.open("r+b", buffering=0) as file:
        place = path.stat().st_size - kv.num_bytes + sum(part.num_bytes for part in kv.layers[:layer])
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), place)
    return path


def test_all_layers_come_in_order(filled):
    with filled.stream(ME) as stream:
        assert (stream.num_layers, stream.num_bytes) == (LAYERS, make_kv(ME, layers=LAYERS).num_bytes)
        assert same_bits(ChunkKV(tuple(stream)), make_kv(ME, layers=LAYERS))
    assert filled.stats()["disk"].hits == 1
    assert same_bits(filled._get(ME, is_helped=True), make_kv(ME, layers=LAYERS))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_stream_ends_at_the_first_damaged_layer(filled, root, layer):
    path = damage(root, layer)
    got = list(filled.stream(ME))
    assert not layer or same_bits(ChunkKV(tuple(got)), ChunkKV(make_kv(ME, layers=LAYERS).layers[:layer]))
    assert len(got) == layer
    assert not path.exists()
    assert filled.stats()["disk"].rejected == 1
    assert filled.get(ME) is None


def test_a_stream_ends_where_the_disk_fails_and_keeps_the_file(filled, monkeypatch):
    real = blob.Blob.layer

    def layer(self, index, place):
        if index >= 2:
            raise OSError(5, "Input/output error")
        return real(self, index, place)

    with monkeypatch.context() as patch:
        patch.setattr(blob.Blob, "layer", layer)
        assert len(list(filled.stream(ME))) == 2
    assert same_bits(filled.get(ME), make_kv(ME, layers=LAYERS))


def test_the_first_layer_is_there_before_the_last_is_read(filled, monkeypatch):
    real, go_on = blob.Blob.layer, threading.Event()

    def layer(self, index, place):
        if index == LAYERS - 1:
            assert go_on.wait(30)
        return real(self, index, place)

    monkeypatch.setattr(blob.Blob, "layer", layer)
    stream = filled.stream(ME)
    first = next(stream)
    go_on.set()
    assert same_bits(ChunkKV((first, *stream)), make_kv(ME, layers=LAYERS))


def test_a_stream_that_is_left_early_leaves_nothing_open(filled):
    before = len(os.listdir("/proc/self/fd"))
    stream = filled.stream(ME)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stream_of_what_is_absent_is_none(filled):
    assert filled.stream(make_identity(9)) is None
    filled.close()
    assert filled.stream(ME) is None


def test_without_threads_the_caller_reads_alone(filled, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert same_bits(ChunkKV(tuple(filled.stream(ME))), make_kv(ME, layers=LAYERS))


def test_memory_that_is_short_is_a_miss_and_not_the_files_fault(filled, monkeypatch):
    def refuse(self, num_bytes):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "take", refuse)
        assert filled.get(ME) is None
        assert filled.stream(ME) is None
    assert same_bits(filled.get(ME), make_kv(ME, layers=LAYERS))
    assert filled.stats()["disk"].rejected == 0


def test_a_buffer_is_used_again_when_its_last_tensor_is_gone():
    buffers = Buffers()
    first = buffers.take(MIN_BYTES + 1)
    place, part = first.data_ptr(), LayerKV(first[:8].view(torch.float32), first[8:16].view(torch.float32))
    del first
    gc.collect()
    assert buffers.idle_bytes == 0
    assert buffers.take(MIN_BYTES + 1).data_ptr() != place
    del part
    gc.collect()
    assert buffers.idle_bytes >= MIN_BYTES
    again = buffers.take(MIN_BYTES + 2)
    assert again.shape == (MIN_BYTES + 2,)


def test_the_pool_keeps_no_more_than_it_may():
    buffers = Buffers(idle_bytes=2 * rounded(MIN_BYTES))
    taken = [buffers.take(MIN_BYTES) for _ in range(5)]
    del taken
    gc.collect()
    assert buffers.idle_bytes == 2 * rounded(MIN_BYTES)


@pytest.mark.parametrize("size", [65_536, 65_537, 1_000_000, 2**20, 2**20 + 1, 123_456_789])
def test_rounding_wastes_little(size):
    assert size <= rounded(size) <= size * 17 / 16 + 4096
