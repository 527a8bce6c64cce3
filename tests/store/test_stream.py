"""Layers come one by one, layer 0 first, each proven; buffers are used again."""

import gc
import os
import threading

import pytest
import torch
from kvrag.store.buffers import MIN_BYTES, Buffers, rounded
from kvrag.store.helpers import Helpers
from kvrag.store.objects import place_of
from processes import ended_in_time

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blob, reader
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.types import ChunkKV, LayerKV

ME = make_identity(1)
LAYERS = 6


@pytest.fixture(params=[(0, 1), (1, 1), (3, 1), (1, 10**9), (2, 200)], ids=str)
def filled(disk, monkeypatch, request):
    """A store with one chunk; so many helpers for its readers, and so many bytes read at once."""
    helpers, step_bytes = request.param
    monkeypatch.setattr(reader, "HELPED_BYTES", 0)
    monkeypatch.setattr(reader, "STEP_BYTES", step_bytes)
    monkeypatch.setattr(reader, "HELPERS", Helpers(helpers))
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
    real = blob.Blob.load

    def load(self, layers, place):
        if layers[-1] >= 2:
            raise OSError(5, "Input/output error")
        return real(self, layers, place)

    with monkeypatch.context() as patch:
        patch.setattr(blob.Blob, "load", load)
        assert len(list(filled.stream(ME))) == 2
    assert same_bits(filled.get(ME), make_kv(ME, layers=LAYERS))


def test_the_first_layer_is_there_before_the_last_is_read(filled, monkeypatch):
    real, go_on = blob.Blob.load, threading.Event()

    def load(self, layers, place):
        if layers[-1] == LAYERS - 1:
            assert go_on.wait(30)
        return real(self, layers, place)

    monkeypatch.setattr(blob.Blob, "load", load)
    stream = filled.stream(ME)
    first = next(stream)
    go_on.set()
    assert same_bits(ChunkKV((first, *stream)), make_kv(ME, layers=LAYERS))


@pytest.mark.parametrize("step_bytes", [1, 50, 51, 10**9])
@pytest.mark.parametrize("layers", [1, 2, 3, 7])
def test_steps_take_in_every_layer_once_and_layer_0_alone(layers, step_bytes):
    offsets = tuple(range(0, 10 * layers + 1, 10))
    steps = reader.steps_of(offsets, step_bytes)
    assert [layer for step in steps for layer in step] == list(range(layers))
    assert steps[0] == range(1)
    assert all(10 * len(step) >= step_bytes for step in steps[1:-1])


def test_a_stream_that_is_left_early_leaves_nothing_open(filled):
    before = len(os.listdir("/proc/self/fd"))
    stream = filled.stream(ME)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stream_that_is_interrupted_leaves_nothing_open(filled, monkeypatch):
    def interrupt(self, layers, place):
        raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(reader, "HELPERS", Helpers(0))
    monkeypatch.setattr(blob.Blob, "load", interrupt)
    stream = filled.stream(ME)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(stream) == []


def test_a_stream_that_a_fork_cuts_ends_in_the_child_and_goes_on_in_the_parent(disk, monkeypatch):
    """The thread that had begun a layer is not there."""
    monkeypatch.setattr(reader, "HELPED_BYTES", 0)
    monkeypatch.setattr(reader, "STEP_BYTES", 1)
    monkeypatch.setattr(reader, "HELPERS", Helpers(1))
    disk.put(ME, make_kv(ME, layers=LAYERS), text=None)
    real, began, go_on = blob.Blob.load, threading.Event(), threading.Event()

    def load(self, layers, place):
        if threading.current_thread().name == "kvrag-helper" and layers[0]:
            began.set()
            assert go_on.wait(30)
        return real(self, layers, place)

    monkeypatch.setattr(blob.Blob, "load", load)
    stream = disk.stream(ME)
    first = next(stream)
    assert began.wait(30)
    child = os.fork()
    if not child:
        rest = list(stream)
        kv = make_kv(ME, layers=LAYERS)
        is_right = same_bits(ChunkKV((first, *rest)), ChunkKV(kv.layers[: 1 + len(rest)]))
        os._exit(0 if is_right and len(rest) < LAYERS - 1 else 1)
    assert ended_in_time(child) == 0
    go_on.set()
    assert same_bits(ChunkKV((first, *stream)), make_kv(ME, layers=LAYERS))


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
