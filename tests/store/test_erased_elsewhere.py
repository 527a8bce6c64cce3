"""What another process has erased is not answered with, from no tier; what it only pushed off the disk leaves memory too.

Two stores on one directory have nothing in common but the directory, like two processes; one test takes a real one.
"""

import shutil
import subprocess
import sys
import threading

import pytest
from kvrag.store.events import Events

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, Retention, TieredStore, WriteBehind, blob, reader, writer
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

ONE, TWO = make_identity(1), make_identity(2)
CONFIG = StoreConfig(min_free_bytes=0)


class Tiers:
    """Accelerator's and host's memory above a disk, and another process that has the same disk."""

    def __init__(self, root, *, behind=False, config=CONFIG, **options):
        self.gpu, self.host = MemoryStore(2**20, name="gpu"), MemoryStore(2**20)
        disk = DiskStore(root, config)
        self.below = TieredStore(self.host, WriteBehind(disk) if behind else disk, **options)
        self.store = TieredStore(self.gpu, self.below, keeps_puts=False)
        self.other = DiskStore(root, CONFIG)

    def put(self, identity=ONE, name="one", **options):
        self.store.put(identity, make_kv(identity), text=make_text(name), doc_id=name, **options)
        self.store.flush()
        assert same_bits(self.store.get(identity), make_kv(identity))  # and is in every tier now

    def held(self, identity=ONE):
        return self.gpu.contains(chunk_key(identity)), self.host.contains(chunk_key(identity))


@pytest.fixture
def tiers(root):
    made = []

    def make(**options):
        made.append(Tiers(root, **options))
        return made[-1]

    yield make
    for each in made:
        each.store.close()
        each.other.close()


ERASURES = {
    "forget": lambda store: store.forget(NAMESPACE, "one"),
    "delete": lambda store: store.delete([chunk_key(ONE)]),
    "unlink": lambda store: store.delete(store.index.unlink(NAMESPACE, "one")),
    "text": lambda store: store.delete(store.index.unlink_text(NAMESPACE, make_text("one").digest)),
    "clear": lambda store: store.clear(),
    "clear a namespace": lambda store: store.clear(NAMESPACE),
}


@pytest.mark.parametrize("behind", [False, True], ids=["through", "back"])
@pytest.mark.parametrize("is_evicted", [False, True], ids=["stored", "evicted"])
@pytest.mark.parametrize("erase", ERASURES.values(), ids=ERASURES.keys())
def test_what_another_process_has_erased_is_in_no_tier(tiers, erase, is_evicted, behind):
    one = tiers(behind=behind)
    one.put()
    if is_evicted:  # its row is gone, so that no erasure finds its key
        one.other.rows.drop(chunk_key(ONE), lambda: one.other.objects.erase(chunk_key(ONE)))
        assert one.held() == (True, True)
    erase(one.other)
    assert one.store.get_many([ONE], timeout_s=30) == [None]
    assert one.store.get(ONE) is None
    assert one.below.get(ONE) is None
    assert one.held() == (False, False)
    assert not one.store.link(ONE, text=make_text("one"), doc_id="one")


CHILD = """
import sys
from kvrag.store import DiskStore
from kvrag.testing.chunks import NAMESPACE
assert DiskStore(sys.argv[1]).forget(NAMESPACE, "one") == 1
"""


@pytest.mark.parametrize("behind", [False, True], ids=["through", "back"])
def test_a_real_process_erases(tiers, root, behind):
    one = tiers(behind=behind)
    one.put()
    subprocess.run([sys.executable, "-c", CHILD, str(root)], check=True)
    assert one.store.get(ONE) is None
    assert one.held() == (False, False)


def test_the_rest_stays_in_memory(tiers, monkeypatch):
    one = tiers()
    one.put()
    one.put(TWO, "two")
    one.other.forget(NAMESPACE, "one")
    monkeypatch.setattr(blob, "open_blob", lambda *args, **kwargs: pytest.fail("read from disk"))
    assert same_bits(one.store.get(TWO), make_kv(TWO))
    assert (one.held(ONE), one.held(TWO)) == ((False, False), (True, True))


@pytest.mark.parametrize("behind", [False, True], ids=["through", "back"])
@pytest.mark.parametrize("who", ["this process", "another one"])
def test_what_was_only_pushed_off_the_disk_leaves_memory_as_evicted(tiers, who, behind):
    """It is not found for a prompt any more: memory must not fill with what nobody can use."""
    log = []
    one = tiers(behind=behind, config=StoreConfig(min_free_bytes=0, on_event=log.append))
    for memory in (one.gpu, one.host):
        memory._events = Events(log.append)
    one.put()
    one.put(TWO, "two")
    evictor = (one.other if who == "another one" else getattr(one.below._disk, "_disk", one.below._disk))._evictor
    with evictor.pinned([chunk_key(TWO)]):
        assert evictor.evict(1) == 1
    assert not one.store.contains(chunk_key(ONE))
    assert one.store.get(ONE) is None
    assert (one.held(ONE), one.held(TWO)) == ((False, False), (True, True))
    gone = [(e.medium, e.reason) for e in log if e.type == "BlockRemoved" and e.block_hashes == (chunk_key(ONE),)]
    below = [("disk", "evicted")] if who == "this process" else []
    assert sorted(gone) == [*below, ("gpu", "evicted"), ("host", "evicted")]
    one.put()
    assert one.held(ONE) == (True, True)


def test_what_was_pushed_off_the_disk_is_not_found_by_who_prefetches_it(tiers):
    one = tiers()
    one.put()
    one.other._evictor.evict(1)
    assert one.store.prefetch([ONE]).found == 0


def test_a_put_that_pushes_another_chunk_off_the_disk_pushes_it_out_of_memory(root):
    size = make_kv(ONE).num_bytes
    host = MemoryStore(2**20)
    store = TieredStore(host, DiskStore(root, StoreConfig(disk_bytes=2 * size, min_free_bytes=0)))
    for number in range(6):
        identity = make_identity(number)
        store.put(identity, make_kv(identity), text=None)
        assert same_bits(host.peek(identity), make_kv(identity))
        assert sorted(host.keys()) == sorted(store.index.keys())
    store.close()


def test_a_read_from_before_an_eviction_may_be_kept_and_one_from_before_an_erasure_not(tiers):
    one = tiers()
    one.put()
    erasures = one.host.erasures
    one.other._evictor.evict(1)
    assert one.store.get(TWO) is None
    assert one.host.keep(ONE, make_kv(ONE), erasures=erasures)
    one.other.delete([chunk_key(TWO)])
    one.put(TWO, "two")
    one.other.delete([chunk_key(TWO)])
    assert one.store.get(TWO) is None
    assert not one.host.keep(ONE, make_kv(ONE), erasures=erasures)
    assert one.held() == (False, False)


def test_an_eviction_after_an_erasure_does_not_hide_it(tiers):
    one = tiers()
    one.put()
    one.put(TWO, "two")
    erasures = one.host.erasures
    one.other.delete([chunk_key(ONE)])
    assert one.other._evictor.evict(1) == 1
    assert one.store.get_many([ONE, TWO], timeout_s=30) == [None, None]
    assert one.host.erasures > erasures
    assert (one.held(ONE), one.held(TWO)) == ((False, False), (False, False))


@pytest.mark.parametrize("namespace", [None, NAMESPACE])
def test_clearing_reaches_what_was_pushed_off_the_disk_and_has_no_document(tiers, namespace):
    one = tiers()
    one.store.put(ONE, make_kv(ONE), text=None)
    one.store.get(ONE)
    assert one.other._evictor.evict(1) == 1
    assert one.held(ONE) == (True, True), "nobody has looked since"
    assert one.other.clear(namespace) == 0, "the disk has nothing of it"
    assert one.store.get(ONE) is None
    assert one.held() == (False, False)


def test_one_look_serves_a_whole_request(tiers, monkeypatch):
    one = tiers()
    identities = [make_identity(number) for number in range(8)]
    for number, identity in enumerate(identities):
        one.put(identity, str(number))
    looks = []
    real = type(one.other.rows)._read
    monkeypatch.setattr(type(one.other.rows), "_read", lambda self, row: looks.append(row) or real(self, row))
    assert all(one.store.get_many(identities, timeout_s=30))
    assert looks == ["erased"]


def test_an_erasure_is_followed_before_its_files_are_gone(tiers):
    one = tiers()
    one.put()
    keys = one.other.index.unlink(NAMESPACE, "one")  # the file is still there
    assert one.store.get(ONE) is None
    assert one.other.contains(chunk_key(ONE))
    one.other.delete(keys)
    assert one.store.get(ONE) is None
    assert one.held() == (False, False)


@pytest.fixture
def slow(monkeypatch):
    """Let reads from the disk wait for ``go_on`` once they have everything."""
    real, began, go_on = reader.read_all, threading.Event(), threading.Event()

    def wait(*args, **kwargs):
        found = real(*args, **kwargs)
        began.set()
        go_on.wait(30)
        return found

    monkeypatch.setattr(reader, "read_all", wait)
    yield began, go_on
    go_on.set()


@pytest.mark.parametrize("looks", [0, 1], ids=["unnoticed", "noticed"])
def test_what_is_erased_during_a_read_is_not_kept(tiers, slow, looks):
    one = tiers()
    began, go_on = slow
    one.other.put(ONE, make_kv(ONE), text=make_text("one"), doc_id="one")
    thread = threading.Thread(target=one.store.get, args=(ONE,))
    thread.start()
    assert began.wait(30)
    one.other.forget(NAMESPACE, "one")
    for _ in range(looks):
        assert one.store.get(TWO) is None
    go_on.set()
    thread.join()
    assert one.store.get(ONE) is None
    assert one.held() == (False, False)


def test_a_read_ahead_that_began_before_an_erasure_answers_nothing_after_it(tiers, monkeypatch):
    one = tiers()
    began, go_on = threading.Event(), threading.Event()
    one.other.put(ONE, make_kv(ONE), text=make_text("one"), doc_id="one")

    def late(identity):  # has been read and proven, and is on its way
        began.set()
        go_on.wait(30)
        return make_kv(identity)

    monkeypatch.setattr(one.below, "get", late)
    one.store.prefetch([ONE])
    assert began.wait(30)
    one.other.forget(NAMESPACE, "one")
    threading.Timer(0.1, go_on.set).start()
    assert one.store.get_many([ONE], timeout_s=30) == [None]


def test_what_is_kept_during_the_look_is_looked_at(tiers, monkeypatch):
    """A read from before the erasure ends just when this process has seen what is in memory."""
    one = tiers()
    one.put(TWO, "two")
    one.other.put(ONE, make_kv(ONE), text=make_text("one"), doc_id="one")
    erasures = one.host.erasures
    real = one.host.keys

    def keys():
        found = real()
        one.host.keep(ONE, make_kv(ONE), erasures=erasures)
        return found

    monkeypatch.setattr(one.host, "keys", keys)
    one.other.forget(NAMESPACE, "one")
    one.below.get(TWO)
    assert one.held() == (False, False)
    assert one.below.get(ONE) is None


def test_what_is_demoted_while_its_erasure_is_half_done_is_not_kept(tiers):
    one = tiers()
    one.put()
    kv = one.gpu.get(ONE)
    keys = one.other.index.unlink(NAMESPACE, "one")
    assert one.store.get(ONE) is None
    one.below.demote(ONE, kv, Retention())  # as by a thread that had taken it out before
    one.other.delete(keys)
    assert one.held() == (False, False)


def test_an_index_that_was_lost_hides_no_erasure(tiers, root):
    one = tiers()
    one.put()
    one.put(TWO, "two")
    shutil.rmtree(root / "index")
    again = DiskStore(root, CONFIG)
    again.forget(NAMESPACE, "one")
    assert one.store.get(ONE) is None
    assert same_bits(one.store.get(TWO), make_kv(TWO))
    again.close()


def test_without_an_index_the_disk_answers(tiers, root):
    """Nobody can tell what was erased, so memory is not asked."""
    one = tiers()
    one.put()
    shutil.rmtree(root / "index")
    (root / "index").write_text("in the way of another one")
    assert same_bits(one.store.get(ONE), make_kv(ONE))
    (file,) = (root / "objects").rglob("*.safetensors")
    file.unlink()
    assert one.store.get(ONE) is None


@pytest.mark.parametrize(
    "is_closed", [False, True]
)  # then its index is read as a whole, and otherwise made of the files
def test_a_store_that_is_open_for_reading_follows_the_files(root, is_closed):
    writer = DiskStore(root, CONFIG)
    for number, identity in ((1, ONE), (2, TWO)):
        writer.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=str(number))
    if is_closed:
        writer.close()
    store = TieredStore(
        MemoryStore(2**20), DiskStore(root, StoreConfig(read_only=True, min_free_bytes=0)), lower_min_priority=30
    )
    for identity in (ONE, TWO):
        assert same_bits(store.get(identity), make_kv(identity))
    writer = DiskStore(root, CONFIG) if is_closed else writer
    writer.forget(NAMESPACE, "1")
    assert store.get(ONE) is None
    assert store.get_many([ONE, TWO], timeout_s=30)[0] is None
    assert same_bits(store.get(TWO), make_kv(TWO))
    assert store.stats()["host"].chunks == 1
    with pytest.raises(StoreError, match="reading only"):  # nobody else would know of it
        store.put(make_identity(3), make_kv(make_identity(3)), text=None, retention=Retention(1))
    store.close()
    writer.close()


def test_what_waits_to_be_written_is_not_answered_with_once_it_is_erased(tiers, monkeypatch):
    one = tiers(behind=True)
    real, go_on = writer.write, threading.Event()
    monkeypatch.setattr(writer, "write", lambda *args: (go_on.wait(30), real(*args)))
    one.store.put(ONE, make_kv(ONE), text=make_text("one"), doc_id="one")
    one.store.put(TWO, make_kv(TWO), text=make_text("two"), doc_id="two")
    one.other.forget(NAMESPACE, "one")
    assert one.store.get_many([ONE, TWO], timeout_s=30)[0] is None
    assert one.below._disk.get(ONE) is None
    assert same_bits(one.store.get(TWO), make_kv(TWO))
    go_on.set()
    assert one.store.flush() == {}
    assert one.other.files() == {chunk_key(TWO)}


def test_what_is_in_memory_alone_is_erased_by_others_too(tiers):
    one = tiers(lower_min_priority=30)
    one.put(retention=Retention(1))
    assert one.other.index.documents(NAMESPACE) == ["one"]
    assert one.other.stats()["disk"].num_bytes == 0
    one.other.forget(NAMESPACE, "one")
    assert one.store.get(ONE) is None
    assert not one.store.contains(chunk_key(ONE))
    assert one.held() == (False, False)


def test_what_was_erased_and_put_again_is_found(tiers):
    one = tiers()
    one.put()
    one.other.forget(NAMESPACE, "one")
    one.other.put(ONE, make_kv(ONE), text=make_text("one"), doc_id="again")
    assert same_bits(one.store.get(ONE), make_kv(ONE))
    assert one.store.forget(NAMESPACE, "again") == 1
    assert one.store.get(ONE) is None


def test_above_a_store_that_nobody_shares_erasures_are_its_own():
    host, lower = MemoryStore(2**20), MemoryStore(2**20, name="disk")
    store = TieredStore(host, lower, lower_min_priority=30)
    for identity, name, priority in ((ONE, "one", 35), (TWO, "two", 1)):
        store.put(identity, make_kv(identity), text=make_text(name), doc_id=name, retention=Retention(priority))
        assert same_bits(store.get(identity), make_kv(identity))
    assert store.link(TWO, text=make_text("two"), doc_id="again")
    lower._shelf.drop(chunk_key(ONE))  # pushed out: what is above has nobody who could erase it
    assert store.forget(NAMESPACE, "two") == 0
    assert (host.contains(chunk_key(ONE)), host.contains(chunk_key(TWO))) == (False, True)
    assert store.forget(NAMESPACE, "again") == 1
    assert store.get(TWO) is None


def test_keys_are_found_by_those_who_prefetch_them_until_they_are_erased(tiers):
    one = tiers()
    one.other.put(ONE, make_kv(ONE), text=make_text("one"), doc_id="one")
    assert one.store.prefetch([chunk_key(ONE)]).found == 1
    assert one.store.get(ONE) is not None
    one.other.forget(NAMESPACE, "one")
    assert one.store.get(ONE) is None
    assert one.store.prefetch([chunk_key(ONE)]).found == 0
