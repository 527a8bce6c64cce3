"""Stores that earlier versions wrote: readable, or left alone and reported, never wrong. A change of the bytes needs a new version."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from golden import DATA, KINDS, chunks, even_kv, fill, folder
from safetensors import safe_open
from stores import config_of, listing, needs_cryptography, path_of

from kvrag.cli.check import fsck, gc
from kvrag.identity.fingerprint import FORMAT_VERSION, chunk_key
from kvrag.store import TieredStore, open_store
from kvrag.testing.chunks import make_identity, make_text, same_bits

OLD = sorted(
    p.name for p in DATA.glob("store-v*") if not p.name.startswith(f"store-v{FORMAT_VERSION}")
)
PRESENT = ["", pytest.param("encrypted", marks=needs_cryptography)]


def files_of(root):
    return {
        str(p.relative_to(root)): p.read_bytes() for p in (root / "objects").rglob("*.safetensors")
    }


@pytest.fixture
def copied(tmp_path):
    """Copies a golden store to where it may be changed."""
    return lambda name: shutil.copytree(DATA / name, tmp_path / "golden")


def test_there_is_a_golden_store_of_every_kind():
    missing = [
        folder(FORMAT_VERSION, kind).name
        for kind in KINDS
        if not folder(FORMAT_VERSION, kind).is_dir()
    ]
    assert missing == [], "make them with tests/store/golden.py"
    assert {f"store-v{version}" for version in range(1, FORMAT_VERSION)} <= set(OLD)


@pytest.mark.parametrize("kind", PRESENT)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_golden_store_of_this_version_is_read(copied, kind, read_only, no_pickle):
    root = copied(folder(FORMAT_VERSION, kind).name)
    store = open_store(root, config_of(KINDS[kind], read_only=read_only))
    wanted = chunks(kind)
    namespace = wanted[0][0].namespace
    assert set(store.catalog.keys()) == {chunk_key(identity) for identity, _ in wanted}
    assert sorted(store.catalog.documents(namespace)) == ["golden", "other"]
    assert store.catalog.texts(namespace, 0)[0] == [
        make_text(f"golden {number}") for number in range(len(wanted))
    ]
    for identity, kv in wanted:
        assert same_bits(store.get(identity), kv)
    assert store.stats()["disk"].rejected == 0
    store.close()


@pytest.mark.parametrize("kind", PRESENT)
def test_its_blobs_are_adopted_where_its_catalog_is_lost(copied, kind):
    root = copied(folder(FORMAT_VERSION, kind).name)
    for catalog in list(root.glob("catalog*")):
        shutil.rmtree(catalog)
    store = open_store(root, config_of(KINDS[kind]))
    for identity, kv in chunks(kind):
        assert store.put(identity, kv, text=None) == 0
        assert same_bits(store.get(identity), kv)
    store.close()


def test_this_version_still_writes_the_same_bytes(tmp_path):
    fill(tmp_path / "new", "")
    assert files_of(tmp_path / "new") == files_of(folder(FORMAT_VERSION, ""))
    assert (tmp_path / "new" / "format.json").read_bytes() == (
        folder(FORMAT_VERSION, "") / "format.json"
    ).read_bytes()


@needs_cryptography
def test_an_encrypted_store_still_writes_the_same_but_what_a_salt_changes(tmp_path):
    fill(tmp_path / "new", "encrypted")
    new, old = files_of(tmp_path / "new"), files_of(folder(FORMAT_VERSION, "encrypted"))
    assert new.keys() == old.keys()
    for name in new:
        heads = [
            json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            for raw in (new[name], old[name])
        ]
        for head in heads:
            assert len(head["__metadata__"].pop("salt")) == 64
            head["__metadata__"]["sealed"] = len(head["__metadata__"]["sealed"])
        assert heads[0] == heads[1]
        assert len(new[name]) == len(old[name])


def test_int4_codes_are_packed_as_the_format_says():
    """Two codes in a byte, offset by 8, the lower one first: what other readers of the files rely on."""
    identity = replace(make_identity(7, tokens=33), kv_dtype="int4")
    with safe_open(path_of(folder(FORMAT_VERSION, ""), identity), framework="pt") as file:
        codes, scales, zeros = (
            file.get_tensor(f"layer.000.{name}") for name in ("keys", "key_scales", "key_zeros")
        )
    low, high = (codes & 15).float() - 8, (codes >> 4).float() - 8
    found = torch.stack([low, high], -1).flatten(-2)
    groups = [0] * 32 + [1]
    decoded = found * scales.float()[:, groups] + zeros.float()[:, groups]
    keys = even_kv().layers[0].keys
    assert (decoded - keys).abs().max() <= scales.float().max()


@pytest.mark.parametrize("erase", [fsck, gc, TieredStore.clear])
@pytest.mark.parametrize("name", OLD)
def test_an_older_store_is_not_read_but_reported_and_erased(copied, name, erase, no_pickle):
    root = copied(name)
    (root / "index").mkdir()
    before = listing(root / "objects")
    assert fsck(open_store(root, config_of(read_only=True))).dormant == 0
    store = open_store(root, config_of())
    identity, kv = chunks("")[1]
    assert store.catalog.keys() == []
    assert store.get(identity) is None
    assert not store.link(identity, text=None, doc_id=None)
    assert listing(root / "objects") == before
    blobs = store.blobs.keys()
    assert getattr(erase(store), "other_versions", len(blobs)) == len(blobs) > 0
    assert (store.blobs.keys(), {*root.glob("[iqr]*")}) == (set(), set())
    assert store.put(identity, kv, text=None) == kv.num_bytes
    assert same_bits(store.get(identity), kv)
    store.close()
    assert json.loads((root / "format.json").read_text())["version"] == FORMAT_VERSION
