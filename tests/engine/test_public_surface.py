"""What is public. Who may import whom is in test_house.py."""

import subprocess
import sys

import pytest

import kvrag
from kvrag import MissingDependencyError, RepairConfig
from kvrag.config import STRATEGIES, SamplingConfig
from kvrag.errors import KVRagError, require

PUBLIC = """
AsyncTokenStream Chunk ConfigError ContextLengthError Explanation GenerationResult InputError KVRagClient KVRagEngine
KVRagError Library MaxContext MissingDependencyError Mode ModelError OutOfMemoryError PrecomputeReport PrefillResult
RepairConfig Retention SamplingConfig ScoreResult StoreConfig StoreError StoreFormatError
SyncReport TemplatePrefix TokenLogprob TokenStream ToolCall UnsupportedModelError VerifyReport __version__ delete_kv
precompute_dataset precompute_kv require sync_kv flash_attention_tier install_flash_attention
uninstall_flash_attention
"""


def test_the_public_names_are_pinned():
    assert sorted(kvrag.__all__) == sorted(PUBLIC.split())
    assert all(hasattr(kvrag, name) for name in kvrag.__all__)


def test_importing_the_package_is_cheap():
    code = "import sys, kvrag, kvrag.config, kvrag.errors; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert set(kvrag.__all__) <= set(dir(kvrag))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvrag.no_such_name


def test_the_error_tree_is_the_one_drawn():
    tree = {e.__name__ for e in _descendants(KVRagError)}
    drawn = sys.modules["kvrag.errors"].__doc__ or ""
    assert all(name in drawn for name in tree)


def _descendants(cls: type) -> set[type]:
    found = {c for c in cls.__subclasses__() if c.__module__ == "kvrag.errors"}
    return found.union(*(_descendants(c) for c in found)) if found else set()


def test_a_missing_package_names_the_extra():
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvrag\[server\]'"):
        require("no_such_package_of_ours", extra="server", purpose="serving")
    assert require("json", extra="x", purpose="y").loads("1") == 1


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("KVRagClient", "kvrag_server", "server"), ("precompute_dataset", "kvrag_ray", "ray")],
)
def test_a_name_of_a_package_that_is_not_installed_names_the_extra(
    name, package, extra, monkeypatch
):
    """The core alone may be installed."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(vars(kvrag), name, raising=False)
    with pytest.raises(MissingDependencyError, match=rf"kvrag\.{name}.*kvrag\[{extra}\]"):
        getattr(kvrag, name)


def test_all_names_of_the_core_can_be_imported_where_it_is_alone():
    code = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("kvrag_server", "kvrag_ray"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("kvrag_server", "kvrag_ray") else found(name)
from kvrag import *
print(KVRagEngine.__name__, "KVRagClient" in globals())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["KVRagEngine", "False"], done.stderr
    assert {"KVRagClient", "precompute_dataset"} <= set(kvrag.__all__)


def test_an_address_needs_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvrag_server", None)
    with pytest.raises(MissingDependencyError, match=r"kvrag\[server\]"):
        kvrag.delete_kv(["a"], server="http://127.0.0.1:1")


def test_configs_hold_their_defaults():
    assert RepairConfig() == RepairConfig("query_runs", None, 1, 1.0)
    blend = RepairConfig.cacheblend()
    assert (blend.strategy, blend.recompute_ratio, blend.first_k, blend.shift) == (
        "hkvd",
        0.15,
        0,
        0.0,
    )
    assert SamplingConfig(stop="x").stop == ("x",)
    assert SamplingConfig(stop=None).stop == ()
    assert len(set(STRATEGIES)) == 9
