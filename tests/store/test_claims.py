"""Rows without files: another process leaves those of a live one alone, and takes those of a dead one; no kill undoes an erasure."""

import os
import signal
import subprocess
import sys

import pytest
from kvrag.store.claims import Claim, is_alive
from kvrag.store.draft import Draft
from kvrag.store.fsck import fsck
from kvrag.store.references import References

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskIndex, DiskStore, MemoryStore, Retention, TieredStore, WriteBehind, blob
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(4)]
KEYS = [chunk_key(identity) for identity in IDENTITIES]
SIZE = make_kv(IDENTITIES[0]).num_bytes
CONFIG = StoreConfig(min_free_bytes=0)


@pytest.fixture
def store(root):
    store = WriteBehind(DiskStore(root, CONFIG))
    yield store
    store.close()


def put(store, number, doc_id="", **options):
    text = make_text(str(number)) if doc_id else None
    return store.put(IDENTITIES[number], make_kv(IDENTITIES[number]), text=text, doc_id=doc_id or None, **options)


def open_(root):
    return DiskStore(root, CONFIG)


def look(root):
    other = open_(root)
    assert [other.get(identity) for identity in IDENTITIES] == [None] * 4
    return other


def check(root):
    other = open_(root)
    assert fsck(other).unknown_rows == 0
    return other


@pytest.mark.parametrize("act", [open_, look, check])
def test_another_process_leaves_what_waits_alone(store, root, held_up, act):
    with held_up():
        put(store, 0)
        put(store, 1, "doc")
        other = act(root)
        assert set(other.index.keys()) == set(KEYS[:2])
        assert other.references.names() == set()
    assert store.flush() == {}
    assert other.files() == set(KEYS[:2])
    assert other.index.documents(NAMESPACE) == ["doc"]
    assert [same_bits(other.get(i), make_kv(i)) for i in IDENTITIES[:2]] == [True, True]
    assert [other.rows.holder(key) for key in KEYS[:2]] == [None, None]
    other.close()


def test_another_process_evicts_files_and_not_what_waits(store, root, held_up):
    other = open_(root)
    put(store, 2)
    assert store.flush() == {}
    with held_up():
        put(store, 0, retention=Retention(1))
        assert other._evictor.evict(2 * SIZE) == 1
        assert set(other.index.keys()) == {KEYS[0]}
    assert store.flush() == {}
    assert other._evictor.evict(SIZE) == 1  # it has its file now
    other.close()


def test_what_is_kept_in_memory_alone_outlives_another_opening(root):
    store = TieredStore(MemoryStore(2**20), DiskStore(root, CONFIG), lower_min_priority=30)
    put(store, 0, "doc", retention=Retention(1))
    other = look(root)
    assert other._evictor.evict(SIZE) == 0
    assert store.contains(KEYS[0])
    assert same_bits(store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    store.close()
    assert look(root).index.keys() == []
    other.close()


CHILD = """
import os, signal, sys, threading
from kvrag.config import StoreConfig
from kvrag.store import DiskIndex, DiskStore, WriteBehind, writer
from kvrag.testing.chunks import make_identity, make_kv, make_text

store = WriteBehind(DiskStore(sys.argv[1], StoreConfig(min_free_bytes=0)))
real, go_on = writer.write, threading.Event()
writer.write = lambda *args: (go_on.wait(), real(*args))
for number in range(2):
    identity = make_identity(number)
    store.put(identity, make_kv(identity), text=make_text(str(number)) if number else None, doc_id="doc" if number else None)
child = os.fork()
if child == 0:
    os.close(0), os.close(1), os.close(2)
    signal.pause()
print(child, flush=True)
sys.stdin.readline()
go_on.set()
assert store.flush() == {}
os.kill(child, signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("is_killed", [False, True], ids=["lives", "killed"])
def test_the_holders_life_decides_and_not_its_childs(root, is_killed):
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            other = open_(root)
            assert set(other.index.keys()) == set(KEYS[:2])
            claim = other.rows.holder(KEYS[0])
            if is_killed:
                process.kill()
                process.wait()
                other.close()
                other = open_(root)
                assert other.index.keys() == []
                assert claim not in other.directory.names("tmp")
                assert other.stats()["disk"].num_bytes == 0
            else:
                process.stdin.write("\n")
                process.stdin.close()
                assert process.wait(30) == 0
                assert other.files() == set(KEYS[:2])
        finally:
            if process.poll() is None or is_killed:
                os.kill(child, signal.SIGKILL)
    other.close()


def test_a_closed_store_gives_its_claim_up(root):
    disk = DiskStore(root, CONFIG)
    claim = disk._claim.name()
    assert is_alive(disk.directory, claim)
    assert disk.directory.names("tmp") == [claim]
    open_(root).close()
    assert is_alive(disk.directory, claim)
    disk.close()
    assert disk.directory.names("tmp") == []
    assert not is_alive(disk.directory, claim)


def test_a_claim_that_can_not_be_made_is_refused(root, monkeypatch):
    store = WriteBehind(DiskStore(root, CONFIG))

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Claim, "name", full)
    with pytest.raises(StoreError, match="No space left"):
        put(store, 0)
    assert store.index.keys() == []
    store.close()


NAME = f"1.{'0' * 8}.{'1' * 16}"


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda p: p.symlink_to("/dev/zero"), lambda p: p.touch()])
def test_a_planted_claim_is_nobodys(disk, plant):
    plant(disk.directory.root / "tmp" / NAME)
    assert not is_alive(disk.directory, NAME)
    disk.rows.hold(blob.plan(IDENTITIES[0], make_kv(IDENTITIES[0]), text=None).header.record(), None, NAME)
    assert disk.get(IDENTITIES[0]) is None
    assert disk.index.keys() == []


@pytest.mark.parametrize("name", [None, "", "../../lock", "/etc/passwd", NAME + "/..", "\0"])
def test_a_name_of_nothing_is_nobodys(disk, name):
    assert not is_alive(disk.directory, name)


def test_without_locks_a_claim_lasts_as_long_as_its_file(disk, monkeypatch):
    def no_locks(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("kvrag.store.claims.fcntl.flock", no_locks)
    claim = disk._claim.name()
    assert is_alive(disk.directory, claim)
    (disk.directory.root / "tmp" / claim).unlink()
    assert not is_alive(disk.directory, claim)


KILLED = """
import os, signal, sys, threading
from kvrag.config import StoreConfig
from kvrag.store import DiskIndex, DiskStore, WriteBehind, writer
from kvrag.store.draft import Draft
from kvrag.testing.chunks import make_identity, make_kv, make_text

store = WriteBehind(DiskStore(sys.argv[1], StoreConfig(min_free_bytes=0)))
identity, folder = make_identity(0), sys.argv[2]
real, go_on, publish = writer.write, threading.Event(), Draft.publish

def published(self, *place, **options):
    done = publish(self, *place, **options)
    if place[0] == folder:
        os.kill(os.getpid(), signal.SIGKILL)
    return done

writer.write = lambda *args: (go_on.wait(), real(*args))
Draft.publish = published
store.put(identity, make_kv(identity), text=make_text("0"), doc_id="doc")
if sys.argv[3] == "linked":
    store.link(identity, text=make_text("0"), doc_id="other")
print(flush=True)
sys.stdin.readline()
go_on.set()
assert store.flush() == {}
"""


def run_killed(root, folder, how, between):
    """Let a process wait with a chunk of a document, do something, and kill the process when a file in ``folder`` has its name."""
    command = [sys.executable, "-c", KILLED, str(root), folder, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        between()
        process.stdin.write("\n")
        process.stdin.close()
        return process.wait(30)


@pytest.mark.parametrize("folder", ["references", "objects"])
def test_no_kill_brings_back_what_was_erased_before_it_was_written(root, folder):
    other = open_(root)
    ended = run_killed(root, folder, "alone", lambda: other.forget(NAMESPACE, "doc"))
    assert ended == 0  # nothing was given its name, so nothing killed it
    other.close()
    again = open_(root)
    assert again.index.documents(NAMESPACE) == []
    assert again.index.texts(NAMESPACE, 0)[0] == []
    assert (again.files(), again.references.names()) == (set(), set())
    again.close()


@pytest.mark.parametrize("folder", ["references", "objects"])
def test_a_kill_between_the_names_leaves_what_can_be_erased(root, folder):
    assert run_killed(root, folder, "alone", lambda: None) == -signal.SIGKILL
    again = open_(root)
    assert again.index.documents(NAMESPACE) == ["doc"]
    is_stored = again.get(IDENTITIES[0]) is not None
    assert is_stored == (folder == "objects")
    assert again.forget(NAMESPACE, "doc") == is_stored
    assert (again.files(), again.references.names()) == (set(), set())
    assert again.rows.gone() == again.rows.gone_references() == []
    again.close()


def test_one_document_is_erased_and_another_still_wants_the_chunk(root):
    other = open_(root)
    ended = run_killed(root, "nowhere", "linked", lambda: other.forget(NAMESPACE, "doc"))
    assert ended == 0
    assert other.index.documents(NAMESPACE) == ["other"]
    assert len(other.references.names()) == 1
    assert same_bits(other.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert other.forget(NAMESPACE, "other") == 1
    other.close()


@pytest.mark.parametrize("what", ["reference", "name", "row", "folder"])
def test_what_can_not_be_named_is_told_and_leaves_nothing(store, root, held_up, monkeypatch, what):
    def full(*args):
        raise OSError(28, "No space left on device")

    publish = Draft.publish
    if what == "reference":
        monkeypatch.setattr(References, "prepared", full)
    elif what == "name":
        monkeypatch.setattr(
            Draft, "publish", lambda self, *p, **o: full() if p[0] == "objects" else publish(self, *p, **o)
        )
    with held_up():
        put(store, 0, "doc")
        if what == "row":
            monkeypatch.setattr(DiskIndex, "_write", full)
        if what == "folder":
            monkeypatch.setattr(store._disk.directory, "sync", full)
    errors = store.flush()
    assert "No space left" in errors[KEYS[0]]
    assert store._disk.files() == set()
    assert store._disk.references.names() == set()
    monkeypatch.undo()
    other = open_(root)
    assert (other.files(), other.references.names()) == (set(), set())
    assert other.index.keys() == (KEYS[:1] if what == "row" else [])  # as long as this process lives
    assert put(store, 0, "doc") == SIZE
    assert store.flush() == {}
    assert other.forget(NAMESPACE, "doc") == 1
    other.close()
