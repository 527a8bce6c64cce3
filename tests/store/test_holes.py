"""How far the load of a chunk came that gave nothing: its row in the bitmap of success per chunk and layer."""

import threading

import pytest
from kvrag.store.holes import MAX_READINGS, Readings, holes_of

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, WriteBehind, reader
from kvrag.testing.chunks import make_identity, make_kv, same_bits

LAYERS = 4
IDENTITY = make_identity(0, tokens=700)
KEY = chunk_key(IDENTITY)


@pytest.fixture(params=["disk", "tiers", "behind"])
def store(request, root):
    disk = DiskStore(root)
    made = {
        "disk": lambda: disk,
        "tiers": lambda: TieredStore(MemoryStore(2**20), disk),
        "behind": lambda: WriteBehind(disk),
    }
    DiskStore(root).put(IDENTITY, make_kv(IDENTITY, layers=LAYERS), text=None)
    store = made[request.param]()
    yield store
    store.close()


def damage(root, layer):
    path = root / "objects" / KEY[:2] / f"{KEY}.safetensors"
    size, per_layer = path.stat().st_size, make_kv(IDENTITY, layers=1).num_bytes
    with path.open("r+b") as file:
        file.seek(size - (LAYERS - layer) * per_layer + 5)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def hole_of(store):
    (hole,) = holes_of(store, {IDENTITY: None})
    return hole


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("is_small", [True, False])
def test_a_hole_names_the_damaged_layer(store, root, layer, is_small, monkeypatch):
    monkeypatch.setattr(reader, "HELPED_BYTES", 2**30 if is_small else 1)
    damage(root, layer)
    assert store.get_many([IDENTITY], timeout_s=30) == [None]
    hole = hole_of(store)
    assert (hole.reason, hole.layer) == ("damaged", layer)
    assert str(hole) == f"{KEY[:12]} damaged at layer {layer}"


def test_the_hole_of_a_late_chunk_says_how_far_it_came(store, monkeypatch):
    monkeypatch.setattr(reader, "HELPED_BYTES", 1)
    monkeypatch.setattr(reader, "STEP_BYTES", 1)
    real, go_on, is_there = reader.Blob.load, threading.Event(), threading.Event()

    def slow(self, layers, place):
        if layers[0] == 2:
            is_there.set()
            go_on.wait(30)
        return real(self, layers, place)

    monkeypatch.setattr(reader.Blob, "load", slow)
    got = []
    thread = threading.Thread(target=lambda: got.extend(store.get_many([IDENTITY], timeout_s=0.5)))
    thread.start()
    assert is_there.wait(30)
    thread.join(30)
    assert got == [None]
    hole = hole_of(store)
    assert (hole.reason, hole.layer) == ("late", 2)
    go_on.set()
    assert same_bits(store.get(IDENTITY), make_kv(IDENTITY, layers=LAYERS))
    assert store.hole(IDENTITY) is None


def test_what_is_gone_or_unreadable_says_so(store, root, monkeypatch):
    path = root / "objects" / KEY[:2] / f"{KEY}.safetensors"

    def broken(*args, **kwargs):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(reader, "read_all", broken)
        assert store.get(IDENTITY) is None
    assert (hole_of(store).reason, hole_of(store).layer) == ("unreadable", 0)
    path.unlink()
    assert store.get(IDENTITY) is None
    assert (hole_of(store).reason, hole_of(store).layer) == ("absent", None)
    assert str(hole_of(store)) == f"{KEY[:12]} absent"


def test_what_nobody_began_to_read_is_late():
    assert hole_of(MemoryStore(2**20)).reason == "late"
    assert holes_of(MemoryStore(2**20), {IDENTITY: make_kv(IDENTITY)}) == ()


def test_only_so_many_reads_are_remembered():
    readings = Readings()
    for number in range(MAX_READINGS + 1):
        readings.begin(f"{number:064x}")
    assert readings.hole(f"{0:064x}") is None
    assert readings.hole(f"{1:064x}").reason == "late"
