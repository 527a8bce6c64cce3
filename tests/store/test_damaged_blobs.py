"""A file that is not the proven KV of the chunk asked for is a miss, never an answer and never an error.

Bits are flipped, and files planted that are none, in tests/reliability.
"""

import os
import shutil

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

from kvrag.kv.format import Blob, BlobRejected, Foreign, OtherVersion
from kvrag.store import Keys
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


def test_every_truncation_and_extension_is_detected(raw, cipher):
    for length in (*range(0, len(raw), 7), len(raw) - 1):
        assert is_rejected(raw[:length], cipher), length
    for tail in (b"\0", b" " * 4096):
        assert is_rejected(raw + tail, cipher)


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


CONTENTS = [truncate, extend, flip_header, flip_data, zero_tail, swap]


@pytest.fixture
def filled(store):
    return fill(store, 1, 2)


@pytest.mark.parametrize("damage", CONTENTS)
def test_damage_is_a_miss_is_erased_and_heals(filled, root, damage, caplog):
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
