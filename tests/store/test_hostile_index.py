"""The index may be lost, damaged or written by anyone: it costs time, not correctness, and runs no code."""

import os
import pickle
import shutil
import sqlite3

import diskcache
import pytest
from kvrag.store.cache import JsonDisk

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskIndex, DiskStore, recovery
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(5)]
TEXTS = [make_text(f"text {number}") for number in range(5)]


@pytest.fixture
def filled(disk):
    for number, identity in enumerate(IDENTITIES):
        disk.put(identity, make_kv(identity), text=TEXTS[number], doc_id=f"doc {number}")
    return disk


def is_whole(store):
    texts, _ = store.index.texts(NAMESPACE, 0)
    return (
        sorted(store.index.keys()) == sorted(map(chunk_key, IDENTITIES))
        and sorted(text.digest for text in texts) == sorted(text.digest for text in TEXTS)
        and store.index.documents(NAMESPACE) == [f"doc {number}" for number in range(5)]
        and all(same_bits(store.get(identity), make_kv(identity)) for identity in IDENTITIES)
        and store.stats()["disk"].chunks == len(IDENTITIES)
    )


def database(root):
    return root / "index" / "cache.db"


def lose(root):
    shutil.rmtree(root / "index")


def garbage(root):
    database(root).write_bytes(os.urandom(20_000))


def empty(root):
    database(root).write_bytes(b"")


def truncated(root):
    os.truncate(database(root), database(root).stat().st_size // 2)


def holes(root):
    raw = bytearray(database(root).read_bytes())
    raw[4096:] = os.urandom(len(raw) - 4096)
    database(root).write_bytes(raw)


def execute(*statements):
    def damage(root):
        connection = sqlite3.connect(database(root))
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return damage


def linked(root):
    path = database(root)
    path.rename(root.parent / "elsewhere.db")
    path.symlink_to(root.parent / "elsewhere.db")


DAMAGES = {
    "link": linked,
    "lost": lose,
    "garbage": garbage,
    "empty": empty,
    "truncated": truncated,
    "holes": holes,
    "dropped table": execute("DROP TABLE Cache"),
    "other columns": execute("DROP TABLE Cache", "CREATE TABLE Cache (key, raw, mode, filename, value)"),
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
    "word in a setting": execute("UPDATE Settings SET value = '0; DROP TABLE Cache' WHERE key = 'sqlite_mmap_size'"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_index_is_rebuilt_from_the_blobs(filled, root, damage, no_pickle):
    filled.close()
    damage(root)
    store = DiskStore(root)
    assert is_whole(store)
    store.close()


def test_a_sound_index_is_not_rebuilt(filled, root, monkeypatch):
    filled.index.add(filled.index.get(chunk_key(IDENTITIES[0])), doc_id="late")
    filled.close()
    monkeypatch.setattr(recovery, "headers", lambda *args: pytest.fail("rebuilt") if args[1] else [])
    store = DiskStore(root)
    assert "late" in store.index.documents(NAMESPACE)
    assert not (root / "index.damaged").exists()
    store.close()


def test_a_rebuild_that_was_cut_short_is_done_again(filled, root):
    filled.close()
    index = DiskIndex(root / "index")
    index.remove(chunk_key(IDENTITIES[0]))
    index._write("complete", None)
    index.close()
    store = DiskStore(root)
    assert is_whole(store)
    store.close()


def test_cursors_of_a_lost_index_miss_nothing(filled, root):
    _, cursor = filled.index.texts(NAMESPACE, 0)
    filled.close()
    lose(root)
    store = DiskStore(root)
    assert len(store.index.texts(NAMESPACE, cursor)[0]) == len(TEXTS)
    store.close()


def test_damage_under_an_open_store_costs_no_answer(filled, root):
    garbage(root)
    for suffix in ("-wal", "-shm"):
        database(root).with_name(f"cache.db{suffix}").write_bytes(b"x" * 40_000)
    for identity in IDENTITIES:
        assert same_bits(filled.get(identity), make_kv(identity))
    filled.index.texts(NAMESPACE, 0)
    filled.stats()
    try:
        filled.put(make_identity(9), make_kv(make_identity(9)), text=None)
    except StoreError:
        assert filled.get(make_identity(9)) is None
    else:
        filled.delete([chunk_key(make_identity(9))])
    filled.close()
    store = DiskStore(root)
    assert is_whole(store)
    store.close()


def test_an_index_that_another_process_replaced_is_followed(filled, root):
    other = DiskStore(root)
    lose(root)
    rebuilt = DiskStore(root)
    rebuilt.put(make_identity(9), make_kv(make_identity(9)), text=make_text("new"))
    assert make_text("new") in other.index.texts(NAMESPACE, 0)[0]
    assert other.index.get(chunk_key(make_identity(9))) is not None
    for store in (other, rebuilt):
        store.close()


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
        ("value", 1, 1, None, "[" * 100_000),
        ("value", 1, 1, None, "9" * 10_000),
        ("value", 1, 1, None, '{"texts": [[1]], "content": 3}'),
        ("value", 1, 1, None, "[[], 1, {}]"),
        ("value", 1, 1, None, "[-1, 18446744073709551616]"),
        ("value", 1, 7, None, 5),
    ],
)
@pytest.mark.parametrize("kinds", ["%", "key%", "text%"])
def test_planted_rows_are_absent_and_run_nothing(filled, root, tmp_path, row, kinds, no_pickle):
    victim = tmp_path / "victim"
    victim.write_bytes(PICKLE)
    name, raw, mode, filename, value = row
    connection = sqlite3.connect(database(root))
    if name == "value":
        names = [row for (row,) in connection.execute("SELECT key FROM Cache WHERE key LIKE ?", (kinds,))]
        connection.execute("DELETE FROM Cache WHERE key LIKE ?", (kinds,))
    else:
        names = [name]
    filename = filename and filename.replace("/{victim}", str(victim))
    connection.executemany(PLANTED, [(name, raw, mode, filename, value) for name in names])
    connection.commit()
    connection.close()
    filled.index.texts(NAMESPACE, 0)
    filled.index.documents(NAMESPACE)
    filled.index.keys()
    filled.stats()
    for number, identity in enumerate(IDENTITIES):
        assert filled.index.variants("x") == []
        assert same_bits(filled.get(identity), make_kv(identity))
        assert filled.link(identity, text=TEXTS[number], doc_id="doc 0")
    filled.delete(filled.index.unlink(NAMESPACE, "doc 0"))
    filled.delete([chunk_key(identity) for identity in IDENTITIES])
    assert victim.read_bytes() == PICKLE


def test_the_disk_of_the_cache_refuses_everything_but_strings(tmp_path, no_pickle):
    cache = diskcache.Cache(str(tmp_path), disk=JsonDisk)
    for key, value in (((1, 2), "x"), ("x", {"a": 1}), ("x", b"bytes"), ("x", 5), (b"x", "x")):
        with pytest.raises(TypeError, match="string"):
            cache.set(key, value)
    cache.close()


def test_the_database_is_not_mapped_and_never_evicts(filled):
    rows = filled.index._rows
    assert rows._sql("PRAGMA mmap_size").fetchall() in ([], [(0,)])
    assert (rows.eviction_policy, rows.cull_limit, rows.statistics) == ("none", 0, 0)


def test_a_locked_index_is_an_error_in_bounded_time(filled, root, monkeypatch):
    monkeypatch.setattr("kvrag.store.connect.BUSY_TIMEOUT_S", 0.05)
    filled.index._before_fork()
    blocker = sqlite3.connect(database(root), isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        filled.put(make_identity(9), make_kv(make_identity(9)), text=None)
    assert filled.get(make_identity(9)) is None
    assert same_bits(filled.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    blocker.execute("ROLLBACK")
    blocker.close()
    assert filled.put(make_identity(9), make_kv(make_identity(9)), text=None) > 0
