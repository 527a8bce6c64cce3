"""An index that is deleted, replaced or changed to another kind under an open store: the next call goes on with what is there."""

import os
import shutil
import subprocess
import sys

import pytest
from kvrag.store.index_kinds import FILES

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, Retention, files, index_kinds, recovery
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(4)]
DOCUMENTS = [f"doc {number}" for number in range(4)]
HIGH = Retention(90, duration_s=3600, cost_ms=7.0)
NEW = make_identity(9)


def config_of(kind=None):
    return StoreConfig(index=kind, min_free_bytes=0)


def put(store, identity, number, **options):
    return store.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=f"doc {number}", **options)


def fill(root, kind=None):
    store = DiskStore(root, config_of(kind))
    for number, identity in enumerate(IDENTITIES):
        put(store, identity, number, retention=HIGH)
    return store


def is_whole(store):
    return store.index.documents(NAMESPACE) == DOCUMENTS and all(
        same_bits(store.get(identity), make_kv(identity)) for identity in IDENTITIES
    )


def priorities(store):
    return {store.priority(chunk_key(identity)) for identity in IDENTITIES}


def there(root):
    return [kind for kind in FILES if (root / "index" / FILES[kind]).exists()]


def other_of(kind):
    return next(other for other in FILES if other != kind)


@pytest.fixture(params=list(FILES))
def kind(request):
    return request.param


@pytest.fixture
def clock(monkeypatch):
    """The index's clock, which stands until it is set."""
    now = [1000.0]
    monkeypatch.setattr("kvrag.store.index.time.monotonic", lambda: now[0])
    return now


LOSSES = {
    "folder": lambda root: shutil.rmtree(root / "index"),
    "database": lambda root: [path.unlink() for path in (root / "index").glob("*.db")],
    "garbage": lambda root: _replace(root, os.urandom(9000)),
    "empty": lambda root: _replace(root, b""),
    "a folder in its place": lambda root: [(path.unlink(), path.mkdir()) for path in (root / "index").glob("*.db")],
}


def _replace(root, content):
    (path,) = (root / "index").glob("*.db")
    shutil.rmtree(root / "index")
    path.parent.mkdir()
    path.write_bytes(content)


CALLS = {
    "documents": lambda store: store.index.documents(NAMESPACE) == DOCUMENTS,
    "texts": lambda store: len(store.index.texts(NAMESPACE, 0)[0]) == 4,
    "put": lambda store: put(store, NEW, 9) > 0 and store.index.documents(NAMESPACE) == [*DOCUMENTS, "doc 9"],
    "delete": lambda store: store.delete([chunk_key(IDENTITIES[0])]) == 1 and store.get(IDENTITIES[0]) is None,
    "forget": lambda store: store.forget(NAMESPACE, "doc 0") == 1 and store.get(IDENTITIES[0]) is None,
    "clear": lambda store: store.clear() == 4 and store.index.documents(NAMESPACE) == [],
    "retain": lambda store: store.retain([chunk_key(IDENTITIES[0])], HIGH) or 90 in priorities(store),
    "mark": lambda store: store.erasure_mark() is not None,
}


@pytest.mark.parametrize(
    ("lose", "call"), [*(("folder", call) for call in CALLS), *((lose, "put") for lose in LOSSES if lose != "folder")]
)
def test_a_lost_index_heals_at_the_next_call(root, kind, lose, call, caplog):
    store = fill(root, kind)
    LOSSES[lose](root)
    assert CALLS[call](store)
    assert sum("is rebuilt" in line and "under this process" in line for line in caplog.messages) == 1
    assert there(root) == [kind]
    store.close()
    again = DiskStore(root, config_of())
    assert again.stats()["disk"].chunks == len(again.files())
    again.close()


CHILD = """
import sys
from kvrag.config import StoreConfig
from kvrag.store import DiskStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text
store, number = DiskStore(sys.argv[1], StoreConfig(min_free_bytes=0)), int(sys.argv[2])
print("open", flush=True)
sys.stdin.readline()
me = make_identity(number)
assert len(store.index.documents(NAMESPACE)) >= 4
assert store.put(me, make_kv(me), text=make_text(str(number)), doc_id=f"doc {number}") > 0
store.close()
"""


def test_several_processes_heal_it_at_once(root, kind):
    fill(root, kind).close()
    numbers = range(10, 14)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in numbers
    ]
    assert [child.stdout.readline() for child in children] == ["open\n"] * 4
    shutil.rmtree(root / "index")
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    ends = [child.wait(300) for child in children]
    for child in children:
        child.stdin.close()
        child.stdout.close()
    assert ends == [0] * 4
    assert there(root) == [kind]
    store = DiskStore(root, config_of())
    assert sorted(store.index.documents(NAMESPACE)) == sorted([*DOCUMENTS, *(f"doc {number}" for number in numbers)])
    assert store.stats()["disk"].chunks == 8
    store.close()


def test_who_heals_it_waits_for_who_opens_or_heals_the_store(root, kind, clock, monkeypatch):
    store = fill(root, kind)
    shutil.rmtree(root / "index")
    monkeypatch.setattr("kvrag.store.files.LOCK_TIMEOUT_S", -1)
    with files.locked(root / "lock"):
        assert store.index.documents(NAMESPACE) == []
        with pytest.raises(StoreError, match="another process has held"):
            put(store, NEW, 9)
    assert not (root / "index").exists()
    assert is_whole(store)
    store.close()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_change_in_whose_midst_the_index_is_lost_is_refused_whole(root, kind, is_last):
    store = fill(root, kind)

    def change():
        with store.rows.batch():
            store.rows.refer(NAMESPACE, "digest", "half")
            shutil.rmtree(root / "index")
            if not is_last:
                store.rows.refer(NAMESPACE, "digest", "the other half")

    with pytest.raises(StoreError, match="midst of a change"):
        change()
    assert is_whole(store)
    store.close()


def test_a_change_that_waited_for_a_database_that_is_gone_is_made_in_the_new_one(root, kind, monkeypatch):
    store = fill(root, kind)
    make, losses = type(store.index._rows), iter([lambda: shutil.rmtree(root / "index")])
    real = make.transact

    def transact(self):
        next(losses, lambda: None)()
        return real(self)

    monkeypatch.setattr(make, "transact", transact)
    assert put(store, NEW, 9) > 0
    monkeypatch.undo()
    assert store.index.get(chunk_key(NEW)) is not None
    assert "doc 9" in store.index.documents(NAMESPACE)
    store.close()


@pytest.mark.parametrize("is_half_done", [False, True])
def test_an_erasure_in_whose_midst_the_index_is_lost_is_one(root, kind, monkeypatch, is_half_done):
    """Another process may have erased the reference by then, so that nothing says any more whose chunk it is."""
    store = fill(root, kind)

    def lose_it():
        if is_half_done:
            recovery.drop_references(store.rows, store.references)
        shutil.rmtree(root / "index")

    real, losses = store.rows.unlink, iter([lose_it])

    def unlink(namespace, doc_id):
        keys = real(namespace, doc_id)
        next(losses, lambda: None)()
        return keys

    monkeypatch.setattr(store.rows, "unlink", unlink)
    assert store.forget(NAMESPACE, "doc 0") == 1
    assert store.get(IDENTITIES[0]) is None
    store.close()
    store = DiskStore(root, config_of())
    assert store.index.documents(NAMESPACE) == DOCUMENTS[1:]
    assert chunk_key(IDENTITIES[0]) not in store.files()
    store.close()


def test_an_erasure_goes_on_where_the_index_was_lost_with_the_file_half_erased(root, kind, monkeypatch):
    store = fill(root, kind)
    real, losses = store.objects.erase, iter([lambda: shutil.rmtree(root / "index")])
    monkeypatch.setattr(store.objects, "erase", lambda key: (next(losses, lambda: None)(), real(key))[1])
    store.forget(NAMESPACE, "doc 0")
    assert store.get(IDENTITIES[0]) is None
    assert store.index.documents(NAMESPACE) == DOCUMENTS[1:]
    store.close()
    store = DiskStore(root, config_of())
    assert store.index.documents(NAMESPACE) == DOCUMENTS[1:]
    store.close()


def test_an_erasure_that_fails_for_another_reason_is_not_tried_again(root, monkeypatch):
    store, calls = fill(root), []

    def refuse(*names):
        calls.append(names)
        raise StoreError("no space")

    monkeypatch.setattr(store.rows, "unlink", refuse)
    with pytest.raises(StoreError, match="no space"):
        store.forget(NAMESPACE, "doc 0")
    assert len(calls) == 1
    store.close()


def test_an_erasure_is_refused_where_the_index_is_lost_again_and_again(root, monkeypatch):
    store = fill(root)
    real = store.rows.unlink
    monkeypatch.setattr(store.rows, "unlink", lambda *names: (real(*names), shutil.rmtree(root / "index"))[0])
    with pytest.raises(StoreError, match="as fast as it is rebuilt"):
        store.forget(NAMESPACE, "doc 0")
    store.close()


def test_a_link_in_its_place_is_not_followed(root, kind, clock, tmp_path):
    store = fill(root, kind)
    elsewhere = tmp_path / "elsewhere"
    fill(tmp_path / "another", kind).close()
    (tmp_path / "another" / "index").rename(elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    shutil.rmtree(root / "index")
    (root / "index").symlink_to(elsewhere)
    assert store.index.documents(NAMESPACE) == []
    with pytest.raises(StoreError, match="its directory is a link"):
        put(store, NEW, 9)
    assert same_bits(store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    (root / "index").unlink()
    assert is_whole(store)
    store.close()


def test_a_directory_that_is_lost_is_not_made_again(root, kind):
    store = fill(root, kind)
    shutil.rmtree(root)
    assert store.get(IDENTITIES[0]) is None
    assert store.index.documents(NAMESPACE) == []
    for change in (lambda: put(store, NEW, 9), lambda: store.forget(NAMESPACE, "doc 0")):
        with pytest.raises(StoreError, match="make sure that the directory exists"):
            change()
    store.close()
    assert not root.exists()


def test_what_failed_is_left_alone_for_a_while(root, clock, caplog):
    store, calls = fill(root), []

    def fail(reopen):
        calls.append(clock[0])
        clock[0] += 0.5
        raise OSError("it is taken")

    real, store.rows.recover = store.rows.recover, fail
    shutil.rmtree(root / "index")
    for _ in range(5):
        assert store.index.documents(NAMESPACE) == []
        with pytest.raises(StoreError, match="it is taken"):
            put(store, NEW, 9)
    clock[0] += 10
    assert store.index.documents(NAMESPACE) == []
    assert calls == [1000.0, 1010.5]
    assert sum("it is taken" in line for line in caplog.messages) == 1
    clock[0] += 10
    store.rows.recover = real
    assert is_whole(store)
    store.close()


def test_a_rebuild_that_fails_is_begun_again(root, clock, monkeypatch):
    store = fill(root)
    shutil.rmtree(root / "index")
    with monkeypatch.context() as patch:
        patch.setattr("kvrag.store.recovery.headers", lambda *args: (_ for _ in ()).throw(OSError("no")))
        assert store.index.documents(NAMESPACE) == []
    assert store.index.generation == 0
    assert is_whole(store)
    store.close()


def test_an_index_that_is_lost_again_while_it_is_rebuilt_is_tried_at_once(root, clock, monkeypatch):
    store, real = fill(root), recovery.headers

    def lose_it_again(*args):
        clock[0] += 5
        shutil.rmtree(root / "index")
        return real(*args)

    shutil.rmtree(root / "index")
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "headers", lose_it_again)
        assert store.index.documents(NAMESPACE) == []
    assert is_whole(store)
    store.close()


def test_it_is_not_looked_for_while_the_store_is_opened(root, monkeypatch):
    """The lock is held then: whoever waited for it would wait for himself."""
    fill(root).close()
    monkeypatch.setattr("kvrag.store.recovery.finish_erasures", lambda *args: shutil.rmtree(root / "index"))
    with pytest.raises(StoreError, match="while the store was opened"):
        DiskStore(root, config_of())


def test_the_default_is_the_kind_that_is_there(root, kind, caplog):
    live = fill(root, kind)
    store = DiskStore(root, config_of())
    assert priorities(store) == {90}
    put(store, NEW, 9)
    assert live.index.documents(NAMESPACE) == [*DOCUMENTS, "doc 9"]
    assert live.forget(NAMESPACE, "doc 9") == 1
    assert is_whole(store)
    assert is_whole(live)
    assert there(root) == [kind]
    assert caplog.messages == []
    live.close()
    store.close()


def test_without_one_the_default_is_diskcache(root):
    fill(root).close()
    assert there(root) == ["diskcache"]


def test_another_kind_takes_over_what_only_the_index_knew(root, kind, caplog):
    store = fill(root, kind)
    put(store, NEW, 9)
    keys = store.index.unlink(NAMESPACE, "doc 9")  # killed before the file was erased
    assert keys == [chunk_key(NEW)]
    retention = store.rows.retention(chunk_key(IDENTITIES[0]))
    store.close()
    store = DiskStore(root, config_of(other_of(kind)))
    assert is_whole(store)
    assert priorities(store) == {90}
    now = store.rows.retention(chunk_key(IDENTITIES[0]))
    assert now.cost_ms == retention.cost_ms == 7.0
    assert now.duration_s == pytest.approx(retention.duration_s, abs=60)
    assert not store.contains(chunk_key(NEW))
    assert there(root) == [other_of(kind)]
    (line,) = caplog.messages
    assert f"is kept by {other_of(kind)} now, and no longer by {kind}" in line
    assert "lost" not in line
    store.close()


def test_who_takes_what_is_there_follows_to_another_kind(root, kind):
    live = fill(root, kind)
    live.close()
    live = DiskStore(root, config_of())
    store = DiskStore(root, config_of(other_of(kind)))
    assert is_whole(live)
    assert live.forget(NAMESPACE, "doc 0") == 1
    assert store.index.documents(NAMESPACE) == DOCUMENTS[1:]
    assert there(root) == [other_of(kind)]
    live.close()
    store.close()


def test_who_asked_for_the_kind_that_was_replaced_is_told(root, kind, caplog):
    live = fill(root, kind)
    store = DiskStore(root, config_of(other_of(kind)))
    assert live.index.documents(NAMESPACE) == []
    assert f"was replaced by one of the kind '{other_of(kind)}'" in caplog.messages[-1]
    for change in (
        lambda: put(live, NEW, 9),
        lambda: live.forget(NAMESPACE, "doc 0"),
        lambda: live.delete([chunk_key(IDENTITIES[0])]),
    ):
        with pytest.raises(
            StoreError, match=r"was replaced by one of the kind .* open it again, with the same Store"
        ) as caught:
            change()
        assert "writable" not in str(caught.value)
    assert there(root) == [other_of(kind)]
    live.close()
    store.close()


def test_a_change_of_kind_that_was_cut_short_leaves_the_old_one_in_use(root, kind, monkeypatch):
    fill(root, kind).close()
    with monkeypatch.context() as patch:

        def refuse(directory, which):
            raise OSError("killed")

        patch.setattr(index_kinds, "remove", lambda directory, which: which == kind and refuse(directory, which))
        with pytest.raises(StoreError, match="killed"):
            DiskStore(root, config_of(other_of(kind)))
    assert sorted(there(root)) == sorted(FILES)
    store = DiskStore(root, config_of())
    assert is_whole(store)
    assert priorities(store) == {90}
    store.close()
    assert there(root) == [kind]
    store = DiskStore(root, config_of(other_of(kind)))
    assert priorities(store) == {90}
    store.close()


def test_a_damaged_index_of_another_kind_is_not_copied(root, kind, caplog, no_pickle):
    fill(root, kind).close()
    (root / "index" / FILES[kind]).write_bytes(os.urandom(9000))
    store = DiskStore(root, config_of(other_of(kind)))
    assert is_whole(store)
    assert priorities(store) == {35}
    assert "priorities, costs and hits are lost" in caplog.messages[-1]
    store.close()


def test_an_index_of_another_kind_that_is_locked_is_left_alone(root, monkeypatch):
    monkeypatch.setattr("kvrag.store.connect.BUSY_TIMEOUT_S", 0.05)
    for kind in FILES:
        live = fill(root / kind, kind)
        with live.index.batch(), pytest.raises(StoreError, match="locked"):
            DiskStore(root / kind, config_of(other_of(kind)))
        assert is_whole(live)
        assert priorities(live) == {90}
        live.close()


def test_a_link_that_is_named_like_another_kind_counts_for_nothing(root, kind, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    fill(root, kind).close()
    (root / "index" / FILES[other_of(kind)]).symlink_to(victim)
    store = DiskStore(root, config_of())
    assert is_whole(store)
    assert priorities(store) == {90}
    store.close()
    assert (root / "index" / FILES[other_of(kind)]).is_symlink()
    assert victim.read_bytes() == b"x"
