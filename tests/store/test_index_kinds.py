"""An index on sqlite3 alone, and stores that change from one kind to the other."""

import os
import sqlite3
import subprocess
import sys

import pytest
from kvrag.store.index_kinds import FILES

from kvrag.config import StoreConfig
from kvrag.errors import ConfigError
from kvrag.store import DiskStore
from kvrag.store.rows import names_of, row_of
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

IDENTITIES = [make_identity(number) for number in range(4)]
SQLITE = StoreConfig(index="sqlite", min_free_bytes=0)


def fill(root, config):
    store = DiskStore(root, config)
    for number, identity in enumerate(IDENTITIES):
        store.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=f"doc {number}")
    return store


def is_whole(store):
    return (
        store.index.documents(NAMESPACE) == [f"doc {number}" for number in range(4)]
        and len(store.index.texts(NAMESPACE, 0)[0]) == 4
        and all(same_bits(store.get(identity), make_kv(identity)) for identity in IDENTITIES)
        and store.stats()["disk"].chunks == 4
        and store.stats()["disk"].rejected == 0
    )


def execute(root, *statements):
    connection = sqlite3.connect(root / "index" / FILES["sqlite"])
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


DAMAGES = {
    "garbage": lambda root: (root / "index" / "rows.db").write_bytes(os.urandom(9000)),
    "empty": lambda root: (root / "index" / "rows.db").write_bytes(b""),
    "dropped": lambda root: execute(root, "DROP TABLE rows"),
    "trigger": lambda root: execute(root, "CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END"),
    "view": lambda root: execute(root, "CREATE VIEW v AS SELECT 1"),
    "blobs": lambda root: execute(root, "UPDATE rows SET value = x'00'"),
    "no json": lambda root: execute(root, "UPDATE rows SET value = '['"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_index_is_rebuilt(root, damage, no_pickle):
    fill(root, SQLITE).close()
    damage(root)
    store = DiskStore(root, SQLITE)
    assert is_whole(store)
    store.close()


@pytest.mark.parametrize(("before", "after"), [("diskcache", "sqlite"), ("sqlite", "diskcache")])
def test_the_kind_of_the_index_may_change(root, before, after):
    store = fill(root, StoreConfig(index=before, min_free_bytes=0))
    store.put(make_identity(9), make_kv(make_identity(9)), text=make_text("9"), doc_id="gone")
    assert store.forget(NAMESPACE, "gone") == 1
    store.close()
    store = DiskStore(root, StoreConfig(index=after, min_free_bytes=0))
    assert is_whole(store)
    store.close()
    assert [file for file in FILES.values() if (root / "index" / file).exists()] == [FILES[after]]


def test_the_sqlite_index_does_without_diskcache(root):
    code = (
        "import sys; sys.modules['diskcache'] = None\n"
        "from kvrag.config import StoreConfig\n"
        "from kvrag.store import open_store\n"
        "from kvrag.testing.chunks import make_identity, make_kv\n"
        "store = open_store(sys.argv[1], StoreConfig(index='sqlite'))\n"
        "assert store.put(make_identity(), make_kv(make_identity()), text=None) > 0\n"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=True)


def test_a_failed_change_leaves_nothing_of_itself(root):
    store = fill(root, SQLITE)
    with pytest.raises(TypeError, match="JSON"):
        write_half(store.index)
    assert store.index._peek("half") is None
    assert is_whole(store)
    store.close()


def write_half(index):
    with index._transaction():
        index._write("half", 1)
        index._write("rest", object())


@pytest.mark.parametrize("kind", FILES)
def test_hits_and_totals_are_shared_by_processes(root, kind):
    config = StoreConfig(index=kind, min_free_bytes=0)
    one, two = fill(root, config), DiskStore(root, config)
    assert one.stats()["disk"].chunks == two.stats()["disk"].chunks == 4
    two.forget(NAMESPACE, "doc 0")
    assert one.stats()["disk"].chunks == 3
    assert one.index.documents(NAMESPACE) == two.index.documents(NAMESPACE)
    one.close()
    two.close()


@pytest.mark.parametrize("names", [["a"], ['a" "b', "c"], ["", " ", '"'], ["\ud800", 'a" ', "ü\\"]])
def test_names_in_rows_come_back_as_they_were(names):
    assert names_of(row_of("x", *names)[2:]) == names


@pytest.mark.parametrize("rest", ["x", '"a', '"a"x', "1", '["a"]'])
def test_what_is_no_name_is_none(rest):
    assert names_of(rest) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disk_bytes", -1),
        ("disk_bytes", 1.5),
        ("min_free_bytes", -1),
        ("high_watermark", 1.1),
        ("low_watermark", 0.99),
        ("durability", "maybe"),
        ("index", "lmdb"),
        ("read_only", "yes"),
        ("event_log", 3),
        ("on_event", "print"),
    ],
)
def test_an_option_out_of_range_is_named(name, value):
    with pytest.raises(ConfigError, match=f"StoreConfig.{name}"):
        StoreConfig(**{name: value})
