"""Stores that earlier versions wrote: readable, or missing, never wrong. A change of the bytes needs a new version."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from kvrag.config import StoreConfig
from kvrag.fingerprint import FORMAT_VERSION, chunk_key
from kvrag.store import DiskStore, blob
from kvrag.store.directory import Directory
from kvrag.store.header import OtherVersion
from kvrag.store.objects import place_of
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

DATA = Path(__file__).parents[1] / "data"
GOLDEN = make_identity(1)
VERSIONS = range(1, FORMAT_VERSION + 1)


def fill(root):
    """What each golden store holds; the present version's was made by this function."""
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    store.put(GOLDEN, make_kv(GOLDEN), text=make_text("golden"), doc_id="golden")
    store.put(GOLDEN, make_kv(GOLDEN), text=make_text("golden"), doc_id="other")
    store.close()


def files_of(root):
    """Digest of each file that the format promises, by its place."""
    files = [path for folder in ("objects", "references") for path in (root / folder).rglob("*.*")]
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in [root / "format.json", *files]
    }


@pytest.fixture(params=VERSIONS)
def golden(request, tmp_path):
    source = DATA / f"store-v{request.param}"
    assert source.is_dir(), f"the golden store of version {request.param} is missing: make it with fill()"
    shutil.copytree(source, tmp_path / "golden")
    return request.param, tmp_path / "golden"


def test_a_golden_store_is_readable_or_missing(golden, no_pickle):
    version, root = golden
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    kv = store.get(GOLDEN)
    if version == FORMAT_VERSION:
        assert same_bits(kv, make_kv(GOLDEN))
        assert store.index.documents(NAMESPACE) == ["golden", "other"]
        assert store.index.texts(NAMESPACE, 0)[0] == [make_text("golden")]
    else:
        assert kv is None
        assert store.index.keys() == []
    assert store.stats()["disk"].rejected == 0
    assert list((root / "quarantine").iterdir()) == []
    assert store.put(GOLDEN, make_kv(GOLDEN), text=None) == (0 if kv else make_kv(GOLDEN).num_bytes)
    assert same_bits(store.get(GOLDEN), make_kv(GOLDEN))
    store.close()
    assert json.loads((root / "format.json").read_text())["version"] == FORMAT_VERSION


def test_the_present_version_still_writes_the_same_bytes(tmp_path):
    fill(tmp_path / "new")
    assert files_of(tmp_path / "new") == files_of(DATA / f"store-v{FORMAT_VERSION}")


def test_golden_blobs_open_as_plain_safetensors_files(golden):
    (path,) = (golden[1] / "objects").rglob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 4
        assert file.metadata()["version"] == str(golden[0])


def test_a_blob_of_another_version_is_left_where_it_is(tmp_path, monkeypatch):
    """Nothing is wrong with it; an older kvrag may still want it."""
    fill(tmp_path)
    path = tmp_path.joinpath(*place_of(chunk_key(GOLDEN)))
    raw = path.read_bytes().replace(f'"version":"{FORMAT_VERSION}"'.encode(), b'"version":"9"')
    path.write_bytes(raw)
    with pytest.raises(OtherVersion):
        blob.Blob(Directory(tmp_path), *place_of(chunk_key(GOLDEN)))
    shutil.rmtree(tmp_path / "index")
    store = DiskStore(tmp_path, StoreConfig(min_free_bytes=0))
    assert store.index.keys() == []
    assert path.read_bytes() == raw
    assert store.get(GOLDEN) is None
    assert store.stats()["disk"].rejected == 1, "under the key that was asked for it is in the way"
    store.close()
