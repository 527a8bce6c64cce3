"""Writing behind: what is promised while a chunk waits for the disk, and what is left when it can't get there."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, Retention, TieredStore, WriteBehind, open_store, usage, writer
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(6)]
KEYS = [chunk_key(identity) for identity in IDENTITIES]
SIZE = make_kv(IDENTITIES[0]).num_bytes


@pytest.fixture
def disk(root):
    return DiskStore(root, StoreConfig(min_free_bytes=0))


@pytest.fixture
def store(disk):
    store = WriteBehind(disk)
    yield store
    store.close()


def put(store, number, text=None, doc_id=None, **options):
    entry = None if text is None else make_text(text)
    return store.put(IDENTITIES[number], make_kv(IDENTITIES[number]), text=entry, doc_id=doc_id, **options)


def test_a_put_returns_before_the_chunk_is_written_and_flush_waits(store, disk, held_up):
    with held_up():
        assert put(store, 0, "a", "doc") == SIZE
        assert not disk.contains(KEYS[0])
        assert store.contains(KEYS[0])
        assert store.link(IDENTITIES[0], text=make_text("b"), doc_id="other")
        assert same_bits(store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
        assert same_bits(store.get_many(IDENTITIES[:2], timeout_s=30)[0], make_kv(IDENTITIES[0]))
        assert store.identity(KEYS[0]) == IDENTITIES[0]
        assert store.stats()["disk"].unwritten == 1
        assert store.index.texts(NAMESPACE, 0)[0] == [make_text("a"), make_text("b")]
    assert store.flush() == {}
    assert store.stats()["disk"].unwritten == 0
    assert disk.contains(KEYS[0])
    other = DiskStore(disk._root)
    assert same_bits(other.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert other.forget(NAMESPACE, "doc") == 0
    assert other.forget(NAMESPACE, "other") == 1
    other.close()


def test_a_duration_begins_with_the_put_and_not_with_the_write(store, disk, held_up, monkeypatch):
    now = usage.since_boot()
    with held_up():
        store.put(IDENTITIES[0], make_kv(IDENTITIES[0]), text=None, retention=Retention(90, duration_s=60))
        monkeypatch.setattr(usage, "since_boot", lambda: now + 45)
    assert store.flush() == {}
    left = disk.retention(KEYS[0]).duration_s
    assert 0 < left <= 16, "it goes on while the chunk waits"


def test_through_is_the_default_and_is_on_disk_at_once(root):
    store = open_store(root, StoreConfig(min_free_bytes=0))
    put(store, 0)
    assert DiskStore(root).contains(KEYS[0])
    assert store.flush() == {}
    store.close()


def test_more_than_the_queue_holds_is_written_through(disk, held_up):
    store = WriteBehind(disk, max_bytes=SIZE)
    with held_up() as go_on:
        put(store, 0)
        threading.Timer(0.1, go_on.set).start()
        put(store, 1)
    assert disk.contains(KEYS[1])
    store.close()


@pytest.mark.parametrize("who", ["delete", "forget"])
def test_what_is_erased_while_it_waits_never_comes_back(store, disk, held_up, who):
    with held_up() as go_on:
        for number in range(3):
            put(store, number, f"text {number}", f"doc {number}")
        put(store, 2, "text 2", "another")
        threading.Timer(0.1, go_on.set).start()  # an erasure waits for the write that is under way
        if who == "delete":
            assert store.delete(KEYS[:2]) == 2
        else:
            assert [store.forget(NAMESPACE, f"doc {number}") for number in range(3)] == [1, 1, 0]
    assert store.flush() == {}
    assert disk.files() == {KEYS[2]}
    assert [store.contains(key) for key in KEYS[:3]] == [False, False, True]
    assert store.index.keys() == [KEYS[2]]


def test_a_chunk_of_a_document_that_another_process_deletes_by_its_key_is_not_written(store, disk, held_up):
    other = DiskStore(disk._root)
    with held_up():
        put(store, 0, "a", "doc")
        put(store, 1, "b", "doc")
        other.delete([KEYS[0]])
    store.flush()
    assert disk.files() == {KEYS[1]}
    assert store.get(IDENTITIES[0]) is None
    assert other.index.keys() == [KEYS[1]]
    other.close()


def test_what_another_process_erases_while_it_waits_never_comes_back(store, disk, held_up):
    other = DiskStore(disk._root)
    with held_up():
        put(store, 0, "a", "doc")
        put(store, 1, "b", "doc")
        put(store, 1, "b", "stays")
        put(store, 2, "c")
        other.forget(NAMESPACE, "doc")
        other.delete([KEYS[2]])
    errors = store.flush()
    assert list(errors) == [KEYS[2]]
    assert "erased before it was written" in errors[KEYS[2]]
    assert disk.files() == {KEYS[1]}
    assert store.index.documents(NAMESPACE) == ["stays"]
    assert DiskStore(disk._root).references.names() == disk.references.names()
    assert len(disk.references.names()) == 1
    other.close()


def test_a_reader_that_looks_too_early_does_not_undo_the_put(store, disk, held_up):
    other = DiskStore(disk._root)
    with held_up():
        put(store, 0, "a", "doc")
        assert other.get(IDENTITIES[0]) is None  # and drops the row, whose file is not there
    assert store.flush() == {}
    assert same_bits(other.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert store.forget(NAMESPACE, "doc") == 1
    other.close()


def test_a_write_that_fails_is_told_and_leaves_nothing(root, disk, monkeypatch, caplog):
    store = TieredStore(MemoryStore(2**20), WriteBehind(disk))
    real = writer.write

    def full(plan, kv, out):
        if plan.header.identity == IDENTITIES[0]:
            raise OSError(28, "No space left on device")
        return real(plan, kv, out)

    monkeypatch.setattr(writer, "write", full)
    for number in range(2):
        put(store, number, f"text {number}", "doc")
    errors = store.flush()
    assert list(errors) == KEYS[:1]
    assert "No space left" in errors[KEYS[0]]
    assert store.flush() == {}
    assert store.stats()["disk"].failed_writes == 1
    assert "could not be written" in caplog.text
    assert store.index.keys() == KEYS[1:2]
    assert store.get(IDENTITIES[0]) is None  # its row is gone, so no erasure would find it in memory
    monkeypatch.setattr(writer, "write", real)
    assert put(store, 0, "text 0", "doc") == SIZE
    assert store.flush() == {}
    assert disk.files() == set(KEYS[:2])
    store.close()


def test_worth_is_said_anew_of_what_waits_and_of_what_is_being_written(store, disk, held_up):
    with store._own.writing:
        put(store, 0, retention=Retention(90, cost_ms=7.0))
        assert store.retain(KEYS[:2], Retention(10)) == 1
    assert store.flush() == {}
    assert (disk.contains(KEYS[0]), disk.retention(KEYS[0])) == (True, Retention(10, cost_ms=7.0))
    with held_up():
        put(store, 1, retention=Retention(90))
        late = threading.Thread(target=store.retain, args=(KEYS[1:2], Retention(10)))
        late.start()
    late.join()
    assert store.flush() == {}
    assert disk.retention(KEYS[1]) == Retention(10)


def test_what_could_never_be_stored_is_refused_at_once(root):
    store = WriteBehind(DiskStore(root, StoreConfig(disk_bytes=2 * SIZE, high_watermark=1, low_watermark=1)))
    kv = make_kv(IDENTITIES[0])
    kv.layers[0].keys[0, 0, 0] = float("nan")
    with pytest.raises(StoreError, match="not finite"):
        store.put(IDENTITIES[0], kv, text=None)
    put(store, 0, retention=Retention(90))
    put(store, 1, retention=Retention(90))
    with pytest.raises(StoreError, match="don't fit"):
        put(store, 2)
    assert store.priority(KEYS[0]) == 90
    store.close()
    assert DiskStore(root).files() == set(KEYS[:2])
    with pytest.raises(StoreError, match="closed"):
        put(store, 3)


def test_room_is_reserved_once(root, held_up):
    """Two chunks fit exactly, and neither is evicted for the other's sake while they wait."""
    store = WriteBehind(DiskStore(root, StoreConfig(disk_bytes=2 * SIZE, high_watermark=1, low_watermark=1)))
    with held_up():
        put(store, 0)
        put(store, 1)
    store.close()
    assert DiskStore(root).files() == set(KEYS[:2])


CHILD = """
import os, signal, sys, threading
from kvrag.config import StoreConfig
from kvrag.store import open_store, writer
from kvrag.testing.chunks import make_identity, make_kv, make_text

store = open_store(sys.argv[1], StoreConfig(write_policy="back", min_free_bytes=0))
for number in range(2):
    identity = make_identity(number)
    store.put(identity, make_kv(identity), text=make_text(f"text {number}"), doc_id=f"doc {number}")
if sys.argv[2] == "killed":
    assert store.flush() == {}
    writer.write = lambda *args: threading.Event().wait()
for number in range(2, 4):
    identity = make_identity(number)
    store.put(identity, make_kv(identity), text=make_text(f"text {number}"), doc_id=f"doc {number}")
assert store.contains(__import__("kvrag.identity.fingerprint").fingerprint.chunk_key(identity))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "left"), [("killed", 2), ("left", 4)])
def test_a_kill_loses_what_waits_and_an_exit_nothing(root, end, left):
    done = subprocess.run([sys.executable, "-c", CHILD, str(root), end], capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    assert store.files() == set(KEYS[:left]) == set(store.index.keys())
    for number in range(4):
        kv = store.get(IDENTITIES[number])
        assert same_bits(kv, make_kv(IDENTITIES[number])) if number < left else kv is None
    for number in range(4):  # what was lost is simply put again
        put(store, number, f"text {number}", f"doc {number}")
        assert store.forget(NAMESPACE, f"doc {number}") == 1
    store.close()


def _child(store, go_on, result):
    go_on.set()  # its own copy
    found = store.get(IDENTITIES[0]) is None, store.put(IDENTITIES[1], make_kv(IDENTITIES[1]), text=None), store.flush()
    result.put(found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_leaves_the_parents_writes_to_the_parent(store, held_up):
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    with held_up() as go_on:
        put(store, 0, "a", "doc")
        child = context.Process(target=_child, args=(store, go_on, result))
        child.start()
        is_absent, written, errors = result.get(timeout=40)
        child.join(30)
    assert (is_absent, written, errors) == (True, SIZE, {})
    assert store.flush() == {}
    assert same_bits(store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert same_bits(store.get(IDENTITIES[1]), make_kv(IDENTITIES[1]))
