"""Stores that machines share, in a real Redis and through obstore: the contracts with two machines, erasure, and faults of the network."""

import shutil
import socket
import subprocess
import time
from itertools import count
from pathlib import Path

import pytest

from kvrag.config import StoreConfig
from kvrag.store import open_store
from kvrag.store.catalog import shared
from kvrag.store.opening import open_url
from kvrag.testing.store import BlobsContract, StoreContract

pytest.importorskip("redis")
pytest.importorskip("obstore")

MACHINES = count()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    """Run a server of Redis or Valkey, on a port of its own."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"redis://127.0.0.1:{port}/0"
    server.terminate()
    server.wait()


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch):
    """Let a machine follow the others at each look, so that tests need not wait."""
    monkeypatch.setattr(shared, "FRESH_S", 0.0)


class OnRedis:
    @pytest.fixture(autouse=True)
    def address(self, redis_url):
        import redis

        redis.Redis.from_url(redis_url).flushall()
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
