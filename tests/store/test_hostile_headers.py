"""Headers that are in order to the last digest, and say what no reader may believe: anyone who can write can plant them."""

import json
from dataclasses import replace

import pytest
import torch
from stores import CHUNKS, KEYS, KVS, blob_of, fill, head_of, in_order, path_of

from kvrag.cli.check import fsck
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.format import Blob, BlobRejected, Header
from kvrag.kv.layers import MAX_LAYERS
from kvrag.testing.chunks import make_kv, same_bits

ME = CHUNKS[1]


def said(raw, tensors=None, **changes):
    """The blob with other things said in its header, digest and padding put in order."""
    fields = json.loads(head_of(raw)[8:])
    metadata = {**fields.pop("__metadata__"), **changes}
    return (
        in_order({"__metadata__": metadata, **(fields if tensors is None else tensors)})
        + raw[len(head_of(raw)) :]
    )


def open_blob(raw, identity=None):
    return Blob(lambda offset, length: raw[offset : offset + length], identity)


@pytest.fixture
def raw():
    return blob_of(ME, KVS[1])


def test_what_is_in_order_and_true_is_believed(raw):
    assert said(raw) == raw
    assert open_blob(said(raw, prefix="other")).header.identity == replace(ME, prefix="other")


@pytest.mark.parametrize("field", ["model", "namespace", "prefix", "context"])
@pytest.mark.parametrize("value", [5, None, True, ["a"], {}, "\ud800"])
def test_a_name_that_has_no_key_is_refused(raw, field, value):
    with pytest.raises(BlobRejected):
        open_blob(said(raw, **{field: value}))


@pytest.mark.parametrize("prefix", [5, "\ud800", "other"])
def test_a_planted_header_keeps_no_store_from_being_used(store, root, prefix):
    fill(store, 1, 2)
    path = path_of(root, ME)
    path.write_bytes(said(path.read_bytes(), prefix=prefix))
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
    path_of(root, ME).write_bytes(said(blob_of(other, make_kv(other)), token_ids=token_ids))
    assert store.get(ME) is None
    assert store.stats()["disk"].rejected == 1


GOOD = ((2, 3, 4), (2, 3, 4))


@pytest.mark.parametrize(
    ("shapes", "digests"),
    [
        ((GOOD, ((2, 3, 0), (2, 3, 4))), 2),
        ((GOOD, ((-2, 3, -4), (2, 3, 4))), 2),
        ((GOOD, ((2, 3, 2**40), (2, 3, 4))), 2),
        ((GOOD,), 2),
        ((GOOD,) * 3, 2),
        ((GOOD,) * (MAX_LAYERS + 1), MAX_LAYERS + 1),
        ((), 0),
    ],
)
def test_layers_that_no_chunk_has_are_refused(shapes, digests):
    """The tensors agree with the shapes."""
    text = Header(ME, torch.float32, shapes, (bytes(16),) * digests).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    with pytest.raises(BlobRejected):
        open_blob(len(text).to_bytes(8, "little") + text)


def otherwise(tensors):
    """Yield tensors that are not those of two layers."""
    names = list(tensors)
    yield {name: tensors[name] for name in names[:-1]}
    yield {**tensors, "layer.002.keys": tensors[names[-1]]}
    yield {name: tensors[name] for name in reversed(names)}
    yield {name.replace("001", "002"): tensor for name, tensor in tensors.items()}
    fields = [
        ("shape", [2, 3, 4.0]),
        ("shape", [True, 3, 4]),
        ("shape", [3, 2, 4]),
        ("dtype", "BF16"),
    ]
    for field, value in (*fields, ("data_offsets", [0, 48]), ("data_offsets", [96, 97])):
        yield {**tensors, names[0]: {**tensors[names[0]], field: value}}


def test_there_is_one_right_place_of_each_tensor(raw):
    tensors = json.loads(head_of(raw)[8:])
    del tensors["__metadata__"]
    for other in otherwise(tensors):
        with pytest.raises(BlobRejected):
            open_blob(said(raw, other))


@pytest.mark.parametrize(
    "changes",
    [
        *({"layer_digests": said} for said in ("0" * 32, "0" * 66, "A" * 64, "x" * 32)),
        *({"token_ids": said} for said in ("AAAA!", "AQAAAB==", "AAA=", "")),
        *({"shapes": f"2,4,2,4;2,4,2{end}"} for end in ("", ",x", ",04", f",{'9' * 5000}")),
        {"shapes": "2,4,2,4;2,3,2,4", "kv_dtype": "int4"},
        {"kv_dtype": "int9"},
        {"dtype": "I8"},
        {"version": "04"},
        {"format": "other"},
        {"more": "than there is"},
    ],
)
def test_a_field_that_is_not_as_it_would_be_written_is_refused(raw, changes):
    with pytest.raises(BlobRejected):
        open_blob(said(raw, **changes))


def test_a_blob_says_whose_it_is_and_is_not_believed_elsewhere(store, root):
    fill(store, 1, 2)
    path_of(root, ME).write_bytes(path_of(root, CHUNKS[2]).read_bytes())
    assert store.identity(KEYS[1]) is None
    assert store.known([KEYS[1]]) == set()
    assert same_bits(store.get(CHUNKS[2]), KVS[2])
    assert chunk_key(open_blob(path_of(root, CHUNKS[2]).read_bytes()).header.identity) == KEYS[2]
