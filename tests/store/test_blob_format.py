import json
import stat
import struct

import pytest
import torch
from kvrag.store.header import MAX_HEADER_BYTES
from safetensors import safe_open

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import FORMAT_VERSION, chunk_key, content_key
from kvrag.store import blob
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV, LayerKV


@pytest.fixture
def path(disk, root):
    identity = make_identity()
    disk.put(identity, make_kv(identity), text=make_text("a"), doc_id="doc \ud800")
    key = chunk_key(identity)
    return root / "objects" / key[:2] / f"{key}.safetensors"


def test_a_blob_opens_as_a_plain_safetensors_file(path):
    kv = make_kv(make_identity())
    with safe_open(path, framework="pt") as file:
        names = [f"layer.{i:03d}.{name}" for i in range(2) for name in ("keys", "values")]
        assert sorted(file.keys()) == names
        assert torch.equal(file.get_tensor("layer.001.keys"), kv.layers[1].keys)
        assert torch.equal(file.get_tensor("layer.001.values"), kv.layers[1].values)
        metadata = file.metadata()
    assert metadata["version"] == str(FORMAT_VERSION)
    assert metadata["content"] == content_key(make_identity())
    assert "doc" not in "".join(metadata)


def test_data_starts_at_a_page_and_lies_layer_after_layer(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert (8 + length) % 4096 == 0
    places = json.loads(raw[8 : 8 + length])
    del places["__metadata__"]
    names = [f"layer.{i:03d}.{name}" for i in range(2) for name in ("keys", "values")]
    assert list(places) == names
    ends = [places[name]["data_offsets"] for name in names]
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert len(raw) == 8 + length + ends[-1][1]


def test_a_read_gives_views_of_one_buffer(disk):
    disk.put(make_identity(), make_kv(make_identity()), text=make_text("a"))
    kv, header = disk.objects.read(make_identity(), is_helped=False)
    tensors = [tensor for layer in kv.layers for tensor in (layer.keys, layer.values)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert tensors[0].untyped_storage().nbytes() == kv.num_bytes == header.num_bytes
    assert header.text == make_text("a")


def test_files_and_folders_are_private(disk, root, path):
    for item in (root, *root.rglob("*")):
        mode = stat.S_IMODE(item.stat().st_mode)
        assert mode == (0o700 if item.is_dir() else 0o600), item


def test_mixed_and_foreign_dtypes_are_refused(disk):
    identity = make_identity()
    good, other = make_kv(identity).layers[0], make_kv(identity, dtype=torch.float16).layers[0]
    for layers in ((good, other), (LayerKV(good.keys.double(), good.values.double()),)):
        with pytest.raises(StoreError, match="float32, float16 and bfloat16"):
            disk.put(identity, ChunkKV(layers), text=None)


def test_a_header_that_could_not_be_read_is_not_written():
    identity = make_identity(tokens=MAX_HEADER_BYTES // 4)
    row = torch.zeros(1, len(identity.token_ids), 1, dtype=torch.float16)
    with pytest.raises(StoreError, match="split it"):
        blob.plan(identity, ChunkKV((LayerKV(row, row),)), text=None)


def test_layers_may_differ_in_shape(disk):
    identity = make_identity()
    a, b = make_kv(identity).layers
    kv = ChunkKV((a, LayerKV(b.keys[:1], b.values[:1]), a))
    disk.put(identity, kv, text=None)
    assert same_bits(disk.get(identity), kv)
