import os
import tempfile
from pathlib import Path

import pytest
import torch
from stores import config_of, other_handle

from kvrag.store import open_store

RAM_DISK = Path("/dev/shm")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def tmp_path(tmp_path):
    """A directory in memory where there is one: the tests sync thousands of files."""
    if not os.access(RAM_DISK, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=RAM_DISK, prefix="kvrag-test-") as name:
        yield Path(name)


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
