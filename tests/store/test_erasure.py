"""Deleting a document erases its KV, its id and its texts from the disk and from the memory of every process."""

import threading

import pytest
from stores import (
    CHUNKS,
    EVERY_KEY,
    KEYS,
    KVS,
    PATIENT_S,
    ended,
    everything_in,
    exactly,
    files,
    fill,
    held,
    in_child,
    path_of,
    present,
    put,
    traces_of,
)

from kvrag.cli.check import gc
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, namespace_digest
from kvrag.store import FileBlobs, Retention
from kvrag.store.catalog.ledger import record_of
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV, Hole

ME, OTHER = CHUNKS[1], CHUNKS[2]
SECRET = "a secret name of a document"


LONG = make_identity(50, tokens=16)


def traces(root):
    """What the disk still holds of the document."""
    seen = everything_in(root)
    wanted = traces_of(LONG, make_kv(LONG), make_text("one"), SECRET)
    del wanted[2]  # its namespace's digest, which the other one has too
    return [trace for trace in (*wanted, chunk_key(LONG).encode()) if trace in seen]


@pytest.fixture
def filled(handle):
    store = handle()
    store.put(LONG, make_kv(LONG), text=make_text("one"), doc_id=SECRET)
    store.put(OTHER, KVS[2], text=make_text("two"), doc_id="other")
    return store


@pytest.mark.parametrize("is_all", [False, True])
def test_nothing_of_what_was_erased_is_left_on_the_disk(filled, root, is_all):
    assert len(traces(root)) >= 7
    assert (filled.clear() if is_all else filled.forget(NAMESPACE, SECRET)) == 1 + is_all
    assert traces(root) == []
    filled.close()
    assert traces(root) == []
    assert files(root) == ([] if is_all else [2])


def test_a_document_of_an_evicted_chunk_is_known_until_it_is_forgotten(handle, root):
    store = handle(budget=exactly(2))
    fill(store, 1, 2, 3)
    gone = ({1, 2, 3} - set(present(store))).pop()
    assert f"doc {gone}" in store.catalog.documents(NAMESPACE)
    assert put(store, gone) > 0
    assert store.forget(NAMESPACE, f"doc {gone}") == 1
    assert f"doc {gone}" not in store.catalog.documents(NAMESPACE)


def test_what_can_not_be_erased_is_an_error_stays_whole_and_can_be_erased_again(
    filled, handle, root, monkeypatch
):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    for erase in (
        lambda: filled.forget(NAMESPACE, SECRET),
        lambda: filled.delete([chunk_key(LONG)]),
        filled.clear,
    ):
        with monkeypatch.context() as patch:
            patch.setattr("kvrag.store.blobs.os.unlink", refuse)
            with pytest.raises(StoreError, match=r"can't be erased: .*Read-only.*try again"):
                erase()
        assert len(filled.catalog.keys()) == 2
        assert SECRET in filled.catalog.documents(NAMESPACE), "it can be named again"
    assert filled.forget(NAMESPACE, SECRET) == 1
    full = fill(handle(ram=0, budget=exactly(2)), 3)
    with monkeypatch.context() as patch:
        patch.setattr("kvrag.store.blobs.os.unlink", refuse)
        with pytest.raises(StoreError, match="freed too little"):
            put(full, 4)
    assert present(full) == files(root) == [2, 3]
    assert all(full.get(CHUNKS[number]) is not None for number in (2, 3))
    assert put(full, 4) > 0
    assert present(full) == files(root)


# -- every tier of every process -----------------------------------------------------------------------------------------

ERASURES = {
    "forget": lambda store: store.forget(NAMESPACE, "doc 1"),
    "delete": lambda store: store.delete([KEYS[1]]),
    "clear": lambda store: store.clear(),
    "clear of the namespace": lambda store: store.clear(NAMESPACE),
}


@pytest.fixture(params=ERASURES)
def erase(request):
    return ERASURES[request.param]


def is_absent(store):
    """Whether a chunk is in no answer of a store."""
    return (
        store.get(ME) is None
        and store.get_many([ME], timeout_s=PATIENT_S) == [Hole(KEYS[1], "absent", None)]
        and store.prefetch([ME, KEYS[1]]).found == 0
        and store.known([KEYS[1]]) == set()
        and store.identity(KEYS[1]) is None
    )


@pytest.mark.parametrize("key", EVERY_KEY)
def test_what_another_process_has_erased_is_in_no_tier(handle, erase, key):
    mine, theirs = fill(handle(key=key, gpu=2**20), 1, 2), handle(key=key)
    assert same_bits(mine.get(ME), KVS[1])
    assert [held(tier) for tier in mine.tiers] == [[1], [1, 2]]
    assert erase(theirs) >= 1
    assert is_absent(mine)
    assert [1 in held(tier) for tier in mine.tiers] == [False, False]
    assert put(mine, 1) > 0
    assert same_bits(theirs.get(ME), KVS[1])


def test_a_real_process_erases(handle, erase):
    store = fill(handle(), 1, 2)
    assert store.get(ME) is not None
    assert ended(in_child(lambda: erase(handle()) >= 1)) == 0
    assert is_absent(store)


def test_the_rest_stays_in_memory(handle, root):
    mine, theirs = fill(handle(), 1, 2), handle()
    assert theirs.delete([KEYS[1]]) == 1
    (root / "objects").rename(root / "hidden")
    assert same_bits(mine.get(OTHER), KVS[2]), "from memory"


def test_what_another_process_evicts_takes_no_memory(handle):
    """A chunk without a row is found for no prompt, and nobody could tell whose it is when its document is erased."""
    seen = []
    mine = fill(handle(on_event=seen.append), 1, 2)
    theirs = handle(budget=exactly(1))
    theirs.make_room()
    gone = ({1, 2} - set(present(theirs))).pop()
    assert mine.get(CHUNKS[gone]) is None
    assert held(mine.tiers[0]) == present(theirs)
    assert [(e.medium, e.reason) for e in seen if e.type == "BlockRemoved"] == [("host", "evicted")]


def test_one_look_at_the_generation_serves_a_whole_request(handle, monkeypatch):
    store, looks = fill(handle(), 1, 2, 3), []
    store.get(ME)
    real = store.catalog.state
    monkeypatch.setattr(store.catalog, "state", lambda: (looks.append(1), real())[1])
    assert all(isinstance(kv, ChunkKV) for kv in store.get_many(CHUNKS[1:4], timeout_s=PATIENT_S))
    assert looks == [1]


READS = {
    "get": lambda store: store.get(ME),
    "get_many": lambda store: store.get_many([ME], timeout_s=PATIENT_S),
    "prefetch": lambda store: store.prefetch([ME]).wait(PATIENT_S),
}


@pytest.mark.parametrize("is_own", [True, False], ids=["by this store", "by another process"])
@pytest.mark.parametrize("how", READS)
def test_what_is_erased_during_a_read_is_not_answered_afterwards(
    handle, erase, monkeypatch, how, is_own
):
    store, other = handle(gpu=2**20), handle()
    fill(other, 1)
    real = FileBlobs.read

    def erase_then_answer(self, *args):
        found = real(self, *args)
        monkeypatch.setattr(FileBlobs, "read", real)
        erase(store if is_own else other)
        return found

    store.get(OTHER)  # has looked at the generation
    monkeypatch.setattr(FileBlobs, "read", erase_then_answer)
    READS[how](store)
    assert is_absent(store)
    assert [held(tier) for tier in store.tiers] == [[], []]


def test_a_chunk_that_is_erased_while_it_is_promoted_from_memory_is_not_kept(
    handle, erase, monkeypatch
):
    store = fill(handle(gpu=2**20), 1)
    gpu, host = store.tiers
    real = host.get

    def erase_then_answer(*args, **options):
        found = real(*args, **options)
        erase(store)
        return found

    monkeypatch.setattr(host, "get", erase_then_answer)
    store.get(ME)
    monkeypatch.undo()
    assert (held(gpu), held(host)) == ([], [])


def test_rows_whose_blobs_are_gone_go_unless_they_are_stored_again_meanwhile(
    handle, root, monkeypatch
):
    store, other = fill(handle(ram=0), *range(9)), handle()
    real = store.catalog.remove
    for number in range(9):
        path_of(root, CHUNKS[number]).unlink()

    def store_again_first(*args, **how):
        monkeypatch.undo()
        assert other.delete([KEYS[1]]) == 1
        assert put(other, 1) > 0
        return real(*args, **how)

    monkeypatch.setattr(store.catalog, "remove", store_again_first)
    assert store.get(ME) is None
    assert same_bits(store.get(ME), KVS[1])
    holes = store.get_many([CHUNKS[0], *CHUNKS[2:9]], timeout_s=PATIENT_S)
    assert {hole.reason for hole in holes} == {"absent"}
    assert present(store) == files(root) == [1]


def test_what_is_stored_again_while_it_is_erased_keeps_row_and_file_together(
    handle, root, monkeypatch
):
    erasing, other = fill(handle(ram=0), 1), handle(ram=0)
    real = erasing.blobs.delete

    def delete_then_others_write(keys):
        gone = real(keys)
        monkeypatch.undo()
        assert other.get(ME) is None, "which removes the row"
        assert other.put(ME, KVS[1], text=make_text("again"), doc_id="again") > 0
        return gone

    monkeypatch.setattr(erasing.blobs, "delete", delete_then_others_write)
    assert erasing.delete([KEYS[1]]) == 1
    for store in (erasing, other):
        assert present(store) == files(root) == [1]
        assert same_bits(store.get(ME), KVS[1])
    assert erasing.forget(NAMESPACE, "again") == 1
    assert present(other) == files(root) == []


def test_a_writer_whose_row_was_erased_leaves_the_blob_that_another_one_counts_on(
    handle, root, monkeypatch
):
    slow, other = handle(ram=0), handle(ram=0)
    write, confirm = slow.blobs.write, slow.catalog.confirm

    def erased_first(*args):
        other.catalog.remove(other.catalog.revisions([KEYS[1]]))
        return write(*args)

    def others_write_first(*args):
        is_there = confirm(*args)
        monkeypatch.undo()
        put(other, 1)
        return is_there

    monkeypatch.setattr(slow.blobs, "write", erased_first)
    monkeypatch.setattr(slow.catalog, "confirm", others_write_first)
    put(slow, 1)
    assert present(slow) == files(root) == [1]
    assert same_bits(slow.get(ME), KVS[1])


def test_a_writer_whose_chunk_was_erased_does_not_confirm_what_another_one_has_only_begun(
    handle, root, monkeypatch
):
    """Who trusts the row would find no blob."""
    slow, other = handle(ram=0), handle(ram=0)
    write = slow.blobs.write

    def erased_and_begun_again(*args):
        written = write(*args)
        monkeypatch.undo()
        assert other.forget(NAMESPACE, "doc 1") == 0
        begun = other.catalog.begin([(record_of(ME, 100), make_text("text 1"), ["doc 1"], None)])
        assert begun != [None]
        return written

    monkeypatch.setattr(slow.blobs, "write", erased_and_begun_again)
    put(slow, 1)
    assert present(slow) == files(root) == [1]
    assert same_bits(slow.get(ME), KVS[1])


@pytest.mark.parametrize("how", ["delete", "gc"])
def test_a_blob_that_is_erased_before_it_is_confirmed_leaves_no_row(handle, root, monkeypatch, how):
    """A row without a blob would keep the next writer from writing it."""
    slow, erasing = handle(ram=0), handle(ram=0)
    confirm, delete = slow.catalog.confirm, erasing.blobs.delete

    def erased_first(*args):
        monkeypatch.setattr(erasing.blobs, "delete", delete_then_confirm)
        erasing.delete([KEYS[1]]) if how == "delete" else gc(erasing)
        return {KEYS[1]}

    def delete_then_confirm(keys):
        if not (gone := delete(keys)):
            return gone
        monkeypatch.undo()
        assert confirm(slow.catalog.revisions([KEYS[1]]))
        return gone

    monkeypatch.setattr(slow.catalog, "confirm", erased_first)
    put(slow, 1)
    assert present(slow) == files(root) == []
    assert put(slow, 1) > 0


def test_threads_read_write_and_erase_at_once_and_the_accounts_stay_right(handle):
    stores, wrong = (handle(gpu=600, ram=1000), handle()), []

    def work(offset):
        store = stores[offset % 2]
        try:
            for step in range(20):
                number = (step + offset) % 8
                put(store, number)
                kv = store.get_many([CHUNKS[number]], timeout_s=PATIENT_S)[0]
                if isinstance(kv, ChunkKV) and not same_bits(kv, KVS[number]):
                    wrong.append(number)
                if step % 5 == 0:
                    store.delete([KEYS[number]])
                if step % 7 == 0:
                    store.forget(NAMESPACE, f"doc {number}")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for store in stores:
        store.get(ME)
        for tier in store.tiers:
            assert tier.stats().num_bytes == KVS[0].num_bytes * len(held(tier)) <= tier.max_bytes
            assert set(held(tier)) <= set(present(store))
    stores[0].clear()
    assert [store.get(identity) for store in stores for identity in CHUNKS] == [None] * 24
    assert files(stores[0].blobs.root) == []


def test_a_namespace_leaves_every_tier_and_only_that(handle):
    seen = []
    store = fill(handle(gpu=2**20, on_event=seen.append), 0, 1)
    space = namespace_digest("other")
    theirs = [make_identity(number, namespace=space) for number in range(3)]
    for number, (text, doc_id) in enumerate(
        [(make_text("0"), "doc 0"), (None, None), (make_text("2"), None)]
    ):
        store.put(theirs[number], make_kv(theirs[number]), text=text, doc_id=doc_id)
    store.get_many([*CHUNKS[:2], *theirs], timeout_s=PATIENT_S)
    store.retain([KEYS[0]], Retention(90))
    seen.clear()
    assert store.clear(space) == 3
    assert {(event.medium, event.type, event.reason) for event in seen} == {
        (medium, "BlockRemoved", "deleted") for medium in ("gpu", "host", "disk")
    }
    assert [held(tier) for tier in store.tiers] == [[0, 1], [0, 1]]
    assert store.catalog.documents(space) == []
    assert present(store) == [0, 1]
    assert store.retention(KEYS[0]) == Retention(90)
