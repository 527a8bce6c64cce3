"""An index that is lost in the midst of something: of a wait for the disk, of a clear, of an erasure."""

import shutil
from contextlib import closing

import pytest

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, namespace_digest
from kvrag.store import DiskIndex, DiskStore, Retention, open_store, recovery
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(3)]
KEYS = [chunk_key(identity) for identity in IDENTITIES]


def put(store, number, doc_id="doc", **options):
    text = make_text(str(number)) if doc_id else None
    return store.put(IDENTITIES[number], make_kv(IDENTITIES[number]), text=text, doc_id=doc_id, **options)


@pytest.fixture(params=[0, 2**20], ids=["disk", "tiers"])
def behind(root, request):
    """A store that writes behind, alone and below memory, whose index is lost while its writer is held up."""
    store = open_store(root, StoreConfig(write_policy="back", min_free_bytes=0, ram_bytes=request.param))
    yield store
    store.close()


@pytest.mark.parametrize("doc_id", ["doc", None])
def test_what_waits_is_told_when_its_row_is_lost_with_the_index(behind, root, held_up, doc_id):
    with held_up():
        put(behind, 0, doc_id)
        shutil.rmtree(root / "index")
        assert behind.index.documents(NAMESPACE) == []
        assert (behind.contains(KEYS[0]), behind.get(IDENTITIES[0])) == (False, None)
    errors = behind.flush()
    assert list(errors) == [KEYS[0]]
    assert "the index was lost before" in errors[KEYS[0]]
    assert behind.stats()["disk"].failed_writes == 1
    assert behind.stats()["disk"].unwritten == 0
    assert not list((root / "objects").rglob("*.safetensors"))
    assert put(behind, 0, doc_id) > 0
    assert behind.flush() == {}
    assert same_bits(behind.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))


def test_what_waits_and_is_put_again_after_the_loss_is_written(behind, root, held_up):
    with held_up():
        put(behind, 0, retention=Retention(90))
        shutil.rmtree(root / "index")
        put(behind, 0, retention=Retention(90))
        assert behind.contains(KEYS[0])
    assert behind.flush() == {}
    assert same_bits(behind.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert behind.index.documents(NAMESPACE) == ["doc"]
    assert behind.priority(KEYS[0]) == 90


def test_who_puts_it_after_the_loss_has_it_and_who_lost_it_is_told(behind, root, held_up):
    with held_up():
        put(behind, 0, "lost")
        shutil.rmtree(root / "index")
        put(behind, 0, "later")
    assert list(behind.flush()) == [KEYS[0]]
    assert same_bits(behind.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert behind.index.documents(NAMESPACE) == ["later"]
    assert behind.forget(NAMESPACE, "later") == 1
    assert behind.get(IDENTITIES[0]) is None


def test_what_another_process_has_erased_before_the_loss_does_not_come_back(behind, root, held_up):
    other = DiskStore(root, StoreConfig(min_free_bytes=0))
    with held_up():
        put(behind, 0)
        other.forget(NAMESPACE, "doc")
        shutil.rmtree(root / "index")
    assert "if that was not erased" in behind.flush()[KEYS[0]]
    assert other.files() == set()
    assert other.index.documents(NAMESPACE) == []
    other.close()


def test_an_index_that_changes_its_kind_loses_nothing_that_waits(behind, root, held_up):
    with held_up():
        put(behind, 0)
        other = DiskStore(root, StoreConfig(index="sqlite", min_free_bytes=0))
    assert behind.flush() == {}
    assert other.index.documents(NAMESPACE) == ["doc"]
    assert same_bits(other.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    other.close()


@pytest.fixture(params=["diskcache", "sqlite"])
def store(root, request):
    seen = []
    store = DiskStore(root, StoreConfig(min_free_bytes=0, index=request.param, on_event=seen.append))
    for number in range(3):
        put(store, number, f"doc {number}")
    store.seen = seen
    yield store
    store.close()


def left_in(store):
    """Return what is known of a store that is opened anew."""
    with closing(DiskStore(store._root, StoreConfig(min_free_bytes=0))) as again:
        return again.index.documents(NAMESPACE), again.references.names(), again.files()


@pytest.mark.parametrize("namespace", [None, NAMESPACE])
@pytest.mark.parametrize("is_half_done", [False, True])
def test_a_clear_in_whose_midst_the_index_is_lost_leaves_no_document(store, root, monkeypatch, namespace, is_half_done):
    real, losses = recovery.drop_references, iter([root / "index"])

    def drop_references(rows, references):
        for folder in losses:
            if is_half_done:
                references.remove(rows.gone_references()[0])
            shutil.rmtree(folder)
        real(rows, references)

    monkeypatch.setattr(recovery, "drop_references", drop_references)
    assert store.clear(namespace) == 3
    assert store.index.documents(NAMESPACE) == []
    assert left_in(store) == ([], set(), set())


def test_a_clear_of_a_namespace_leaves_the_others_their_documents_though_the_index_is_lost(store, root, monkeypatch):
    theirs = make_identity(7, namespace=namespace_digest("other"))
    store.put(theirs, make_kv(theirs), text=make_text("0"), doc_id="doc 0")
    real, losses = store.rows.mark_erasure, iter([root / "index"])
    monkeypatch.setattr(store.rows, "mark_erasure", lambda: (list(map(shutil.rmtree, losses)), real()))
    assert store.clear(NAMESPACE) == 3
    assert store.index.documents(theirs.namespace) == ["doc 0"]
    assert left_in(store)[2] == {chunk_key(theirs)}


def test_a_clear_is_refused_where_the_index_is_lost_again_and_again(store, root, monkeypatch):
    real = store.rows.unlink_text
    monkeypatch.setattr(store.rows, "unlink_text", lambda *names: (real(*names), shutil.rmtree(root / "index")))
    with pytest.raises(StoreError, match="as fast as it is rebuilt"):
        store.clear()


ERASURES = {
    "delete": lambda store: store.delete(KEYS),
    "forget": lambda store: sum(store.forget(NAMESPACE, f"doc {number}") for number in range(3)),
    "clear": lambda store: store.clear(),
    "clear namespace": lambda store: store.clear(NAMESPACE),
    "evict": lambda store: store._evictor.evict(2**20),
}


@pytest.mark.parametrize("how", ERASURES)
def test_what_is_erased_counts_though_the_index_is_lost_with_its_file(store, root, monkeypatch, how):
    real, losses = store.objects.erase, iter([root / "index"])

    def erase(key):
        found = real(key)
        for folder in losses:
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr(store.objects, "erase", erase)
    monkeypatch.setattr(store._evictor, "_erase", erase)
    had_room = (root / "ballast").exists()
    assert ERASURES[how](store) == 3
    gone = [key for event in store.seen if event.type == "BlockRemoved" for key in event.block_hashes]
    assert sorted(gone) == ([] if how == "clear" else sorted(KEYS))
    assert store.files() == set()
    assert (root / "ballast").exists() == had_room  # which a loss has nothing to do with


def test_a_file_that_is_erased_is_told_of_though_its_row_stays(store, monkeypatch):
    def full(self, *args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "_erase", full)
        with pytest.raises(StoreError, match="No space left"):
            store.delete(KEYS[:1])
    assert [event.block_hashes for event in store.seen if event.type == "BlockRemoved"] == [(KEYS[0],)]
    assert store.files() == set(KEYS[1:])


def test_room_for_an_erasure_is_made_where_the_disk_is_full(store, root, monkeypatch):
    real = DiskIndex._erase

    def full(self, row):
        if (root / "ballast").exists():
            raise OSError(28, "No space left on device")
        return real(self, row)

    monkeypatch.setattr(DiskIndex, "_erase", full)
    assert store.forget(NAMESPACE, "doc 0") == 1
    assert store.index.documents(NAMESPACE) == ["doc 1", "doc 2"]
    assert not (root / "ballast").exists()
