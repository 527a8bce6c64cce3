"""Stores that earlier versions wrote: readable, or missing, never wrong. A change of the bytes needs a new version."""

import hashlib
import json
import shutil

import pytest
from golden import DATA, FIRST, KINDS, PROMISED, PROTECTION, chunks, even_kv, fill, folder, store_of, text_of
from kvrag.store.directory import Directory
from kvrag.store.header import OtherVersion
from kvrag.store.objects import place_of
from protected import names_of, needs_cryptography
from safetensors import safe_open

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import FORMAT_VERSION, chunk_key
from kvrag.store import DiskStore, blob
from kvrag.testing.chunks import same_bits

STORES = sorted(path.name for path in DATA.glob("store-v*"))
MADE_AGAIN = [kind for kind in KINDS if kind != "encrypted"]


def files_of(root):
    """Digest of each file that the format promises, by its place."""
    files = [path for name in PROMISED for path in (root / name).rglob("*.*")]
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in [root / "format.json", *files]
    }


def marked(name):
    """Skip what is encrypted where nothing can decrypt it."""
    return pytest.param(name, marks=needs_cryptography) if name.endswith("encrypted") else name


@pytest.fixture(params=map(marked, STORES))
def golden(request, tmp_path):
    """Version and kind of a golden store, and a copy of it."""
    shutil.copytree(DATA / request.param, tmp_path / "golden")
    version, _, kind = request.param.removeprefix("store-v").partition("-")
    return int(version), kind, tmp_path / "golden"


def test_there_is_a_golden_store_of_every_kind():
    missing = [folder(FORMAT_VERSION, kind).name for kind in KINDS if not folder(FORMAT_VERSION, kind).is_dir()]
    assert missing == [], "make them with tests/store/golden.py"
    assert {f"store-v{version}" for version in range(1, FORMAT_VERSION)} <= set(STORES)


def test_a_golden_store_is_readable_or_missing(golden, no_pickle):
    version, kind, root = golden
    store, wanted = store_of(root, kind), chunks(kind)
    is_present = version == FORMAT_VERSION
    namespace = names_of(PROTECTION.get(kind, kind)).namespace("default")
    for identity, kv in wanted:
        assert same_bits(store.get(identity), kv) if is_present else store.get(identity) is None
    assert set(store.index.keys()) == ({chunk_key(identity) for identity, _ in wanted} if is_present else set())
    if is_present:
        assert sorted(store.index.documents(namespace)) == ["golden", "other"]
        texts = store.index.texts(namespace, 0)[0]
        assert sorted(texts, key=str) == sorted((text_of(kind, n) for n in range(len(wanted))), key=str)
    assert store.stats()["disk"].rejected == 0
    assert list((root / "quarantine").iterdir()) == []
    for identity, kv in wanted:
        assert store.put(identity, kv, text=None) == (0 if is_present else kv.num_bytes)
        assert same_bits(store.get(identity), kv)
    store.close()
    assert json.loads((root / "format.json").read_text())["version"] == FORMAT_VERSION


@pytest.mark.parametrize("kind", MADE_AGAIN)
def test_the_present_version_still_writes_the_same_bytes(tmp_path, kind):
    fill(tmp_path / "new", kind)
    assert files_of(tmp_path / "new") == files_of(folder(FORMAT_VERSION, kind))


@needs_cryptography
def test_an_encrypted_store_still_writes_the_same_but_what_a_salt_changes(tmp_path):
    """Names and sealed references have no salt; of the blobs everything but salt, tags, digests and what is encrypted stays."""
    fill(tmp_path / "new", "encrypted")
    old, new = folder(FORMAT_VERSION, "encrypted"), tmp_path / "new"
    assert files_of(new).keys() == files_of(old).keys()
    for path in (old / "references").rglob("*.json"):
        assert path.read_bytes() == (new / path.relative_to(old)).read_bytes()
    for path in (old / "objects").rglob("*.safetensors"):
        assert _skeleton(path) == _skeleton(new / path.relative_to(old))


SALTED = {"salt", "layer_digests", "layer_tags", "layer_sums", "sealed", "header_digest", "header_mac"}


def _skeleton(path):
    """What of a blob does not depend on its salt: order and sizes of all fields, and the content of the others."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8:start])
    said = [(name, len(value) if name in SALTED else value) for name, value in fields.pop("__metadata__").items()]
    return len(raw), start, said, list(fields.items())


def test_golden_blobs_open_as_plain_safetensors_files(golden):
    for path in (golden[2] / "objects").rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert len(file.keys()) >= 2
            assert file.metadata()["version"] == str(golden[0])


def test_int4_codes_are_packed_as_the_format_says():
    """By hand, from the file: two codes in a byte, offset by 8, the lower first, scaled by group."""
    identity = next(identity for identity, _ in chunks("dtypes") if identity.kv_dtype == "int4")
    path = folder(FORMAT_VERSION, "dtypes").joinpath(*place_of(chunk_key(identity)))
    exact = even_kv(identity).layers[0]
    with safe_open(path, framework="pt") as file:
        keys, values, scales, zeros, value_scales = (
            file.get_tensor(f"layer.000.{name}")
            for name in ("keys", "values", "key_scales", "key_zeros", "value_scales")
        )
    tokens = exact.keys.shape[1]
    for head, token, channel in ((0, 0, 0), (1, 31, 3), (1, 32, 5), (0, 32, 2)):
        code = (int(keys[head, token, channel // 2]) >> 4 * (channel % 2) & 15) - 8
        group = token // 32
        value = code * float(scales[head, group, channel]) + float(zeros[head, group, channel])
        assert abs(value - float(exact.keys[head, token, channel])) <= float(scales[head, group, channel])
    width = values.shape[2] * 2 // value_scales.shape[2]
    assert value_scales.shape == (1, tokens, exact.values.shape[2] // width)
    for token, channel in ((0, 0), (17, 23), (32, 65), (5, 40)):
        code = (int(values[0, token, channel // 2]) >> 4 * (channel % 2) & 15) - 8
        scale = float(value_scales[0, token, channel // width])
        assert abs(code * scale - float(exact.values[0, token, channel])) <= scale


def test_a_blob_of_another_version_is_left_where_it_is(tmp_path, monkeypatch):
    """Nothing is wrong with it; an older kvrag may still want it."""
    fill(tmp_path, "")
    path = tmp_path.joinpath(*place_of(chunk_key(FIRST)))
    raw = path.read_bytes().replace(f'"version":"{FORMAT_VERSION}"'.encode(), b'"version":"9"')
    path.write_bytes(raw)
    with pytest.raises(OtherVersion):
        blob.Blob(Directory(tmp_path), *place_of(chunk_key(FIRST)))
    shutil.rmtree(tmp_path / "index")
    store = DiskStore(tmp_path, StoreConfig(min_free_bytes=0))
    assert store.index.keys() == []
    assert path.read_bytes() == raw
    assert store.get(FIRST) is None
    assert store.stats()["disk"].rejected == 1, "under the key that was asked for it is in the way"
    store.close()
