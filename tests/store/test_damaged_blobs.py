"""A file that is not the proven KV of the chunk asked for is a miss, never an answer and never an error."""

import os
import random
import shutil
import socket

import pytest
import torch
from kvrag.store.directory import Directory
from kvrag.store.header import BlobRejected
from kvrag.store.reader import read_all

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, blob, writer
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV, LayerKV

ME, OTHER = make_identity(1), make_identity(2)


def path_of(root, identity):
    key = chunk_key(identity)
    return root / "objects" / key[:2] / f"{key}.safetensors"


@pytest.fixture
def tiny(tmp_path):
    """Path and bytes of a blob with one row in one layer."""
    identity = make_identity(tokens=1)
    kv = ChunkKV((LayerKV(torch.ones(1, 1, 2), torch.ones(1, 1, 2)),))
    path = tmp_path / "blob"
    with path.open("wb", buffering=0) as file:
        plan = blob.plan(identity, kv, text=make_text("a"))
        writer.write(plan, kv, lambda views, at: os.pwritev(file.fileno(), views, at))
    assert same_bits(read(path, identity), kv)
    return path, bytearray(path.read_bytes()), identity


def read(path, identity):
    with blob.open_blob(Directory(path.parent), path.name, identity=identity) as file:
        return read_all(file, torch.empty(file.header.num_bytes, dtype=torch.uint8))


def is_rejected(path, raw, identity):
    path.write_bytes(raw)
    return is_miss(path, identity)


def is_miss(path, identity):
    try:
        read(path, identity)
    except BlobRejected:
        return True
    return False


def test_every_flipped_byte_is_detected(tiny):
    path, raw, identity = tiny
    with path.open("r+b", buffering=0) as file:
        for place, byte in enumerate(raw):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
            assert is_miss(path, identity), place
            os.pwrite(file.fileno(), bytes([byte]), place)


def test_every_truncation_is_detected(tiny):
    path, raw, identity = tiny
    for length in range(0, len(raw), 7):
        assert is_rejected(path, raw[:length], identity), length
    assert is_rejected(path, raw[:-1], identity)


@pytest.mark.parametrize("tail", [b"\0", b" " * 4096])
def test_every_extension_is_detected(tiny, tail):
    path, raw, identity = tiny
    assert is_rejected(path, raw + tail, identity)


def test_random_damage_is_detected(tiny):
    path, raw, identity = tiny
    rng = random.Random(0)
    for _ in range(700):
        bad = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(bad))
            bad[start : start + rng.randint(1, 64)] = rng.randbytes(rng.randint(0, 64))
        if bad != raw:
            assert is_rejected(path, bad, identity)


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 100_000,
        b'{"__metadata__": {}}',
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"__metadata__": {"token_ids": "' + b"A" * 1000 + b'", "layer_digests": "x"}}',
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_hostile_headers_are_detected(tiny, head):
    path, _, identity = tiny
    head += b" " * (-(len(head) + 8) % 4096)
    assert is_rejected(path, len(head).to_bytes(8, "little") + head, identity)


def test_a_header_longer_than_the_limit_is_not_read(tiny):
    path, _, identity = tiny
    with path.open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**31)
    with pytest.raises(BlobRejected, match="impossible length"):
        read(path, identity)


def truncate(path, root):
    os.truncate(path, path.stat().st_size - 1)


def extend(path, root):
    with path.open("ab") as file:
        file.write(b"\0" * 4096)


def flip(path, root):
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)


def zero_tail(path, root):
    raw = path.read_bytes()
    path.write_bytes(raw[:4096] + bytes(len(raw) - 4096))


def swap(path, root):
    shutil.copy(path_of(root, OTHER), path)


def symlink(path, root):
    path.rename(root / "elsewhere")
    path.symlink_to(root / "elsewhere")


def fifo(path, root):
    path.unlink()
    os.mkfifo(path)


def unix_socket(path, root):
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is limited to about 100 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def folder(path, root):
    path.unlink()
    path.mkdir()


def empty(path, root):
    path.write_bytes(b"")


def pickled(path, root):
    path.unlink()
    torch.save({"layer.000.keys": torch.zeros(1)}, path)


DAMAGES = [truncate, extend, flip, zero_tail, swap, symlink, fifo, unix_socket, folder, empty, pickled]


@pytest.fixture
def filled(disk):
    for identity in (ME, OTHER):
        disk.put(identity, make_kv(identity), text=make_text(str(identity.token_ids)), doc_id="doc")
    return disk


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_miss_and_heals(filled, root, damage, no_pickle, caplog):
    damage(path_of(root, ME), root)
    assert filled.get(ME) is None
    assert filled.get_many([ME, OTHER], timeout_s=30)[0] is None
    assert filled.stats()["disk"].rejected == 1
    assert len(caplog.records) == 1
    assert filled.index.get(chunk_key(ME)) is None
    (put_away,) = os.listdir(root / "quarantine")
    assert put_away.startswith(f"{chunk_key(ME)}.safetensors")
    assert same_bits(filled.get(OTHER), make_kv(OTHER))
    assert filled.put(ME, make_kv(ME), text=make_text("a"), doc_id="doc") > 0
    assert same_bits(filled.get(ME), make_kv(ME))


@pytest.mark.parametrize("damage", [symlink, fifo, folder])
def test_what_is_no_file_does_not_hinder_a_put(filled, root, damage):
    damage(path_of(root, ME), root)
    assert not filled.contains(chunk_key(ME))
    assert filled.put(ME, make_kv(ME), text=None) > 0
    assert same_bits(filled.get(ME), make_kv(ME))


def test_the_same_fault_is_reported_once(filled, root, caplog):
    for identity in (ME, OTHER):
        flip(path_of(root, identity), root)
        assert filled.get(identity) is None
    assert len(caplog.records) == 1
    assert filled.stats()["disk"].rejected == 2


def test_erasing_reaches_the_quarantine(filled, root):
    flip(path_of(root, ME), root)
    filled.get(ME)
    filled.delete([chunk_key(ME)])
    assert os.listdir(root / "quarantine") == []


def test_a_file_that_is_planted_twice_under_two_names_makes_way_twice(filled, root, tmp_path):
    """Renaming one name of a file to another one of it does nothing: the chunk could never be stored again."""
    (tmp_path / "planted").write_bytes(b"no chunk")
    for _ in range(2):
        path_of(root, ME).unlink()
        os.link(tmp_path / "planted", path_of(root, ME))
        assert filled.get(ME) is None
        assert filled.put(ME, make_kv(ME), text=None) > 0
        assert same_bits(filled.get(ME), make_kv(ME))
    assert (tmp_path / "planted").read_bytes() == b"no chunk"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_rebuild_leaves_damaged_headers_out(filled, root, damage, no_pickle):
    damage(path_of(root, ME), root)
    filled.close()
    shutil.rmtree(root / "index")
    store = DiskStore(root)
    assert same_bits(store.get(OTHER), make_kv(OTHER))
    assert store.get(ME) is None
    assert store.index.keys() == [chunk_key(OTHER)]
    store.close()


def test_a_blob_without_its_row_gets_it_back(filled):
    filled.index.remove(chunk_key(ME))
    assert same_bits(filled.get(ME), make_kv(ME))
    record = filled.index.get(chunk_key(ME))
    assert record is not None
    assert record.text == make_text(str(ME.token_ids))
    assert filled.index.documents(ME.namespace) == ["doc"]


def test_a_row_without_its_blob_goes(filled, root):
    path_of(root, ME).unlink()
    assert filled.get(ME) is None
    assert filled.index.get(chunk_key(ME)) is None
    assert filled.stats()["disk"].rejected == 0


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n"])
def test_no_key_leaves_the_folder(filled, key):
    assert not filled.contains(key)
    assert filled.delete([key]) == 0
