"""Whatever a header or a reference says, it is read as what it is or refused; nothing else ever comes of it."""

import json
import struct

import pytest
import reader_target
from hypothesis import given, settings
from hypothesis import strategies as st
from kvrag.store.header import BlobRejected, decode
from protected import needs_cryptography

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blob, references
from kvrag.testing.chunks import make_identity, make_kv, make_text

ME = make_identity(1)
HEAD = bytearray(blob.plan(ME, make_kv(ME), text=make_text("a")).header.encode())
FIELDS = json.loads(HEAD[8:])
REFERENCE = references.ReferenceFile("namespace", "doc", make_text("a"), chunk_key(ME)).encode()

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def refused(head):
    try:
        header = decode(bytearray(head))
    except BlobRejected:
        return True
    assert header.encode() == head
    return False


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(HEAD) - 1), st.binary(max_size=40), st.integers(0, 40))
def test_spliced_headers(place, insert, drop):
    head = HEAD[:place] + insert + HEAD[place + drop :]
    assert head == HEAD or refused(head)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*FIELDS, *FIELDS["__metadata__"]]), values, st.booleans())
def test_headers_with_another_value(name, value, is_dropped):
    fields = {key: dict(each) for key, each in FIELDS.items()}
    place = fields if name in fields else fields["__metadata__"]
    before = place.pop(name)
    if not is_dropped:
        place[name] = value
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    assert value == before or refused(struct.pack("<Q", len(text)) + text)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_headers_of_noise(noise):
    assert refused(b"\0" * 8 + noise)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(REFERENCE) - 1), st.binary(max_size=20), st.integers(0, 20))
def test_spliced_references(place, insert, drop):
    content = REFERENCE[:place] + insert + REFERENCE[place + drop :]
    assert content == REFERENCE or references.decode(content) is None


NAMES = [
    *(name for name in reader_target.TARGETS if name not in reader_target.NEED_CRYPTOGRAPHY),
    *(pytest.param(name, marks=needs_cryptography) for name in reader_target.NEED_CRYPTOGRAPHY),
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_whatever_is_read_is_right_or_refused(name, data):
    """The targets of `make fuzz-reader`: headers, whole files, references and rows of the index, spliced, with keys and without."""
    seed = data.draw(st.sampled_from(reader_target.SEEDS[name]))
    place, drop = data.draw(st.integers(0, len(seed))), data.draw(st.integers(0, 40))
    reader_target.TARGETS[name](seed[:place] + data.draw(st.binary(max_size=40)) + seed[place + drop :])


SAID = [json.loads(seed[1:]) for seed in reader_target.SEEDS["header in order"]]
texts = st.tuples(st.text(max_size=3), *[st.integers(-(2**65), 2**65)] * 3).map(json.dumps)


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, len(SAID) - 1), st.data())
def test_headers_in_order_that_say_something_else_are_usable_or_refused(number, data):
    """Digest, MAC and encryption are those of the one who says it."""
    fields = {key: dict(each) for key, each in SAID[number].items()}
    place = fields[data.draw(st.sampled_from([*fields, *["__metadata__"] * 9]))]
    name = data.draw(st.sampled_from([*place]))
    place[name] = data.draw(texts if name == "text" else values)
    said = json.dumps(fields, separators=(",", ":")).encode()
    reader_target.TARGETS["header in order"](bytes([number]) + said)


@pytest.mark.parametrize("name", NAMES)
def test_the_targets_accept_what_is_sound(name):
    """A target that refuses everything would prove nothing."""
    assert all(reader_target.TARGETS[name](seed) for seed in reader_target.SEEDS[name] if seed[:5] != b"total")


@settings(max_examples=200, deadline=None)
@given(st.text(), st.text(), st.text())
def test_references_come_back(namespace, doc_id, text):
    file = references.ReferenceFile(namespace, doc_id, make_text("a"), chunk_key(ME))
    assert references.decode(file.encode()) == file
    other = (namespace, text, doc_id)
    assert (references.name_of(other) == references.name_of(file.reference)) == (other == file.reference)
