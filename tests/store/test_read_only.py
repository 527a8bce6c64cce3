"""A store that can't be written to: from the index if it is whole, otherwise from the files; nothing is changed."""

import errno
import os
import shutil

import pytest
from kvrag.store.directory import Directory
from kvrag.store.objects import place_of

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, recovery
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(4)]


@pytest.fixture(params=["diskcache", "sqlite"])
def kind(request):
    return request.param


@pytest.fixture
def shipped(root, kind):
    store = DiskStore(root, StoreConfig(index=kind, min_free_bytes=0))
    for number, identity in enumerate(IDENTITIES):
        store.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=f"doc {number}")
    store.close()
    return root


def open_shipped(root, kind):
    return DiskStore(root, StoreConfig(index=kind, read_only=True))


def listing(root):
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size, p.stat().st_mode) for p in sorted(root.rglob("*"))}


def is_whole(store):
    return (
        store.index.documents(NAMESPACE) == [f"doc {number}" for number in range(4)]
        and len(store.index.texts(NAMESPACE, 0)[0]) == 4
        and all(same_bits(store.get(identity), make_kv(identity)) for identity in IDENTITIES)
    )


def test_it_is_read_from_its_index_and_left_as_it_is(shipped, kind, monkeypatch):
    before = listing(shipped)
    monkeypatch.setattr(recovery, "headers", lambda *args: pytest.fail("files were read"))
    store = open_shipped(shipped, kind)
    assert is_whole(store)
    store.close()
    assert listing(shipped) == before


@pytest.mark.parametrize("damage", ["lost", "garbage", "journal"])
def test_it_is_read_without_its_index(shipped, kind, damage):
    index = shipped / "index"
    if damage == "lost":
        shutil.rmtree(index)
    for file in list(index.glob("*.db")):
        (file if damage == "garbage" else file.with_name(file.name + "-wal")).write_bytes(b"x" * 5000)
    before = listing(shipped)
    store = open_shipped(shipped, kind)
    assert is_whole(store)
    store.close()
    assert listing(shipped) == before


def test_nothing_can_be_changed(shipped, kind):
    store = TieredStore(MemoryStore(2**20), open_shipped(shipped, kind))
    new = make_identity(9)
    for change in (
        lambda: store.put(new, make_kv(new), text=None),
        lambda: store.delete([chunk_key(IDENTITIES[0])]),
        lambda: store.forget(NAMESPACE, "doc 0"),
    ):
        with pytest.raises(StoreError, match="reading only"):
            change()
    assert not store.link(IDENTITIES[0], text=None, doc_id="x")
    assert is_whole(store)
    store.close()


@pytest.mark.parametrize("has_index", [True, False])
def test_a_damaged_blob_is_a_miss_and_stays(shipped, kind, has_index, caplog):
    path = shipped.joinpath(*place_of(chunk_key(IDENTITIES[0])))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    before, events = listing(shipped), []
    if not has_index:
        shutil.rmtree(shipped / "index")  # the headers are read at opening then
        raw[20] ^= 1
        path.write_bytes(raw)
        before = listing(shipped)
    store = DiskStore(shipped, StoreConfig(index=kind, read_only=True, on_event=events.append))
    assert store.get(IDENTITIES[0]) is None
    assert listing(shipped) == before
    assert "stays there" in caplog.text
    assert "quarantine" not in caplog.text
    assert events == []
    assert store.stats()["disk"].rejected > 0
    store.close()


def test_a_store_for_writing_says_what_it_put_away_as_it_was_opened(shipped, kind, caplog):
    """Also when it was found while the store was being opened, before it is known whether it can be written to."""
    path = shipped.joinpath(*place_of(chunk_key(IDENTITIES[0])))
    path.write_bytes(b"x" * 5000)
    shutil.rmtree(shipped / "index")
    events = []
    store = DiskStore(shipped, StoreConfig(index=kind, min_free_bytes=0, on_event=events.append))
    assert [(event.type, event.block_hashes) for event in events] == [("BlockRemoved", (chunk_key(IDENTITIES[0]),))]
    assert "was moved to" in caplog.text
    assert not path.exists()
    store.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_can_not_be_written_to_is_opened_for_reading(shipped, kind, monkeypatch, number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("kvrag.store.draft.Draft.__init__", refuse)
    store = DiskStore(shipped, StoreConfig(index=kind))
    assert store.read_only
    assert is_whole(store)
    store.close()


def test_what_is_no_store_is_not_made_one(tmp_path):
    with pytest.raises(StoreError, match="no store"):
        DiskStore(tmp_path / "absent", StoreConfig(read_only=True))
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("place", ["objects", "shard", "references", "tmp", "quarantine", "index"])
def test_links_are_not_followed(shipped, kind, tmp_path, place):
    """Whatever a link leads to is neither read nor written."""
    key = chunk_key(IDENTITIES[0])
    folder = shipped / "objects" / key[:2] if place == "shard" else shipped / place
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = listing(elsewhere)
    assert Directory(shipped).status(*folder.relative_to(shipped).parts, "x") is None
    if place == "shard":
        store = DiskStore(shipped, StoreConfig(index=kind, min_free_bytes=0))
        assert store.get(IDENTITIES[0]) is None
        assert store.put(IDENTITIES[0], make_kv(IDENTITIES[0]), text=None) > 0
        assert same_bits(store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
        store.close()
    else:
        with pytest.raises(StoreError, match=r"link|directory"):
            DiskStore(shipped, StoreConfig(index=kind, min_free_bytes=0))
    assert listing(elsewhere) == before
