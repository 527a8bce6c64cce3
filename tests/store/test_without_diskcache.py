"""Where diskcache must not be installed, everything works with the standard library's sqlite3, and one line says so."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from kvrag.cli.maintenance import must_not_write
from protected import needs_cryptography

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, Retention
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

ONE = make_identity(1)
KEYS = {"plain": {}, "cipher": {"encryption_key": "ab" * 32}}
ROOT = Path(__file__).parents[2]

ABSENT = """
import logging, sys
sys.modules["diskcache"] = None
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=sys.stdout)
import kvrag, kvrag.cli.app, kvrag.engine
from kvrag.config import StoreConfig
from kvrag.store import open_store
from kvrag.testing.chunks import *
one, config = make_identity(1), StoreConfig(min_free_bytes=0, {options})
for _ in range(2):
    store = open_store(sys.argv[1], config)
    if not config.read_only:
        store.put(one, make_kv(one), text=make_text("a"), doc_id="doc")
    assert same_bits(store.get(one), make_kv(one))
    assert store.index.documents(NAMESPACE) == ["doc"]
    store.close()
sys.argv[1:] = ["stats", "--kv-dir", sys.argv[1], "--json"]
kvrag.cli.app.main()
"""


def run(root, options=""):
    script = ABSENT.replace("{options}", options)
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"chunks": 1' in done.stdout
    return [line for line in done.stdout.splitlines() if line.startswith("LOG")]


@pytest.mark.parametrize(("options", "lines"), [("", 1), ("index='sqlite'", 0)])
def test_the_package_works_without_it(root, options, lines):
    logged = run(root, options)
    assert len(logged) == lines
    assert all("diskcache is not installed" in line for line in logged)
    assert os.listdir(root / "index") == ["rows.db"]
    with_it = DiskStore(root, StoreConfig(min_free_bytes=0))
    assert same_bits(with_it.get(ONE), make_kv(ONE))
    assert with_it.forget(NAMESPACE, "doc") == 1
    with_it.close()


@pytest.mark.parametrize(
    ("options", "lines"), [("", ["not installed", "no longer by diskcache"]), ("read_only=True", ["not installed"])]
)
def test_a_store_that_was_made_with_it_is_read_without(root, options, lines):
    """Who writes changes the kind of the index, and says so; who reads doesn't, ``kvrag stats`` included."""
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    store.put(ONE, make_kv(ONE), text=make_text("a"), doc_id="doc")
    store.close()
    logged = run(root, options)
    assert len(logged) == len(lines)
    assert all(words in line for words, line in zip(lines, logged, strict=True))
    assert (root / "index" / "cache.db").exists() == (options == "read_only=True")
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    assert store.contains(chunk_key(ONE))
    store.close()


def test_an_export_leaves_the_index_of_its_source_as_it_is(root, tmp_path):
    store = DiskStore(root, StoreConfig(min_free_bytes=0))
    store.put(ONE, make_kv(ONE), text=make_text("a"), doc_id="doc", retention=Retention(90))
    store.close()
    script = "import sys; sys.modules['diskcache'] = None; import kvrag.cli.app; kvrag.cli.app.main()"
    options = ["--document", "doc", "--kv-dir"]
    command = [sys.executable, "-c", script, "export", str(tmp_path / "copy"), *options, str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path / "copy" / "index") == ["rows.db"]
    copy, store = (DiskStore(path, StoreConfig(min_free_bytes=0)) for path in (tmp_path / "copy", root))
    assert same_bits(copy.get(ONE), make_kv(ONE))
    assert copy.index.documents(NAMESPACE) == ["doc"]
    assert (root / "index" / "cache.db").exists()
    assert store.priority(chunk_key(ONE)) == 90
    copy.close()
    store.close()


@pytest.fixture
def without(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "diskcache" else real(name))


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("kind", ["plain", pytest.param("cipher", marks=needs_cryptography)])
def test_only_the_index_of_the_environments_own_keys_is_not_to_be_changed(root, kind, monkeypatch):
    for option, value in KEYS[kind].items():
        monkeypatch.setenv(f"KVRAG_{option.upper()}", value)
    config = StoreConfig(min_free_bytes=0, **{option: f"env:KVRAG_{option.upper()}" for option in KEYS[kind]})
    assert not must_not_write(root)
    DiskStore(root, replace(config, index="sqlite")).close()
    for other in ("index.damaged", "index-of-other-keys", "index" if kind == "cipher" else "index-0123"):
        (root / other).mkdir(exist_ok=True)
        (root / other / "cache.db").touch()
    assert not must_not_write(root)
    DiskStore(root, replace(config, index="diskcache")).close()
    assert must_not_write(root)


def test_nothing_keeps_a_store_from_being_written_to_where_it_is_installed(root):
    DiskStore(root, StoreConfig(min_free_bytes=0)).close()
    assert not must_not_write(root)


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not here: run from a checkout")
def test_the_recipe_of_the_documents_lists_all_but_diskcache(tmp_path):
    """It reads the metadata of an installed kvrag: here, of one made from pyproject.toml."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, extras = declared["dependencies"], declared["optional-dependencies"]
    lines = [*wanted, *(f'{each}; extra == "{name}"' for name, group in extras.items() for each in group)]
    made = tmp_path / "kvrag-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Name: kvrag\nVersion: 1\n" + "".join(f"Requires-Dist: {line}\n" for line in lines))
    (line,) = re.findall(
        r"^python -c \"(.*)\" > requirements.txt$", (ROOT / "docs" / "store.md").read_text(), re.MULTILINE
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split("\n")[:-1] == [each for each in wanted if not each.startswith("diskcache")]
    assert any(each.startswith("diskcache") for each in wanted)
    assert not any("diskcache" in each for group in extras.values() for each in group)
