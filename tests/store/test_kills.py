"""A process may be killed between any two steps: it costs time only, and what was erased stays erased.

Real processes are killed in tests/reliability.
"""

from contextlib import suppress

import pytest
from stores import CHUNKS, EVERY_KEY, KEYS, KVS, Killed, files, fill, present, put

from kvrag.cli.check import fsck, gc
from kvrag.store import Catalog, FileBlobs, Retention
from kvrag.store import blobs as blobs_module
from kvrag.testing.chunks import NAMESPACE, make_text, same_bits

STEPS = [
    *((FileBlobs, name) for name in ("read", "write", "delete", "keys")),
    *(
        (Catalog, name)
        for name in (
            "link",
            "begin",
            "confirm",
            "remove",
            "unlink",
            "clear",
            "retain",
            "no_dormant",
        )
    ),
    *((blobs_module.os, name) for name in ("open", "pwritev", "link", "unlink", "mkdir")),
]
"""What a kill may come before or after."""

ACTIONS = {
    "put": lambda store: put(store, 2),
    "put of a known text": lambda store: store.put(
        CHUNKS[2], KVS[2], text=make_text("text 1"), doc_id="doc 1"
    ),
    "link": lambda store: store.link(CHUNKS[1], text=make_text("text 1"), doc_id="new"),
    "delete": lambda store: store.delete([KEYS[1]]),
    "forget": lambda store: store.forget(NAMESPACE, "doc 1"),
    "clear": lambda store: store.clear(),
    "clear of a namespace": lambda store: store.clear(NAMESPACE),
    "retain": lambda store: store.retain([KEYS[1]], Retention(90)),
    "fsck": lambda store: fsck(store, verify_data=True),
    "gc": gc,
}


def killed_at(monkeypatch, action, step):
    """Do something and die before or after one step of it; whether it came so far."""
    count, reached = [0], []

    def wrap(real):
        def call(*args, **options):
            count[0] += 1
            if count[0] == step:
                reached.append(True)
                raise Killed
            result = real(*args, **options)
            count[0] += 1
            if count[0] == step:
                reached.append(True)
                raise Killed
            return result

        return call

    with monkeypatch.context() as patch:
        for owner, name in STEPS:
            patch.setattr(owner, name, wrap(getattr(owner, name)))
        with suppress(Killed):
            action()
    return bool(reached)


def is_sound(store):
    """Whether all that a store knows can be read, has its file, and is counted."""
    known = present(store)
    assert all(same_bits(store.get(CHUNKS[number]), KVS[number]) for number in known)
    assert store.catalog.totals() == (len(known), len(known) * KVS[0].num_bytes)
    assert store.stats()["disk"].rejected == 0
    return True


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("loses_catalog", [False, True], ids=["", "catalog lost"])
def test_a_kill_at_any_step_costs_time_only(root, handle, monkeypatch, name, loses_catalog):
    """Whatever it was, it can be done again, and is then done whole; the other chunk is not touched by what is not about it."""
    step = 0
    while True:
        step += 1
        doomed = fill(handle(ram=0), 1, 3)
        if not killed_at(monkeypatch, lambda doomed=doomed: ACTIONS[name](doomed), step):
            break
        store = handle(ram=0)
        if loses_catalog:
            store.catalog._rows.close()
            for file in (root / "catalog").iterdir():
                file.unlink()
            store = handle(ram=0)
        survivors = present(store)
        for number in survivors:
            kv = store.get(CHUNKS[number])
            assert kv is None or same_bits(kv, KVS[number])
        ACTIONS[name](store)
        assert is_sound(store)
        if not loses_catalog and not name.startswith("clear"):
            assert 3 in present(store)
        if name in ("delete", "forget") or name.startswith("clear"):
            assert 1 not in files(root)
            assert not store.link(CHUNKS[1], text=None, doc_id=None)
        store.clear()
        assert files(root) == []
        assert store.catalog.documents(NAMESPACE) == store.catalog.keys(pending=True) == []
        for each in (doomed, store):
            each.close()
    assert step > 2, "the kills must have come"


@pytest.mark.parametrize("key", EVERY_KEY)
def test_a_chunk_whose_writer_died_is_unknown_and_goes_with_its_document(
    handle, root, monkeypatch, key
):
    """Its blob may be there already: neither a read, nor a lost catalog, may bring it back after its document was erased."""
    doomed = handle(key=key)
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "confirm", lambda *args: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            put(doomed, 1)
    assert files(root) == [1]
    store = handle(key=key)
    assert present(store) == []
    assert store.get(CHUNKS[1]) is None
    assert store.identities(NAMESPACE, make_text("text 1").digest) == []
    assert store.forget(NAMESPACE, "doc 1") == 0
    assert files(root) == []
    assert put(store, 1) > 0


def test_a_chunk_whose_writer_died_is_taken_over_by_the_next(handle, monkeypatch):
    doomed = handle()
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "confirm", lambda *args: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            put(doomed, 1)
    store = handle()
    assert store.put(CHUNKS[1], KVS[1], text=make_text("text 1"), doc_id="other") == 0, (
        "its blob is there"
    )
    assert present(store) == [1]
    assert store.forget(NAMESPACE, "doc 1") == 0, "the other document has it too"
    assert same_bits(store.get(CHUNKS[1]), KVS[1])


def test_an_erasure_between_two_steps_of_a_put_wins_or_is_before_it(handle, root, monkeypatch):
    """What is put and erased at the same time is there whole, or not at all."""
    real = FileBlobs.write
    for erase in (
        lambda store: store.forget(NAMESPACE, "doc 1"),
        lambda store: store.clear(),
        lambda store: store.delete([KEYS[1]]),
    ):
        store, other = handle(), handle()
        for after in (False, True):
            with monkeypatch.context() as patch:

                def write(*args, after=after, erase=erase, other=other):
                    if not after:
                        erase(other)
                    written = real(*args)
                    if after:
                        erase(other)
                    patch.setattr(FileBlobs, "write", real)
                    return written

                patch.setattr(FileBlobs, "write", write)
                put(store, 1)
            assert present(other) == [1], "it was put again, after the erasure"
            assert same_bits(other.get(CHUNKS[1]), KVS[1])
            assert store.catalog.documents(NAMESPACE) in (["doc 1"], [])
            other.clear()
            assert files(root) == []
