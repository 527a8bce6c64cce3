"""What keys protect: nothing is answered that was not written with them, and nothing of the keys or the documents can be read."""

import base64
import json
import logging
import shutil
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvrag.store.guard import Guard
from kvrag.store.header import BlobRejected
from kvrag.store.helpers import Helpers
from kvrag.store.objects import place_of
from protected import (
    CIPHER,
    EVERY,
    MAC,
    OPTIONS,
    PROVING,
    SECRET,
    WITH_CIPHER,
    config_of,
    identity_of,
    names_of,
    needs_cryptography,
    path_of,
)
from safetensors import safe_open

from kvrag.config import StoreConfig
from kvrag.errors import ConfigError, MissingDependencyError
from kvrag.identity.fingerprint import chunk_key, ids_bytes
from kvrag.store import DiskStore, foreign
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.testing.store import StoreContract
from kvrag.types import TextEntry

DOCUMENT = "Ärzte-Akte Kardiologie-4711"
PLAIN_PART = b"Kardiologie-4711"  # in every encoding; too long to turn up among digests and times by chance


@pytest.fixture
def opened(root):
    """Opens stores with a kind of protection in one directory, and closes them."""
    stores = []

    def open_(kind="plain", **options):
        stores.append(DiskStore(root, config_of(kind, **options)))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def put(store, kind, number=0, *, doc_id=DOCUMENT, tokens=3):
    """Store a small chunk as an engine would, and return its identity."""
    me = identity_of(kind, number, tokens=tokens)
    assert store.put(me, make_kv(me), text=names_of(kind).hide(make_text(f"text {number}")), doc_id=doc_id) > 0
    return me


# -- the contract ------------------------------------------------------------------------------------------------------


class TestSignedStore(StoreContract):
    def make_store(self, directory):
        return DiskStore(directory, config_of("mac", durability="cache"))


@needs_cryptography
class TestEncryptedStore(StoreContract):
    def make_store(self, directory):
        return DiskStore(directory, config_of("cipher", durability="cache"))


@needs_cryptography
class TestStoreWithAllKeysOnSqlite(StoreContract):
    dtype = torch.bfloat16

    def make_store(self, directory):
        return DiskStore(directory, config_of("all", index="sqlite", durability="cache"))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("index", ["diskcache", "sqlite"])
def test_a_store_is_whole_when_it_is_opened_again_and_when_its_index_is_lost(opened, root, kind, index):
    first = opened(kind, index=index)
    me, kv = put(first, kind), make_kv(identity_of(kind))
    texts = first.index.texts(me.namespace, 0)[0]
    first.close()
    for lose_index in (False, True):
        if lose_index:
            [folder] = root.glob("index*")
            shutil.rmtree(folder)
        for read_only in (False, True):
            store = opened(kind, index=index, read_only=read_only)
            assert same_bits(store.get(me), kv)
            assert store.index.documents(me.namespace) == [DOCUMENT]
            assert store.index.document_keys(me.namespace, DOCUMENT) == [chunk_key(me)]
            assert store.index.texts(me.namespace, 0)[0] == texts == [names_of(kind).hide(make_text("text 0"))]
            assert store.stats()["disk"].chunks == 1
            store.close()
    store = opened(kind, index=index)
    assert store.forget(me.namespace, DOCUMENT) == 1
    assert [p for p in root.rglob("*") if p.suffix in (".safetensors", ".json") and p.name != "format.json"] == []


@pytest.mark.parametrize("kind", PROVING)
def test_layers_stream_one_by_one(opened, kind):
    store = opened(kind)
    me = put(store, kind)
    with store.stream(me) as layers:
        for found, layer in zip(layers, make_kv(me).layers, strict=True):
            assert torch.equal(found.keys, layer.keys)
            assert torch.equal(found.values, layer.values)


@pytest.mark.parametrize("kind", PROVING)
def test_a_stream_ends_before_the_first_layer_that_is_not_proven(opened, root, kind):
    store = opened(kind)
    me = put(store, kind)
    flip(path_of(root, me), -1)  # in the last layer
    with store.stream(me) as layers:
        assert len(list(layers)) == 1
    assert [p.name for p in (root / "quarantine").iterdir()] == [path_of(root, me).name]


@needs_cryptography
def test_memory_that_is_short_while_a_chunk_is_decrypted_is_a_miss_and_not_the_files_fault(opened, monkeypatch):
    store = opened("cipher")
    me = put(store, "cipher")

    def refuse(*args, **options):
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvrag.store.blob.torch", SimpleNamespace(empty=refuse, uint8=torch.uint8))
        assert store.get(me) is None
        assert list(store.stream(me)) == []
    assert same_bits(store.get(me), make_kv(me))
    assert store.stats()["disk"].rejected == 0


@pytest.mark.parametrize("piece_bytes", [1, 7, 10**6])
@pytest.mark.parametrize("kind", PROVING)
def test_every_byte_of_what_other_keys_protect_is_checked(opened, root, kind, piece_bytes, monkeypatch):
    monkeypatch.setattr(foreign, "PIECE_BYTES", piece_bytes)
    store = opened(kind)
    place = place_of(chunk_key(put(store, kind)))
    foreign.check(store.directory, *place, data=True)
    good = root.joinpath(*place).read_bytes()
    start = 8 + struct.unpack("<Q", good[:8])[0]
    for at in range(start, len(good)):
        root.joinpath(*place).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(BlobRejected):
            foreign.check(store.directory, *place, data=True)


@pytest.mark.parametrize("kind", PROVING)
def test_large_chunks_are_read_by_several_threads(opened, kind, monkeypatch):
    monkeypatch.setattr("kvrag.store.reader.HELPED_BYTES", 0)
    monkeypatch.setattr("kvrag.store.reader.HELPERS", Helpers(2))
    store = opened(kind)
    me = identity_of(kind, tokens=8)
    kv = make_kv(me, layers=12)
    store.put(me, kv, text=None)
    failures = []

    def read():
        failures.extend(None for _ in range(20) if not same_bits(store.get(me), kv))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- isolation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", ["plain", *EVERY])
@pytest.mark.parametrize("namespace", ["default", "other"])
def test_a_chunk_is_found_with_its_own_keys_and_namespace_alone(opened, mine, namespace):
    """The same tokens in one directory, by every set of keys and two namespaces."""
    store = opened(mine)
    me = identity_of(mine, namespace=namespace)
    store.put(me, make_kv(me), text=None)
    store.close()
    for kind in ("plain", *(p if isinstance(p, str) else p.values[0] for p in EVERY)):
        if "cipher" in kind or kind == "all":
            pytest.importorskip("cryptography")
        for name in ("default", "other"):
            store = opened(kind)
            found = store.get(identity_of(kind, namespace=name))
            assert (found is not None) == ((kind, name) == (mine, namespace))
            store.close()


def test_two_secrets_share_nothing(opened, root):
    other = StoreConfig(namespace_secret=lambda: MAC)
    store = opened("secret")
    me = put(store, "secret")
    from kvrag.store.keys import Keys

    theirs = Keys.of(other).names
    assert theirs.namespace("default") != me.namespace
    with_other = DiskStore(root, other)
    assert with_other.get(make_identity(namespace=theirs.namespace("default"))) is None
    assert with_other.index.documents(theirs.namespace("default")) == []
    assert with_other.index.texts(theirs.namespace("default"), 0)[0] == []
    with_other.close()


# -- wrong and missing keys --------------------------------------------------------------------------------------------

WRONG = {
    "plain": {},
    "another mac key": {"mac_key": lambda: SECRET},
    "another cipher key": {"encryption_key": lambda: SECRET},
    "mac": OPTIONS["mac"],
    "cipher": OPTIONS["cipher"],
}


@pytest.mark.parametrize("kind", PROVING)
@pytest.mark.parametrize("wrong", WRONG)
def test_other_keys_find_nothing_and_harm_nothing(opened, root, kind, wrong, caplog):
    """Not even when they are asked for the very chunk: a wrong key must not cost anybody a good store."""
    if wrong == kind:
        return
    if "cipher" in wrong:
        pytest.importorskip("cryptography")
    store = opened(kind)
    me = put(store, kind)
    store.close()
    before = path_of(root, me).read_bytes()
    with caplog.at_level(logging.WARNING):
        other = DiskStore(root, StoreConfig(min_free_bytes=0, **WRONG[wrong]))
        for _ in range(3):
            assert other.get(me) is None
            assert other.stream(me) is None
            assert other.get_many([me], timeout_s=30) == [None]
        other.close()
    assert path_of(root, me).read_bytes() == before
    assert list((root / "quarantine").iterdir()) == []
    assert sum("not protected by the keys" in message for message in caplog.messages) == 1
    store = opened(kind)
    assert same_bits(store.get(me), make_kv(me))
    assert store.index.documents(me.namespace) == [DOCUMENT]


def test_a_config_whose_key_is_missing_opens_nothing(root, monkeypatch):
    monkeypatch.delenv("KVRAG_TEST_KEY", raising=False)
    for option in ("namespace_secret", "mac_key", "encryption_key"):
        with pytest.raises(ConfigError, match="KVRAG_TEST_KEY"):
            DiskStore(root, StoreConfig(**{option: "env:KVRAG_TEST_KEY"}))
    assert not root.exists()


def test_without_the_package_encryption_names_the_extra_and_writes_nothing(root, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(MissingDependencyError, match=r"encryption of the KV store.*kvrag\[crypto\]"):
        DiskStore(root, config_of("cipher"))
    assert not root.exists()
    DiskStore(root, config_of("mac")).close()


# -- forgery -----------------------------------------------------------------------------------------------------------


def flip(path, place, mask=1):
    raw = bytearray(path.read_bytes())
    raw[place] ^= mask
    path.write_bytes(raw)


def assert_miss(store, identity):
    """Reading gives nothing, and what is computed anew takes the place."""
    assert store.get(identity) is None
    assert store.put(identity, make_kv(identity), text=None) > 0
    assert same_bits(store.get(identity), make_kv(identity))


@pytest.mark.parametrize("kind", PROVING)
@pytest.mark.parametrize("planted", ["plain", "mac", "cipher", "other key"])
def test_a_file_that_was_not_written_with_the_keys_is_a_miss(opened, root, tmp_path, kind, planted):
    """Downgrade: whoever can write to the directory puts a sound file in the place of a protected one."""
    if planted == kind:
        return
    if planted == "cipher":
        pytest.importorskip("cryptography")
    store = opened(kind)
    me = put(store, kind)
    config = config_of(planted) if planted != "other key" else StoreConfig(mac_key=lambda: SECRET, min_free_bytes=0)
    forger = DiskStore(tmp_path / "forged", config)
    forged = make_kv(identity_of("plain", 7))
    forger.put(me, forged, text=None)
    assert same_bits(forger.get(me), forged)
    forger.close()
    shutil.copy(path_of(tmp_path / "forged", me), path_of(root, me))
    assert_miss(store, me)


@pytest.mark.parametrize("kind", PROVING)
def test_a_chunks_file_in_the_place_of_another_one_is_a_miss(opened, root, kind):
    store = opened(kind)
    me, other = put(store, kind), put(store, kind, 1)
    shutil.copy(path_of(root, other), path_of(root, me))
    assert_miss(store, me)


def parts_of(path):
    """Header fields, and data, of a blob."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def rewrite(path, fields, data):
    """Write a blob whose header has the right digest of itself, as whoever knows the format can."""
    from kvrag.store.header import frame
    from kvrag.store.places import dump

    marks = dict(fields.pop("__metadata__"))
    marks.pop("header_digest")
    mac = marks.pop("header_mac", None)
    path.write_bytes(frame(marks, dump(fields), None if mac is None else lambda _: mac) + data)


@pytest.mark.parametrize("kind", PROVING)
def test_swapped_layers_are_a_miss(opened, root, kind):
    """With their digests, tags and everything else that stands in clear."""
    store = opened(kind)
    me = put(store, kind)
    fields, data = parts_of(path_of(root, me))
    half = len(data) // 2
    for name in ("layer_digests", "layer_sums", "layer_tags"):
        if name in fields["__metadata__"]:
            fields["__metadata__"][name] = ",".join(reversed(fields["__metadata__"][name].split(",")))
    rewrite(path_of(root, me), fields, data[half:] + data[:half])
    assert_miss(store, me)


@pytest.mark.parametrize("kind", PROVING)
def test_layers_of_the_same_chunk_written_at_another_time_are_a_miss(opened, root, kind):
    """Every part of a file must be of one writing; where the bytes are the same again, so is the file."""
    store = opened(kind)
    me = put(store, kind)
    old = parts_of(path_of(root, me))
    store.delete([chunk_key(me)])
    changed = make_kv(identity_of(kind, 9))
    store.put(me, changed, text=None)
    new = parts_of(path_of(root, me))
    rewrite(path_of(root, me), new[0], old[1])
    assert store.get(me) is None
    store.put(me, changed, text=None)
    rewrite(path_of(root, me), old[0], new[1])
    assert store.get(me) is None


@pytest.mark.parametrize("kind", PROVING)
@pytest.mark.parametrize(
    "name",
    [
        "version",
        "key",
        "cipher",
        "cipher_key",
        "salt",
        "layer_tags",
        "sealed",
        "mac_key",
        "layer_sums",
        "layer_digests",
        "token_ids",
    ],
)
def test_no_field_of_a_header_can_be_changed(opened, root, kind, name):
    """Even where the digests are made right again."""
    store = opened(kind)
    me = put(store, kind)
    fields, data = parts_of(path_of(root, me))
    if name not in fields["__metadata__"]:
        return
    value = fields["__metadata__"][name]
    fields["__metadata__"][name] = value[:-1] + ("0" if value[-1] != "0" else "1")
    rewrite(path_of(root, me), fields, data)
    assert_miss(store, me)


@pytest.mark.parametrize("kind", PROVING)
@pytest.mark.parametrize("name", ["mac_key", "layer_sums", "header_mac", "cipher", "layer_tags"])
def test_no_protection_can_be_left_out(opened, root, kind, name):
    store = opened(kind)
    me = put(store, kind)
    fields, data = parts_of(path_of(root, me))
    if fields["__metadata__"].pop(name, None) is None:
        return
    rewrite(path_of(root, me), fields, data)
    assert_miss(store, me)


@pytest.mark.parametrize("kind", PROVING)
def test_forged_data_with_right_digests_is_a_miss(opened, root, kind):
    """The digests of plain stores find damage; these find whoever computes them anew."""
    import hashlib

    import xxhash

    store = opened(kind)
    me = put(store, kind)
    fields, data = parts_of(path_of(root, me))
    half = len(data) // 2
    forged = bytes(half) + data[half:]
    marks = fields["__metadata__"]
    marks["layer_digests"] = ",".join(xxhash.xxh3_128_hexdigest(part) for part in (forged[:half], forged[half:]))
    if "layer_sums" in marks:
        marks["layer_sums"] = ",".join(hashlib.sha256(part).hexdigest() for part in (forged[:half], forged[half:]))
    rewrite(path_of(root, me), fields, forged)
    assert_miss(store, me)


@pytest.mark.parametrize("kind", PROVING)
def test_truncated_and_extended_files_are_misses(opened, root, kind):
    store = opened(kind)
    me = put(store, kind)
    path = path_of(root, me)
    raw = path.read_bytes()
    for bad in (*(raw[:length] for length in range(0, len(raw), 211)), raw[:-1], raw + b"\0"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bad)
        assert store.get(me) is None


@pytest.mark.parametrize("kind", PROVING)
def test_every_flipped_bit_of_the_data_and_any_of_the_header_is_a_miss(tmp_path, kind):
    store = DiskStore(tmp_path / "store", config_of(kind, durability="cache"))
    me = put(store, kind, tokens=1)
    path = path_of(tmp_path / "store", me)
    raw = path.read_bytes()

    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(st.integers(0, len(raw) - 1), st.integers(0, 7))
    def flipped(place, bit):
        bad = bytearray(raw)
        bad[place] ^= 1 << bit
        path.write_bytes(bad)
        assert store.get(me) is None

    flipped()
    start = len(raw) - make_kv(me).num_bytes
    for place in range(start, len(raw)):
        path.write_bytes(raw)
        flip(path, place, 1 << place % 8)
        assert store.get(me) is None
    path.write_bytes(raw)
    assert same_bits(store.get(me), make_kv(me))
    store.close()


@pytest.mark.parametrize("kind", PROVING)
@settings(max_examples=100, deadline=None)
@given(noise=st.binary(max_size=300), fields=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_headers_of_noise_are_refused_and_nothing_else(kind, noise, fields):
    from kvrag.store.header import BlobRejected, pad
    from kvrag.store.keys import Keys

    guard = Guard.of(Keys.of(config_of(kind)))
    marks = {"format": "kvrag", "version": "3", "mac_key": guard.ids[0], "cipher_key": guard.ids[1], **fields}
    said = {"__metadata__": {name: value for name, value in marks.items() if value is not None}}
    for head in (b"\0" * 8 + noise, pad(json.dumps(said).encode())):
        with pytest.raises(BlobRejected):
            guard.decode(bytearray(head))


# -- what can be seen ----------------------------------------------------------------------------------------------------


def everything_in(root):
    """Names and bytes of all files of a store."""
    return b"\n".join(
        str(p.relative_to(root)).encode() + (p.read_bytes() if p.is_file() else b"") for p in root.rglob("*")
    )


def forms_of(value):
    """How bytes may be written down: as they are, in hex, in base64 at any offset."""
    inner = [base64.b64encode(b"\0" * pad + value)[4:-4] for pad in range(3)]
    return [value, value.hex().encode(), *(form for form in inner if len(form) >= 12)]


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("index", ["diskcache", "sqlite"])
def test_no_key_is_ever_on_the_disk(opened, root, kind, index):
    store = opened(kind, index=index, event_log=str(root / "events"))
    me = put(store, kind)
    assert store.get(me) is not None
    seen = everything_in(root)
    store.close()
    seen += everything_in(root)
    keys = [
        SECRET,
        MAC,
        CIPHER,
        *filter(None, (store.keys.mac, store.keys.cipher, store.keys.names.address, store.keys.names.text)),
    ]
    if store.keys.cipher is not None:
        raw = parts_of(path_of(root, me))[0]["__metadata__"]
        keys.append(store.objects.guard._key(raw["key"], bytes.fromhex(raw["salt"])))
    assert [form for key in keys for form in forms_of(key) if form in seen] == []


def traces_of(me, kind):
    """What a document could be recognised by in a store."""
    text = make_text("text 0")
    kv = make_kv(me).layers[0].keys.numpy().tobytes()
    numbers = [str(value).encode() for value in (text.head, text.tail)]
    names = [DOCUMENT.encode(), json.dumps(DOCUMENT).encode(), PLAIN_PART, text.digest.encode()]
    digests = [me.namespace.encode(), me.namespace.rpartition(":")[2].encode()]
    return [
        *names,
        *numbers,
        *digests,
        *forms_of(ids_bytes(me.token_ids)),
        *forms_of(kv[:24]),
        b"token_ids",
        me.prefix.encode() * 2,
    ]


@pytest.mark.parametrize("kind", WITH_CIPHER)
@pytest.mark.parametrize("index", ["diskcache", "sqlite"])
def test_nothing_of_a_document_can_be_read_in_an_encrypted_store(opened, root, kind, index):
    store = opened(kind, index=index)
    me = put(store, kind, tokens=16)
    seen = everything_in(root)
    store.close()
    seen += everything_in(root)
    assert [trace for trace in traces_of(me, kind) if trace in seen] == []


def test_the_scan_finds_what_a_plain_store_shows(opened, root):
    """Otherwise the test above would prove nothing."""
    store = opened("plain")
    me = put(store, "plain", tokens=16)
    store.close()
    seen = everything_in(root)
    found = [trace for trace in traces_of(me, "plain") if trace in seen]
    for trace in (
        PLAIN_PART,
        make_text("text 0").digest.encode(),
        str(make_text("text 0").head).encode(),
        b"token_ids",
    ):
        assert trace in found
    assert any(form in found for form in forms_of(ids_bytes(me.token_ids)))
    assert any(form in found for form in forms_of(make_kv(me).layers[0].keys.numpy().tobytes()[:24]))


def test_a_secret_hides_names_of_namespaces_and_texts(opened, root):
    store = opened("secret")
    put(store, "secret")
    store.close()
    seen, text = everything_in(root), make_text("text 0")
    from kvrag.identity.fingerprint import namespace_digest

    for trace in (text.digest, str(text.head), str(text.tail), namespace_digest("default").partition(":")[2]):
        assert trace.encode() not in seen


@pytest.mark.parametrize("kind", WITH_CIPHER)
def test_an_encrypted_blob_opens_as_a_plain_safetensors_file(opened, root, kind):
    store = opened(kind)
    me = put(store, kind)
    with safe_open(path_of(root, me), framework="pt") as file:
        assert sorted(file.keys()) == ["layer.000", "layer.001"]
        layer = file.get_tensor("layer.001")
        metadata = file.metadata()
    assert layer.dtype == torch.uint8
    assert len(layer) == make_kv(me).layers[1].num_bytes
    assert metadata["key"] == chunk_key(me)
    assert set(metadata) - {"mac_key", "layer_sums", "header_mac"} == {
        *("format", "version", "key", "cipher", "cipher_key", "salt", "layer_digests", "layer_tags", "sealed"),
        "header_digest",
    }


def test_a_signed_blob_opens_as_a_plain_safetensors_file(opened, root):
    store = opened("mac")
    me = put(store, "mac")
    with safe_open(path_of(root, me), framework="pt") as file:
        assert torch.equal(file.get_tensor("layer.001.keys"), make_kv(me).layers[1].keys)


@needs_cryptography
def test_no_nonce_comes_twice_under_one_key(opened, monkeypatch):
    """What is given to the cipher itself is looked at, while the same chunks are stored again and again."""
    from cryptography.hazmat.primitives.ciphers import algorithms, modes

    keys, nonces, real = [], [], (algorithms.AES, modes.GCM)
    monkeypatch.setattr(algorithms, "AES", lambda key: keys.append(bytes(key)) or real[0](key))
    monkeypatch.setattr(
        modes, "GCM", lambda nonce, *rest, **more: nonces.append(nonce) or real[1](nonce, *rest, **more)
    )
    store = opened("cipher")
    for _ in range(3):
        mine = [put(store, "cipher", number) for number in range(20)]
        store.delete([chunk_key(me) for me in mine])
    used = list(zip(keys, nonces, strict=True))
    assert len(used) == 60 * 3, "two layers and a header each"
    assert len(set(used)) == len(used), "a key and a nonce came twice"


@needs_cryptography
def test_the_same_chunk_is_never_the_same_bytes(opened, root):
    store = opened("cipher")
    seen = set()
    for _ in range(3):
        me = put(store, "cipher")
        seen.add(parts_of(path_of(root, me))[1])
        store.delete([chunk_key(me)])
    assert len(seen) == 3


@needs_cryptography
def test_rows_and_references_of_others_are_absent(opened, root):
    """Values moved to other rows, references under other names, and what a plain store would have written."""
    store = opened("cipher", index="sqlite")
    me = put(store, "cipher")
    put(store, "cipher", 1, doc_id="other")
    files = sorted(p for p in (root / "references").rglob("*.json"))
    a, b = (p.read_bytes() for p in files)
    files[0].write_bytes(b)
    files[1].write_bytes(a)
    assert [store.references.read(p.stem) for p in files] == [None, None]
    store.close()

    import sqlite3
    from contextlib import closing

    [path] = root.glob("index-*/rows.db")
    with closing(sqlite3.connect(path)) as database:
        table, (name, value) = _columns(database)
        rows = dict(database.execute(f"SELECT {name}, {value} FROM {table} WHERE {name} LIKE 'key %'").fetchall())
        (one, _), (two, of_two) = rows.items()
        with database:
            database.execute(f"UPDATE {table} SET {value} = ? WHERE {name} = ?", (of_two, one))
            database.execute(f"UPDATE {table} SET {value} = ? WHERE {name} = ?", (json.dumps({"num_tokens": 1}), two))
    store = opened("cipher", index="sqlite")
    assert store.rows.get(chunk_key(me)) is None
    assert same_bits(store.get(me), make_kv(me))  # its file says all
    assert store.rows.get(chunk_key(me)) is not None


def _columns(database):
    [(table,)] = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return table, [row[1] for row in database.execute(f"PRAGMA table_info({table})")][:2]


# -- the cost of nothing -------------------------------------------------------------------------------------------------


def test_without_keys_nothing_of_this_is_used(opened, root):
    store = opened("plain")
    me = put(store, "plain")
    assert store.objects.guard is None
    assert store.rows._seal is None
    assert set(parts_of(path_of(root, me))[0]["__metadata__"]) == {
        *("format", "version", "model", "namespace", "prefix", "token_ids", "content", "layer_digests", "text"),
        "header_digest",
    }
    assert sorted(p.name for p in root.iterdir() if p.name.startswith("index")) == ["index"]


def test_entries_of_texts_survive_every_protection():
    entry = TextEntry("ab" * 32, 2**64 - 1, 0, 77)
    names = names_of("secret")
    revealed = names.reveal(names.hide(entry))
    assert (revealed.head, revealed.tail, revealed.num_chars) == (2**64 - 1, 0, 77)
