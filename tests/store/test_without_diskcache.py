"""Where diskcache must not be installed, everything works with the standard library's sqlite3, and one line says so."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvrag.config import StoreConfig
from kvrag.fingerprint import chunk_key
from kvrag.store import DiskStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

ONE = make_identity(1)
ROOT = Path(__file__).parents[2]

ABSENT = """
import logging, sys
sys.modules["diskcache"] = None
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=sys.stdout)
import kvrag, kvrag.cli, kvrag.engine
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
kvrag.cli.main()
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
