"""Hostile and shared directories: links are not followed, modes are private, and a store for reading only is left as it is."""

import errno
import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from kit import raising
from stores import (
    CHUNKS,
    EVERY_KEY,
    KEYS,
    KVS,
    PATIENT_S,
    fill,
    flip,
    listing,
    path_of,
    present,
    put,
)

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import FORMAT_VERSION
from kvrag.testing.chunks import NAMESPACE, make_text, same_bits
from kvrag.types import Hole

NUMBERS = range(4)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=EVERY_KEY)
def key(request):
    return request.param


@pytest.fixture
def shipped(opened, root, key):
    fill(opened(key=key), *NUMBERS).close()
    return root


def is_whole(store):
    assert present(store) == list(NUMBERS)
    assert sorted(store.catalog.documents(NAMESPACE)) == [f"doc {number}" for number in NUMBERS]
    assert len(store.catalog.texts(NAMESPACE, 0)[0]) == 4
    assert all(same_bits(store.get(CHUNKS[number]), KVS[number]) for number in NUMBERS)
    return True


# -- links and modes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["objects", "shard", "tmp"])
def test_links_to_folders_are_not_followed(shipped, opened, key, tmp_path, place):
    """Whatever a link leads to is neither read nor written."""
    folder = shipped / "objects" / KEYS[0][:2] if place == "shard" else shipped / place
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = listing(elsewhere)
    store = opened(key=key, ram_bytes=0)
    if place != "tmp":
        assert store.get(CHUNKS[0]) is None
        assert KEYS[0] not in store.blobs.keys()  # noqa: SIM118 - blobs are no dict
    with pytest.raises(StoreError, match="can't be written"):
        fill(store, 9 if place == "tmp" else 0)
    with suppress(StoreError):
        store.clear()
    assert listing(elsewhere) == before


def test_a_root_that_is_a_link_is_its_target(shipped, opened, key, tmp_path):
    (tmp_path / "link").symlink_to(shipped)
    one, two = opened(key=key), opened(tmp_path / "link", key=key)
    assert one.catalog is two.catalog, "one store, whatever it is called"
    assert is_whole(two)


def test_a_root_that_others_could_read_is_made_private(shipped, opened, key):
    shipped.chmod(0o755)
    opened(key=key).close()
    assert mode(shipped) == 0o700


def test_a_root_that_holds_other_things_keeps_its_mode_and_what_is_new_in_it_is_private(
    root, opened
):
    root.mkdir()
    (root / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds 'notes.txt' and is no KV store"):
        opened()
    assert os.listdir(root) == ["notes.txt"], "nothing is begun in a folder of somebody's own"
    # A store that is there.
    (root / "format.json").write_text(json.dumps({"format": "kvrag", "version": FORMAT_VERSION}))
    root.chmod(0o755)
    (root / "notes.txt").chmod(0o644)
    fill(opened(), 1)
    assert (mode(root), mode(root / "notes.txt")) == (0o755, 0o644)
    for path in root.rglob("*"):
        if path.name not in ("notes.txt", "format.json"):
            assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_strangers_files_among_the_blobs_are_no_blobs(shipped, opened, key):
    strangers = [
        shipped / "objects" / "README",
        shipped / "objects" / "zz",
        path_of(shipped, CHUNKS[0]).parent / "x",
    ]
    strangers.append(path_of(shipped, CHUNKS[1]).parent / f"{KEYS[0]}.safetensors.bak")
    for path in strangers:
        path.write_text("mine")
    store = opened(key=key)
    assert store.blobs.keys() == {KEYS[number] for number in NUMBERS}
    store.clear()
    assert all(path.read_text() == "mine" for path in strangers)


# -- reading only --------------------------------------------------------------------------------------------------------


def test_it_is_read_from_its_catalog_and_left_as_it_is(shipped, opened, key):
    before = listing(shipped)
    store = opened(key=key, read_only=True)
    assert store.read_only
    assert is_whole(store)
    assert store.prefetch(CHUNKS[:2]).wait(PATIENT_S)
    store.get_many(CHUNKS, timeout_s=PATIENT_S)
    store.close()
    assert listing(shipped) == before


@pytest.mark.parametrize("damage", ["lost", "garbage", "journal", "link"])
def test_without_its_catalog_it_is_empty_and_left_as_it_is(shipped, opened, key, damage, tmp_path):
    [folder] = shipped.glob("catalog*")
    if damage == "lost":
        shutil.rmtree(folder)
    elif damage == "link":
        (folder / "cache.db").rename(tmp_path / "elsewhere.db")
        (folder / "cache.db").symlink_to(tmp_path / "elsewhere.db")
    else:
        (folder / ("cache.db" if damage == "garbage" else "cache.db-wal")).write_bytes(b"x" * 5000)
    before = listing(shipped)
    store = opened(key=key, read_only=True)
    if damage == "journal":
        assert is_whole(store)
    else:
        assert present(store) == []
        assert store.get(CHUNKS[0]) is None
    store.close()
    assert listing(shipped) == before


def test_nothing_can_be_changed(shipped, opened, key):
    store = opened(key=key, read_only=True)
    for change in (
        lambda: put(store, 9),
        lambda: store.delete([KEYS[0]]),
        lambda: store.forget(NAMESPACE, "doc 0"),
        lambda: store.clear(),
        lambda: store.make_room(),
    ):
        with pytest.raises(StoreError, match="reading only"):
            change()
    assert not store.link(CHUNKS[0], text=None, doc_id="x")
    assert is_whole(store)


def test_a_damaged_blob_is_a_miss_and_stays(shipped, opened, key):
    events = []
    flip(path_of(shipped, CHUNKS[0]), -1)
    before = listing(shipped)
    store = opened(key=key, read_only=True, on_event=events.append)
    [hole] = store.get_many(CHUNKS[:1], timeout_s=PATIENT_S)
    assert isinstance(hole, Hole)
    assert hole.reason == "damaged"
    assert listing(shipped) == before
    assert events == []
    assert store.stats()["disk"].rejected > 0


def test_a_reader_follows_what_its_owner_changes(shipped, opened, handle, key):
    reader, owner = opened(key=key, read_only=True), handle(key=key)
    assert is_whole(reader)
    assert owner.forget(NAMESPACE, "doc 1") == 1
    put(owner, 9)
    assert reader.get(CHUNKS[1]) is None
    assert reader.get_many(CHUNKS[1:2], timeout_s=PATIENT_S) == [Hole(KEYS[1], "absent", None)]
    assert present(reader) == [0, 2, 3, 9]
    assert same_bits(reader.get(CHUNKS[9]), KVS[9])
    assert make_text("text 9") in reader.catalog.texts(NAMESPACE, 0)[0]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_can_not_be_written_to_is_opened_for_reading(
    shipped, opened, key, monkeypatch, caplog, number
):
    monkeypatch.setattr("kvrag.store.opening.os.access", lambda *args: False)
    monkeypatch.setattr("kvrag.store.opening._close_to_others", lambda *_, **__: None)
    store = opened(key=key)
    assert store.read_only
    assert "opened for reading only" in caplog.text
    assert is_whole(store)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_directory_that_can_not_be_entered_is_no_store(opened, root, monkeypatch, read_only):
    denied = raising(PermissionError, errno.EACCES, "Permission denied")
    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(StoreError, match=r"can't be used: .*denied; make sure"):
        opened(root, read_only=read_only)


def test_what_is_no_store_is_not_made_one(tmp_path, opened):
    store = opened(tmp_path / "absent", read_only=True)
    assert present(store) == []
    assert store.get(CHUNKS[0]) is None
    store.close()
    assert os.listdir(tmp_path) == []


SYSTEM_FILES = [
    ".DS_Store",
    "._a",
    ".Trash-1000",
    ".Spotlight-V100",
    ".fseventsd",
    ".snapshot",
    ".TemporaryItems",
    ".nfs0001",
    "lost+found",
    "Thumbs.db",
    "desktop.ini",
    "@eaDir",
    "#recycle",
    "$RECYCLE.BIN",
    "$Recycle.Bin",
    "System Volume Information",
]


@pytest.mark.parametrize("name", SYSTEM_FILES)
def test_the_root_of_a_share_can_be_a_store(opened, root, name):
    (root / name).mkdir(parents=True)
    assert same_bits(fill(opened(), 1).get(CHUNKS[1]), KVS[1])


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EROFS])
def test_a_mount_that_keeps_its_modes_is_used_with_one_warning(
    opened, root, monkeypatch, caplog, number
):
    def refuse(self, mode):
        raise OSError(number, os.strerror(number))

    root.mkdir(mode=0o777, parents=True)
    root.chmod(0o777)
    monkeypatch.setattr("pathlib.Path.chmod", refuse)
    assert same_bits(fill(opened(), 1).get(CHUNKS[1]), KVS[1])
    assert caplog.text.count("other users may have access") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away, which needs root")
def test_an_open_directory_of_another_user_is_refused_with_a_remedy(opened, root, monkeypatch):
    def refuse(self, mode):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    root.mkdir(parents=True)
    root.chmod(0o777)
    os.chown(root, 23456, 34567)
    monkeypatch.setattr("pathlib.Path.chmod", refuse)
    with pytest.raises(StoreError, match=r"belongs to another user.*chown.*encryption_key"):
        opened()
