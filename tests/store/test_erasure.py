"""Deleting a document erases its KV, its id and its references from the disk, also when it is cut short."""

import os
import shutil

import pytest

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, ids_bytes
from kvrag.store import DiskStore, MemoryStore, TieredStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

ONE, TWO = make_identity(1), make_identity(2)
SECRET = "a secret name of a document"


def traces(root, *needles):
    """Every place below ``root`` that still holds one of these byte strings."""
    found = []
    for path in root.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        found += [
            (str(path), needle) for needle in needles if needle in content or needle.decode("latin1") in path.name
        ]
    return found


@pytest.fixture(params=["diskcache", "sqlite"])
def config(request):
    return StoreConfig(index=request.param, min_free_bytes=0)


@pytest.fixture
def filled(root, config):
    store = DiskStore(root, config)
    store.put(ONE, make_kv(ONE), text=make_text("one"), doc_id=SECRET)
    store.put(TWO, make_kv(TWO), text=make_text("two"), doc_id="other")
    yield store
    store.close()


def needles():
    kv = make_kv(ONE)
    data = kv.layers[0].keys.numpy().tobytes()
    import base64

    ids = base64.b64encode(ids_bytes(ONE.token_ids))
    return (data, ids, chunk_key(ONE).encode(), SECRET.encode(), make_text("one").digest.encode())


def test_nothing_of_a_forgotten_document_is_left_on_the_disk(filled, root):
    assert {needle for _, needle in traces(root, *needles())} == set(needles())
    assert filled.forget(NAMESPACE, SECRET) == 1
    assert traces(root, *needles()) == []
    filled.close()
    assert traces(root, *needles()) == []


def test_nothing_is_left_when_it_is_unlinked_and_deleted_in_two_steps(filled, root):
    assert filled.delete(filled.index.unlink(NAMESPACE, SECRET)) == 1
    assert traces(root, *needles()) == []


def test_forgetting_reaches_memory(root, config):
    store = TieredStore(MemoryStore(2**20), DiskStore(root, config))
    store.put(ONE, make_kv(ONE), text=make_text("one"), doc_id=SECRET)
    assert store.get(ONE) is not None
    assert store.forget(NAMESPACE, SECRET) == 1
    assert store.get(ONE) is None
    assert store.stats()["host"].chunks == 0
    store.close()


def test_an_erasure_that_was_cut_short_is_finished_at_the_next_opening(filled, root, config):
    keys = filled.index.unlink(NAMESPACE, SECRET)
    assert keys == [chunk_key(ONE)]
    assert filled.get(ONE) is None, "it must not be served, nor come back"
    filled.close()
    store = DiskStore(root, config)
    assert not store.contains(chunk_key(ONE))
    assert store.index.documents(NAMESPACE) == ["other"]
    assert [name for name in os.listdir(root / "references") if os.listdir(root / "references" / name)] != []
    assert store.index.gone() == []
    assert store.index.gone_references() == []
    store.close()
    assert traces(root, needles()[0], needles()[3]) == []


def test_a_chunk_that_is_added_again_in_time_stays(filled, root, config):
    filled.index.unlink(NAMESPACE, SECRET)
    other = DiskStore(root, config)  # finishes the erasure
    assert other.put(ONE, make_kv(ONE), text=make_text("one"), doc_id="new") > 0
    other.close()
    filled.index.unlink(NAMESPACE, "new")
    assert filled.link(ONE, text=make_text("one"), doc_id="newer")
    assert not filled.index.settle((chunk_key(ONE),), lambda: pytest.fail("erased"))
    assert same_bits(filled.get(ONE), make_kv(ONE))


def test_a_lost_index_gets_every_document_back(filled, root, config):
    filled.put(ONE, make_kv(ONE), text=make_text("one"), doc_id="second")
    filled.put(ONE, make_kv(ONE), text=make_text("same ids"), doc_id="third \ud800")
    filled.forget(NAMESPACE, SECRET)
    filled.close()
    shutil.rmtree(root / "index")
    store = DiskStore(root, config)
    assert store.index.documents(NAMESPACE) == ["other", "second", "third \ud800"]
    digests = {text.digest for text in store.index.texts(NAMESPACE, 0)[0]}
    assert digests == {make_text(name).digest for name in ("one", "two", "same ids")}
    assert store.forget(NAMESPACE, "second") == 0
    assert store.forget(NAMESPACE, "third \ud800") == 1
    assert not store.contains(chunk_key(ONE))
    store.close()


def test_references_and_rows_are_brought_in_step_at_the_opening(filled, root, config):
    """A power cut may lose the latest rows, or the latest files."""
    filled.index._erase(f'ref "{NAMESPACE}" "{make_text("two").digest}" "other"')
    filled.index._erase(f'doc "{NAMESPACE}" "other" "{make_text("two").digest}"')
    (file,) = [path for path in (root / "references").rglob("*.json") if SECRET in path.read_text()]
    file.unlink()
    filled.close()
    store = DiskStore(root, config)
    assert store.index.documents(NAMESPACE) == [SECRET, "other"]
    assert file.exists()
    store.close()


@pytest.mark.parametrize("damage", [b"", b"[", b"{}", None])
def test_a_damaged_reference_is_no_reference(filled, root, config, damage):
    (file,) = [path for path in (root / "references").rglob("*.json") if SECRET in path.read_text()]
    file.write_bytes(file.read_bytes().replace(b"secret", b"sacred") if damage is None else damage)
    filled.close()
    shutil.rmtree(root / "index")
    store = DiskStore(root, config)
    assert store.index.documents(NAMESPACE) == ["other"]
    assert same_bits(store.get(ONE), make_kv(ONE))
    store.close()


def test_clearing_erases_everything(filled, root):
    assert filled.clear() == 2
    assert filled.index.documents(NAMESPACE) == []
    assert filled.index.texts(NAMESPACE, 0)[0] == []
    assert traces(root, *needles()) == []
    assert filled.put(ONE, make_kv(ONE), text=None) > 0


def test_what_can_not_be_written_as_a_reference_is_not_stored(filled, monkeypatch):
    def refuse(self, file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kvrag.store.references.References.add", refuse)
        with pytest.raises(StoreError, match="reference"):
            filled.put(make_identity(3), make_kv(make_identity(3)), text=make_text("c"), doc_id="c")
    assert not filled.contains(chunk_key(make_identity(3)))
