import os
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvrag.store import DiskStore, writer


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


RAM_DISK = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path):
    """A directory in memory where there is one: the tests sync thousands of files."""
    if not os.access(RAM_DISK, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=RAM_DISK, prefix="kvrag-test-") as name:
        yield Path(name)


@pytest.fixture
def disk(tmp_path):
    store = DiskStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


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


@pytest.fixture
def held_up(monkeypatch):
    """Let no blob be written inside the context."""
    real = writer.write

    @contextmanager
    def hold():
        go_on = threading.Event()

        def wait(*args):
            go_on.wait(30)
            return real(*args)

        monkeypatch.setattr(writer, "write", wait)
        try:
            yield go_on
        finally:
            go_on.set()

    return hold
