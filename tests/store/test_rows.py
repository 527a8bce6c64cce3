"""The catalog's database may be damaged or written by anyone: it costs time, not correctness, and runs no code."""

import itertools
import os
import pickle
import shutil
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import diskcache
import pytest
from stores import CHUNKS, EVERY_KEY, KEYS, KVS, SIZE, failing, fill, present, put

from kvrag.errors import StoreError
from kvrag.store.catalog import rows
from kvrag.store.catalog.database import CHOICES, SCHEMA, SETTINGS, own
from kvrag.testing.chunks import NAMESPACE, make_text, same_bits

NUMBERS = range(5)


@pytest.fixture
def filled(store):
    return fill(store, *NUMBERS)


def database(root):
    return root / "catalog" / "cache.db"


def garbage(root):
    database(root).write_bytes(os.urandom(20_000))


def truncated(root):
    os.truncate(database(root), database(root).stat().st_size // 2)


def holes(root):
    raw = bytearray(database(root).read_bytes())
    raw[4096:] = os.urandom(len(raw) - 4096)
    database(root).write_bytes(raw)


def linked(root):
    database(root).rename(root.parent / "elsewhere.db")
    database(root).symlink_to(root.parent / "elsewhere.db")


def folder(root):
    database(root).unlink()
    database(root).mkdir()


def fifo(root):
    database(root).unlink()
    os.mkfifo(database(root))


def execute(*statements):
    def damage(root):
        with closing(sqlite3.connect(database(root))) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    return damage


DAMAGES = {
    "link": linked,
    "folder": folder,
    "fifo": fifo,
    "garbage": garbage,
    "truncated": truncated,
    "holes": holes,
    "dropped table": execute("DROP TABLE Cache"),
    "other columns": execute(
        "DROP TABLE Cache", "CREATE TABLE Cache (key, raw, mode, filename, value)"
    ),
    "trigger": execute("CREATE TRIGGER t AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END"),
    "trigger of a known name": execute(
        "DROP TRIGGER Settings_count_insert",
        "CREATE TRIGGER Settings_count_insert AFTER INSERT ON Cache FOR EACH ROW BEGIN DELETE FROM Cache; END",
    ),
    "index on an expression": execute(
        "DROP INDEX Cache_expire_time", "CREATE INDEX Cache_expire_time ON Cache (abs(mode))"
    ),
    "view": execute("ALTER TABLE Cache RENAME TO C", "CREATE VIEW Cache AS SELECT * FROM C"),
    "foreign setting": execute("INSERT INTO Settings VALUES ('close', 1)"),
    "other word in a setting": execute(
        "UPDATE Settings SET value = 'least-recently-used' WHERE key = 'eviction_policy'"
    ),
    "word in a setting": execute(
        "UPDATE Settings SET value = '0; DROP TABLE Cache' WHERE key = 'sqlite_mmap_size'"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_catalog_is_moved_aside_and_begun_anew(
    filled, opened, root, damage, no_pickle, caplog
):
    """Its chunks are dormant then: unknown, and adopted where they are stored again."""
    filled.close()
    damage(root)
    store = opened(ram_bytes=0)
    assert "moved aside and begun anew" in caplog.text
    assert (root / "catalog.damaged").exists()
    assert present(store) == []
    assert store.listed() - store.catalog.present() == {KEYS[number] for number in NUMBERS}
    for number in NUMBERS:
        assert store.link(CHUNKS[number], text=make_text(f"text {number}"), doc_id=f"doc {number}")
        assert same_bits(store.get(CHUNKS[number]), KVS[number])
    assert store.catalog.totals() == (5, 5 * KVS[0].num_bytes)


@pytest.mark.parametrize("damage", ["empty", "absent", "absent with journals"])
def test_an_empty_or_lost_catalog_is_begun_anew(filled, opened, root, damage):
    filled.close()
    if damage == "empty":
        database(root).write_bytes(b"")
    else:
        shutil.rmtree(root / "catalog")
    if damage == "absent with journals":
        (root / "catalog").mkdir()
        (root / "catalog" / "cache.db-wal").write_bytes(b"x" * 40_000)
    store = opened()
    assert present(store) == []
    assert put(store, 0) == 0, "adopted: nothing is written"
    assert same_bits(store.get(CHUNKS[0]), KVS[0])


def test_what_looks_damaged_once_is_kept(filled, opened, root, monkeypatch):
    """A page that can't be read is damage in the words of some versions of SQLite; it can be read the next time."""
    filled.close()
    verdicts = iter(["it has a foreign schema", None])
    monkeypatch.setattr("kvrag.store.catalog.database._fault_at", lambda _: next(verdicts))
    assert present(opened()) == list(NUMBERS)
    assert not (root / "catalog.damaged").exists()


def test_damage_under_an_open_store_costs_no_wrong_answer(filled, opened, root):
    garbage(root)
    for suffix in ("-wal", "-shm"):
        database(root).with_name(f"cache.db{suffix}").write_bytes(b"x" * 40_000)
    for number in NUMBERS:
        kv = filled.get(CHUNKS[number])
        assert kv is None or same_bits(kv, KVS[number])
    filled.catalog.texts(NAMESPACE, 0)
    filled.stats()
    try:
        put(filled, 9)
    except StoreError:
        assert filled.get(CHUNKS[9]) is None
    filled.close()
    store = opened()
    for number in NUMBERS:
        assert put(store, number) in (0, KVS[0].num_bytes)
        assert same_bits(store.get(CHUNKS[number]), KVS[number])


def test_a_store_that_is_opened_on_a_full_disk_is_read(filled, opened, root, monkeypatch):
    """From a private copy of the catalog: SQLite can't open one where it can write nothing."""
    real = diskcache.Cache

    def full(folder, **options):
        if folder == str(root / "catalog"):
            raise sqlite3.OperationalError("database or disk is full")
        return real(folder, **options)

    monkeypatch.setattr(diskcache, "Cache", full)
    with pytest.raises(StoreError, match="disk is full"):
        opened(ram_bytes=SIZE)
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=1, f_flag=0)
    )
    store = opened(ram_bytes=SIZE)
    assert same_bits(store.get(CHUNKS[1]), KVS[1])
    with pytest.raises(StoreError, match="reading only"):
        put(store, 9)
    filled.delete([KEYS[1]])
    assert store.get(CHUNKS[1]) is None


def test_an_open_store_is_read_where_its_disk_becomes_read_only(opened, root, monkeypatch):
    """From a private copy of the catalog, until the real one can be opened again; changes are refused meanwhile."""
    store, real = fill(opened(ram_bytes=0), *NUMBERS), rows.locked
    store.catalog._rows.let_go()
    with monkeypatch.context() as patch:
        patch.setattr(
            rows, "locked", lambda path: (failing(30)(real) if path.parent == root else real)(path)
        )
        assert present(store) == []
        patch.setattr(
            os,
            "statvfs",
            lambda path: SimpleNamespace(f_bavail=2**40, f_frsize=1, f_flag=os.ST_RDONLY),
        )
        assert same_bits(store.get(CHUNKS[1]), KVS[1])
        with pytest.raises(StoreError, match="Read-only"):
            put(store, 9)
    assert put(store, 9) > 0
    assert present(store) == [*NUMBERS, 9]


# -- rows ----------------------------------------------------------------------------------------------------------------

PLANTED = "INSERT INTO Cache (key, raw, store_time, size, mode, filename, value) VALUES (?, ?, 0, 0, ?, ?, ?)"
PICKLE = pickle.dumps(print)


@pytest.mark.parametrize(
    "row",
    [
        ("value", 1, 4, None, PICKLE),
        ("value", 1, 1, None, PICKLE),
        ("value", 1, 3, "../../victim", None),
        ("value", 1, 2, "/{victim}", None),
        ("value", 1, 4, "../../victim", None),
        (PICKLE, 0, 4, None, PICKLE),
        (PICKLE, 0, 1, None, "1"),
        (7, 1, 1, None, "1"),
        ("value", 1, 1, None, "[" * 100_000),
        ("value", 1, 1, None, "9" * 10_000),
        ("value", 1, 1, None, "[[], 1, {}]"),
        ("value", 1, 1, None, "[-1, 18446744073709551616]"),
        ("value", 1, 1, None, '["a", "b", "c", "d", "e", 1, 1e400, [5], {}]'),
        ("value", 1, 7, None, 5),
    ],
)
@pytest.mark.parametrize("kinds", ["%", "c %", "t %", "s"])
@pytest.mark.parametrize("key", EVERY_KEY)
def test_planted_rows_are_absent_and_run_nothing(
    opened, root, tmp_path, row, kinds, key, no_pickle
):
    store = fill(opened(key=key, ram_bytes=0), *NUMBERS)
    victim = tmp_path / "victim"
    victim.write_bytes(PICKLE)
    name, raw, mode, filename, value = row
    [path] = root.glob("catalog*/cache.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        names = [name]
        if name == "value":
            names = [
                name
                for (name,) in connection.execute(
                    "SELECT key FROM Cache WHERE key LIKE ?", (kinds,)
                )
            ]
            connection.execute("DELETE FROM Cache WHERE key LIKE ?", (kinds,))
        filename = filename and filename.replace("/{victim}", str(victim))
        connection.executemany(PLANTED, [(name, raw, mode, filename, value) for name in names])
    store.catalog.texts(NAMESPACE, 0)
    store.catalog.documents(NAMESPACE)
    store.stats()
    for number in NUMBERS:
        kv = store.get(CHUNKS[number])
        assert kv is None or same_bits(kv, KVS[number])
        store.catalog.variants("x")
        store.retention(KEYS[number])
    assert put(store, 0) in (0, KVS[0].num_bytes)
    assert same_bits(store.get(CHUNKS[0]), KVS[0])
    store.forget(NAMESPACE, "doc 0")
    store.clear()
    assert store.blobs.keys() == set()
    assert victim.read_bytes() == PICKLE


def test_a_row_of_any_length_is_in_the_database(filled, root):
    """diskcache would keep long ones in files, which it takes their names for."""
    table, long = filled.catalog._rows, "x" * 2**20
    table.change(lambda: table.set("a", long))
    assert table.get("a") == f'"{long}"'
    assert {path.name for path in (root / "catalog").iterdir()} <= {
        "cache.db",
        "cache.db-wal",
        "cache.db-shm",
    }


# -- what is assumed of diskcache ----------------------------------------------------------------------------------------


def test_the_examination_sees_all_that_diskcache_makes_of_an_empty_folder():
    """The tables, indices and triggers that it believes, and the settings that it makes attributes and PRAGMAs of."""
    kinds = {(kind, name) for kind, name, _, _ in own(SCHEMA)}
    assert kinds >= {("table", "Cache"), ("table", "Settings"), ("index", "Cache_key_raw")}
    assert {kind for kind, _ in kinds} == {"table", "index", "trigger"}
    words = {"eviction_policy": "none", "sqlite_journal_mode": "wal"}
    names = {*diskcache.DEFAULT_SETTINGS, *SETTINGS, "count", "size", "hits", "misses"}
    assert dict(own(CHOICES)) == {**dict.fromkeys(names, 0), **words}, (
        "whole numbers may differ: they are set anew"
    )


def test_a_sound_database_is_kept_not_mapped_never_evicts_and_overwrites_what_is_erased(
    filled, opened, root
):
    filled.close()
    store = opened()
    assert (present(store), (root / "catalog.damaged").exists()) == (list(NUMBERS), False)
    cache = store.catalog._rows._current().cache
    assert (cache.eviction_policy, cache.cull_limit, cache.statistics) == ("none", 0, 0)
    assert cache._sql("PRAGMA mmap_size").fetchall() in ([], [(0,)])
    assert cache._sql("PRAGMA secure_delete").fetchall() == [(1,)]
    assert cache._sql("PRAGMA trusted_schema").fetchall() == [(0,)]


def test_a_locked_catalog_is_an_error_in_bounded_time_and_reads_go_on(filled, root, monkeypatch):
    monkeypatch.setattr(rows, "BUSY_S", 0.05)
    filled.catalog._rows.let_go()
    assert filled.known(KEYS), "opened again"
    with closing(sqlite3.connect(database(root), isolation_level=None)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            put(filled, 9)
        with pytest.raises(StoreError, match="locked"):
            filled.delete([KEYS[0]])
        assert filled.get(CHUNKS[9]) is None
        assert same_bits(filled.get(CHUNKS[1]), KVS[1])
        blocker.execute("ROLLBACK")
    assert put(filled, 9) > 0


def test_a_change_that_fails_changes_nothing(filled, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(filled.catalog, "_count", failing(28)(None))
        with pytest.raises(StoreError, match="No space left"):
            put(filled, 9)
    assert present(filled) == list(NUMBERS)
    assert filled.catalog.keys(pending=True) == []
    assert put(filled, 9) > 0


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_names_come_by_their_beginning(opened, count):
    """Those that are listed are first or last of all: few rows are looked at, and none is missed."""
    store = opened()
    table = store.catalog._rows
    written = itertools.product(("c", "i", "l", "p", "t", "z"), range(count))
    table.change(lambda: [table.set(f"{kind} {number:04d}", number) for kind, number in written])
    for kind in ("c", "p", "z"):
        assert sorted(table.names(f"{kind} ")) == [f"{number:04d}" for number in range(count)]
    assert table.names("q ") == []


def test_a_row_that_can_not_be_read_costs_no_other_row(filled, monkeypatch):
    cache = filled.catalog._rows._current().cache
    get = cache.get

    def half_damaged(name, *rest, **options):
        if name == f"c {KEYS[2]}":
            raise sqlite3.DatabaseError("database disk image is malformed")
        return get(name, *rest, **options)

    monkeypatch.setattr(cache, "get", half_damaged)
    assert filled.catalog.known(KEYS[:5]) == {*KEYS[:5]} - {KEYS[2]}
