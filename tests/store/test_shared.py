"""Stores that machines share, with their catalog in a real Redis: the contracts with two machines, and erasure."""

import os
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from catalog_contract import CatalogContract
from kit import raising
from stores import needs_cryptography, put
from texts import make_chunks

from kvrag import Chunk
from kvrag.config import Retention, StoreConfig
from kvrag.errors import ConfigError, StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blobs, copies, open_store, opening
from kvrag.store.base import NewKV
from kvrag.store.catalog import hits
from kvrag.store.catalog.ledger import PER_PAGE
from kvrag.store.opening import open_url
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.testing.store import BlobsContract
from kvrag_shared.redis import RedisRows

redis = pytest.importorskip("redis")
pytest.importorskip("obstore")

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


class InRedis:
    """The catalog in a Redis, wherever the blobs are."""

    @pytest.fixture(autouse=True)
    def database(self, redis_url):
        self.catalog = redis_url


class AnyBlobs(BlobsContract):
    def make_blobs(self, directory: Path):
        return open_url(self.url)


class TestRedisBlobs(OnRedis, AnyBlobs):
    pass


class TestObjectBlobs(OnObjects, AnyBlobs):
    pass


class TestS3Blobs(OnS3, AnyBlobs):
    pass


class AnyStore(CatalogContract):
    """Two machines, each with copies on a disk of its own."""

    catalog = None

    def make_store(self, directory: Path):
        config = StoreConfig(
            shared=self.url, catalog=self.catalog, min_free_bytes=0, ram_bytes=2**22
        )
        return open_store(directory.parent / f"machine {next(MACHINES)}", config)


class TestStoreOnRedis(OnRedis, AnyStore):
    pass


class TestStoreOnObjects(OnObjects, InRedis, AnyStore):
    pass


@pytest.mark.slow
class TestStoreOnS3(OnS3, InRedis, AnyStore):
    pass


class WithoutCopies(CatalogContract):
    catalog = None

    def make_store(self, directory: Path):
        ram = 2**22 + next(MACHINES)  # stores with the same budget would share their parts
        config = StoreConfig(catalog=self.catalog, min_free_bytes=0, ram_bytes=ram)
        return open_store(self.url, config)


class TestStoreOnRedisAlone(OnRedis, WithoutCopies):
    pass


class TestStoreOnObjectsAlone(OnObjects, InRedis, WithoutCopies):
    pass


@needs_cryptography
class TestSealedStoreOnObjects(OnObjects, InRedis, CatalogContract):
    def make_store(self, directory: Path):
        config = StoreConfig(
            catalog=self.catalog,
            min_free_bytes=0,
            encryption_key=lambda: b"k" * 32,
            ram_bytes=next(MACHINES),
        )
        return open_store(self.url, config)


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
    assert {left for name, left in ends.items() if b":catalog" in name} == {-1}
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreError, match="volatile-lru"):
            open_store(f"{redis_url}?other", StoreConfig())
    finally:
        client.config_set("maxmemory-policy", "noeviction")


def contents_of(url, *, erase=False):
    """Return all that a Redis holds of catalogs, or erase it."""
    client = redis.Redis.from_url(url)
    names = client.keys("kvrag:catalog*")
    return client.delete(*names) if erase else [client.hgetall(name) for name in names]


@pytest.fixture(params=["redis", "objects"])
def shared(request, redis_url, tmp_path):
    """Opens a store as another machine each time, its blobs in Redis or in a bucket."""
    address, catalog = redis_url, None
    if request.param == "objects":
        address, catalog = f"file://{tmp_path}/bucket", redis_url
    stores = []

    def open_(kv_dir=None, **options):
        where = {"kv_dir": address} if kv_dir is None else {"kv_dir": kv_dir}
        if kv_dir is not None:
            options["shared"] = address
        config = StoreConfig(
            catalog=catalog, **{"min_free_bytes": 0, "ram_bytes": len(stores), **options}
        )
        stores.append(open_store(config=config, **where))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def keys_of(*numbers):
    return {chunk_key(make_identity(number)) for number in numbers}


@pytest.fixture
def round_trips(monkeypatch):
    """Counts what Redis is asked."""
    asked, real = [], RedisRows._fetch
    monkeypatch.setattr(
        RedisRows, "_fetch", lambda rows, names: asked.append(names) or real(rows, names)
    )
    return asked


def test_the_rows_of_a_request_are_read_in_one_round_trip(shared, round_trips):
    store = shared()
    identities = [make_identity(number) for number in range(20)]
    chunks = [
        NewKV(each, make_kv(each), make_text(f"t{n}"), ("d",)) for n, each in enumerate(identities)
    ]
    store.put_all(chunks)
    round_trips.clear()
    assert store.known(keys_of(*range(20))) == keys_of(*range(20))
    assert len(round_trips) == 1
    round_trips.clear()
    loaded = store.get_many(identities, timeout_s=30.0)
    assert all(same_bits(kv, make_kv(each)) for kv, each in zip(loaded, identities, strict=True))
    assert len(round_trips) == 2, "whether something was erased, and the chunks"
    round_trips.clear()
    store.register(NAMESPACE, [(f"d{n}", make_text(f"text {n}")) for n in range(500)])
    assert len(round_trips) <= 1 + 500 // PER_PAGE + 2, "their rows, and the pages of the texts"


def test_a_change_that_another_machine_overtakes_is_made_again(shared):
    here, there = (shared().catalog._rows for _ in range(2))
    runs = []

    def add(rows, amount):
        rows.set("n", int(rows.get("n") or 0) + amount)

    def overtaken():
        runs.append(here.get("n"))
        if len(runs) < 3:
            there.change(lambda: add(there, 1))
        add(here, 10)

    here.change(overtaken)
    assert (len(runs), here.get("n"), there.get("n")) == (3, "12", "12")


def test_what_a_change_has_read_as_absent_must_still_be_absent(shared):
    here, there = (shared().catalog._rows for _ in range(2))

    def overtaken():
        if here.get("a") is None:
            there.change(lambda: there.set("a", 1))
            here.set("b", 1)

    here.change(overtaken)
    assert (here.get("a"), here.get("b")) == ("1", None)


def test_a_change_sees_what_it_has_written_and_others_see_all_of_it_or_nothing(shared):
    here, there = (shared().catalog._rows for _ in range(2))
    here.change(lambda: [here.set(f"c {name}", 1) for name in "abc"])

    def change():
        here.set("c d", 2)
        here.delete("c a")
        assert (here.names("c "), here.get("c a"), here.get("c d")) == (["b", "c", "d"], None, "2")
        assert there.names("c ") == ["a", "b", "c"]
        here.clear()
        assert (here.names("c "), here.get("c b")) == ([], None)
        here.set("c e", 3)
        assert here.names("c ") == ["e"]

    here.change(change)
    assert (there.names("c "), there.get("c e")) == (["e"], "3")
    with pytest.raises(ZeroDivisionError):
        here.change(lambda: here.set("c f", 1 / 0))
    assert there.names("c ") == ["e"]


def test_an_answer_that_was_lost_counts_nothing_twice(shared, monkeypatch):
    store = shared()
    real, is_first = RedisRows._commit, iter([True, True])
    monkeypatch.setattr(
        RedisRows, "_commit", lambda rows, draft: real(rows, draft) and not next(is_first, False)
    )
    put(store, 0)
    assert store.catalog.totals() == (1, make_kv(make_identity(0)).num_bytes)
    assert shared().catalog.documents(NAMESPACE) == ["doc 0"]


def test_a_catalog_that_was_lost_is_begun_anew(shared, redis_url):
    """Its blobs are adopted where they are stored again; the first erasure erases all others."""
    here, there = shared(), shared()
    for number in range(3):
        put(here, number)
    generation = there.catalog.state().generation
    assert contents_of(redis_url, erase=True)
    assert here.known(keys_of(0, 1, 2)) == there.known(keys_of(0, 1, 2)) == set()
    put(there, 0)
    assert here.known(keys_of(0, 1, 2)) == keys_of(0)
    assert here.catalog.state().generation == there.catalog.state().generation != generation
    assert here.forget(NAMESPACE, "doc 0") == 1
    assert there.listed() == set()


def test_buckets_that_share_a_redis_have_catalogs_of_their_own(tmp_path, redis_url):
    config = StoreConfig(catalog=redis_url, min_free_bytes=0)
    one, two = (open_store(f"file://{tmp_path}/{name}", config) for name in ("one", "two"))
    put(one, 0)
    put(two, 1)
    assert (set(one.catalog.keys()), set(two.catalog.keys())) == (keys_of(0), keys_of(1))
    two.clear()
    assert set(one.catalog.keys()) == keys_of(0)
    same = open_store(f"file://{tmp_path}/one/", config)
    assert set(same.catalog.keys()) == keys_of(0)


@needs_cryptography
def test_rows_in_redis_are_sealed(shared, redis_url):
    put(shared(encryption_key=lambda: b"k" * 32), 0)
    text = repr(contents_of(redis_url))
    assert text.count("c ") >= 1
    assert not any(word in text for word in ("doc 0", make_text("text 0").digest))
    assert shared().known(keys_of(0)) == set()
    assert shared(encryption_key=lambda: b"k" * 32).known(keys_of(0)) == keys_of(0)


# -- a bucket without a database -----------------------------------------------------------------------------------------


def test_a_bucket_without_a_database_is_read_by_key_and_by_listing(tmp_path, redis_url):
    url = f"file://{tmp_path}/bucket"
    filled = open_store(url, StoreConfig(catalog=redis_url, min_free_bytes=0))
    for number in range(3):
        put(filled, number)
    store = open_store(url, StoreConfig(ram_bytes=2**22))
    assert set(store.catalog.keys()) == store.listed() == keys_of(0, 1, 2)
    assert store.known(keys_of(1, 2, 3)) == keys_of(1, 2)
    assert same_bits(store.get(make_identity(1)), make_kv(make_identity(1)))
    assert store.identity(chunk_key(make_identity(2))) == make_identity(2)
    assert store.get(make_identity(3)) is None
    filled.forget(NAMESPACE, "doc 2")
    assert store.get(make_identity(2)) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda store: put(store, 1),
        lambda store: store.forget(NAMESPACE, "doc 0"),
        lambda store: store.delete(keys_of(0)),
        lambda store: store.clear(),
        lambda store: store.retain(keys_of(0), Retention(90)),
        lambda store: store.catalog.documents(NAMESPACE),
        lambda store: store.catalog.present(),
    ],
)
def test_calls_that_need_a_database_name_the_remedy(tmp_path, redis_url, call):
    url = f"file://{tmp_path}/bucket"
    put(open_store(url, StoreConfig(catalog=redis_url, min_free_bytes=0)), 0)
    store = open_store(url, StoreConfig())
    with pytest.raises(StoreError, match=r"StoreConfig\.catalog .*redis://"):
        call(store)
    assert store.listed() == keys_of(0)


def test_an_engine_on_a_bucket_without_a_database_reuses_the_chunks_that_a_prompt_names(
    engine_of, tmp_path, redis_url
):
    url = f"file://{tmp_path}/bucket"
    filled = engine_of(
        kv_dir=url, prefix="", store_config=StoreConfig(catalog=redis_url, min_free_bytes=0)
    )
    filled.precompute(CHUNKS, ids=list("abcd"))
    stitched = ask(filled)
    engine = engine_of(kv_dir=url, prefix="")
    answer = ask(engine)
    assert (answer.token_ids, answer.cached_tokens) == (stitched.token_ids, stitched.cached_tokens)
    with pytest.raises(StoreError, match="redis://"):
        engine.document_ids()
    with pytest.raises(StoreError, match="redis://"):
        engine.delete("a")


def test_the_journal_of_a_former_store_is_left_alone_and_its_blobs_are_adopted(tmp_path, redis_url):
    url, folder = f"file://{tmp_path}/bucket", tmp_path / "bucket"
    config = StoreConfig(catalog=redis_url, min_free_bytes=0)
    put(open_store(f"file://{tmp_path}/other", config), 0)
    (folder / "journal").mkdir(parents=True)
    (folder / "journal" / "0").write_bytes(b"an entry")
    shutil.copytree(tmp_path / "other" / "objects", folder / "objects")
    store = open_store(url, config)
    assert store.get(make_identity(0)) is None
    assert put(store, 0) == 0, "adopted: nothing is written"
    assert same_bits(store.get(make_identity(0)), make_kv(make_identity(0)))
    assert (folder / "journal" / "0").read_bytes() == b"an entry"


@pytest.mark.parametrize(
    ("kv_dir", "catalog", "error"),
    [
        ("kv", "redis://10.0.0.1:6379/0", "no effect on a store of one machine"),
        (None, "redis://10.0.0.1:6379/0", "no effect on a store of one machine"),
        ("s3://bucket/kv", "mysql://me:secret@host/kv", "there is no catalog at mysql://"),
        *(
            ("s3://bucket/kv", f"{scheme}://me:secret@host/kv", "name a Redis or Valkey server")
            for scheme in ("postgresql", "postgres")
        ),
    ],
)
def test_an_address_that_is_no_catalog_is_refused(tmp_path, kv_dir, catalog, error, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, StoreError), match=error) as refused:
        open_store(kv_dir, StoreConfig(catalog=catalog))
    assert "sec" not in str(refused.value)


# -- copies on a disk ----------------------------------------------------------------------------------------------------


def test_copies_of_what_was_erased_leave_at_the_next_look(shared, tmp_path, monkeypatch):
    """Whether the machine has looked meanwhile, was stopped, or was just reading."""
    here = shared(tmp_path / "copies")
    for number in range(3):
        put(here, number)
    there = shared()
    there.forget(NAMESPACE, "doc 0")
    assert here.get(make_identity(0)) is None
    assert here.blobs.local.keys() == keys_of(1, 2)
    here.close()
    there.forget(NAMESPACE, "doc 1")
    again = shared(tmp_path / "copies")
    assert same_bits(again.get(make_identity(2)), make_kv(make_identity(2)))
    assert again.blobs.local.keys() == keys_of(2)
    blobs, read = again.blobs, again.blobs.shared.read
    looks = [lambda: there.forget(NAMESPACE, "doc 2"), again.memory.follow]
    monkeypatch.setattr(
        blobs.shared, "read", lambda key: (read(key), [each() for each in looks])[0]
    )
    again.release()
    blobs.forget(keys_of(2))
    again.get(make_identity(2))
    assert blobs.local.keys() == set()


def test_copies_stay_while_the_database_can_not_be_reached(shared, tmp_path, monkeypatch):
    store = shared(tmp_path / "copies")
    put(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(RedisRows, "_fetch", raising(OSError, "cut off"))
        assert store.get(make_identity(0)) is None
    assert store.blobs.local.keys() == keys_of(0)
    store.catalog._rows._again_s = 0.0
    assert store.get(make_identity(0)) is not None


def test_stores_with_one_directory_of_copies_leave_each_other_s_copies_alone(redis_url, tmp_path):
    urls = [redis_url, redis_url.replace("/0", "/1")]
    redis.Redis.from_url(urls[1]).flushdb()
    one, two = (
        open_store(tmp_path / "c", StoreConfig(shared=url, min_free_bytes=0)) for url in urls
    )
    put(one, 0)
    put(two, 1)
    one.clear()
    assert two.get(make_identity(1)) is not None
    assert (one.blobs.local.keys(), two.blobs.local.keys()) == (set(), keys_of(1))


def test_hits_are_written_from_time_to_time_alone(redis_url, monkeypatch):
    monkeypatch.setattr(hits, "MAX_TOUCHED", 2)
    monkeypatch.setattr(hits.POOL, "submit", lambda action: action())
    store = open_store(redis_url, StoreConfig(min_free_bytes=0))
    for number in range(3):
        put(store, number)
    commits, real = [], RedisRows._commit
    monkeypatch.setattr(
        RedisRows, "_commit", lambda rows, draft: commits.append(draft) or real(rows, draft)
    )
    for _ in range(5):
        for number in range(3):
            assert store.get(make_identity(number)) is not None
        assert len(commits) == 1
    monkeypatch.setattr(store.catalog, "_next_flush_s", 0.0)
    store.get(make_identity(2))
    assert len(commits) == 2
    counted = [store.catalog.usage(chunk_key(make_identity(number))).hits for number in range(3)]
    assert [round(hit) for hit in counted] == [5, 1, 6], "of those that had most"


def test_copies_keep_to_their_budget_and_a_full_disk_costs_copies_alone(
    tmp_path, redis_url, monkeypatch
):
    one = make_kv(make_identity(0))
    config = StoreConfig(shared=redis_url, min_free_bytes=0, ram_bytes=0, disk_bytes=50_000)
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


def test_copies_leave_the_disk_its_free_space(tmp_path, redis_url, monkeypatch):
    size = [150_000]
    monkeypatch.setattr(
        blobs.FileBlobs, "free_bytes", lambda copies: size[0] - sum(copies.sizes().values())
    )
    store = open_store(
        tmp_path / "copies", StoreConfig(shared=redis_url, min_free_bytes=120_000, ram_bytes=0)
    )
    for number in range(12):
        put(store, number)
        assert store.blobs.local.free_bytes() >= 120_000
    kept = store.blobs.local.keys()
    assert 0 < len(kept) < 12
    size[0] = 50_000  # others have filled the disk
    assert all(store.get(make_identity(number)) is not None for number in range(12))
    assert store.blobs.local.keys() <= kept


def test_processes_share_the_budget_of_their_copies(tmp_path, redis_url, monkeypatch):
    monkeypatch.setattr(copies, "LISTINGS", 4)
    config = StoreConfig(shared=redis_url, min_free_bytes=0, ram_bytes=0, disk_bytes=40_000)
    stores = []
    for _ in range(3):
        stores.append(open_store(tmp_path / "copies", config))
        opening._shared.clear()  # the next one is another process
    for number in range(30):
        put(stores[number % 3], number)
        assert sum(stores[0].blobs.local.sizes().values()) <= 40_000 * (1 + 3 / 4) + 5000
    assert sum(stores[0].blobs.local.sizes().values()) >= 40_000 / 2, "no more leaves than has to"
    assert all(stores[0].get(make_identity(number)) is not None for number in range(30))


def test_many_machines_write_at_once(shared):
    stores = [shared() for _ in range(4)]

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
    assert len(stores[0].catalog.texts(NAMESPACE, 0)[0]) == 5
