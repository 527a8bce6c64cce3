import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest
from stores import config_of, other_handle

from kvrag.store import open_store


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def opened(root):
    """Opens stores on one directory, as an engine does, and closes them; ``key="cipher"`` encrypts."""
    stores = []

    def open_(directory=root, *, key=None, **options):
        stores.append(open_store(directory, config_of(key, **options)))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def store(opened):
    """A store whose memory tier keeps nothing: each read comes from the disk."""
    return opened(ram_bytes=0)


@pytest.fixture
def handle(root):
    """Opens handles that share nothing but the directory, as another process would."""
    stores = []

    def open_(**options):
        stores.append(other_handle(root, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def no_pickle(monkeypatch):
    """Whoever unpickles fails the test, even if the exception is swallowed."""
    calls = []

    def refuse(*args, **kwargs):
        calls.append(args)
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    yield
    assert calls == []


@contextmanager
def server(folder):
    """Run a server of Redis or Valkey, on a port of its own."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.DEVNULL)
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
    pytest.importorskip("redis").Redis.from_url(everyones_redis).flushall()
    return everyones_redis


@pytest.fixture
def own_redis(tmp_path):
    """Process and address of a server that a test may harm."""
    with server(tmp_path) as found:
        yield found


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
