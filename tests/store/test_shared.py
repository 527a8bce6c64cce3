"""Stores that machines share, in a real Redis and through obstore: the contracts with two machines, erasure, and faults of the network."""

import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from texts import make_chunks

import kvrag.store.redis as redis_blobs
from kvrag import Chunk
from kvrag.config import StoreConfig
from kvrag.store import open_store
from kvrag.store.catalog import shared
from kvrag.store.opening import open_url
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


class AnyBlobs(BlobsContract):
    def make_blobs(self, directory: Path):
        return open_url(self.url, "objects")


class TestRedisBlobs(OnRedis, AnyBlobs):
    pass


class TestObjectBlobs(OnObjects, AnyBlobs):
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
