"""Headers that are in order to the last digest, and say what no reader may believe: anyone who can write can plant them."""

import json
import struct
import tracemalloc
from dataclasses import replace

import pytest
import xxhash
from stores import CHUNKS, KEYS, KVS, blob_of, fill, head_of, path_of

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import format
from kvrag.store.check import fsck
from kvrag.store.format import Blob, BlobRejected
from kvrag.store.layers import MAX_LAYERS
from kvrag.testing.chunks import make_kv, same_bits

ME = CHUNKS[1]


def in_order(raw, tensors=None, **said):
    """The blob with other things said in its header, digest and padding put in order."""
    head = json.loads(head_of(raw)[8:])
    metadata = {**head.pop("__metadata__"), **said}
    del metadata["header_digest"]
    dump = json.JSONEncoder(separators=(",", ":")).encode
    tail = dump(head if tensors is None else tensors)
    metadata["header_digest"] = xxhash.xxh3_128_hexdigest(dump(metadata).encode() + tail.encode())
    text = ('{"__metadata__":' + dump(metadata) + "," + tail[1:]).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text + raw[len(head_of(raw)) :]


def open_blob(raw, identity=None):
    return Blob(lambda offset, length: raw[offset : offset + length], identity)


@pytest.fixture
def raw():
    return blob_of(ME, KVS[1])


def test_what_is_in_order_and_true_is_believed(raw):
    assert in_order(raw) == raw
    assert open_blob(in_order(raw, prefix="other")).header.identity == replace(ME, prefix="other")


@pytest.mark.parametrize("field", ["model", "namespace", "prefix", "context"])
@pytest.mark.parametrize("value", [5, None, True, ["a"], {}, "\ud800"])
def test_a_name_that_has_no_key_is_refused(raw, field, value):
    with pytest.raises(BlobRejected):
        open_blob(in_order(raw, **{field: value}))


@pytest.mark.parametrize("prefix", [5, "\ud800", "other"])
def test_a_planted_header_keeps_no_store_from_being_used(store, root, prefix):
    fill(store, 1, 2)
    path = path_of(root, ME)
    path.write_bytes(in_order(path.read_bytes(), prefix=prefix))
    store.catalog.clear()
    assert store.get(ME) is None
    assert not store.link(ME, text=None, doc_id=None)
    assert fsck(store).checked <= 1
    assert store.link(CHUNKS[2], text=None, doc_id=None) is False, "fsck erased what was dormant"
    assert fill(store, 1, 2).catalog.keys() == sorted(KEYS[1:3])


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_kv_of_other_tokens_is_a_miss(store, root, raw, tokens):
    """The identity is right, and so are all digests; with so many rows nothing could be computed."""
    fill(store, 1)
    other = replace(ME, token_ids=ME.token_ids[:1] * tokens)
    token_ids = json.loads(head_of(raw)[8:])["__metadata__"]["token_ids"]
    path_of(root, ME).write_bytes(in_order(blob_of(other, make_kv(other)), token_ids=token_ids))
    assert store.get(ME) is None
    assert store.stats()["disk"].rejected == 1


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("keys", "shape", [2, 3, 0]),
        ("keys", "shape", [2, 3, 2**40]),
        ("keys", "shape", [2, 3, 4.0]),
        ("keys", "shape", [2, 3]),
        ("keys", "shape", [True, 3, 4]),
        ("keys", "shape", [-2, 3, -4]),
        ("values", "dtype", "F64"),
        ("values", "dtype", "BF16"),
        ("values", "data_offsets", [0, 48]),
        ("values", "data_offsets", [96, 97]),
    ],
)
def test_a_tensor_that_is_not_where_it_must_be_is_refused(raw, name, field, value):
    tensors = json.loads(head_of(raw)[8:])
    del tensors["__metadata__"]
    tensors[f"layer.000.{name}"][field] = value
    with pytest.raises(BlobRejected):
        open_blob(in_order(raw, tensors))


@pytest.mark.parametrize("change", ["missing", "more", "other order", "gap"])
def test_there_is_one_right_order_of_tensors(raw, change):
    tensors = json.loads(head_of(raw)[8:])
    del tensors["__metadata__"]
    names = list(tensors)
    if change == "missing":
        del tensors[names[-1]]
    elif change == "more":
        tensors["layer.002.keys"] = tensors[names[-1]]
    elif change == "other order":
        tensors = {name: tensors[name] for name in reversed(names)}
    else:
        tensors = {name.replace("001", "002"): tensor for name, tensor in tensors.items()}
    with pytest.raises(BlobRejected):
        open_blob(in_order(raw, tensors))


@pytest.mark.parametrize(
    "said",
    [
        {"layer_digests": "0" * 32},
        {"layer_digests": ",".join(["0" * 32] * (MAX_LAYERS + 1))},
        {"layer_digests": "x" * 32},
        {"token_ids": "AAAA!"},
        {"token_ids": "AAA="},
        {"token_ids": ""},
        {"kv_dtype": "int9"},
        {"dtype": "I8"},
        {"version": "04"},
        {"format": "other"},
        {"more": "than there is"},
    ],
)
def test_a_field_that_is_not_as_it_would_be_written_is_refused(raw, said):
    with pytest.raises(BlobRejected):
        open_blob(in_order(raw, **said))


def test_long_headers_leave_little_in_memory(raw):
    """The layout of a header is remembered, and hostile ones must not fill the memory."""
    long = [{"dtype": "F32", "shape": [1, 3, 1 + number], "data_offsets": [10**6, 10**7]} for number in range(10)]
    names = [f"layer.{i:03d}.{name}" for i in range(512) for name in ("keys", "values")]
    digests = ",".join(["0" * 32] * 512)
    heads = [in_order(raw, dict.fromkeys(names, tensor), layer_digests=digests) for tensor in long]
    format._shapes.cache_clear()
    tracemalloc.start()
    for head in heads:
        with pytest.raises(BlobRejected):
            open_blob(head)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 4 * len(heads[0])


def test_a_blob_says_whose_it_is_and_is_not_believed_elsewhere(store, root):
    fill(store, 1, 2)
    path_of(root, ME).write_bytes(path_of(root, CHUNKS[2]).read_bytes())
    assert store.identity(KEYS[1]) is None
    assert store.known([KEYS[1]]) == set()
    assert same_bits(store.get(CHUNKS[2]), KVS[2])
    assert chunk_key(open_blob(path_of(root, CHUNKS[2]).read_bytes()).header.identity) == KEYS[2]
