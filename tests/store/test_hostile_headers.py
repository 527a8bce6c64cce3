"""Headers that are in order to the last digest, and say what no reader may believe: anyone who can write can plant them."""

import json
import shutil
import tracemalloc
from dataclasses import replace

import pytest
import torch
from kvrag.store.fsck import fsck
from kvrag.store.header import MAX_LAYERS, BlobRejected, Header, decode, frame, split
from kvrag.store.objects import place_of

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.prompt.spans import SpanIndex
from kvrag.store import DiskStore, places, references
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV

ME, OTHER = make_identity(1), make_identity(2)
CONFIG = StoreConfig(min_free_bytes=0)


def in_order(raw, **said):
    """The file with other things said in its header, digest and all."""
    start = 8 + int.from_bytes(raw[:8], "little")
    metadata, tensors = split(bytearray(raw[:start]))
    del metadata["header_digest"]
    return frame(metadata | said, tensors) + raw[start:]


@pytest.fixture
def planted(root):
    """Plant a file that says other things in a store beside a sound one, and lose the index."""

    def plant(**said):
        store = DiskStore(root, CONFIG)
        for me, name in ((ME, "a"), (OTHER, "b")):
            store.put(me, make_kv(me), text=make_text(name), doc_id=name)
        store.close()
        path = root.joinpath(*place_of(chunk_key(ME)))
        path.write_bytes(in_order(path.read_bytes(), **said))
        shutil.rmtree(root / "index")
        for file in (root / "references").rglob("*.json"):
            file.unlink()

    return plant


@pytest.mark.parametrize("prefix", [5, None, True, ["a"], {}, "\ud800"])
def test_a_prefix_that_has_no_key_keeps_no_store_from_being_opened(root, planted, prefix):
    planted(prefix=prefix)
    store = DiskStore(root, CONFIG)
    assert store.index.keys() == [chunk_key(OTHER)]
    assert fsck(store).checked == 1
    assert store.get(ME) is None
    assert same_bits(store.get(OTHER), make_kv(OTHER))
    store.close()


@pytest.mark.parametrize(
    "text",
    [
        ["a", 1, 2, 2**63],
        ["a", 1, 2, 10**4000],
        ["a", 2**64, 2, 40],
        ["a", 1, -1, 40],
        ["a", 1, 2, -1],
        ["\ud800", 1, 2, 40],
        ["a", 1.0, 2, 40],
    ],
)
def test_a_text_that_the_scanner_can_not_take_is_not_registered(root, planted, text):
    """It scans every prompt for all texts: one that it can't take would be the end of every answer."""
    planted(text=json.dumps(text))
    store = DiskStore(root, CONFIG)
    assert store.index.texts(NAMESPACE, 0)[0] == [make_text("b")]
    spans = SpanIndex()
    spans.add(map(store.keys.names.reveal, store.index.texts(NAMESPACE, 0)[0]))
    assert spans.scan("x" * 100) == []
    store.close()
    plain = references.ReferenceFile(NAMESPACE, "doc", make_text("a"), chunk_key(ME))
    assert references.decode(plain.encode()) == plain
    wrong = replace(plain, text=replace(plain.text, num_chars=2**63))
    assert references.decode(wrong.encode()) is None


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_kv_of_other_tokens_is_a_miss(root, tokens):
    """The identity is right, and so are all digests; with so many rows nothing could be computed."""
    store = DiskStore(root, CONFIG)
    store.put(ME, make_kv(ME), text=None)
    other = replace(ME, token_ids=ME.token_ids[:1] * tokens)
    store.put(other, make_kv(other), text=None)
    raw = root.joinpath(*place_of(chunk_key(other))).read_bytes()
    mine = root.joinpath(*place_of(chunk_key(ME)))
    metadata, _ = split(bytearray(mine.read_bytes()[: 8 + int.from_bytes(mine.read_bytes()[:8], "little")]))
    mine.write_bytes(in_order(raw, token_ids=metadata["token_ids"], content=metadata["content"]))
    assert store.get(ME) is None
    assert store.stats()["disk"].rejected == 1
    store.close()


def head_of(num_layers, number=0):
    """Header of so many layers that it is long."""
    shape = (1, 3, 1 + number)
    return Header(ME, torch.float32, ((shape, shape),) * num_layers, ("0" * 32,) * num_layers, None)


def test_many_layers_are_neither_written_nor_read(disk):
    most = head_of(MAX_LAYERS)
    assert decode(bytearray(most.encode())) == most
    with pytest.raises(BlobRejected):
        decode(bytearray(head_of(MAX_LAYERS + 1).encode()))
    layers = make_kv(ME).layers
    kv = ChunkKV(layers[:1] * MAX_LAYERS)
    disk.put(ME, kv, text=None)
    assert same_bits(disk.get(ME), kv)
    with pytest.raises(StoreError, match=f"at most {MAX_LAYERS}"):
        disk.put(OTHER, ChunkKV(layers[:1] * (MAX_LAYERS + 1)), text=None)


def test_long_headers_leave_little_in_memory():
    heads = [bytearray(head_of(4 * MAX_LAYERS, number).encode()) for number in range(10)]
    places.tensors_of.cache_clear()
    tracemalloc.start()
    for head in heads:
        with pytest.raises(BlobRejected):
            decode(head)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < len(heads[0])
