"""Layers through several tiers: at once from memory, else as the disk gives them, and promoted when the last one has come."""

import os
import threading

import pytest
import torch
from kvrag.store.events import Events
from kvrag.store.objects import place_of

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, WriteBehind, blob, reader, tiered_reads
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV

ME = make_identity(1, tokens=40)
KEY = chunk_key(ME)
LAYERS = 6
KV = make_kv(ME, layers=LAYERS)


class Tiers:
    """The accelerator's memory (the host's stands in) above the host's above a disk that has one chunk."""

    def __init__(self, root, *, gpu=2**20, host=2**20, host_dtype=None, behind=False):
        self.log = []
        events = Events(self.log.append)
        self.gpu = MemoryStore(gpu, name="gpu", events=events)
        self.host = MemoryStore(host, events=events, kv_dtype=host_dtype)
        self.disk = DiskStore(root, StoreConfig(min_free_bytes=0))
        self.disk.put(ME, KV, text=make_text("a"), doc_id="doc")
        self.below = TieredStore(self.host, WriteBehind(self.disk) if behind else self.disk)
        self.store = TieredStore(self.gpu, self.below, keeps_puts=False)

    def held(self):
        return self.gpu.contains(KEY), self.host.contains(KEY)


@pytest.fixture
def tiers(root, monkeypatch):
    monkeypatch.setattr(reader, "HELPED_BYTES", 0)
    monkeypatch.setattr(reader, "STEP_BYTES", 1)
    made = []

    def make(**options):
        made.append(Tiers(root, **options))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


@pytest.mark.parametrize("behind", [False, True], ids=["through", "back"])
def test_a_chunk_is_promoted_to_every_tier_with_its_last_layer(tiers, behind, monkeypatch):
    one = tiers(behind=behind)
    stream = one.store.stream(ME)
    got = [next(stream) for _ in range(LAYERS - 1)]
    assert one.held() == (False, False)
    got.append(next(stream))
    assert one.held() == (True, True)
    assert [(e.medium, e.reason) for e in one.log] == [("host", "promoted"), ("gpu", "promoted")]
    assert list(stream) == []
    assert same_bits(ChunkKV(tuple(got)), KV)
    monkeypatch.setattr(blob, "open_blob", lambda *args, **kwargs: pytest.fail("read from disk"))
    assert same_bits(ChunkKV(tuple(one.store.stream(ME))), KV)
    assert one.store.stats()["gpu"].hits == 1
    assert same_bits(one.below.get(ME), KV)


def test_the_first_layer_is_there_before_the_last_is_read(tiers, monkeypatch):
    one = tiers()
    real, go_on = blob.Blob.load, threading.Event()

    def load(self, layers, place):
        if layers[-1] == LAYERS - 1:
            assert go_on.wait(30)
        return real(self, layers, place)

    monkeypatch.setattr(blob.Blob, "load", load)
    stream = one.store.stream(ME)
    first = next(stream)
    go_on.set()
    assert same_bits(ChunkKV((first, *stream)), KV)
    assert one.held() == (True, True)


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
def test_nothing_is_promoted_of_a_stream_that_breaks(tiers, root, layer):
    one = tiers()
    path = root.joinpath(*place_of(KEY))
    with path.open("r+b", buffering=0) as file:
        place = path.stat().st_size - KV.num_bytes + sum(part.num_bytes for part in KV.layers[:layer])
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), place)
    got = list(one.store.stream(ME))
    assert len(got) == layer
    assert not layer or same_bits(ChunkKV(tuple(got)), ChunkKV(KV.layers[:layer]))
    assert one.held() == (False, False)
    assert one.log == []
    assert one.store.get(ME) is None


def test_nothing_is_promoted_of_a_stream_that_is_left_and_no_file_stays_open(tiers):
    one = tiers()
    one.store.get(make_identity(9))
    before = len(os.listdir("/proc/self/fd"))
    one.store.stream(ME).close()
    with one.store.stream(ME) as stream:
        for _ in range(LAYERS - 1):
            next(stream)
    assert list(stream) == []
    assert one.held() == (False, False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_layers_are_rounded_as_their_tier_keeps_them(tiers):
    one = tiers(host_dtype="int8")
    stream = one.store.stream(ME)
    assert stream.kv_dtype == "int8"
    streamed = ChunkKV(tuple(stream), stream.kv_dtype)
    assert streamed.layers[0].scales is not None
    assert same_bits(one.host.peek(ME), streamed)
    assert one.host.peek(ME).kv_dtype == one.gpu.peek(ME).kv_dtype == "int8"
    one.host.delete([KEY])
    one.gpu.delete([KEY])
    assert same_bits(one.store.get(ME), streamed)


def test_what_can_not_be_rounded_again_ends_the_stream(tiers, monkeypatch, caplog):
    one = tiers(host_dtype="int8")
    stream = one.store.stream(ME)
    monkeypatch.setattr(stream._below._below, "kv_dtype", "fp8")  # as if the file's had been rounded otherwise
    assert list(stream) == []
    assert "a chunk is computed" in caplog.text
    assert one.held() == (False, False)


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("no room"), ValueError("a fault of ours")])
def test_a_full_accelerator_gives_the_layers_and_keeps_none(tiers, monkeypatch, fault):
    one = tiers()
    real = tiered_reads._is_on

    def full(*args):
        raise fault

    monkeypatch.setattr(tiered_reads, "_is_on", lambda kv, device: False)
    monkeypatch.setattr(tiered_reads, "copy_kv", full)
    one.host.keep(ME, KV)
    stream = one.store.stream(ME)
    if isinstance(fault, ValueError):
        with pytest.raises(ValueError, match="fault of ours"):
            next(stream)
        assert list(stream) == []
    else:
        assert same_bits(ChunkKV(tuple(stream)), KV)
    monkeypatch.setattr(tiered_reads, "_is_on", real)
    assert one.held() == (False, True)


def test_without_room_the_layers_come_all_the_same(tiers):
    one = tiers(gpu=1, host=1)
    for _ in range(2):
        assert same_bits(ChunkKV(tuple(one.store.stream(ME))), KV)
    assert one.held() == (False, False)


@pytest.mark.parametrize("looks", [0, 1], ids=["unnoticed", "noticed"])
def test_what_another_process_erases_meanwhile_is_not_answered_with(tiers, root, looks):
    one = tiers()
    other = DiskStore(root, StoreConfig(min_free_bytes=0))
    stream = one.store.stream(ME)
    next(stream)
    other.forget(NAMESPACE, "doc")
    for _ in range(looks):
        assert one.store.get(make_identity(9)) is None
    list(stream)
    assert one.store.stream(ME) is None
    assert one.held() == (False, False)
    other.close()


def test_a_chunk_without_a_row_gets_it_back_before_it_is_kept(tiers):
    """Otherwise a copy of it would be in memory that no erasure finds."""
    one = tiers()
    one.disk.rows.remove(KEY)
    assert same_bits(ChunkKV(tuple(one.store.stream(ME))), KV)
    assert one.disk.rows.get(KEY) is not None
    assert one.held() == (True, True)


def test_what_waits_to_be_written_is_streamed_from_memory(root, held_up):
    with held_up():
        store = WriteBehind(DiskStore(root))
        store.put(ME, KV, text=None)
        assert same_bits(ChunkKV(tuple(store.stream(ME))), KV)
        assert store.stats()["disk"].hits == 1
    store.close()
