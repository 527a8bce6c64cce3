import os
import tempfile
from pathlib import Path

import pytest
import torch

from kvrag.config import StoreConfig
from kvrag.store import open_store


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
    store = open_store(tmp_path / "store", StoreConfig())
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
