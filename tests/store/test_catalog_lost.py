"""A catalog that is lost or replaced, also under an open store: the next call heals it, and nothing that was erased comes back."""

import shutil
from contextlib import suppress

import pytest
from stores import (
    CHUNKS,
    EVERY_KEY,
    KEYS,
    KVS,
    PATIENT_S,
    SIZE,
    ended,
    files,
    fill,
    in_child,
    listing,
    present,
    put,
)

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import Catalog
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits


def lose(root):
    for folder in list(root.glob("catalog*")):
        shutil.rmtree(folder)


def move(root):
    for number, folder in enumerate(root.glob("catalog*")):
        folder.rename(root.parent / f"moved {number}")


def unlink(root):
    """What a user might delete: the database without its journals."""
    for path in root.glob("catalog*/cache.db"):
        path.unlink()


def replace_it(root):
    """By another store's, as a backup would."""
    other = root.parent / "other"
    Catalog(other).close()
    for folder in list(root.glob("catalog*")):
        shutil.rmtree(folder)
        shutil.copytree(other, folder)


LOSSES = [lose, move, unlink, replace_it]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("key", EVERY_KEY)
def test_a_lost_catalog_heals_at_the_next_call(handle, root, loss, key):
    one, two = handle(key=key), handle(key=key)
    fill(one, 1, 2)
    loss(root)
    for each in (one, two):
        assert present(each) == []
        assert each.get(CHUNKS[1]) is None, (
            "its row is gone: nobody could tell whether it was erased"
        )
        assert each.catalog.documents(NAMESPACE) == []
    assert put(two, 1) == 0, "adopted: nothing is written"
    assert put(one, 3) > 0
    for each in (one, two):
        assert present(each) == [1, 3]
        assert same_bits(each.get(CHUNKS[1]), KVS[1])
    assert files(root) == [1, 2, 3]


def test_dormant_blobs_are_adopted_without_their_tensors(handle, root):
    one = fill(handle(), 1)
    lose(root)
    two, events = (
        handle(on_event=lambda event: events.append((event.type, event.medium, event.reason))),
        [],
    )
    assert two.link(CHUNKS[1], text=make_text("text 1"), doc_id="new")
    assert not two.link(CHUNKS[2], text=make_text("text 2"), doc_id="new")
    assert events == [("BlockStored", "disk", "adopted")]
    assert two.catalog.totals() == (1, SIZE)
    assert one.identities(NAMESPACE, make_text("text 1").digest) == [CHUNKS[1]]
    assert two.catalog.document_keys(NAMESPACE, "new") == [KEYS[1]]
    assert one.forget(NAMESPACE, "new") == 1
    assert files(root) == []


@pytest.mark.parametrize("damage", ["truncated", "other chunk"])
def test_what_is_no_sound_blob_is_not_adopted(handle, root, damage):
    fill(handle(), 1, 2)
    lose(root)
    path = next(root.glob(f"**/{KEYS[1]}.safetensors"))
    raw = (
        path.read_bytes()
        if damage == "truncated"
        else next(root.glob(f"**/{KEYS[2]}.safetensors")).read_bytes()
    )
    path.write_bytes(raw[:100] if damage == "truncated" else raw)
    store = handle()
    assert not store.link(CHUNKS[1], text=None, doc_id=None)
    assert put(store, 1) > 0
    assert same_bits(store.get(CHUNKS[1]), KVS[1])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_document_that_the_catalog_forgot_is_erased_all_the_same(handle, root, loss):
    """Any dormant blob might be the document's, so all of them go."""
    store = fill(handle(), 1, 2)
    loss(root)
    put(store, 2)
    assert store.forget(NAMESPACE, "doc 1") == 0, "nobody knows how many"
    assert files(root) == [2]
    lose(root)
    assert not store.link(CHUNKS[1], text=make_text("text 1"), doc_id="doc 1")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("erase", ["clear", "forget", "delete", "namespace"])
@pytest.mark.parametrize("key", EVERY_KEY)
def test_what_was_erased_before_or_after_the_loss_never_returns(handle, root, loss, erase, key):
    store, other = handle(key=key), handle(key=key)
    theirs = make_identity(7, namespace="other")
    fill(store, 1, 2, 3)
    store.put(theirs, make_kv(theirs), text=None)
    other.get_many(CHUNKS[:4], timeout_s=PATIENT_S)
    assert store.forget(NAMESPACE, "doc 3") == 1
    loss(root)
    if erase == "clear":
        other.clear()
    elif erase == "forget":
        other.forget(NAMESPACE, "doc 1")
    elif erase == "delete":
        assert other.delete([KEYS[1], KEYS[3]]) == 1
    else:
        other.clear(NAMESPACE)
    lose(root)
    for each in (store, other, handle(key=key)):
        assert not each.link(CHUNKS[1], text=None, doc_id=None)
        assert not each.link(CHUNKS[3], text=None, doc_id=None)
        assert each.get(CHUNKS[1]) is None
    left = {"delete": {2, theirs}, "namespace": {theirs}}.get(erase, set())
    assert store.blobs.keys() == {chunk_key(one) if one is theirs else KEYS[one] for one in left}


def test_a_cursor_of_a_lost_catalog_misses_no_text(handle, root):
    store = fill(handle(), 1, 2)
    cursor = store.catalog.texts(NAMESPACE, 0)[1]
    lose(root)
    put(store, 1)
    assert store.catalog.texts(NAMESPACE, cursor)[0] == [make_text("text 1")]


def test_a_catalog_that_is_lost_during_a_change_refuses_it_whole(handle, root, monkeypatch):
    store = fill(handle(), 1)
    real = store.catalog._attach

    def lose_then_attach(*args):
        lose(root)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "_attach", lose_then_attach)
        with pytest.raises(StoreError, match="replaced or deleted"):
            put(store, 2)
    assert present(store) == []
    assert store.catalog.documents(NAMESPACE) == []
    assert put(store, 2) > 0
    assert put(store, 1) == 0


@pytest.mark.parametrize("step", ["only_held_by", "unlink"])
def test_an_erasure_in_whose_midst_the_catalog_is_lost_erases(handle, root, monkeypatch, step):
    store = fill(handle(), 1, 2)
    real, calls = getattr(store.catalog, step), []

    def lose_first(*args):
        calls.append(args)
        if len(calls) == 1:
            lose(root)
        return real(*args)

    monkeypatch.setattr(store.catalog, step, lose_first)
    store.forget(NAMESPACE, "doc 1")
    store.forget(NAMESPACE, "doc 1")
    assert 1 not in files(root)
    assert not store.link(CHUNKS[1], text=None, doc_id=None)


def test_a_directory_that_vanished_is_empty_refuses_puts_and_heals_when_it_is_there_again(
    handle, root
):
    store = fill(handle(), 1)
    shutil.rmtree(root)
    assert store.get(CHUNKS[1]) is None
    assert present(store) == []
    assert store.stats()["disk"].chunks == 0
    with pytest.raises(StoreError, match="make sure that the directory exists"):
        put(store, 1)
    assert not root.exists(), "it may be a mount that is gone"
    root.mkdir()
    assert put(store, 1) > 0
    store.release()
    assert same_bits(store.get(CHUNKS[1]), KVS[1])


def test_several_processes_heal_it_at_once(handle, root):
    store = fill(handle(), 1)
    lose(root)

    def heal(number):
        with_own = handle()
        return put(with_own, number) > 0 and put(with_own, 1) == 0

    children = [in_child(lambda number=number: heal(number)) for number in range(2, 6)]
    assert [ended(child) for child in children] == [0] * 4
    assert present(store) == [1, 2, 3, 4, 5]
    assert store.catalog.totals() == (5, 5 * SIZE)


@pytest.mark.parametrize("place", ["catalog", "catalog/cache.db"])
def test_a_link_in_its_place_is_not_followed(handle, opened, root, tmp_path, place):
    fill(handle(), 1).close()
    (root / place).rename(tmp_path / "elsewhere")
    (root / place).symlink_to(tmp_path / "elsewhere")
    before = (
        listing(tmp_path / "elsewhere")
        if place == "catalog"
        else (tmp_path / "elsewhere").read_bytes()
    )
    with suppress(StoreError):
        store = opened()
        put(store, 2)
        store.close()
    after = (
        listing(tmp_path / "elsewhere")
        if place == "catalog"
        else (tmp_path / "elsewhere").read_bytes()
    )
    assert after == before


def test_a_catalog_that_can_not_be_made_is_an_error_at_the_opening(opened, root):
    root.mkdir()
    (root / "catalog").write_text("not a folder")
    with pytest.raises(StoreError, match="can't be opened"):
        opened()
