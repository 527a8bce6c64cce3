"""A directory is shared by threads, forked children and processes of their own."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from stores import KVS, PATIENT_S, SIZE, ended, fill, in_child, present, put

from kvrag.errors import StoreError
from kvrag.store import open_store
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

HERE = Path(__file__).parent
IDENTITIES = [make_identity(number) for number in range(30)]

WRITER = """
import sys, time
from stores import config_of
from test_processes import write_all
from kvrag.store import open_store, reading
from kvrag.testing.chunks import make_identity
store = open_store(sys.argv[1], config_of())
print(write_all(store, "other"), flush=True)
store.release()
reading.Blob = lambda *args: time.sleep(120)
print(store.get_many([make_identity()], timeout_s=0.1)[0].reason)
"""


VISITOR = """
import sys
from stores import config_of, fill
from kvrag.store import open_store
store = fill(open_store(sys.argv[1], config_of()), *map(int, sys.argv[2:]))
store.close()
"""


LEAVER = """
import os, sys
from stores import config_of, fill
from kvrag.store import open_store
stores = fill(open_store(None, config_of()), 0), open_store(sys.argv[1], config_of(read_only=True))
if child := os.fork():
    os.waitpid(child, 0)
    print(sum(name.startswith("kvrag-") for name in os.listdir(os.environ["TMPDIR"])))
"""


def write_all(store, name):
    """Write every chunk in an order of one's own, and return how many weren't there yet."""
    order = list(range(len(IDENTITIES)))
    random.Random(name).shuffle(order)
    written = 0
    for number in order:
        identity = IDENTITIES[number]
        written += (
            store.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=name) > 0
        )
        assert same_bits(store.get(identity), make_kv(identity))
        store.catalog.texts(NAMESPACE, 0)
    return written


def test_two_processes_write_each_chunk_once_and_agree(opened, root):
    """The other one leaves while a read of its own hangs, which must not hinder its exit."""
    command = [sys.executable, "-c", WRITER, root]
    other = subprocess.Popen(
        command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    store = opened()
    deadline = time.monotonic() + 60
    while not store.catalog.keys() and other.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    mine = write_all(store, "mine")
    out, err = other.communicate(timeout=90)
    assert other.returncode == 0, err
    theirs, hung = out.split()
    assert mine + int(theirs) == len(IDENTITIES)
    assert hung == "late"
    assert store.catalog.totals() == (30, 30 * SIZE)
    assert len(store.catalog.texts(NAMESPACE, 0)[0]) == 30
    assert sorted(store.catalog.documents(NAMESPACE)) == ["mine", "other"]
    assert store.forget(NAMESPACE, "mine") == 0
    assert store.forget(NAMESPACE, "other") == len(IDENTITIES)
    assert store.catalog.keys() == []
    assert store.blobs.keys() == set()


def test_stores_of_one_process_see_what_another_writes_and_closes(opened, root, handle):
    """Its close would remove SQLite's journal if this process had lost its locks by a copy."""
    mine = fill(opened(), 0)
    copy, again = opened(read_only=True), handle()
    for number in (1, 2):
        assert present(mine) == present(copy) == present(again) == list(range(number))
        subprocess.run([sys.executable, "-c", VISITOR, root, str(number)], cwd=HERE, check=True)
    fill(mine, 3)
    assert present(mine) == present(copy) == present(again) == [0, 1, 2, 3]


def test_what_stores_keep_beside_a_directory_goes_at_exit(opened, root, tmp_path):
    """It holds the names of documents. A forked child that ends leaves it to its parent."""
    fill(opened(), 0)
    there, command = {**os.environ, "TMPDIR": str(tmp_path)}, [sys.executable, "-c", LEAVER, root]
    assert int(subprocess.check_output(command, cwd=HERE, env=there)) == 2
    assert not list(tmp_path.glob("kvrag-*"))


def test_a_store_opened_before_a_fork_says_in_the_child_where_to_open_it(opened, caplog):
    """A look-up for a prompt never raises: it says so in the log, and counts as late."""
    store = fill(opened(), 0)

    def child():
        uses = [
            lambda: store.get(IDENTITIES[0]),
            lambda: put(store, 1),
            lambda: store.forget(NAMESPACE, "doc 0"),
            lambda: store.clear(),
            lambda: store.stats(),
        ]
        for use in uses:
            with pytest.raises(StoreError, match="before the process was forked; open it after"):
                use()
        missed = store.get_many([IDENTITIES[0]], timeout_s=10)
        store.close()
        return [hole.reason for hole in missed] == ["late"] and "open it after" in caplog.text

    assert ended(in_child(child)) == 0
    assert same_bits(store.get(IDENTITIES[0]), KVS[0])
    assert put(store, 1) > 0


def test_a_forked_child_shares_the_directory_by_a_store_of_its_own(opened, root):
    store = fill(opened(), 0)

    def child():
        own = open_store(root, store.config)
        is_right = same_bits(own.get_many([IDENTITIES[0]], timeout_s=10)[0], KVS[0])
        fill(own, 1)
        return is_right and sorted(own.catalog.documents(NAMESPACE))[:2] == ["doc 0", "doc 1"]

    pid = in_child(child)
    fill(store, 2)
    assert ended(pid) == 0
    assert present(store) == [0, 1, 2]
    assert same_bits(store.get(IDENTITIES[1]), KVS[1])
    assert len(store.catalog.texts(NAMESPACE, 0)[0]) == 3


def test_a_forked_child_that_closes_its_parents_store_goes_on_with_its_own(opened, root):
    store = fill(opened(), 0)

    def child():
        own = open_store(root, store.config)
        store.close()
        is_right = same_bits(own.get(IDENTITIES[0]), KVS[0]) and put(own, 1) > 0
        own.close()
        return is_right and own.get(IDENTITIES[0]) is None

    assert ended(in_child(child)) == 0
    assert same_bits(store.get(IDENTITIES[1]), KVS[1])
    assert put(store, 2) > 0


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_inherits_no_connection_of_any_thread(opened, root):
    """SQLite would think that it holds its parent's locks."""
    store, looked, stop = fill(opened(), 0), threading.Event(), threading.Event()
    ending = threading.Thread(target=present, args=[store])
    living = threading.Thread(
        target=lambda: (present(store), looked.set(), stop.wait()), daemon=True
    )
    for thread in (ending, living):
        thread.start()
    ending.join()
    assert looked.wait(PATIENT_S)

    def is_open():
        links = Path("/proc/self/fd").iterdir()
        return any(os.path.realpath(link).startswith(str(root / "catalog")) for link in links)

    assert is_open()
    status = ended(in_child(lambda: not is_open()))
    stop.set()
    assert status == 0


def test_another_process_reads_what_this_one_wrote(opened, root):
    store = fill(opened(durability="durable"), 1)
    child = in_child(lambda: same_bits(open_store(root, store.config).get(IDENTITIES[1]), KVS[1]))
    assert ended(child) == 0
    assert os.listdir(root / "tmp") == []
