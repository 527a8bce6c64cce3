"""fsck, gc, export and import: nothing is mended, nothing that others protect is touched, and every byte is proven on the way."""

import os
import shutil
import time

import pytest
from stores import (
    CHUNKS,
    EVERY_KEY,
    KEYS,
    KVS,
    SIZE,
    blob_of,
    config_of,
    files,
    fill,
    flip,
    listing,
    needs_cryptography,
    path_of,
    present,
    put,
)

from kvrag.cli.check import copy, fsck, gc, sample
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import Keys, Retention, blobs
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

NUMBERS = range(8)


@pytest.fixture(params=EVERY_KEY)
def key(request):
    return request.param


@pytest.fixture
def filled(opened, key):
    store = fill(opened(key=key, ram_bytes=0), *NUMBERS)
    store.put(CHUNKS[0], KVS[0], text=make_text("again"), doc_id="second")
    return store


# -- fsck ----------------------------------------------------------------------------------------------------------------


def test_a_sound_store_is_ok(filled):
    report = fsck(filled, verify_data=True)
    assert (report.ok, report.checked, report.verified, report.dormant) == (True, 8, 8, 0)


def test_damage_of_headers_is_found_at_once_and_of_data_when_asked(filled, root):
    flip(path_of(root, CHUNKS[1]), 100)
    flip(path_of(root, CHUNKS[2]), -1)
    report = fsck(filled)
    assert [key for key, _ in report.rejected] == [KEYS[1]]
    assert report.verified == 0
    assert not report.ok
    assert fsck(filled, verify_data=True).rejected == [(KEYS[2], "its data is damaged")]
    assert fsck(filled, verify_data=True).ok
    assert present(filled) == files(root) == [0, 3, 4, 5, 6, 7]


def test_nothing_is_mended_and_what_is_another_chunks_is_no_chunk(filled, root):
    os.truncate(path_of(root, CHUNKS[3]), path_of(root, CHUNKS[3]).stat().st_size - 1)
    shutil.copy(path_of(root, CHUNKS[5]), path_of(root, CHUNKS[4]))
    found = dict(fsck(filled, verify_data=True).rejected)
    assert found == {KEYS[3]: "it has the wrong length", KEYS[4]: "it belongs to another chunk"}
    assert files(root) == [0, 1, 2, 5, 6, 7]


def test_samples_are_everything_once(filled):
    keys = sorted(filled.blobs.keys())
    parts = [sample(keys, part, 3) for part in (1, 2, 3)]
    assert sorted(key for part in parts for key in part) == keys
    assert fsck(filled, parts[0]).verified == len(parts[0])
    for bad in ((0, 3), (4, 3)):
        with pytest.raises(StoreError, match="sample"):
            sample(keys, *bad)


def test_rows_without_files_are_removed_and_files_without_rows_erased(filled, root):
    path_of(root, CHUNKS[4]).unlink()
    filled.catalog.remove(filled.catalog.revisions([KEYS[5]]))
    report = fsck(filled)
    assert (report.ok, report.unknown_rows, report.dormant) == (True, 1, 1)
    assert present(filled) == files(root) == [0, 1, 2, 3, 6, 7]
    assert filled.stats()["disk"].chunks == 6


# -- gc ------------------------------------------------------------------------------------------------------------------


def test_gc_removes_what_nobody_needs(filled, root, monkeypatch, key):
    monkeypatch.setattr(blobs, "ABANDONED_S", -1.0)
    raw = path_of(root, CHUNKS[2]).read_bytes().replace(b'"version":"4"', b'"version":"1"')
    stray = root / "objects" / "aa" / ("a" * 64 + ".safetensors")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(raw)
    (root / "tmp" / "left").write_text("x")
    filled.catalog.remove(filled.catalog.revisions([KEYS[5]]))
    filled.catalog.begin([(record(filled, 9), make_text("9"), ["doc 9"], None)])
    (root / "catalog.damaged").mkdir()
    report = gc(filled)
    assert (report.swept, report.other_versions, report.dormant, report.pending) == (1, 1, 1, 1)
    assert not stray.exists()
    assert not (root / "catalog.damaged").exists()
    assert os.listdir(root / "tmp") == []
    assert fsck(filled, verify_data=True).ok
    assert present(filled) == files(root) == [0, 1, 2, 3, 4, 6, 7]


def record(store, number):
    """Record of a chunk that is not stored."""
    return store.catalog.get(KEYS[0])._replace(key=KEYS[number], content=f"content {number}")


def test_gc_evicts_what_is_over_the_budget(opened, filled, key):
    store = opened(key=key, ram_bytes=0, disk_bytes=3 * SIZE)
    store.retain(KEYS[6:8], Retention(90))
    assert gc(store).evicted == 5
    assert {6, 7} < set(present(filled))


@needs_cryptography
@pytest.mark.parametrize(
    ("mine", "other"), [(None, "cipher"), ("cipher", None), ("cipher", "wrong")]
)
def test_what_other_keys_protect_is_counted_and_left_alone_unless_it_is_asked_for(
    opened, root, mine, other
):
    def identity_of(key, number):
        return make_identity(number, namespace=Keys.of(config_of(key)).namespace("default"))

    stores = {key: opened(key=key, ram_bytes=0) for key in (mine, other)}
    for key, store in stores.items():
        for number in range(3):
            store.put(identity_of(key, number), make_kv(identity_of(key, number)), text=None)
    before = listing(root / "objects")
    for tool in (gc, fsck, lambda store: fsck(store, verify_data=True)):
        assert tool(stores[mine]).foreign in (0, 3)
        assert listing(root / "objects") == before
    assert fsck(stores[mine]).foreign == 3
    stores[other].close()
    assert gc(stores[mine], with_foreign=True).foreign == 3
    assert len(list(root.glob("catalog*"))) == 1
    assert all(stores[mine].get(identity_of(mine, number)) is not None for number in range(3))
    assert opened(key=other).get(identity_of(other, 0)) is None


# -- copies --------------------------------------------------------------------------------------------------------------


def test_copies_hold_the_same(filled, opened, tmp_path, root, key):
    flip(path_of(root, CHUNKS[5]), -1)
    other = opened(tmp_path / "copy", key=key)
    assert copy(filled, other) == (7, 0, 1, 0)
    assert copy(filled, other, filled.catalog.document_keys(NAMESPACE, "second")) == (0, 1, 0, 0)
    assert set(other.catalog.documents(NAMESPACE)) == {
        *(f"doc {n}" for n in NUMBERS if n != 5),
        "second",
    }
    assert all(same_bits(other.get(CHUNKS[n]), KVS[n]) for n in NUMBERS if n != 5)
    assert other.forget(NAMESPACE, "doc 0") == 0
    assert other.forget(NAMESPACE, "second") == 1


@needs_cryptography
@pytest.mark.parametrize(("old", "new"), [(None, "cipher"), ("cipher", None), ("cipher", "wrong")])
def test_a_copy_with_another_key_is_called_otherwise(opened, tmp_path, old, new):
    source, target = opened(key=old), opened(tmp_path / "copy", key=new)
    names = {key: Keys.of(config_of(key)) for key in (old, new)}
    for name in ("default", "other"):
        identity = make_identity(1, namespace=names[old].namespace(name))
        source.put(identity, KVS[1], text=make_text("a"), doc_id="doc")
    assert copy(source, target, namespaces=["default"]) == (1, 0, 0, 0)
    space = names[new].namespace("default")
    mine = make_identity(1, namespace=space)
    assert same_bits(target.get(mine), KVS[1])
    assert target.catalog.document_keys(space, "doc") == [chunk_key(mine)]
    assert target.catalog.texts(space, 0)[0] == [make_text("a")]
    assert target.catalog.keys() == [chunk_key(mine)]


def test_copies_keep_priority_duration_and_cost_and_what_is_there_its_own(
    filled, opened, tmp_path, key, monkeypatch
):
    clock = [time.time()]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    keys = KEYS[:4]
    filled.retain(keys[:1], Retention(90, duration_s=1000, cost_ms=12.5))
    filled.retain(keys[1:2], Retention(90, duration_s=10))
    filled.retain(keys[2:3], Retention(20))
    clock[0] += 400
    other = opened(tmp_path / "copy", key=key)
    assert copy(filled, other, keys) == (4, 0, 0, 0)
    kept = [other.retention(key) for key in keys]
    assert (kept[0].priority, kept[0].duration_s, kept[0].cost_ms) == (90, pytest.approx(600), 12.5)
    assert kept[1:] == [None, Retention(20), None]
    other.retain(keys[2:3], Retention(70))
    assert copy(filled, other, keys) == (0, 4, 0, 0)
    assert other.retention(keys[2]) == Retention(70)


def test_a_copy_is_announced_as_an_import_and_its_source_is_not_changed(
    filled, opened, tmp_path, root, key
):
    events = []
    filled.close()
    flip(path_of(root, CHUNKS[5]), -1)
    before = listing(root)
    source = opened(key=key, read_only=True)
    other = opened(tmp_path / "copy", key=key, on_event=events.append)
    assert copy(source, other) == (7, 0, 1, 0)
    put(other, 9)
    assert [event.reason for event in events if event.medium == "disk"] == ["import"] * 7 + ["put"]
    assert listing(root) == before


def test_a_copy_keeps_to_the_limits_of_its_target(filled, opened, tmp_path, key):
    other = opened(tmp_path / "copy", key=key, disk_bytes=3 * SIZE, ram_bytes=0)
    copied, *others, evicted = copy(filled, other)
    assert (others, copied + evicted) == ([0, 0], 8)
    assert 1 <= copied == len(present(other)) <= 3


def test_a_source_that_says_anything_is_not_trusted(opened, tmp_path):
    """Blobs are proven; what a source's catalog says of others' chunks has no effect."""
    source, target = opened(tmp_path / "source"), opened(tmp_path / "target")
    fill(source, 1, 2)
    path_of(tmp_path / "source", CHUNKS[1]).write_bytes(blob_of(CHUNKS[1], KVS[1])[:-1])
    source.release()
    assert copy(source, target) == (1, 0, 1, 0)
    assert present(target) == [2]
