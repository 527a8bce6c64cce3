"""Snapshots of the rows that machines share: who begins with one has what all others have, whatever happened while it was written."""

import os
import random
import shutil
import zlib
from contextlib import closing, suppress

import pytest
from stores import ended, in_child

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import open_store
from kvrag.store.catalog import journal, shared
from kvrag.store.opening import open_url
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text

pytest.importorskip("obstore")

pytestmark = pytest.mark.usefixtures("always_fresh")


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def opened(url, tmp_path):
    """Opens another machine at each call."""
    stores = []

    def open_():
        stores.append(
            open_store(
                tmp_path / f"machine {len(stores)}", StoreConfig(shared=url, min_free_bytes=0)
            )
        )
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def small_parts(monkeypatch):
    """A snapshot has a part for every few rows, and is written when a test says so."""
    monkeypatch.setattr(shared, "PER_PART", 4)
    monkeypatch.setattr(shared, "PER_LOOK", 2)
    monkeypatch.setattr(shared, "AT_ONCE", 0)


def put(store, number):
    identity = make_identity(number)
    store.put(identity, make_kv(identity), text=make_text(f"text {number}"), doc_id=f"doc {number}")


def rows_of(store):
    """All rows of a store's copy, after it has followed."""
    store.catalog.state()
    cache = store.catalog._rows._cache
    return {name: cache.get(name) for name in cache if name != shared.PLACE}


def blobs_of(url, folder):
    with closing(open_url(url, folder)) as blobs:
        return {key: bytes(blobs.read(key)) for key in blobs.keys()}  # noqa: SIM118 - blobs are no dict


def test_a_machine_that_was_away_begins_with_a_snapshot(tmp_path, url):
    stores = [
        open_store(tmp_path / name, StoreConfig(shared=url, min_free_bytes=0)) for name in "ab"
    ]
    assert not stores[1].known([chunk_key(make_identity(0))])
    for number in range(6):
        stores[0].put(make_identity(number), make_kv(make_identity(number)), text=None)
        stores[0].catalog.scrub()
    assert len(list((tmp_path / "bucket" / "journal").iterdir())) == 2, (
        "only the first and the last entry are left"
    )
    for store in (stores[1], open_store(url, StoreConfig())):
        assert store.known([chunk_key(make_identity(n)) for n in range(11)]) == set(
            stores[0].catalog.keys()
        )
        store.put(make_identity(10), make_kv(make_identity(10)), text=None)
    assert len(stores[0].catalog.keys()) == 7


def test_the_journal_does_not_keep_the_names_of_erased_documents(url):
    with closing(open_store(url, StoreConfig())) as store:
        for number, doc_id in enumerate(["kept", "secret"]):
            identity = make_identity(number)
            store.put(identity, make_kv(identity), text=make_text(f"text {number}"), doc_id=doc_id)
        store.forget(identity.namespace, "secret")
    kept = {**blobs_of(url, "journal"), **blobs_of(url, "journal-snapshots")}
    said = b"".join(map(zlib.decompress, kept.values()))
    assert b"kept" in said
    assert b"secret" not in said


def test_a_large_catalog_is_written_down_part_by_part(opened, url, small_parts):
    writer = opened()
    for number in range(6):
        put(writer, number)
    writer.catalog._rows._snapshot()
    assert len(blobs_of(url, "journal")) == 2, "the first and the last entry"
    assert len(blobs_of(url, "journal-snapshots")) > 6, "a head and parts"
    new = opened()
    assert rows_of(new) == rows_of(writer)
    for number in (6, 7):
        put(new, number)
    assert rows_of(new) == rows_of(writer)


@pytest.mark.parametrize("seed", range(4))
def test_what_changes_while_a_snapshot_is_written_is_in_it(opened, small_parts, monkeypatch, seed):
    """Rows that come, change and go before, at and behind the place where it reads."""
    rng, writer, other = random.Random(seed), opened(), opened()
    for number in range(8):
        put(writer, number)
    parts = shared.SharedRows._parts

    def disturbed(rows, place):
        for part in parts(rows, place):
            yield part
            for _ in range(2):
                number = rng.randrange(12)
                put(other, number) if rng.random() < 0.5 else other.forget(
                    NAMESPACE, f"doc {number}"
                )
            writer.catalog.state()  # which follows

    with monkeypatch.context() as patch:
        patch.setattr(shared.SharedRows, "_parts", disturbed)
        writer.catalog._rows._snapshot()
    assert writer.catalog._rows._journal.begin()[0].number > 17, "it was given up"
    assert rows_of(opened()) == rows_of(other) == rows_of(writer)


def test_a_snapshot_that_is_late_is_given_up(opened, url, small_parts):
    slow, other = opened(), opened()
    put(slow, 0)
    place = shared._place_of(slow.catalog._rows._cache)

    def late():
        yield {"c late": "1"}
        put(other, 1)
        other.catalog._rows._snapshot()

    with pytest.raises(journal.Conflict):
        slow.catalog._rows._journal.snapshot(place, late())
    assert all(
        b"late" not in zlib.decompress(each) for each in blobs_of(url, "journal-snapshots").values()
    )
    assert rows_of(opened()) == rows_of(slow) == rows_of(other)


@pytest.mark.parametrize("when", ["while it is written", "when it is read"])
def test_a_catalog_that_is_cleared_beside_a_snapshot_is_empty(
    opened, url, small_parts, monkeypatch, when
):
    writer, other = opened(), opened()
    for number in range(4):
        put(writer, number)
    parts = shared.SharedRows._parts

    def cleared(rows, place):
        yield from parts(rows, place)
        if when == "while it is written":
            other.clear()

    with monkeypatch.context() as patch, suppress(journal.Conflict):
        patch.setattr(shared.SharedRows, "_parts", cleared)
        writer.catalog._rows._snapshot()
    if when == "when it is read":
        other.clear()
    assert opened().catalog.keys() == writer.catalog.keys() == []


def test_what_a_killed_writer_has_left_goes_with_a_later_snapshot(opened, url, small_parts):
    store = opened()
    put(store, 0)
    left = f"{shared._place_of(store.catalog._rows._cache).number:016x}{'5' * 32}{0:016x}"
    store.catalog._rows._journal._snapshots.write(left, [journal._dump({})])
    for number in (1, 2):
        put(store, number)
        store.catalog._rows._snapshot()
    assert left not in blobs_of(url, "journal-snapshots")
    assert rows_of(opened()) == rows_of(store)


@pytest.mark.parametrize("fault", ["damaged", "exchanged"])
def test_a_damaged_part_is_found(opened, url, small_parts, fault):
    store = opened()
    for number in range(4):
        put(store, number)
    store.catalog._rows._snapshot()
    snapshots = store.catalog._rows._journal._snapshots
    part, other = sorted(blobs_of(url, "journal-snapshots"))[1:3]
    data = b"?" if fault == "damaged" else bytes(snapshots.read(other))
    snapshots.delete([part])
    snapshots.write(part, [data])
    with pytest.raises(StoreError, match="damaged"):
        put(opened(), 9)


def test_who_reads_a_snapshot_that_goes_meanwhile_begins_with_the_next_one(
    opened, small_parts, monkeypatch
):
    store, times = opened(), []
    put(store, 0)
    store.catalog._rows._snapshot()
    begin = journal.Journal.begin

    def too_late(own):
        found = begin(own)
        times.append(found[0])
        if len(times) < 3:
            put(store, len(times))
            store.catalog._rows._snapshot()
        return found

    monkeypatch.setattr(journal.Journal, "begin", too_late)
    assert rows_of(opened()) == rows_of(store)
    assert len(times) == 3


def test_a_copy_that_is_replaced_while_it_is_read_is_not_written_down(
    opened, small_parts, tmp_path
):
    store = opened()
    for number in range(6):
        put(store, number)
    parts = store.catalog._rows._parts(journal.Place(0, ""))
    next(parts)
    [catalog] = (tmp_path / "machine 0").glob("catalog-*")
    shutil.rmtree(catalog)
    with pytest.raises(OSError, match="can't be read"):
        list(parts)


def test_a_copy_that_is_replaced_before_it_is_read_is_not_written_down(
    opened, small_parts, tmp_path, monkeypatch
):
    store = opened()
    for number in range(6):
        put(store, number)
    parts = shared.SharedRows._parts

    def replaced(rows, place):
        [catalog] = (tmp_path / "machine 0").glob("catalog-*")
        shutil.rmtree(catalog)
        return parts(rows, place)

    with monkeypatch.context() as patch:
        patch.setattr(shared.SharedRows, "_parts", replaced)
        with pytest.raises(OSError, match="replaced"):
            store.catalog._rows._snapshot()
    assert len(opened().catalog.keys()) == len(store.catalog.keys()) == 6


def test_a_fork_amid_a_snapshot_inherits_no_connection(opened, small_parts):
    store = opened()
    for number in range(6):
        put(store, number)
    parts = store.catalog._rows._parts(journal.Place(0, ""))
    next(parts)

    def child():
        there = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return not [
            path for path in there if os.path.exists(path) and "cache.db" in os.readlink(path)
        ]

    assert ended(in_child(child)) == 0
    with pytest.raises(OSError, match="can't be read"):
        list(parts)
    store.catalog._rows._snapshot()
    assert rows_of(opened()) == rows_of(store)


def test_names_leave_although_another_snapshot_began_before_the_erasure(opened, url, monkeypatch):
    slow, other = opened(), opened()
    for number in range(2):
        put(slow, number)
    rows, parts = slow.catalog._rows, list(slow.catalog._rows._parts(journal.Place(0, "")))

    def late():
        yield from parts
        other.forget(NAMESPACE, "doc 1")

    with suppress(journal.Conflict):
        rows._journal.snapshot(shared._place_of(rows._cache), late())
    said = b"".join(
        map(
            zlib.decompress,
            (blobs_of(url, "journal") | blobs_of(url, "journal-snapshots")).values(),
        )
    )
    assert b"doc 0" in said
    assert b"doc 1" not in said


def test_an_erasure_in_a_large_catalog_waits_for_the_next_snapshot(opened, url, small_parts):
    store = opened()
    put(store, 0)
    store.forget(NAMESPACE, "doc 0")
    assert blobs_of(url, "journal-snapshots") == {}


def test_more_rows_have_fewer_snapshots():
    intervals = [shared._interval(rows) for rows in (0, 10_000, 100_000, 4_000_000)]
    assert intervals == sorted(intervals)
    assert intervals[0] == shared.PER_SNAPSHOT
    assert 4_000_000 / 64 < intervals[-1] <= 4_000_000 / 32


@pytest.mark.parametrize("seed", range(3))
def test_machines_that_write_erase_and_take_snapshots_all_have_the_same_rows(
    opened, small_parts, monkeypatch, seed
):
    monkeypatch.setattr(shared, "_interval", lambda _: 3)
    rng, stores = random.Random(seed), [opened() for _ in range(3)]
    for _ in range(40):
        store, number = rng.choice(stores), rng.randrange(10)
        if (dice := rng.random()) < 0.6:
            put(store, number)
        elif dice < 0.9:
            store.forget(NAMESPACE, f"doc {number}")
        elif dice < 0.95:
            store.clear()
        else:
            with suppress(journal.Conflict):
                store.catalog._rows._snapshot()
    assert rows_of(opened()) == rows_of(stores[0]) == rows_of(stores[1]) == rows_of(stores[2])
    assert {chunk_key(make_identity(n)) for n in range(10)} >= set(stores[0].catalog.keys())


@pytest.mark.parametrize("wrong", [3, [1], ["", 3], {}, [3, {}]])
def test_what_is_no_snapshot_counts_as_a_fault_of_the_journal(opened, wrong):
    store = opened()
    put(store, 0)
    snapshots = store.catalog._rows._journal._snapshots
    snapshots.write(journal._key(99), [journal._dump(wrong)])
    with pytest.raises(OSError, match="damaged"):
        store.catalog._rows._journal.begin()
