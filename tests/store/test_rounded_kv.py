"""Rounded KV in every tier: the same bits everywhere, proven like any other, and never taken for what was not rounded."""

import json
import os
import struct

import pytest
import torch
from kvrag.store.fsck import copy, fsck
from safetensors import safe_open

from kvrag import StoreConfig, StoreError
from kvrag.blend.quantise import convert, pack
from kvrag.identity.fingerprint import chunk_key, content_key
from kvrag.store import DiskStore, MemoryStore, open_store
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkIdentity, ChunkKV, LayerKV

LOSSY = ("int8", "int4", "fp8")
NAMES = ("keys", "values", "key_scales", "key_zeros", "value_scales")
PATIENT_S = 30.0


def identity_of(kv_dtype, number=0):
    plain = make_identity(number)
    return ChunkIdentity(plain.model, plain.namespace, plain.prefix, plain.token_ids, kv_dtype)


def rounded(kv_dtype, number=0):
    return pack(make_kv(make_identity(number)), kv_dtype)


def path_of(root, identity):
    key = chunk_key(identity)
    return root / "objects" / key[:2] / f"{key}.safetensors"


def opened(directory, **options):
    return open_store(directory, StoreConfig(min_free_bytes=0, **options))


@pytest.fixture(params=LOSSY)
def kv_dtype(request):
    return request.param


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_was_put_comes_back_bit_for_bit(tmp_path, kv_dtype, in_memory):
    store = opened(None if in_memory else tmp_path, kv_dtype=kv_dtype)
    identity, kv = identity_of(kv_dtype), rounded(kv_dtype)
    assert store.put(identity, kv, text=make_text("a"), doc_id="doc") == kv.num_bytes
    for _ in range(2):
        assert same_bits(store.get(identity), kv)
    record = store.index.get(chunk_key(identity))
    assert record.num_bytes == kv.num_bytes
    store.close()
    if not in_memory:
        again = opened(tmp_path, kv_dtype=kv_dtype)
        assert same_bits(again.get_many([identity], timeout_s=PATIENT_S)[0], kv)
        again.close()


def test_a_stream_gives_codes_and_scales(disk, kv_dtype):
    identity, kv = identity_of(kv_dtype), rounded(kv_dtype)
    disk.put(identity, kv, text=None)
    with disk.stream(identity) as stream:
        assert same_bits(ChunkKV(tuple(stream), kv_dtype), kv)


def test_rounded_and_exact_kv_of_a_chunk_are_two_chunks(disk, kv_dtype):
    exact, other = make_identity(), identity_of(kv_dtype)
    disk.put(exact, make_kv(exact), text=make_text("a"), doc_id="doc")
    assert disk.get(other) is None
    assert disk.index.variants(content_key(other)) == []
    disk.put(other, rounded(kv_dtype), text=make_text("a"), doc_id="doc")
    assert same_bits(disk.get(exact), make_kv(exact))
    assert same_bits(disk.get(other), rounded(kv_dtype))
    assert disk.forget(exact.namespace, "doc") == 2, "a document holds on to its text, however that is kept"


def test_kv_must_be_kept_as_its_identity_says(disk, kv_dtype):
    other = "int8" if kv_dtype != "int8" else "fp8"
    exact, kv = make_kv(make_identity()), rounded(kv_dtype)
    for identity, wrong in (
        (make_identity(), kv),
        (identity_of(kv_dtype), exact),
        (identity_of(other), kv),
        (identity_of(other), ChunkKV(kv.layers, other)),
        (identity_of(kv_dtype), convert(kv, "auto")),
        (make_identity(), ChunkKV(kv.layers)),
    ):
        for store in (disk, MemoryStore(2**20)):
            with pytest.raises(StoreError):
                store.put(identity, wrong, text=None)
    assert disk.files() == set()


def test_a_blob_opens_as_a_plain_safetensors_file(disk, root, kv_dtype):
    identity, kv = identity_of(kv_dtype), rounded(kv_dtype)
    disk.put(identity, kv, text=None)
    with safe_open(path_of(root, identity), framework="pt") as file:
        assert set(file.keys()) == {f"layer.{i:03d}.{name}" for i in range(2) for name in NAMES}
        for i, layer in enumerate(kv.layers):
            for name, tensor in zip(NAMES, layer.tensors, strict=True):
                found = file.get_tensor(f"layer.{i:03d}.{name}")
                assert found.dtype == tensor.dtype
                assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        assert file.metadata()["kv_dtype"] == kv_dtype
        assert file.metadata()["dtype"] == "F32"


def test_an_exact_blob_does_not_mention_rounding(disk, root):
    disk.put(make_identity(), make_kv(make_identity()), text=None)
    with safe_open(path_of(root, make_identity()), framework="pt") as file:
        assert not {"kv_dtype", "dtype"} & set(file.metadata())


def test_scales_behind_an_odd_number_of_codes_are_read(disk):
    random = torch.Generator().manual_seed(0)
    layers = [LayerKV(torch.randn(1, 3, 2, generator=random), torch.randn(1, 3, 4, generator=random)) for _ in range(3)]
    kv = pack(ChunkKV(tuple(layers)), "int4")
    assert sum(t.nbytes for t in kv.layers[0].tensors[:2]) % 2 == 1
    disk.put(identity_of("int4"), kv, text=None)
    assert same_bits(disk.get(identity_of("int4")), kv)


def test_every_byte_is_proven(disk, root, kv_dtype):
    """Codes, scales and zeros have one digest per layer: a flipped bit anywhere is a miss."""
    identity, kv = identity_of(kv_dtype), rounded(kv_dtype)
    disk.put(identity, kv, text=None)
    path = path_of(root, identity)
    good = path.read_bytes()
    start = 8 + struct.unpack("<Q", good[:8])[0]
    assert len(good) - start == kv.num_bytes
    for place in range(start, len(good)):
        raw = bytearray(good)
        raw[place] ^= 1
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
        assert disk.get(identity) is None
    path.write_bytes(good)
    assert same_bits(disk.get(identity), kv)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"kv_dtype":"int8"', b'"kv_dtype":"int4"'),
        (b'"kv_dtype":"int8"', b'"kv_dtype":"int9"'),
        (b'"kv_dtype":"int8"', b'"kv_dtypo":"int8"'),
        (b'"dtype":"F32"', b'"dtype":"I64"'),
        (b'"dtype":"I8"', b'"dtype":"U8"'),
    ],
)
def test_a_header_that_says_something_else_is_a_miss(disk, root, old, new):
    disk.put(identity_of("int8"), rounded("int8"), text=None)
    path = path_of(root, identity_of("int8"))
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    assert disk.get(identity_of("int8")) is None


def test_a_blob_under_the_key_of_another_type_is_a_miss(disk, root):
    disk.put(identity_of("int8"), rounded("int8"), text=None)
    target = path_of(root, make_identity())
    target.parent.mkdir(exist_ok=True)
    os.rename(path_of(root, identity_of("int8")), target)
    assert disk.get(make_identity()) is None
    assert disk.stats()["disk"].rejected == 1


def test_scales_that_are_not_finite_are_refused(disk, kv_dtype):
    for index, tensor in enumerate(rounded(kv_dtype).layers[-1].tensors):
        kv = rounded(kv_dtype)
        changed = kv.layers[-1].tensors[index]
        if tensor.dtype == torch.float16:
            changed.view(torch.int16)[0, 0, 0] = 0x7C00
        elif kv_dtype == "fp8":
            changed.view(torch.uint8)[0, 0, 0] = 0xFF
        else:
            continue
        with pytest.raises(StoreError, match="not finite"):
            disk.put(identity_of(kv_dtype), kv, text=None)


def test_the_tools_know_rounded_chunks(disk, root, tmp_path, kv_dtype):
    identity, kv = identity_of(kv_dtype), rounded(kv_dtype)
    disk.put(identity, kv, text=make_text("a"), doc_id="doc")
    report = fsck(disk, verify_data=True)
    assert (report.checked, report.verified, report.rejected) == (1, 1, [])
    target = DiskStore(tmp_path / "target", StoreConfig(min_free_bytes=0))
    assert copy(disk, target) == (1, 0, 0)
    assert same_bits(target.get(identity), kv)
    target.close()


def test_an_index_that_is_lost_gets_its_rows_back(tmp_path, kv_dtype):
    identity = identity_of(kv_dtype)
    store = DiskStore(tmp_path / "s", StoreConfig(min_free_bytes=0))
    store.put(identity, rounded(kv_dtype), text=make_text("a"), doc_id="doc")
    before = store.index.get(chunk_key(identity))
    store.close()
    for file in (tmp_path / "s" / "index").iterdir():
        file.unlink()
    again = DiskStore(tmp_path / "s", StoreConfig(min_free_bytes=0))
    assert again.index.get(chunk_key(identity)) == before
    assert again.index.variants(content_key(identity)) == [before]
    again.close()


# -- the memory tier -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ram_bytes", [0, 2**20])
def test_memory_may_keep_what_was_read_from_codes(tmp_path, kv_dtype, ram_bytes):
    store = opened(tmp_path, kv_dtype=kv_dtype, ram_dtype="auto", ram_bytes=ram_bytes)
    identity, kv = identity_of(kv_dtype), rounded(kv_dtype)
    store.put(identity, kv, text=None)
    for _ in range(3):
        found = store.get(identity)
        assert same_bits(found, convert(kv, "auto"))
        assert found.kv_dtype == kv_dtype, "what was rounded stays so, however it is kept"
    store.close()


@pytest.mark.parametrize("ram_bytes", [0, 2**20])
def test_memory_may_round_what_stays_exact_on_disk(tmp_path, kv_dtype, ram_bytes):
    """Every read gives the same bits, from whichever tier: what is read from disk is rounded too."""
    store = opened(tmp_path, ram_dtype=kv_dtype, ram_bytes=ram_bytes)
    identity = make_identity()
    exact = make_kv(identity)
    assert store.put(identity, exact, text=None) == exact.num_bytes
    for _ in range(3):
        assert same_bits(store.get(identity), rounded(kv_dtype))
        assert same_bits(store.get_many([identity], timeout_s=PATIENT_S)[0], rounded(kv_dtype))
    assert store.stats()["host"].num_bytes == (rounded(kv_dtype).num_bytes if ram_bytes else 0)
    store.close()
    again = opened(tmp_path)
    assert same_bits(again.get(identity), exact)
    again.close()


def test_a_store_in_memory_alone_may_round(kv_dtype):
    store = opened(None, ram_dtype=kv_dtype)
    assert store.put(make_identity(), make_kv(make_identity()), text=None) == rounded(kv_dtype).num_bytes
    assert same_bits(store.get(make_identity()), rounded(kv_dtype))
    assert store.index.get(chunk_key(make_identity())).num_bytes == store.stats()["host"].num_bytes


def test_what_memory_can_not_round_is_neither_promised_nor_read(tmp_path, caplog):
    huge = ChunkKV((LayerKV(*(torch.tensor([1e30, -1e30, 1.0]).reshape(1, 3, 1),) * 2),))
    store = opened(tmp_path / "rounding", ram_dtype="int8")
    with pytest.raises(StoreError, match="too large for int8"):
        store.put(make_identity(), huge, text=None)
    assert not store.contains(chunk_key(make_identity()))
    store.close()
    plain = opened(tmp_path / "plain")
    plain.put(make_identity(), huge, text=None)
    plain.close()
    store = opened(tmp_path / "plain", ram_dtype="int8")
    assert store.get(make_identity()) is None
    assert "a chunk is computed" in caplog.text
    store.close()


def test_the_format_says_its_version(disk, root):
    assert json.loads((root / "format.json").read_text())["version"] == 3
