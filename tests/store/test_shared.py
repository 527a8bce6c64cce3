"""Stores that machines share, in a real Redis and through obstore: the contracts with two machines, erasure, and faults of the network."""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from kit import raising
from proxy import FAULTS, proxy_of
from texts import make_chunks

import kvrag.store.object_store as object_blobs
import kvrag.store.redis as redis_blobs
from kvrag import Chunk
from kvrag.config import Retention, StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import open_store
from kvrag.store.catalog import journal, shared
from kvrag.store.opening import open_url
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.testing.store import BlobsContract, StoreContract

redis = pytest.importorskip("redis")
pytest.importorskip("obstore")

MACHINES = count()


@contextmanager
def server(folder):
    """Run a server of Redis or Valkey, on a port of its own."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    try:
        yield process, f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def everyones_redis(tmp_path_factory):
    with server(tmp_path_factory.mktemp("redis")) as (_, url):
        yield url


@pytest.fixture
def redis_url(everyones_redis):
    """Address of an empty server."""
    redis.Redis.from_url(everyones_redis).flushall()
    return everyones_redis


@pytest.fixture
def own_redis(tmp_path):
    """Process and address of a server that a test may harm."""
    with server(tmp_path) as found:
        yield found


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch):
    """Let a machine follow the others at each look, so that tests need not wait."""
    monkeypatch.setattr(shared, "FRESH_S", 0.0)


class OnRedis:
    @pytest.fixture(autouse=True)
    def address(self, redis_url):
        self.url = redis_url


class OnObjects:
    @pytest.fixture(autouse=True)
    def address(self, tmp_path):
        self.url = f"file://{tmp_path}/bucket"


@pytest.fixture(scope="module")
def s3():
    """Run moto, which answers as S3 does."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patch.setenv(f"AWS_{name}", "testing")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        yield
    server.stop()


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
    second = engine_of(kv_dir=tmp_path / "copies", store_config=StoreConfig(shared=redis_url, min_free_bytes=0))
    answers = [ask(engine) for engine in (first, second, second)]
    assert answers[0].cached_tokens > 100
    assert len({(tuple(answer.token_ids), answer.cached_tokens) for answer in answers}) == 1
    assert len(second.store.blobs.local.keys()) == 4
    assert not second.precompute(CHUNKS, ids=list("abcd")).stored
    first.delete("a")
    assert ask(second).cached_tokens < answers[1].cached_tokens
    assert len(second.store.blobs.local.keys()) == 3, "the copy of an erased chunk stays"


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


def test_a_machine_that_was_away_begins_with_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "PER_SNAPSHOT", 4)
    url = f"file://{tmp_path}/bucket"
    stores = [open_store(tmp_path / name, StoreConfig(shared=url, min_free_bytes=0)) for name in "ab"]
    assert not stores[1].known([chunk_key(make_identity(0))])
    for number in range(6):
        stores[0].put(make_identity(number), make_kv(make_identity(number)), text=None)
        stores[0].catalog.scrub()
    assert len(list((tmp_path / "bucket" / "journal").iterdir())) == 2, "only the first and the last entry are left"
    for store in (stores[1], open_store(url, StoreConfig())):
        assert store.known([chunk_key(make_identity(n)) for n in range(11)]) == set(stores[0].catalog.keys())
        store.put(make_identity(10), make_kv(make_identity(10)), text=None)
    assert len(stores[0].catalog.keys()) == 7


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
    assert set(old.catalog.keys()) == set(new.catalog.keys()) == {chunk_key(make_identity(n)) for n in numbers}
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
    behind, ahead = (open_store(tmp_path / name, StoreConfig(shared=url, min_free_bytes=0)) for name in "ab")
    put(behind, 0)
    for number in range(1, 5):
        put(ahead, number)
    ahead.catalog.scrub()
    rows, tried = behind.catalog._rows, []
    follow, append = rows._follow, rows._journal.append
    monkeypatch.setattr(rows, "_follow", lambda: follow() if tried else None)
    monkeypatch.setattr(rows._journal, "append", lambda *args, **options: tried.append(1) or append(*args, **options))
    put(behind, 5)
    assert set(ahead.catalog.keys()) == set(behind.catalog.keys()) == {chunk_key(make_identity(n)) for n in range(6)}


def test_copies_keep_to_their_budget_and_a_full_disk_costs_copies_alone(tmp_path, monkeypatch):
    one = make_kv(make_identity(0))
    config = StoreConfig(shared=f"file://{tmp_path}/bucket", min_free_bytes=0, ram_bytes=0, disk_bytes=50_000)
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


def test_many_machines_write_at_once(tmp_path):
    url = f"file://{tmp_path}/bucket"
    stores = [open_store(tmp_path / str(n), StoreConfig(shared=url, min_free_bytes=0)) for n in range(4)]

    def put(of):
        store, number = of
        store.put(make_identity(number), make_kv(make_identity(number)), text=make_text(f"t{number % 5}"), doc_id="d")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, [(stores[n % 4], n // 2) for n in range(48)]))
    states = {tuple(sorted(store.catalog.keys())) for store in stores}
    assert len(states) == 1
    assert {store.catalog.totals()[0] for store in stores} == {24}


@pytest.mark.parametrize("fault", ["cut", "half-open", "wrong bytes", "lost"])
def test_a_fault_of_the_network_costs_time_and_nothing_else(engine_of, own_redis, tmp_path, fault, monkeypatch):
    monkeypatch.setattr(redis_blobs, "ANSWER_S", 0.5)
    server, url = own_redis
    engine = engine_of(kv_dir=url, store_config=StoreConfig(ram_bytes=0, load_timeout_s=3.0))
    engine.precompute(CHUNKS, ids=list("abcd"))
    full, stitched = ask(engine, "full"), ask(engine)
    assert stitched.cached_tokens > 100
    client = redis.Redis.from_url(url)
    if fault == "cut":
        server.kill()
    elif fault == "half-open":
        server.send_signal(signal.SIGSTOP)
    elif fault == "wrong bytes":
        for name in client.keys("kvrag:objects:*"):
            client.setrange(name, 20_000, b"x" * 64)
    else:
        client.flushall()
    start = time.monotonic()
    answer = ask(engine)
    took_s = time.monotonic() - start
    assert (answer.token_ids, answer.cached_tokens) == (full.token_ids, 0)
    assert took_s < 8
    if fault == "half-open":
        server.send_signal(signal.SIGCONT)
        monkeypatch.setattr(shared, "AGAIN_S", 0.0)
        engine.store.catalog._rows._again_s = 0.0
        assert ask(engine).cached_tokens == stitched.cached_tokens
    if fault in ("wrong bytes", "lost"):
        assert engine.precompute(CHUNKS, ids=list("abcd")).stored == 4
        assert ask(engine).cached_tokens == stitched.cached_tokens


@pytest.fixture(params=["redis", "s3"])
def far(request, own_redis, monkeypatch):
    """Address of a shared store, and the network before it."""
    if request.param == "redis":
        url = own_redis[1]
        with proxy_of(int(url.rpartition(":")[2].partition("/")[0])) as network:
            yield url.replace(url.rpartition(":")[2], f"{network.port}/0"), network
        return
    request.getfixturevalue("s3")
    server, name = os.environ["AWS_ENDPOINT_URL"], f"bucket-{next(MACHINES)}"
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT")).close()
    with proxy_of(int(server.rpartition(":")[2])) as network:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")
        yield f"s3://{name}/kv", network


@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_network_costs_no_more_than_the_deadline(engine_of, far, tmp_path, fault, has_copies, monkeypatch):
    monkeypatch.setattr(redis_blobs, "ANSWER_S", 0.5)
    monkeypatch.setattr(object_blobs, "ANSWER_S", 0.5)
    monkeypatch.setattr(shared, "AGAIN_S", 0.2)
    url, network = far
    at = {"kv_dir": tmp_path / "copies"} if has_copies else {"kv_dir": url}
    config = StoreConfig(ram_bytes=0, load_timeout_s=1.0, shared=url if has_copies else None, min_free_bytes=0)
    engine = engine_of(**at, store_config=config)
    engine.precompute(CHUNKS, ids=list("abcd"))
    full, stitched = ask(engine, "full"), ask(engine)
    assert stitched.cached_tokens > 100
    network.become(fault)
    start = time.monotonic()
    answer = ask(engine)
    took_s = time.monotonic() - start
    is_known = has_copies and fault not in ("cut", "half-open", "slow")  # who can ask the journal may use copies
    assert (answer.token_ids, answer.cached_tokens) in (
        (full.token_ids, 0),
        (stitched.token_ids, stitched.cached_tokens),
    )
    assert is_known or fault == "slow" or answer.cached_tokens == 0
    assert took_s < 1.0 + 2.0  # the deadline, and what it takes to compute all
    network.become(None)
    deadline = time.monotonic() + 20
    while ask(engine).cached_tokens != stitched.cached_tokens:
        assert time.monotonic() < deadline, "it has not recovered"
        engine.precompute(CHUNKS, ids=list("abcd"))
        time.sleep(0.3)


# -- faults that a review has found --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"\0" * 60_000])
def test_a_damaged_copy_harms_no_shared_blob(tmp_path, damage):
    url, key = f"file://{tmp_path}/bucket", chunk_key(make_identity(0))
    store = open_store(tmp_path / "copies", StoreConfig(shared=url, min_free_bytes=0, ram_bytes=0))
    put(store, 0)
    [copy] = [path for path in (tmp_path / "copies").rglob(f"*{key}*") if path.is_file()]
    copy.write_bytes(damage)
    assert same_bits(store.get(make_identity(0)), make_kv(make_identity(0)))
    assert store.blobs.shared.keys() == {key}
    assert copy.stat().st_size > 1000  # made anew
    [blob] = [path for path in (tmp_path / "bucket").rglob(f"*{key}*") if path.is_file()]
    for path in (copy, blob):
        path.write_bytes(b"x" * 60_000)
    assert store.get(make_identity(0)) is None
    assert store.blobs.shared.keys() == set()


def test_a_thread_that_can_follow_again_ends_the_pause_of_one_that_could_not(tmp_path, monkeypatch):
    stores = [open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=0)) for _ in range(2)]
    put(stores[0], 0)
    assert stores[1].known([chunk_key(make_identity(0))])
    rows = stores[1].catalog._rows
    with monkeypatch.context() as patch:
        patch.setattr(shared.Journal, "after", raising(OSError, "time-out"))
        assert not stores[1].known([chunk_key(make_identity(0))])
    assert rows._again_s > time.monotonic()
    assert not stores[1].known([chunk_key(make_identity(0))]), "in the pause nobody knows"
    rows._again_s = 0.0
    assert stores[1].known([chunk_key(make_identity(0))])
    stores[0].delete([chunk_key(make_identity(0))])
    assert not stores[1].known([chunk_key(make_identity(0))])


def test_an_entry_that_its_writer_could_not_check_is_taken_back(tmp_path, monkeypatch):
    store = open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=0))
    put(store, 0)
    entries = store.catalog._rows._journal._entries
    before = entries.keys()
    with monkeypatch.context() as patch:
        patch.setattr(shared.Journal, "_is_at", raising(OSError, "time-out"))
        with pytest.raises(StoreError):
            store.catalog._rows.change(lambda: store.catalog._rows.set("x", 1))
    assert entries.keys() == before


@pytest.mark.parametrize("wrong", [3, [1], ["", False, 3], ["", False, {"c x": 3}], [None, False, {}], ["", 1, {}], {}])
def test_what_is_no_entry_counts_as_a_fault_of_the_journal(tmp_path, wrong, monkeypatch):
    monkeypatch.setattr(shared, "AGAIN_S", 0.0)
    store = open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=0))
    put(store, 0)
    entries = store.catalog._rows._journal._entries
    last = max(entries.keys())
    entries.write(journal._key(int(last, 16) + 1), [journal._dump(wrong)])
    assert store.get(make_identity(0)) is None
    with pytest.raises(StoreError, match="damaged"):
        put(store, 1)
    entries.delete([journal._key(int(last, 16) + 1)])
    assert store.get(make_identity(0)) is not None


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://:hunter2@host:1/0",
        "https://me:hunter2@host/kv",
        "redis://:hunt/er2@host:port",
        "nowhere://hunter2",
    ],
)
def test_no_password_of_an_address_is_in_a_message(url):
    with pytest.raises(StoreError) as caught:
        open_url(url, "objects")
    assert "hunt" not in str(caught.value)


def test_valkeys_own_addresses_are_taken(redis_url):
    assert open_url(redis_url.replace("redis://", "Valkey://"), "objects").keys() == set()


def test_an_empty_object_is_read_as_nothing(tmp_path):
    blobs, key = open_url(f"file://{tmp_path}/bucket", "objects"), chunk_key(make_identity(0))
    blobs.write(key, [b""])
    assert bytes(blobs.read(key, 0, 10) or b"") == b""
    assert blobs.read(key, 0, 10) is not None


@pytest.mark.parametrize("has_copies", [False, True])
def test_what_the_server_let_go_is_precomputed_again(engine_of, redis_url, tmp_path, has_copies):
    config = StoreConfig(shared=redis_url if has_copies else None, min_free_bytes=0, ram_bytes=0)
    engine = engine_of(kv_dir=tmp_path / "copies" if has_copies else redis_url, store_config=config)
    engine.precompute(CHUNKS, ids=list("abcd"))
    client = redis.Redis.from_url(redis_url)
    client.delete(*client.keys("kvrag:objects:*"))
    assert engine.precompute(CHUNKS, ids=list("abcd")).stored == 4
    assert len(client.keys("kvrag:objects:*")) >= 4
    assert sorted(engine.document_ids()) == list("abcd")
    assert engine.precompute(CHUNKS, ids=list("abcd")).skipped == 4
