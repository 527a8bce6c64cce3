"""A directory is shared by processes, some of which are killed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

HERE = Path(__file__).parent
IDENTITIES = [make_identity(number) for number in range(30)]

WRITER = """
import sys, time
from kvrag.store import DiskStore, blob
from kvrag.testing.chunks import make_identity
from test_processes import write_all
store = DiskStore(sys.argv[1])
print(write_all(store, "other"), flush=True)
blob.open_blob = lambda *args, **kwargs: time.sleep(120)
print(store.get_many([make_identity()], timeout_s=0.1))
"""


def write_all(store, name):
    """Write every chunk in an order of one's own, and return how many weren't there yet."""
    order = list(range(len(IDENTITIES)))
    random.Random(name).shuffle(order)
    written = 0
    for number in order:
        identity = IDENTITIES[number]
        written += store.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=name) > 0
        assert same_bits(store.get(identity), make_kv(identity))
        store.index.texts(NAMESPACE, 0)
    return written


def in_child(work):
    """Run ``work`` in a forked child, and return its exit status: 0 if it returned something true."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return pid


def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_two_processes_write_each_chunk_once_and_agree(root):
    """The other one leaves while a read of its own hangs, which must not hinder its exit."""
    command = [sys.executable, "-c", WRITER, root]
    other = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    store = DiskStore(root)
    deadline = time.monotonic() + 60
    while not store.index.keys() and other.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    mine = write_all(store, "mine")
    out, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
    theirs, hung = out.split()
    assert mine + int(theirs) == len(IDENTITIES)
    assert hung == "[None]"
    assert sorted(store.index.keys()) == sorted(map(chunk_key, IDENTITIES))
    texts, _ = store.index.texts(NAMESPACE, 0)
    assert sorted(text.digest for text in texts) == sorted(make_text(str(number)).digest for number in range(30))
    assert store.stats()["disk"].chunks == len(IDENTITIES)
    assert store.index.documents(NAMESPACE) == ["mine", "other"]
    assert store.index.unlink(NAMESPACE, "mine") == []
    assert store.delete(store.index.unlink(NAMESPACE, "other")) == len(IDENTITIES)
    assert store.index.keys() == []
    store.close()


def test_a_killed_writer_leaves_whole_chunks_or_none(root):
    rng = random.Random(0)
    DiskStore(root).close()
    for _ in range(12):
        pid = in_child(lambda: write_for_ever(root))
        time.sleep(rng.uniform(0.02, 0.12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        store = DiskStore(root)
        assert os.listdir(root / "tmp") == []
        present = [identity for identity in IDENTITIES if store.contains(chunk_key(identity))]
        for identity in IDENTITIES:
            kv = store.get(identity)
            assert same_bits(kv, make_kv(identity)) if identity in present else kv is None
        assert store.stats()["disk"].rejected == 0
        assert sorted(store.index.keys()) == sorted(map(chunk_key, present))
        store.close()


def write_for_ever(root):
    store = DiskStore(root)
    rng = random.Random()
    while True:
        identity = rng.choice(IDENTITIES)
        if rng.random() < 0.3:
            store.delete([chunk_key(identity)])
        store.put(identity, make_kv(identity), text=make_text(str(identity.token_ids)), doc_id=str(rng.randrange(3)))


def test_a_forked_child_shares_the_store(root):
    store = TieredStore(MemoryStore(2**20), DiskStore(root))
    store.put(IDENTITIES[0], make_kv(IDENTITIES[0]), text=make_text("0"), doc_id="parent")

    def child():
        ok = same_bits(store.get_many([IDENTITIES[0]], timeout_s=10)[0], make_kv(IDENTITIES[0]))
        store.put(IDENTITIES[1], make_kv(IDENTITIES[1]), text=make_text("1"), doc_id="child")
        return ok and sorted(store.index.documents(NAMESPACE)) == ["child", "parent"]

    pid = in_child(child)
    store.put(IDENTITIES[2], make_kv(IDENTITIES[2]), text=make_text("2"), doc_id="parent")
    assert wait(pid) == 0
    assert len(store.index.texts(NAMESPACE, 0)[0]) == 3
    assert same_bits(store.get(IDENTITIES[1]), make_kv(IDENTITIES[1]))
    store.close()


@pytest.mark.filterwarnings("ignore:This process")
def test_a_fork_while_other_threads_write_leaves_no_lock_behind(root):
    store = TieredStore(MemoryStore(2**20), DiskStore(root))
    stop = threading.Event()

    def write():
        for step in range(10**6):
            if stop.is_set():
                return
            identity = IDENTITIES[step % 20]
            store.put(identity, make_kv(identity), text=make_text(str(step % 20)), doc_id="thread")
            store.delete([chunk_key(identity)])

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()

    def child():
        signal.alarm(20)
        store.put(IDENTITIES[25], make_kv(IDENTITIES[25]), text=make_text("25"))
        return same_bits(store.get(IDENTITIES[25]), make_kv(IDENTITIES[25])) and store.stats()

    try:
        for _ in range(8):
            assert wait(in_child(child)) == 0
            store.delete([chunk_key(IDENTITIES[25])])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    store.close()
