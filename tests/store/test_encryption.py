"""What a key protects: nothing of a document can be read, other keys find nothing and harm nothing, and no key gets out."""

import json
import logging
import shutil
import sqlite3
import struct
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from stores import (
    CHUNKS,
    EVERY_KEY,
    SECRETS,
    blob_of,
    config_of,
    everything_in,
    fill,
    forms_of,
    listing,
    needs_cryptography,
    path_of,
    present,
    put,
    traces_of,
)

from kvrag.errors import ConfigError, MissingDependencyError, StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.crypto import derive
from kvrag.store import Keys, open_store
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

pytestmark = needs_cryptography

DOCUMENT = "Ärzte-Akte Kardiologie-4711"
TEXT = make_text("text")


def identity_of(key, number=0, *, tokens=16, namespace="default"):
    """Identity of a chunk as an engine with this key calls it."""
    names = Keys.of(config_of(key))
    return make_identity(number, namespace=names.namespace(namespace), tokens=tokens)


@pytest.fixture
def filled(opened):
    """Fill a store with a document, and return the chunk's identity; the store stays open."""

    def fill(key):
        store, me = opened(key=key), identity_of(key)
        store.put(me, make_kv(me), text=TEXT, doc_id=DOCUMENT)
        return store, me

    return fill


@pytest.mark.parametrize("key", [None, "cipher"])
def test_nothing_of_a_document_can_be_read_in_an_encrypted_store(filled, root, key):
    store, me = filled(key)
    store.get(me)
    seen = everything_in(root)
    store.close()
    seen += everything_in(root)
    plain = replace(me, namespace=NAMESPACE)
    traces = [
        *traces_of(plain, make_kv(me), TEXT, DOCUMENT),
        b"token_ids",
        b"Kardiologie",
        me.prefix.encode() * 2,
    ]
    found = [trace for trace in traces if trace in seen]
    if key is not None:
        assert found == []
    else:  # otherwise the test would prove nothing
        assert len(found) >= 7


def test_no_key_is_ever_on_the_disk_nor_in_a_log(filled, root, opened, caplog):
    with caplog.at_level(logging.DEBUG):
        store, me = filled("cipher")
        assert opened(key="wrong").get(me) is None
        store.close()
    secrets = [
        SECRETS["cipher"],
        store.names.cipher,
        store.names.address,
        derive(store.names.cipher, "rows 1"),
    ]
    with safe_open(path_of(root, me), framework="pt") as file:
        salt = bytes.fromhex(file.metadata()["salt"])
    secrets.append(derive(store.names.cipher, f"blob {chunk_key(me)}", salt=salt))
    seen = (
        everything_in(root)
        + caplog.text.encode()
        + repr(store.config).encode()
        + repr(store.names).encode()
    )
    assert [form for secret in secrets for form in forms_of(secret) if form in seen] == []


def test_an_encrypted_blob_opens_as_a_plain_safetensors_file(filled, root):
    _, me = filled("cipher")
    with safe_open(path_of(root, me), framework="pt") as file:
        assert sorted(file.keys()) == ["layers"]
        layers, metadata = file.get_tensor("layers"), file.metadata()
    assert (layers.dtype, len(layers)) == (torch.uint8, make_kv(me).num_bytes)
    assert metadata["key"] == chunk_key(me)
    assert set(metadata) == {"format", "version", "cipher_key", "key", "salt", "sealed"}


def test_no_nonce_comes_twice_under_one_key(opened, monkeypatch):
    """What is given to the cipher itself is looked at, while the same chunks are stored again and again."""
    from cryptography.hazmat.primitives.ciphers import algorithms, modes

    keys, nonces, real = [], [], (algorithms.AES, modes.GCM)
    monkeypatch.setattr(algorithms, "AES", lambda key: keys.append(bytes(key)) or real[0](key))
    monkeypatch.setattr(
        modes,
        "GCM",
        lambda nonce, *rest, **more: nonces.append(nonce) or real[1](nonce, *rest, **more),
    )
    store = opened(key="cipher")
    for _ in range(3):
        fill(store, *range(12))
        store.clear()
    used = list(zip(keys, nonces, strict=True))
    assert len(used) == 36 * 4, "a header to know its length, then two layers and the header"
    assert len(set(used)) == len(used), "a key and a nonce came twice"


def test_the_same_chunk_is_never_the_same_bytes(filled, root):
    seen = set()
    for _ in range(3):
        store, me = filled("cipher")
        seen.add(path_of(root, me).read_bytes()[-100:])
        store.clear()
    assert len(seen) == 3


# -- isolation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [None, "cipher", "wrong"])
@pytest.mark.parametrize("namespace", ["default", "other"])
def test_a_chunk_is_found_with_its_own_key_and_namespace_alone(opened, mine, namespace):
    me = identity_of(mine, namespace=namespace)
    store = opened(key=mine)
    store.put(me, make_kv(me), text=TEXT, doc_id=DOCUMENT)
    for key in (None, "cipher", "wrong"):
        for name in ("default", "other"):
            is_owner = (key, name) == (mine, namespace)
            other, space = opened(key=key), Keys.of(config_of(key)).namespace(name)
            assert (other.get(identity_of(key, namespace=name)) is not None) == is_owner
            assert other.catalog.documents(space) == [DOCUMENT] * is_owner
            assert other.catalog.texts(space, 0)[0] == [TEXT] * is_owner
            assert len(other.identities(space, TEXT.digest)) == is_owner


@pytest.mark.parametrize("mine", [None, "cipher"])
@pytest.mark.parametrize("other", [None, "cipher", "wrong"])
def test_other_keys_find_nothing_and_harm_nothing(filled, opened, root, mine, other):
    """Not even when they are asked for the very chunk, or erase all that they can: a wrong key must not cost a good store."""
    if mine == other:
        return
    store, me = filled(mine)
    store.release()
    before = listing(root / "objects")
    wrong = opened(key=other)
    assert wrong.get(me) is None
    assert not wrong.link(me, text=TEXT, doc_id=DOCUMENT)
    assert wrong.identities(me.namespace, TEXT.digest) == []
    assert wrong.delete([chunk_key(make_identity(7))]) == 0
    assert wrong.forget(me.namespace, DOCUMENT) == 0
    assert wrong.clear(me.namespace) == 0
    assert wrong.clear() == 0
    assert listing(root / "objects") == before
    assert same_bits(store.get(me), make_kv(me))
    assert store.catalog.documents(me.namespace) == [DOCUMENT]


def test_each_key_has_a_catalog_of_its_own_and_none_counts_as_damaged(filled, root):
    for key in (None, "cipher", "wrong"):
        filled(key)
    assert len(list(root.glob("catalog*"))) == 3
    assert list(root.glob("*.damaged")) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_an_encrypted_store_is_whole_when_it_is_opened_again(filled, opened, read_only):
    store, me = filled("cipher")
    store.close()
    again = opened(key="cipher", read_only=read_only, ram_bytes=0)
    assert same_bits(again.get(me), make_kv(me))
    assert again.catalog.documents(me.namespace) == [DOCUMENT]
    assert again.catalog.document_keys(me.namespace, DOCUMENT) == [chunk_key(me)]
    assert again.catalog.texts(me.namespace, 0)[0] == [TEXT]


def test_rows_that_were_moved_or_written_by_others_are_absent(filled, opened, root):
    """Values of other rows, and what a store without the key would have written."""
    store, me = filled("cipher")
    other = replace(me, prefix="other")
    store.put(other, make_kv(other), text=None)
    [path] = root.glob("catalog-*/cache.db")
    with closing(sqlite3.connect(path)) as database, database:
        rows = dict(
            database.execute("SELECT key, value FROM Cache WHERE key LIKE 'c %'").fetchall()
        )
        database.execute(
            "UPDATE Cache SET value = ? WHERE key = ?",
            (rows[f"c {chunk_key(other)}"], f"c {chunk_key(me)}"),
        )
        database.execute("UPDATE Cache SET value = '[1]' WHERE key = ?", (f"c {chunk_key(other)}",))
    assert store.catalog.get(chunk_key(me)) is store.catalog.get(chunk_key(other)) is None
    assert store.catalog.usages()[1] == []


# -- tampering -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [None, "wrong"])
def test_a_file_that_was_not_written_with_the_key_is_a_miss(opened, root, tmp_path, planted):
    """Downgrade: whoever can write to the directory puts a sound file in the place of an encrypted one."""
    store, me = opened(key="cipher", ram_bytes=0), CHUNKS[1]
    put(store, 1)
    forger = open_store(tmp_path / "forged", config_of(planted))
    forged = make_kv(CHUNKS[7])
    forger.put(me, forged, text=None)
    assert same_bits(forger.get(me), forged)
    forger.close()
    shutil.copy(path_of(tmp_path / "forged", me), path_of(root, me))
    assert store.get(me) is None


@pytest.mark.parametrize("planted", [None, "wrong", "noise", "other version"])
def test_a_planted_file_does_not_keep_a_chunk_from_being_stored(opened, root, planted):
    store, path = opened(key="cipher", ram_bytes=0), path_of(root, CHUNKS[1])
    raw = blob_of(CHUNKS[1], make_kv(CHUNKS[7]), None if planted != "wrong" else SECRETS["wrong"])
    raw = (
        b"noise"
        if planted == "noise"
        else raw.replace(b'"4"', b'"3"')
        if planted == "other version"
        else raw
    )
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    for _ in range(2):
        put(store, 1)
        kv = store.get(CHUNKS[1])
    assert same_bits(kv, make_kv(CHUNKS[1]))


def test_parts_of_other_writings_are_misses(opened, root):
    """Layers of the same chunk at another time, layers in another order, another chunk's file: all were written with the key."""
    store, me = opened(key="cipher", ram_bytes=0), CHUNKS[1]
    fill(store, 1, 2)
    path = path_of(root, me)
    old, other = path.read_bytes(), path_of(root, CHUNKS[2]).read_bytes()
    store.delete([chunk_key(me)])
    store.put(me, make_kv(CHUNKS[7]), text=None)
    new = path.read_bytes()
    start, half = len(new) - make_kv(me).num_bytes, make_kv(me).num_bytes // 2
    for bad in (
        new[:start] + old[start:],
        old[:start] + new[start:],
        other,
        new[:start] + new[-half:] + new[start:-half],
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bad)
        assert store.get(me) is None
        assert not store.link(me, text=None, doc_id=None) or store.get(me) is None


@pytest.mark.parametrize("field", ["version", "key", "cipher_key", "salt", "sealed", "format"])
@pytest.mark.parametrize("change", ["another", "none", "empty"])
def test_no_field_of_an_encrypted_header_can_be_changed_or_left_out(opened, root, field, change):
    store, me = opened(key="cipher", ram_bytes=0), CHUNKS[1]
    put(store, 1)
    raw = path_of(root, me).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    head = json.loads(raw[8 : 8 + length])
    value = head["__metadata__"].pop(field)
    if change != "none":
        head["__metadata__"][field] = (
            "" if change == "empty" else value[:-1] + ("0" if value[-1] != "0" else "1")
        )
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    path_of(root, me).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert store.get(me) is None


# -- keys that are missing -----------------------------------------------------------------------------------------------


def test_a_config_whose_key_is_missing_opens_nothing(root, monkeypatch):
    monkeypatch.delenv("KVRAG_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="KVRAG_TEST_KEY"):
        open_store(root, config_of(encryption_key="env:KVRAG_TEST_KEY"))
    assert not root.exists()


def test_without_the_package_encryption_names_the_extra_and_writes_nothing(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(
        MissingDependencyError, match=r"encryption of the KV store.*kvrag\[crypto\]"
    ):
        open_store(root, config_of("cipher"))
    assert not root.exists()


@pytest.mark.parametrize("key", EVERY_KEY)
def test_a_store_in_memory_may_have_a_key(opened, key):
    store = fill(opened(None, key=key), 1)
    assert same_bits(store.get(CHUNKS[1]), make_kv(CHUNKS[1]))
    assert store.forget(NAMESPACE, "doc 1") == 1
    assert store.blobs.keys() == set()


@pytest.mark.parametrize("after", [0, 1])
def test_memory_that_is_short_for_encryption_is_the_stores_fault(opened, monkeypatch, after):
    """For the header, and for the layers."""
    store, real, sizes = opened(key="cipher"), np.empty, []
    with monkeypatch.context() as patch:

        def refused(size, dtype):
            is_refused = len(sizes) >= after
            sizes.append(size)
            return real(2**62 if is_refused else size, dtype)

        patch.setattr("kvrag.kv.crypto.np", SimpleNamespace(empty=refused, uint8=np.uint8))
        with pytest.raises(
            StoreError, match="memory is short for the chunk" if not after else "can't be written"
        ):
            put(store, 1)
    assert (present(store), store.blobs.keys()) == ([], set())
    assert put(store, 1) > 0
