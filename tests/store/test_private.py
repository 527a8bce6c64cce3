"""A store that others could read is private again once it is opened for writing; what is not the store's keeps its mode."""

import logging
import os
import shutil
import stat

import pytest

from kvrag.config import StoreConfig
from kvrag.store import DiskStore, privacy
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(3)]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def open_up(root):
    """Give modes as a copy by hand has them."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def is_private(root):
    return all(mode(path) == (0o700 if path.is_dir() else 0o600) for path in (root, *root.rglob("*")))


def use(root, **options):
    store = DiskStore(root, StoreConfig(min_free_bytes=0, **options))
    found = [store.get(identity) for identity in IDENTITIES]
    store.close()
    return found


@pytest.fixture(params=["diskcache", "sqlite"])
def kind(request):
    return request.param


@pytest.fixture
def copied(root, kind):
    store = DiskStore(root, StoreConfig(index=kind, min_free_bytes=0))
    for number, identity in enumerate(IDENTITIES):
        store.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=f"doc {number}")
    store.close()
    shutil.copytree(
        root / "objects" / next(iter(os.listdir(root / "objects"))), root / "quarantine", dirs_exist_ok=True
    )
    open_up(root)
    return root


def test_a_copied_store_is_made_private_and_says_so_once(copied, kind, caplog):
    assert all(
        same_bits(kv, make_kv(identity)) for kv, identity in zip(use(copied, index=kind), IDENTITIES, strict=True)
    )
    assert is_private(copied)
    assert [record.levelno for record in caplog.records if "made private" in record.message] == [logging.WARNING]
    caplog.clear()
    use(copied, index=kind)
    assert caplog.records == []


def test_an_index_that_was_put_aside_is_the_stores_own(copied, kind):
    """It holds the ids of documents, and is no reason to leave the root open."""
    shutil.copytree(copied / "index", copied / "index.damaged")
    open_up(copied)
    use(copied, index=kind)
    assert is_private(copied)


def test_a_directory_that_was_there_before_is_made_private(root, caplog):
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    use(root)
    assert is_private(root)
    assert "made private" in caplog.text


def test_a_new_store_says_nothing(root, caplog):
    use(root)
    use(root)
    assert caplog.records == []


def test_a_root_that_holds_other_things_keeps_its_mode_and_they_theirs(copied, kind, caplog):
    strangers = [
        copied / "notes.txt",
        copied / "objects" / "README",
        copied / "index" / "mine.txt",
        copied / "objects" / "zz",
    ]
    for path in strangers:
        path.write_text("mine")
    (copied / "data").mkdir()
    (copied / "data" / "table.csv").write_text("mine")
    open_up(copied)
    use(copied, index=kind)
    assert mode(copied) == mode(copied / "data") == 0o755
    assert {mode(path) for path in (*strangers, copied / "data" / "table.csv")} == {0o644}
    assert mode(copied / "objects") == mode(copied / "index") == mode(copied / "references") == 0o700
    assert all(mode(path) == 0o600 for path in copied.rglob("*.safetensors"))
    assert mode(copied / "format.json") == 0o600


def test_links_are_not_followed_and_other_names_of_a_file_keep_their_mode(copied, kind, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a").write_text("mine")
    open_up(elsewhere)
    first = next((copied / "objects").rglob("*.safetensors"))
    os.link(first, elsewhere / "kept")
    (copied / "references" / "00").symlink_to(elsewhere)
    (first.parent / ("f" * 64 + ".safetensors")).symlink_to(elsewhere / "a")
    use(copied, index=kind)
    assert mode(elsewhere) == 0o755
    assert mode(elsewhere / "a") == mode(elsewhere / "kept") == 0o644


def test_a_root_that_is_a_link_is_private_at_its_target(copied, kind, tmp_path):
    (tmp_path / "link").symlink_to(copied)
    use(tmp_path / "link", index=kind)
    assert is_private(copied)


def test_what_lies_in_private_folders_is_not_looked_at(copied, kind, monkeypatch):
    use(copied, index=kind)
    next((copied / "objects").rglob("*.safetensors")).chmod(0o644)
    monkeypatch.setattr(privacy, "_files", lambda *args: pytest.fail("files were listed"))
    use(copied, index=kind)


def test_reading_only_changes_nothing(copied, kind):
    use(copied, index=kind, read_only=True)
    assert mode(copied) == mode(copied / "objects") == 0o755
    assert all(mode(path) == 0o644 for path in copied.rglob("*.safetensors"))


@pytest.mark.parametrize("fault", ["denied", "no modes"])
def test_what_can_not_be_made_private_is_told_and_the_store_is_used(copied, kind, monkeypatch, caplog, fault):
    def fchmod(fd, mode):
        if fault == "denied":
            raise PermissionError("not the owner")

    monkeypatch.setattr(privacy.os, "fchmod", fchmod)
    assert all(use(copied, index=kind))
    assert "could not be made private (the directory itself first)" in caplog.text
    assert "chmod -R go-rwx" in caplog.text


def test_the_adapters_table_is_made_private_too(copied, kind):
    folder = copied / "llama_index"
    folder.mkdir()
    (folder / "refs.sqlite").write_bytes(b"")
    open_up(copied)
    use(copied, index=kind)
    assert is_private(copied)


def test_owners_rights_and_special_bits_stay(copied, kind):
    (copied / "objects").chmod(0o2755)
    use(copied, index=kind)
    assert mode(copied / "objects") == 0o2700
