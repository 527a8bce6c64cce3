"""What fails below the store costs time, not correctness."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from kvrag.store.loader import MAX_STUCK, Loader

from kvrag.config import StoreConfig
from kvrag.errors import StoreError, StoreFormatError
from kvrag.identity.fingerprint import FORMAT_VERSION, chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, blob, directory, draft, files, open_store
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

ME = make_identity(1)


def failing(number, after=0):
    """A stand-in that fails with an errno from some call on."""

    def make(real):
        calls = iter(range(10**9))

        def call(*args, **kwargs):
            if next(calls) >= after:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return call

    return make


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("pwrite", errno.ENOSPC),
        ("pwritev", errno.ENOSPC),
        ("pwritev", errno.EDQUOT),
        ("link", errno.EIO),
        ("fsync", errno.EIO),
        ("open", errno.EMFILE),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_write_that_fails_leaves_nothing(disk, root, monkeypatch, name, number, after):
    with monkeypatch.context() as patch:
        patch.setattr(draft.os, name, failing(number, after)(getattr(os, name)))
        fault = None
        try:
            disk.put(ME, make_kv(ME), text=make_text("a"), doc_id="doc")
        except StoreError as error:
            fault = str(error)
    if fault is None:
        assert after, "the first call must have failed"
        return
    assert os.strerror(number) in fault
    assert str(root) in fault
    assert os.listdir(root / "tmp") == []
    assert disk.get(ME) is None
    assert not disk.contains(chunk_key(ME))
    assert disk.index.documents(NAMESPACE) == []
    assert disk.put(ME, make_kv(ME), text=None) > 0


def test_a_failed_data_sync_leaves_nothing(disk, root, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(draft, "sync_data", failing(errno.EIO)(None))
        with pytest.raises(StoreError, match="can't be written"):
            disk.put(ME, make_kv(ME), text=None)
    assert os.listdir(root / "tmp") == []
    assert disk.get(ME) is None


def test_short_writes_are_continued(disk, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(draft.os, "pwrite", lambda fd, view, at: real(fd, view[:700], at))
    monkeypatch.setattr(draft.os, "pwritev", lambda fd, views, at: real(fd, views[0][:700], at))
    disk.put(ME, make_kv(ME), text=None)
    assert same_bits(disk.get(ME), make_kv(ME))


def test_short_reads_are_continued(disk, monkeypatch):
    disk.put(ME, make_kv(ME), text=None)
    real = os.preadv
    monkeypatch.setattr(blob.os, "preadv", lambda fd, views, offset: real(fd, [views[0][:100]], offset))
    assert same_bits(disk.get(ME), make_kv(ME))


def test_file_systems_without_hard_links_will_do(disk, root, monkeypatch):
    monkeypatch.setattr(draft.os, "link", failing(errno.EPERM)(None))
    assert disk.put(ME, make_kv(ME), text=None) > 0
    assert same_bits(disk.get(ME), make_kv(ME))
    assert os.listdir(root / "tmp") == []


def test_an_index_that_takes_no_row_leaves_no_blob(disk, monkeypatch):
    def refuse(record, *, doc_id):
        raise StoreError("the index is full")

    with monkeypatch.context() as patch:
        patch.setattr(disk.index, "add", refuse)
        with pytest.raises(StoreError, match="full"):
            disk.put(ME, make_kv(ME), text=None)
    assert disk.get(ME) is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_a_read_that_fails_is_a_miss_and_keeps_the_file(disk, monkeypatch, caplog, number):
    disk.put(ME, make_kv(ME), text=None)
    with monkeypatch.context() as patch:
        patch.setattr(blob.os, "preadv", failing(number)(None))
        assert disk.get(ME) is None
        assert disk.get(ME) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert same_bits(disk.get(ME), make_kv(ME))


def test_a_directory_that_vanished_is_a_miss(disk, root):
    disk.put(ME, make_kv(ME), text=make_text("a"), doc_id="doc")
    shutil.rmtree(root)
    assert disk.get(ME) is None
    assert disk.get_many([ME], timeout_s=30) == [None]
    assert not disk.contains(chunk_key(ME))
    assert disk.index.texts(NAMESPACE, 0) == ([], 0)
    assert disk.index.documents(NAMESPACE) == []
    assert disk.delete([chunk_key(ME)]) == 0
    assert disk.stats()["disk"].chunks == 0
    with pytest.raises(StoreError, match="make sure that the directory exists"):
        disk.put(ME, make_kv(ME), text=None)
    assert not root.exists()


def test_a_closed_store_has_nothing_and_takes_nothing(disk):
    disk.put(ME, make_kv(ME), text=make_text("a"))
    disk.close()
    assert disk.get(ME) is None
    assert disk.index.texts(NAMESPACE, 0) == ([], 0)
    with pytest.raises(StoreError, match="closed"):
        disk.put(ME, make_kv(ME), text=None)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_is_no_directory(tmp_path, place):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="choose a directory"):
        DiskStore(tmp_path / place)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_directory_that_can_not_be_written_to_is_refused_at_open(tmp_path, monkeypatch, number):
    monkeypatch.setattr(files.os, "open", failing(number)(None))
    with pytest.raises(StoreError, match=os.strerror(number)):
        DiskStore(tmp_path / "store")


def test_a_newer_format_is_refused(disk, root):
    disk.close()
    (root / "format.json").write_text(json.dumps({"format": "kvrag", "version": FORMAT_VERSION + 1}))
    with pytest.raises(StoreFormatError, match="upgrade kvrag"):
        DiskStore(root)


def test_a_store_of_an_older_format_is_taken_over(root, caplog):
    DiskStore(root).close()
    (root / "format.json").write_text(json.dumps({"format": "kvrag", "version": FORMAT_VERSION - 1}))
    DiskStore(root).close()
    assert json.loads((root / "format.json").read_text())["version"] == FORMAT_VERSION
    assert "computed again" in caplog.text


@pytest.mark.parametrize("content", ['{"format": "other", "version": 1}', "[1]", '{"format": "kvrag", "version": "1"}'])
def test_a_foreign_directory_is_refused(tmp_path, content):
    (tmp_path / "format.json").write_text(content)
    with pytest.raises(StoreError, match="choose another directory"):
        DiskStore(tmp_path)


def test_a_damaged_format_file_is_written_again(disk, root):
    disk.put(ME, make_kv(ME), text=None)
    disk.close()
    (root / "format.json").write_bytes(b"\0\0")
    store = DiskStore(root)
    assert same_bits(store.get(ME), make_kv(ME))
    assert json.loads((root / "format.json").read_text()) == {"format": "kvrag", "version": FORMAT_VERSION}
    store.close()


def test_leftovers_of_dead_writers_are_swept(disk, root):
    disk.close()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    mine = draft.tmp_name()
    dead = mine.replace(str(os.getpid()), str(child.pid), 1)
    foreign = f"{child.pid}.otherhost.x.1"
    for name in (mine, dead, foreign):
        (root / "tmp" / name).write_text("x")
    DiskStore(root).close()
    assert sorted(os.listdir(root / "tmp")) == sorted([mine, foreign])


def test_leftovers_that_nobody_holds_are_swept_when_they_are_old(disk, root, monkeypatch):
    monkeypatch.setattr(draft, "YOUNG_S", -1.0)
    for name in ("1.otherhost.x", "garbage"):
        (root / "tmp" / name).write_text("x")
    with draft.Draft(disk.directory, 10) as held:
        assert draft.sweep(disk.directory) == 2
        assert os.listdir(root / "tmp") == [held._name]


@pytest.fixture
def stuck(monkeypatch):
    """Reads of chunk ``ME`` hang until the event is set."""
    release = threading.Event()
    real = blob.open_blob

    def slow(*args, identity, **kwargs):
        if identity == ME:
            release.wait(30)
        return real(*args, identity=identity, **kwargs)

    monkeypatch.setattr(blob, "open_blob", slow)
    yield release
    release.set()


@pytest.fixture(params=["disk", "tiered"])
def store(request, root):
    store = DiskStore(root) if request.param == "disk" else TieredStore(MemoryStore(2**20), DiskStore(root))
    yield store
    store.close()


def test_late_chunks_are_misses_and_do_not_hinder_others(store, stuck):
    others = [make_identity(number) for number in range(2, 8)]
    for identity in (ME, *others):
        DiskStore.put(getattr(store, "_disk", store), identity, make_kv(identity), text=None)
    start = time.monotonic()
    for _ in range(2):
        got = store.get_many([ME, *others, ME], timeout_s=0.3)
        assert got[0] is None
        assert got[-1] is None
        assert all(same_bits(kv, make_kv(identity)) for kv, identity in zip(got[1:-1], others, strict=True))
    assert store.get_many([ME, others[0]], timeout_s=0)[0] is None
    assert time.monotonic() - start < 5
    stuck.set()
    assert same_bits(store.get_many([ME], timeout_s=30)[0], make_kv(ME))


def test_a_dead_disk_is_not_asked_again_and_again():
    release = threading.Event()
    asked = []

    def load(identity):
        asked.append(identity)
        release.wait(30)

    loader = Loader(load)
    for _ in range(3 * MAX_STUCK):
        assert loader.load_many([ME], timeout_s=0.001) == [None]
    assert len(asked) <= MAX_STUCK
    release.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > 1 and any(thread.name == "kvrag-load" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
    assert loader.load_many([ME], timeout_s=30) == [None]
    assert len(asked) <= MAX_STUCK + 1


def test_a_load_that_raises_is_a_miss():
    assert Loader(lambda identity: 1 / 0).load_many([ME], timeout_s=30) == [None]


def test_without_threads_everything_is_a_miss(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Loader(make_kv).load_many([ME], timeout_s=30) == [None]


def test_open_store_chooses_the_tiers(root):
    memory = open_store(None, StoreConfig(ram_bytes=1000))
    assert list(memory.stats()) == ["host"]
    tiered = open_store(str(root), StoreConfig())
    assert list(tiered.stats()) == ["host", "disk"]
    tiered.close()


def test_what_can_not_be_erased_is_an_error_after_everything_else_is_erased(disk, monkeypatch):
    identities = [make_identity(number) for number in range(3)]
    for identity in identities:
        disk.put(identity, make_kv(identity), text=None)
    keys = [chunk_key(identity) for identity in identities]
    real = os.unlink

    def unlink(path, **kwargs):
        if keys[0] in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(directory.os, "unlink", unlink)
        with pytest.raises(StoreError, match="delete again"):
            disk.delete(keys)
    assert [disk.contains(key) for key in keys] == [True, False, False]
    assert disk.delete(keys) == 1


def test_a_chunk_that_is_being_erased_may_be_linked_again(disk):
    disk.put(ME, make_kv(ME), text=make_text("a"), doc_id="one")
    disk.index.unlink(NAMESPACE, "one")
    assert disk.link(ME, text=make_text("b"), doc_id="two")
    assert disk.index.documents(NAMESPACE) == ["two"]
    assert [text.digest for text in disk.index.texts(NAMESPACE, 0)[0]] == [make_text("b").digest]


def test_a_process_that_holds_the_lock_too_long_is_named(disk, root, monkeypatch):
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.05)
    with files.locked(root / "lock"), pytest.raises(StoreError, match="another process"):
        DiskStore(root)


def test_a_file_system_without_locks_will_do(root, monkeypatch, caplog):
    monkeypatch.setattr(files.fcntl, "flock", failing(errno.ENOLCK)(None))
    store = DiskStore(root)
    assert store.put(ME, make_kv(ME), text=None) > 0
    assert "can't be locked" in caplog.text
    store.close()
