"""Clearing: nothing is left in any tier, and each says so; what other keys protect is left alone."""

import os
import shutil

import pytest
from kvrag.store.events import Events
from protected import config_of, identity_of, needs_cryptography, path_of
from typer.testing import CliRunner

from kvrag.cli.app import app
from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, namespace_digest
from kvrag.store import DiskStore, MemoryStore, Retention, TieredStore, WriteBehind
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

CHUNKS = [make_identity(number) for number in range(4)]
KEYS = [chunk_key(chunk) for chunk in CHUNKS]


def put(store, number, priority=35):
    text = make_text(str(number))
    return store.put(
        CHUNKS[number], make_kv(CHUNKS[number]), text=text, doc_id=f"doc {number}", retention=Retention(priority)
    )


@pytest.fixture
def seen():
    return []


@pytest.fixture
def tiers(root, seen):
    events = Events(seen.append)
    gpu, host = MemoryStore(2**20, name="gpu", events=events), MemoryStore(2**20, events=events)
    disk = DiskStore(root, StoreConfig(on_event=seen.append, min_free_bytes=0))
    below = TieredStore(host, WriteBehind(disk), lower_min_priority=30)
    store = TieredStore(gpu, below, keeps_puts=False)
    yield store, gpu, host, disk
    store.close()


def test_every_tier_is_emptied_and_says_so(tiers, seen):
    store, gpu, host, disk = tiers
    put(store, 0)
    put(store, 1, priority=10)  # in the host's memory alone
    store.get(CHUNKS[0])
    assert store.clear() == 2
    assert [(e.medium, e.reason) for e in seen if e.type == "AllBlocksCleared"] == [
        ("disk", "cleared"),
        ("host", "cleared"),
        ("gpu", "cleared"),
    ]
    assert gpu.keys() == host.keys() == []
    assert (disk.files(), disk.index.documents(NAMESPACE), store.get(CHUNKS[1])) == (set(), [], None)
    assert [tier.num_bytes for tier in store.stats().values()] == [0, 0, 0]


def test_a_namespace_leaves_every_tier_and_only_that(tiers, seen):
    store, gpu, host, disk = tiers
    space = namespace_digest("other")
    theirs = [make_identity(number, namespace=space) for number in range(3)]
    put(store, 0)
    put(store, 1, priority=10)  # in the host's memory alone
    store.put(theirs[0], make_kv(theirs[0]), text=make_text("0"), doc_id="doc 0", retention=Retention(10))
    store.put(theirs[1], make_kv(theirs[1]), text=None)
    store.put(theirs[2], make_kv(theirs[2]), text=make_text("2"))
    store.get_many([*CHUNKS[:2], *theirs], timeout_s=30)
    seen.clear()
    assert store.clear(space) == 3
    gone = {chunk_key(one) for one in theirs}
    assert {(e.medium, key) for e in seen for key in e.block_hashes} >= {("gpu", key) for key in gone}
    # A write that was under way may end first.
    assert {(e.type, e.reason) for e in seen} - {("BlockStored", "put")} == {("BlockRemoved", "deleted")}
    assert sorted(gpu.keys()) == sorted(host.keys()) == sorted(KEYS[:2])  # they came side by side
    assert store.get_many(theirs, timeout_s=30) == [None] * 3
    assert (disk.index.documents(space), disk.index.documents(NAMESPACE)) == ([], ["doc 0", "doc 1"])
    store.flush()
    assert disk.files() == {KEYS[0]}
    assert same_bits(store.get(CHUNKS[1]), make_kv(CHUNKS[1]))


def test_a_file_without_a_row_is_cleared_with_its_namespace(root):
    """The index may lag behind the files; whose a file is stands in its head."""
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    theirs = make_identity(7, namespace=namespace_digest("other"))
    put(store, 0)
    store.put(theirs, make_kv(theirs), text=None)
    for key in store.index.keys():  # noqa: SIM118
        store.index.remove(key)
    assert store.clear(theirs.namespace) == 1
    assert store.files() == {KEYS[0]}
    store.close()


def test_what_waits_to_be_written_does_not_come_back(root):
    disk = DiskStore(root, StoreConfig(min_free_bytes=0))
    store = WriteBehind(disk)
    with store._own.writing:
        put(store, 0)
        assert store.clear() == 1
    assert store.flush() == {}
    assert disk.files() == set()
    store.close()


def test_a_read_that_began_before_does_not_bring_it_back(tiers, monkeypatch):
    store, gpu, host, disk = tiers
    put(store, 0)
    store.flush()
    host.delete(KEYS[:1])
    real = disk.get

    def slow(identity):
        found = real(identity)
        store.clear()
        return found

    monkeypatch.setattr(disk, "get", slow)
    store.get(CHUNKS[0])
    assert gpu.keys() == host.keys() == []


def test_what_waits_of_a_namespace_does_not_come_back_and_the_rest_is_written(root):
    disk = DiskStore(root, StoreConfig(min_free_bytes=0))
    store = WriteBehind(disk)
    theirs = make_identity(7, namespace=namespace_digest("other"))
    with store._own.writing:
        put(store, 0)
        store.put(theirs, make_kv(theirs), text=make_text("0"), doc_id="doc 0")
        assert store.clear(theirs.namespace) == 1
    assert store.flush() == {}
    assert disk.files() == {KEYS[0]}
    store.close()


@pytest.mark.parametrize("namespace", [None, NAMESPACE])
def test_what_was_put_away_is_erased_too(root, namespace):
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    put(store, 0)
    path = next((root / "objects").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert store.get(CHUNKS[0]) is None
    assert os.listdir(root / "quarantine")
    (root / "objects" / KEYS[1][:2]).mkdir(exist_ok=True)
    shutil.copy(next((root / "quarantine").iterdir()), root / "objects" / KEYS[1][:2] / f"{KEYS[1]}.safetensors")
    store.clear(namespace)
    assert os.listdir(root / "quarantine") == []
    assert store.files() == set()
    store.close()


@pytest.mark.parametrize("kind", ["mac", pytest.param("cipher", marks=needs_cryptography)])
def test_what_other_keys_protect_is_left_alone(root, kind):
    mine = DiskStore(root, StoreConfig(min_free_bytes=0))
    put(mine, 0)
    yours = DiskStore(root, config_of(kind))
    identity = identity_of(kind)
    yours.put(identity, make_kv(identity), text=make_text("yours"), doc_id="yours")
    assert mine.clear() == 1
    assert path_of(root, identity).exists()
    assert same_bits(yours.get(identity), make_kv(identity))
    assert mine.files() == {chunk_key(identity)}
    assert mine.index.documents(NAMESPACE) == []
    assert yours.index.documents(identity.namespace) == ["yours"]
    assert yours.clear() == 1
    mine.close()
    yours.close()


@pytest.mark.parametrize("kind", ["secret", "mac", pytest.param("all", marks=needs_cryptography)])
def test_a_namespace_of_other_keys_is_left_alone(root, kind):
    """Both call it the same, and each clears its own: what stands in the store covers the keys."""
    plain, keyed = DiskStore(root, StoreConfig(min_free_bytes=0)), DiskStore(root, config_of(kind))
    identity = identity_of(kind)
    put(plain, 0)
    keyed.put(identity, make_kv(identity), text=make_text("yours"), doc_id="yours")
    assert keyed.clear(identity.namespace) == 1
    assert plain.files() == {KEYS[0]}
    keyed.put(identity, make_kv(identity), text=make_text("yours"), doc_id="yours")
    assert plain.clear(NAMESPACE) == 1
    assert plain.files() == {chunk_key(identity)}
    assert same_bits(keyed.get(identity), make_kv(identity))
    plain.close()
    keyed.close()


def test_a_store_for_reading_only_is_not_cleared(root):
    store = DiskStore(root)
    put(store, 0)
    store.close()
    store = DiskStore(root, StoreConfig(read_only=True))
    with pytest.raises(StoreError, match="reading only"):
        store.clear()
    store.close()


def run(*args, code=0, **options):
    result = CliRunner().invoke(app, list(map(str, args)), **options)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def filled(root):
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    for number in range(4):
        put(store, number)
    store.close()
    return root


def chunks_in(root):
    return len(list((root / "objects").rglob("*.safetensors")))


def test_the_command_line_asks_before_it_erases_everything(filled):
    assert "4 chunk(s) of every namespace?" in run("rm", "--all", "--kv-dir", filled, input="n\n", code=1)
    run("rm", "--all", "--kv-dir", filled, code=1)  # nobody to ask
    assert chunks_in(filled) == 4
    assert "everything: erased, with 4 chunk(s)" in run("rm", "--all", "--kv-dir", filled, input="y\n")
    assert chunks_in(filled) == 0


def test_the_command_line_erases_everything_when_told_so_twice(filled):
    for also in (["--document", "doc 1"], ["--collection", "c"], ["--namespace", "mine", "--document", "doc 1"]):
        run("rm", "--all", "--yes", *also, "--kv-dir", filled, code=2)
    assert chunks_in(filled) == 4
    assert '"erased_chunks": 4' in run("rm", "--all", "--yes", "--json", "--kv-dir", filled)
    assert chunks_in(filled) == 0


def test_the_command_line_erases_a_namespace(filled):
    store = DiskStore(filled, StoreConfig(min_free_bytes=0))
    theirs = make_identity(7, namespace=namespace_digest("mine"))
    store.put(theirs, make_kv(theirs), text=make_text("0"), doc_id="doc 0")
    store.close()
    asked = run("rm", "--all", "--namespace", "mine", "--kv-dir", filled, input="n\n", code=1)
    assert "1 chunk(s) of the namespace 'mine'?" in asked
    assert "nothing is known" in run("rm", "--all", "-y", "--namespace", "none", "--kv-dir", filled, code=1)
    assert chunks_in(filled) == 5
    assert "erased, with 1 chunk(s)" in run("rm", "--all", "-y", "--namespace", "mine", "--kv-dir", filled)
    assert chunks_in(filled) == 4
    assert '"erased_chunks": 4' in run("rm", "--all", "-y", "--json", "--namespace", "default", "--kv-dir", filled)
    assert chunks_in(filled) == 0


def test_the_command_line_erases_a_namespace_that_a_secret_hides(root, monkeypatch):
    monkeypatch.setenv("KVRAG_NAMESPACE_SECRET", "ab" * 32)
    config = StoreConfig(namespace_secret="env:KVRAG_NAMESPACE_SECRET", min_free_bytes=0)
    store = DiskStore(root, config)
    for name in ("mine", "yours"):
        identity = make_identity(1, namespace=store.keys.names.namespace(name))
        store.put(identity, make_kv(identity), text=make_text(name), doc_id=name)
    assert "erased, with 1 chunk(s)" in run("rm", "--all", "-y", "--namespace", "mine", "--kv-dir", root)
    assert store.files() == {chunk_key(identity)}
    store.close()
