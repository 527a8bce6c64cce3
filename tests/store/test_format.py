"""What a blob is: a plain safetensors file, aligned, whole and finite, however its chunk is cut into parts and reads."""

import json
import re
import stat
import struct

import pytest
import torch
from safetensors import safe_open
from stores import CHUNKS, KVS, blob_of, head_of, path_of

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import FORMAT_VERSION
from kvrag.kv import format
from kvrag.kv.format import Blob, Encoded
from kvrag.kv.layers import MAX_LAYERS, SCAN_BYTES
from kvrag.store import MemoryBlobs
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV, LayerKV

ME, KV = CHUNKS[1], KVS[1]
HALVES = [torch.float16, torch.bfloat16]


def read(raw, identity):
    """The chunk of a blob's bytes."""
    return Blob(lambda offset, length: raw[offset : offset + length], identity).load()


@pytest.fixture
def path(store, root):
    store.put(ME, KV, text=make_text("a"), doc_id="doc \ud800")
    return path_of(root, ME)


def test_a_blob_opens_as_a_plain_safetensors_file(path):
    with safe_open(path, framework="pt") as file:
        names = [f"layer.{i:03d}.{name}" for i in range(2) for name in ("keys", "values")]
        assert sorted(file.keys()) == names
        assert torch.equal(file.get_tensor("layer.001.keys"), KV.layers[1].keys)
        assert torch.equal(file.get_tensor("layer.001.values"), KV.layers[1].values)
        metadata = file.metadata()
    assert metadata["version"] == str(FORMAT_VERSION)
    assert metadata["context"] == ""
    assert b"doc" not in path.read_bytes(), "documents are in the catalog alone"
    assert make_text("a").digest.encode() not in path.read_bytes()


def test_data_starts_at_a_page_and_lies_layer_after_layer(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert (8 + length) % 4096 == 0
    places = json.loads(raw[8 : 8 + length])
    del places["__metadata__"]
    assert list(places) == [
        f"layer.{i:03d}.{name}" for i in range(2) for name in ("keys", "values")
    ]
    ends = [place["data_offsets"] for place in places.values()]
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert len(raw) == 8 + length + ends[-1][1]


def test_files_and_folders_are_private(path, root):
    for item in (root, *root.rglob("*")):
        mode = stat.S_IMODE(item.stat().st_mode)
        assert mode == (0o700 if item.is_dir() else 0o600), item


def test_the_same_chunk_gives_the_same_bytes():
    assert blob_of(ME, KV) == blob_of(ME, make_kv(ME))


def test_mixed_and_foreign_dtypes_are_refused(store):
    good, other = KV.layers[0], make_kv(ME, dtype=torch.float16).layers[0]
    for layers in ((good, other), (LayerKV(good.keys.double(), good.values.double()),)):
        with pytest.raises(StoreError, match="float32, float16 and bfloat16"):
            store.put(ME, ChunkKV(layers), text=None)


def test_a_header_that_could_not_be_read_is_not_written():
    identity = make_identity(tokens=format.MAX_HEADER_BYTES // 4)
    row = torch.zeros(1, len(identity.token_ids), 1, dtype=torch.float16)
    with pytest.raises(StoreError, match="split it"):
        Encoded(identity, ChunkKV((LayerKV(row, row),)))


def test_more_layers_than_the_format_has_are_not_written(store):
    kv = ChunkKV(KV.layers[:1] * MAX_LAYERS)
    store.put(ME, kv, text=None)
    assert same_bits(store.get(ME), kv)
    with pytest.raises(StoreError, match=f"at most {MAX_LAYERS}"):
        store.put(CHUNKS[2], ChunkKV(KV.layers[:1] * (MAX_LAYERS + 1)), text=None)


@pytest.mark.parametrize("step_bytes", [1, 40, 2**24])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (3000, 1), (1, 70_000)])
def test_layers_of_any_size_come_back(monkeypatch, sizes, step_bytes):
    """In one read or in many; not contiguous, too; layers may differ in heads and widths."""
    monkeypatch.setattr(format, "STEP_BYTES", step_bytes)
    strided = [
        (torch.randn(1, 3, sizes[0]), torch.randn(sizes[1] + 1, 3, 1).permute(2, 1, 0))
        for _ in range(5)
    ]
    layers = (KV.layers[0], *(LayerKV(keys, values) for keys, values in strided), KV.layers[1])
    raw = blob_of(ME, ChunkKV(layers))
    assert same_bits(
        read(raw, ME),
        ChunkKV(tuple(LayerKV(each.keys, each.values.contiguous()) for each in layers)),
    )


def test_layers_are_read_and_proven_one_by_one(monkeypatch):
    """From any ``read(offset, length)``: a damaged layer costs nothing before it, whatever is read ahead of it."""
    monkeypatch.setattr(format, "STEP_BYTES", 1)
    kv = ChunkKV(KV.layers * 2)
    raw, asked = bytearray(blob_of(ME, kv)), []
    start, layer = len(head_of(raw)), kv.layers[0].num_bytes
    raw[start + 2 * layer + 3] ^= 1

    def read_some(offset, length):
        asked.append((offset, length))
        return raw[offset : offset + length]

    layers = Blob(read_some, ME).layers()
    found = [next(layers), next(layers)]
    assert same_bits(ChunkKV(tuple(found)), ChunkKV(kv.layers[:2]))
    with pytest.raises(format.BlobRejected) as fault:
        next(layers)
    assert (fault.value.hole, fault.value.layer) == ("damaged", 2)
    assert set(asked[1:]) >= {(start + i * layer, layer) for i in range(3)}


# -- values that are not finite ------------------------------------------------------------------------------------------


def is_accepted(values):
    """Whether a chunk with these values can be stored."""
    try:
        list(
            Encoded(
                make_identity(tokens=1),
                ChunkKV((LayerKV(torch.zeros(1, 1, 1, dtype=values.dtype), values),)),
            )
        )
    except StoreError as error:
        return not re.search("values of layer 0 .* not finite", str(error))
    return True


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_number_is_judged_rightly(dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    is_finite = torch.isfinite(numbers)
    assert is_accepted(numbers[is_finite].reshape(1, 1, -1))
    judged = (is_accepted(number.reshape(1, 1, 1)) for number in numbers[~is_finite][::7])
    assert not any(judged)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
def test_one_bad_number_is_found_wherever_it_is(dtype, bad):
    values = torch.randn(1, 1, 1000).to(dtype)
    values[..., 7:10], values[..., 10] = torch.finfo(dtype).max, torch.finfo(dtype).min
    for place in (0, 1, 499, 998, 999):
        planted = values.clone()
        if bad is not None:
            planted[..., place] = bad
        assert is_accepted(planted) == (bad is None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_part_of_a_long_tensor_is_scanned(dtype):
    width = 2 * SCAN_BYTES // dtype.itemsize + 3
    for place in (0, width // 2 - 2, width // 2 - 1, width // 2, width - 1):
        values = torch.zeros(1, 1, width, dtype=dtype)
        values[..., place] = -float("nan")
        assert not is_accepted(values)


def test_a_blob_in_memory_is_the_same_as_in_a_file(path):
    blobs = MemoryBlobs()
    blobs.write("0" * 64, Encoded(ME, KV))
    assert bytes(blobs.read("0" * 64)) == path.read_bytes()
