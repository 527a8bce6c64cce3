"""What fails below the store costs time, not correctness, and leaves nothing behind; a full disk is one such fault."""

import errno
import json
import logging
import os
from functools import partial

import pytest
from stores import CHUNKS, KEYS, KVS, failing, files, fill, present, put

from kvrag.cli import check
from kvrag.errors import StoreError, StoreFormatError
from kvrag.identity.fingerprint import FORMAT_VERSION
from kvrag.store import FileBlobs, blobs, open_store
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

ME = CHUNKS[1]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("pwritev", errno.ENOSPC),
        ("pwritev", errno.EDQUOT),
        ("pwritev", errno.EIO),
        ("fdatasync", errno.EIO),
        ("open", errno.EMFILE),
        ("open", errno.EROFS),
        ("mkdir", errno.ENOSPC),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_write_that_fails_leaves_nothing(opened, root, monkeypatch, name, number, after):
    """Of other KV of the document's text, it takes nothing from the document."""
    store = fill(opened(durability="durable"), 2)
    store.put(CHUNKS[3], KVS[3], text=make_text("text 1"), doc_id="doc 1")
    with monkeypatch.context() as patch:
        patch.setattr(blobs.os, name, failing(number, after)(getattr(os, name)))
        fault = None
        try:
            put(store, 1)
        except StoreError as error:
            fault = str(error)
    if fault is None:
        assert after, "the first call must have failed"
        return
    assert os.strerror(number) in fault
    assert (root / "tmp").is_dir() is False or os.listdir(root / "tmp") == []
    assert store.get(ME) is None
    assert (present(store), files(root)) == ([2, 3], [2, 3])
    assert store.catalog.keys(pending=True) == []
    assert store.forget(NAMESPACE, "doc 1") == 1
    assert put(store, 1) > 0
    assert same_bits(store.get(CHUNKS[1]), KVS[1])


def test_a_write_that_fails_takes_back_only_what_was_its_own(handle, monkeypatch):
    """Another writer of the same chunk may have been quicker, and a document that holds on to its text stays."""
    one, two = handle(), handle()

    def fail(self, key, parts):
        monkeypatch.undo()
        two.put(ME, KVS[1], text=make_text("text 1"), doc_id="other")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileBlobs, "write", fail)
    with pytest.raises(StoreError, match="No space left"):
        put(one, 1)
    assert same_bits(one.get(ME), KVS[1])
    assert "other" in one.catalog.documents(NAMESPACE)
    assert two.forget(NAMESPACE, "doc 1") + two.forget(NAMESPACE, "other") == 1


def cut(views, most):
    """The first so many bytes of some views."""
    return [
        view[: max(0, most - sum(map(len, views[:number])))] for number, view in enumerate(views)
    ]


@pytest.mark.parametrize("most", [1, 700, 5000])
def test_short_writes_and_short_reads_are_continued(store, monkeypatch, most):
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(
        blobs.os, "pwritev", lambda fd, views, offset: write(fd, cut(views, most), offset)
    )
    monkeypatch.setattr(
        blobs.os, "preadv", lambda fd, views, offset: read(fd, [views[0][:most]], offset)
    )
    fill(store, 1)
    assert same_bits(store.get(ME), KVS[1])


def test_systems_without_all_calls_will_do(opened, monkeypatch):
    """macOS has neither of these."""
    for name in ("fdatasync", "posix_fadvise"):
        monkeypatch.delattr(blobs.os, name)
    store = fill(opened(durability="durable", ram_bytes=0), 1)
    assert same_bits(store.get(ME), KVS[1])


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EOPNOTSUPP, errno.EIO, errno.EXDEV, errno.EACCES, 45]
)
def test_file_systems_without_hard_links_will_do(opened, root, monkeypatch, number):
    monkeypatch.setattr(blobs.os, "link", failing(number)(None))
    store = fill(opened(ram_bytes=0), 1)
    assert same_bits(store.get(ME), KVS[1])
    assert os.listdir(root / "tmp") == []


UNSYNCED = {
    "fsync": ("directories", ("EINVAL", "EOPNOTSUPP", "EIO", "EBADF", "EACCES")),
    "fdatasync": ("files", ("EINVAL", "EOPNOTSUPP", "ENOSYS")),
}


@pytest.mark.parametrize(("call", "fault"), [(c, f) for c in UNSYNCED for f in UNSYNCED[c][1]])
def test_file_systems_that_can_not_sync_will_do(opened, monkeypatch, caplog, call, fault):
    blobs._warn_of_sync.cache_clear()
    monkeypatch.setattr(blobs.os, call, failing(getattr(errno, fault))(None))
    store = fill(opened(durability="durable", ram_bytes=0), 1)
    assert same_bits(store.get(ME), KVS[1])
    assert caplog.text.count(f"can't sync {UNSYNCED[call][0]}") == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("name", ["preadv", "open"])
def test_a_read_that_fails_is_a_miss_is_logged_once_and_keeps_the_chunk(
    store, root, monkeypatch, caplog, name, number
):
    fill(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(blobs.os, name, failing(number)(None))
        for _ in range(3):
            assert store.get(ME) is None
    said = [record for record in caplog.records if "can't be read" in record.message]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert (present(store), files(root)) == ([1], [1])
    assert same_bits(store.get(ME), KVS[1])
    assert store.stats()["disk"].rejected == 0


@pytest.mark.parametrize("name", ["preadv", "open"])
def test_what_could_not_be_read_for_a_while_is_erased_with_its_document(
    store, root, monkeypatch, name
):
    fill(store, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(blobs.os, name, failing(errno.EMFILE)(None))
        assert store.get(ME) is None
    store.forget(NAMESPACE, "doc 1")
    assert files(root) == [2]
    assert not store.link(ME, text=make_text("text 1"), doc_id="doc 1")


def test_blobs_that_can_not_be_listed_are_not_taken_for_none(store, root, monkeypatch):
    """What another catalog left behind might be the document's: it is not forgotten before all of it was seen."""
    fill(store, 1, 2)
    rows = store.catalog._rows
    rows.change(lambda: rows.set("s", store.catalog.state()._replace(dormant=True)))
    stray = root / "objects" / "aa" / ("a" * 64 + ".safetensors")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"left by another catalog")
    with monkeypatch.context() as patch:
        patch.setattr(blobs.os, "listdir", failing(errno.EMFILE)(None))
        for refused in (
            partial(store.forget, NAMESPACE, "doc 1"),
            partial(check.fsck, store),
            partial(check.gc, store),
        ):
            with pytest.raises(StoreError, match="can't be listed"):
                refused()
    assert store.forget(NAMESPACE, "doc 1") == 1
    assert not stray.exists()


def test_a_closed_store_has_nothing_and_takes_nothing(store, root):
    fill(store, 1)
    store.close()
    assert store.get(ME) is None
    assert store.catalog.texts(NAMESPACE, 0) == ([], 0)
    for change in (
        lambda: put(store, 2),
        lambda: store.delete([KEYS[1]]),
        store.clear,
        lambda: store.forget(NAMESPACE, "x"),
        lambda: store.catalog.documents(NAMESPACE),
    ):
        with pytest.raises(StoreError, match="the KV store is closed; open it again"):
            change()
    assert not store.link(ME, text=None, doc_id=None)
    assert files(root) == [1]


def test_leftovers_of_dead_writers_are_swept_when_they_are_old(opened, root, monkeypatch):
    store = fill(opened(), 1)
    for name in ("garbage", "1.otherhost.x"):
        (root / "tmp" / name).write_text("x")
    os.mkfifo(root / "tmp" / "fifo")
    assert store.blobs.sweep() == 0, "they are young"
    monkeypatch.setattr(blobs, "ABANDONED_S", -1.0)
    store.close()
    opened()
    assert os.listdir(root / "tmp") == []


# -- opening -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_is_no_directory(opened, tmp_path, place):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="choose a directory"):
        opened(tmp_path / place)


def test_a_newer_format_is_refused_and_an_older_one_taken_over(opened, root):
    fill(opened(), 1).close()
    for version in (FORMAT_VERSION + 1, 99):
        (root / "format.json").write_text(json.dumps({"format": "kvrag", "version": version}))
        with pytest.raises(StoreFormatError, match="update kvrag"):
            opened()
    (root / "format.json").write_text(
        json.dumps({"format": "kvrag", "version": FORMAT_VERSION - 1})
    )
    assert same_bits(opened().get(ME), KVS[1])
    assert json.loads((root / "format.json").read_text())["version"] == FORMAT_VERSION


@pytest.mark.parametrize(
    "content", [b"\0\0", b"", b"[1]", b"[" * 100_000, b'{"format": "kvrag", "version": "1"}']
)
def test_a_damaged_format_file_is_written_again(opened, root, content):
    fill(opened(), 1).close()
    (root / "format.json").write_bytes(content)
    assert same_bits(opened().get(ME), KVS[1])
    assert json.loads((root / "format.json").read_text()) == {
        "format": "kvrag",
        "version": FORMAT_VERSION,
    }


def test_a_store_without_a_directory_refuses_what_does_not_fit(tmp_path, opened):
    store = opened(None, ram_bytes=2 * KVS[0].num_bytes)
    fill(store, 1, 2, 3)
    assert len(present(store)) == 2
    assert 3 in present(store)
    big = make_identity(50, tokens=20)
    with pytest.raises(StoreError, match="ram_bytes without kv_dir"):
        store.put(big, make_kv(big), text=None)
    assert open_store(None, store.config).catalog.keys() == []
