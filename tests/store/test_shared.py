"""Stores that machines share, in a real Redis and through obstore: the contracts with two machines, erasure, and faults of the network."""

import os
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from kit import raising
from texts import make_chunks

from kvrag import Chunk
from kvrag.config import Retention, StoreConfig
from kvrag.errors import ConfigError, StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blobs, copies, open_store, opening
from kvrag.store.catalog import hits, shared
from kvrag.store.opening import open_url
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.testing.store import BlobsContract, StoreContract

redis = pytest.importorskip("redis")
pytest.importorskip("obstore")

pytestmark = pytest.mark.usefixtures("always_fresh")

MACHINES = count()


class OnRedis:
    @pytest.fixture(autouse=True)
    def address(self, redis_url):
        self.url = redis_url


class OnObjects:
    @pytest.fixture(autouse=True)
    def address(self, tmp_path):
        self.url = f"file://{tmp_path}/bucket"


class OnS3:
    @pytest.fixture(autouse=True)
    def address(self, s3):
        name = f"bucket-{next(MACHINES)}"
        url = os.environ["AWS_ENDPOINT_URL"]
        urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT")).close()
        self.url = f"s3://{name}/some/prefix"


class AnyBlobs(BlobsContract):
    def make_blobs(self, directory: Path):
        return open_url(self.url, "objects")


class TestRedisBlobs(OnRedis, AnyBlobs):
    pass


class TestObjectBlobs(OnObjects, AnyBlobs):
    pass


class TestS3Blobs(OnS3, AnyBlobs):
    pass


class AnyStore(StoreContract):
    """Two machines, each with copies on a disk of its own."""

    def make_store(self, directory: Path):
        config = StoreConfig(shared=self.url, min_free_bytes=0, ram_bytes=2**22)
        return open_store(directory.parent / f"machine {next(MACHINES)}", config)


class TestStoreOnRedis(OnRedis, AnyStore):
    pass


class TestStoreOnObjects(OnObjects, AnyStore):
    pass


@pytest.mark.slow
class TestStoreOnS3(OnS3, AnyStore):
    pass


class WithoutCopies(StoreContract):
    def make_store(self, directory: Path):
        return open_store(self.url, StoreConfig(min_free_bytes=0, ram_bytes=2**22))


class TestStoreOnRedisAlone(OnRedis, WithoutCopies):
    pass


class TestStoreOnObjectsAlone(OnObjects, WithoutCopies):
    pass


# -- engines -------------------------------------------------------------------------------------------------------------

CHUNKS = make_chunks(4, words=42)
PROMPT = [*(Chunk(text) for text in CHUNKS), "\n\nWhat is it?"]


def ask(engine, mode="stitch"):
    return engine.generate(PROMPT, max_new_tokens=6, mode=mode)


def test_what_one_machine_precomputes_all_others_stitch(engine_of, redis_url, tmp_path):
    first = engine_of(kv_dir=redis_url)
    assert first.precompute(CHUNKS, ids=list("abcd")).stored == 4
    second = engine_of(
        kv_dir=tmp_path / "copies", store_config=StoreConfig(shared=redis_url, min_free_bytes=0)
    )
    answers = [ask(engine) for engine in (first, second, second)]
    assert answers[0].cached_tokens > 100
    assert len({(tuple(answer.token_ids), answer.cached_tokens) for answer in answers}) == 1
    assert len(second.store.blobs.local.keys()) == 4
    assert not second.precompute(CHUNKS, ids=list("abcd")).stored
    first.delete("a")
    assert ask(second).cached_tokens < answers[1].cached_tokens
    assert len(second.store.blobs.local.keys()) == 3, "the copy of an erased chunk stays"


@pytest.mark.parametrize("kv_dir", [None, "redis://10.0.0.1:6379/0"])
def test_shared_without_a_directory_for_copies_is_refused(kv_dir):
    with pytest.raises(ConfigError, match="shared has no effect") as refused:
        open_store(kv_dir, StoreConfig(shared="redis://:secret@10.0.0.2:6379/0"))
    assert "secret" not in str(refused.value)


def test_only_chunks_have_an_end(engine_of, redis_url):
    engine = engine_of(kv_dir=redis_url)
    engine.precompute(CHUNKS[:2])
    engine.precompute(CHUNKS[2:], retention=Retention(90, duration_s=60))
    client = redis.Redis.from_url(redis_url)
    ends = {name: client.ttl(name) for name in client.scan_iter()}
    of_chunks = sorted(left for name, left in ends.items() if name.startswith(b"kvrag:objects:"))
    assert [left // 61 for left in of_chunks[:2]] == [0, 0]
    assert all(left > 29 * 24 * 3600 for left in of_chunks[2:])
    assert {left for name, left in ends.items() if b":journal" in name} == {-1}
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreError, match="volatile-lru"):
            open_store(f"{redis_url}?other", StoreConfig())
    finally:
        client.config_set("maxmemory-policy", "noeviction")


def put(store, number):
    store.put(make_identity(number), make_kv(make_identity(number)), text=None)


@pytest.mark.parametrize("count", [1, 3])
def test_a_journal_that_was_lost_and_begun_anew_is_another_one(tmp_path, count):
    """Whether it has as many entries as the old one, or more."""
    url = f"file://{tmp_path}/bucket"
    old = open_store(url, StoreConfig(min_free_bytes=0))
    put(old, 0)
    shutil.rmtree(tmp_path / "bucket")
    new = open_store(tmp_path / "copies", StoreConfig(shared=url, min_free_bytes=0))
    numbers = range(1, 1 + count)
    for number in numbers:
        put(new, number)
    assert (
        set(old.catalog.keys())
        == set(new.catalog.keys())
        == {chunk_key(make_identity(n)) for n in numbers}
    )
    put(old, 9)
    assert new.known([chunk_key(make_identity(9))])


def test_who_can_not_know_what_was_erased_answers_with_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shared, "AGAIN_S", 0.0)
    store = open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=0))
    put(store, 0)
    assert store.get(make_identity(0)) is not None
    with monkeypatch.context() as patch:
        patch.setattr(shared.Journal, "after", raising(OSError, "cut off"))
        for _ in range(3):
            assert store.get(make_identity(0)) is None
        with pytest.raises(StoreError, match="cut off"):
            put(store, 1)
    assert len([record for record in caplog.records if "counts as empty" in record.message]) == 1
    assert store.get(make_identity(0)) is not None


def test_a_number_that_is_free_because_its_entry_was_erased_is_not_taken(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/bucket"
    behind, ahead = (
        open_store(tmp_path / name, StoreConfig(shared=url, min_free_bytes=0)) for name in "ab"
    )
    put(behind, 0)
    for number in range(1, 5):
        put(ahead, number)
    ahead.catalog.scrub()
    rows, tried = behind.catalog._rows, []
    follow, append = rows._follow, rows._journal.append
    monkeypatch.setattr(rows, "_follow", lambda: follow() if tried else None)
    monkeypatch.setattr(
        rows._journal,
        "append",
        lambda *args, **options: tried.append(1) or append(*args, **options),
    )
    put(behind, 5)
    assert (
        set(ahead.catalog.keys())
        == set(behind.catalog.keys())
        == {chunk_key(make_identity(n)) for n in range(6)}
    )


@pytest.mark.parametrize("others", [0, 1])
def test_copies_of_what_was_erased_while_nobody_looked_leave_at_the_next_opening(tmp_path, others):
    """Unless the directory has another store's chunks, too."""
    url, copies = f"file://{tmp_path}/shared", tmp_path / "copies"
    for name in range(others):
        (copies / f"catalog-{name}").mkdir(parents=True)
    with closing(open_store(copies, StoreConfig(shared=url))) as store:
        for number in range(2):
            identity = make_identity(number)
            store.put(
                identity,
                make_kv(identity),
                text=make_text(f"text {number}"),
                doc_id=f"doc {number}",
            )
        kept = {path: path.read_bytes() for path in copies.glob("objects/**/*.safetensors")}
        store.forget(identity.namespace, "doc 1")
    for path, data in kept.items():  # as if the process had been killed amid that
        path.write_bytes(data)
    open_store(copies, StoreConfig(shared=url)).close()
    assert len(kept) == 2
    assert len(list(copies.glob("objects/**/*.safetensors"))) == 1 + others


def test_hits_are_written_to_the_journal_from_time_to_time_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(hits, "MAX_TOUCHED", 2)
    monkeypatch.setattr(hits.POOL, "submit", lambda action: action())
    store = open_store(f"file://{tmp_path}", StoreConfig(min_free_bytes=0))
    for number in range(3):
        put(store, number)
    entries = store.catalog._rows._journal._entries
    before = len(entries.keys())
    for _ in range(5):
        for number in range(3):
            assert store.get(make_identity(number)) is not None
        assert len(entries.keys()) == before + 1
    monkeypatch.setattr(store.catalog, "_next_flush_s", 0.0)
    store.get(make_identity(2))
    assert len(entries.keys()) == before + 2
    counted = [store.catalog.usage(chunk_key(make_identity(number))).hits for number in range(3)]
    assert [round(hit) for hit in counted] == [5, 1, 6], "of those that had most"


def test_copies_keep_to_their_budget_and_a_full_disk_costs_copies_alone(tmp_path, monkeypatch):
    one = make_kv(make_identity(0))
    config = StoreConfig(
        shared=f"file://{tmp_path}/bucket", min_free_bytes=0, ram_bytes=0, disk_bytes=50_000
    )
    store = open_store(tmp_path / "copies", config)
    for number in range(12):
        store.put(make_identity(number), make_kv(make_identity(number)), text=None)
        assert sum(store.blobs.local.sizes().values()) <= 50_000
    kept = set(store.blobs.local.keys())
    assert 0 < len(kept) < 12
    assert chunk_key(make_identity(11)) in kept, "the latest stay"
    monkeypatch.setattr(store.blobs.local, "write", raising(OSError, 28, "No space left on device"))
    for number in range(12):
        assert same_bits(store.get(make_identity(number)), make_kv(make_identity(number)))
    assert same_bits(store.get(make_identity(0)), one)


def test_copies_leave_the_disk_its_free_space(tmp_path, monkeypatch):
    size = [150_000]
    monkeypatch.setattr(
        blobs.FileBlobs, "free_bytes", lambda copies: size[0] - sum(copies.sizes().values())
    )
    store = open_store(
        tmp_path / "copies",
        StoreConfig(shared=f"file://{tmp_path}/bucket", min_free_bytes=120_000, ram_bytes=0),
    )
    for number in range(12):
        put(store, number)
        assert store.blobs.local.free_bytes() >= 120_000
    kept = store.blobs.local.keys()
    assert 0 < len(kept) < 12
    size[0] = 50_000  # others have filled the disk
    assert all(store.get(make_identity(number)) is not None for number in range(12))
    assert store.blobs.local.keys() <= kept


def test_processes_share_the_budget_of_their_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "LISTINGS", 4)
    config = StoreConfig(
        shared=f"file://{tmp_path}/bucket", min_free_bytes=0, ram_bytes=0, disk_bytes=40_000
    )
    stores = []
    for _ in range(3):
        stores.append(open_store(tmp_path / "copies", config))
        opening._shared.clear()  # the next one is another process
    for number in range(30):
        put(stores[number % 3], number)
        assert sum(stores[0].blobs.local.sizes().values()) <= 40_000 * (1 + 3 / 4) + 5000
    assert sum(stores[0].blobs.local.sizes().values()) >= 40_000 / 2, "no more leaves than has to"
    assert all(stores[0].get(make_identity(number)) is not None for number in range(30))


def test_many_machines_write_at_once(tmp_path):
    url = f"file://{tmp_path}/bucket"
    stores = [
        open_store(tmp_path / str(n), StoreConfig(shared=url, min_free_bytes=0)) for n in range(4)
    ]

    def put(of):
        store, number = of
        store.put(
            make_identity(number),
            make_kv(make_identity(number)),
            text=make_text(f"t{number % 5}"),
            doc_id="d",
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, [(stores[n % 4], n // 2) for n in range(48)]))
    states = {tuple(sorted(store.catalog.keys())) for store in stores}
    assert len(states) == 1
    assert {store.catalog.totals()[0] for store in stores} == {24}
