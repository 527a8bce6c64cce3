"""A file that is not the proven KV of the chunk asked for is a miss, never an answer and never an error."""

import os
import random
import shutil
import socket

import pytest
import torch
from stores import (
    CHUNKS,
    EVERY_KEY,
    KEYS,
    KVS,
    PATIENT_S,
    SECRETS,
    blob_of,
    config_of,
    fill,
    flip,
    path_of,
    put,
)

from kvrag.store import Keys
from kvrag.store.format import Blob, BlobRejected, Foreign, OtherVersion
from kvrag.testing.chunks import make_identity, same_bits
from kvrag.types import ChunkKV, Hole, LayerKV

TINY = make_identity(tokens=1)
TINY_KV = ChunkKV((LayerKV(torch.ones(1, 1, 2), torch.ones(1, 1, 2)),))


@pytest.fixture(params=EVERY_KEY)
def key(request):
    return request.param


@pytest.fixture
def cipher(key):
    return Keys.of(config_of(key)).cipher


@pytest.fixture
def raw(cipher):
    """Bytes of a blob with one row in one layer."""
    return bytearray(blob_of(TINY, TINY_KV, cipher))


def is_rejected(raw, cipher, identity=TINY):
    """Whether bytes are not taken for the chunk's; if they are, they must be right."""
    try:
        kv = Blob(lambda offset, length: raw[offset : offset + length], identity, cipher).load()
    except BlobRejected:
        return True
    assert same_bits(kv, TINY_KV)
    return False


def test_every_flipped_byte_is_detected(raw, cipher):
    assert not is_rejected(raw, cipher)
    for place in range(len(raw)):
        raw[place] ^= 1 << place % 8
        assert is_rejected(raw, cipher), place
        raw[place] ^= 1 << place % 8


def test_every_truncation_and_extension_is_detected(raw, cipher):
    for length in (*range(0, len(raw), 7), len(raw) - 1):
        assert is_rejected(raw[:length], cipher), length
    for tail in (b"\0", b" " * 4096):
        assert is_rejected(raw + tail, cipher)


def test_random_damage_is_detected(raw, cipher):
    rng = random.Random(0)
    for _ in range(500):
        bad = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(bad))
            bad[start : start + rng.randint(1, 64)] = rng.randbytes(rng.randint(0, 64))
        if bad != raw:
            assert is_rejected(bad, cipher)


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 100_000,
        b'{"__metadata__": {}}',
        b'{"__metadata__":{}}',
        b'{"__metadata__":[],"a":1}',
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"__metadata__":{"format":"kvrag","version":7},"a":1}',
        b'{"__metadata__":{"format":"kvrag","version":"4","token_ids":"'
        + b"A" * 1000
        + b'","layer_digests":"x"},"a":1}',
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_headers_of_anything_are_detected(head, cipher):
    head += b" " * (-(len(head) + 8) % 4096)
    assert is_rejected(len(head).to_bytes(8, "little") + head, cipher)


def test_a_header_longer_than_the_limit_is_not_read():
    """Whoever is asked for much of a hostile blob would fill the memory."""
    asked = []

    def read(offset, length):
        asked.append(length)
        return (2**30).to_bytes(8, "little") + bytes(length - 8)

    with pytest.raises(BlobRejected, match="impossible length"):
        Blob(read, TINY)
    assert sum(asked) <= 2**14


def test_other_versions_and_other_keys_are_told_from_damage(raw, key, cipher):
    def reason(raw, cipher):
        with pytest.raises(BlobRejected) as fault:
            Blob(lambda offset, length: raw[offset : offset + length], TINY, cipher)
        return type(fault.value)

    assert reason(raw.replace(b'"version":"4"', b'"version":"3"'), cipher) is OtherVersion
    assert reason(raw.replace(b'"version":"4"', b'"version":"5"'), cipher) is OtherVersion
    if key is not None:
        assert reason(raw, None) is reason(raw, SECRETS["wrong"]) is Foreign
        assert reason(blob_of(TINY, TINY_KV), cipher) is Foreign


# -- in a store ----------------------------------------------------------------------------------------------------------

ME, OTHER = CHUNKS[1], CHUNKS[2]


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def extend(path):
    with path.open("ab") as file:
        file.write(b"\0" * 4096)


def flip_header(path):
    flip(path, 100)


def flip_data(path):
    flip(path, -5, 4)


def zero_tail(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:4096] + bytes(len(raw) - 4096))


def swap(path):
    root = path.parents[2]
    shutil.copy(path_of(root, OTHER), path)


def empty(path):
    path.write_bytes(b"")


def pickled(path):
    path.unlink()
    torch.save({"layer.000.keys": torch.zeros(1)}, path)


def symlink(path):
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def unix_socket(path):
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is limited to about 100 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


CONTENTS = [truncate, extend, flip_header, flip_data, zero_tail, swap, empty, pickled]
NO_FILES = [symlink, fifo, unix_socket]


@pytest.fixture
def filled(store):
    return fill(store, 1, 2)


@pytest.mark.parametrize("damage", CONTENTS)
def test_damage_is_a_miss_is_erased_and_heals(filled, root, damage, no_pickle, caplog):
    damage(path_of(root, ME))
    hole, good = filled.get_many([ME, OTHER], timeout_s=PATIENT_S)
    assert isinstance(hole, Hole)
    assert (hole.key, hole.reason) == (KEYS[1], "damaged")
    assert same_bits(good, KVS[2])
    assert filled.get(ME) is None
    assert filled.stats()["disk"].rejected == 1
    assert len([record for record in caplog.records if "rejected" in record.message]) == 1
    assert (filled.catalog.get(KEYS[1]), path_of(root, ME).exists()) == (None, False)
    assert put(filled, 1) > 0
    assert same_bits(filled.get(ME), KVS[1])


@pytest.mark.parametrize("damage", NO_FILES)
def test_what_is_no_file_is_a_miss_and_does_not_hinder_a_put(filled, root, damage, no_pickle):
    damage(path_of(root, ME))
    assert filled.get(ME) is None
    (hole,) = filled.get_many([ME], timeout_s=PATIENT_S)
    assert isinstance(hole, Hole)
    assert filled.delete([KEYS[1]]) in (0, 1), "it may have been erased by then"
    damage_again = path_of(root, ME)
    damage_again.touch()
    damage(damage_again)
    assert put(filled, 1) > 0
    assert same_bits(filled.get(ME), KVS[1])


def test_a_folder_in_the_place_of_a_file_is_a_miss_and_hinders_no_clear(filled, root):
    for identity in (ME, OTHER):
        path_of(root, identity).unlink()
        path_of(root, identity).mkdir()
    (path_of(root, OTHER) / "mine").touch()
    assert filled.get(OTHER) is None
    filled.clear()
    assert (path_of(root, ME).exists(), os.listdir(path_of(root, OTHER))) == (False, ["mine"])


def test_a_layer_that_is_damaged_is_named(filled, root):
    flip(path_of(root, ME), -1)
    assert filled.get_many([ME], timeout_s=PATIENT_S) == [Hole(KEYS[1], "damaged", 1)]


def test_a_row_without_its_blob_goes(filled, root):
    path_of(root, ME).unlink()
    assert filled.get_many([ME], timeout_s=PATIENT_S) == [Hole(KEYS[1], "absent", None)]
    assert filled.catalog.get(KEYS[1]) is None
    assert filled.stats()["disk"].rejected == 0


def test_a_file_that_is_planted_under_another_name_makes_way(filled, root, tmp_path):
    (tmp_path / "planted").write_bytes(b"no chunk")
    for _ in range(2):
        path_of(root, ME).unlink()
        os.link(tmp_path / "planted", path_of(root, ME))
        assert filled.get(ME) is None
        assert put(filled, 1) > 0
        assert same_bits(filled.get(ME), KVS[1])
    assert (tmp_path / "planted").read_bytes() == b"no chunk"


@pytest.mark.parametrize(
    "key", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n"]
)
def test_no_key_leaves_the_folder(filled, key):
    assert filled.known([key]) == set()
    assert filled.delete([key]) == 0
    assert filled.blobs.read(key) is None
    assert filled.blobs.delete([key]) == set()
    with pytest.raises(OSError, match="no key"):
        filled.blobs.write(key, [b"x"])
