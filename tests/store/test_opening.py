"""Opening a store: budgets are the lesser of bytes and fractions, and impossible options are named."""

import importlib
import pkgutil
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
from stores import CHUNKS, KEYS, KVS, SIZE, fill

from kvrag import runtime
from kvrag.cli import check
from kvrag.config import StoreConfig
from kvrag.errors import ConfigError, StoreError
from kvrag.runtime import host_memory
from kvrag.store import Blobs, Retention, opening
from kvrag.store.opening import lesser
from kvrag.testing.chunks import NAMESPACE, same_bits

ROOT = Path(__file__).parents[2]


def test_there_is_a_host_tier_above_the_disk_and_none_above_memory(opened):
    assert list(opened(None).stats()) == ["host"]
    assert list(opened().stats()) == ["host", "disk"]


@pytest.mark.parametrize(
    ("limit", "fraction", "expected"),
    [(None, 1, None), (50, 1, 50), (50, 0.2, 20), (10, 0.2, 10), (None, 0.5, 50), (50, 0, 0)],
)
def test_the_lesser_budget_wins(limit, fraction, expected):
    assert lesser(limit, fraction, lambda: 100) == expected


def test_a_total_that_nobody_knows_limits_nothing(opened, monkeypatch):
    def unknown(*args):
        raise OSError("no such file system")

    assert lesser(7, 0.5, unknown) == 7
    monkeypatch.setattr(
        "kvrag.store.opening.os.sysconf", lambda name: (_ for _ in ()).throw(ValueError("unknown"))
    )
    assert opened(ram_bytes=100).tiers[0].max_bytes == 100


def test_fractions_are_of_what_there_is(opened, root, monkeypatch, tmp_path):
    assert 2**20 < host_memory() < 2**50
    limit = tmp_path / "memory.max"
    limit.write_text("4096\n")
    monkeypatch.setattr(runtime, "CGROUP_LIMITS", (str(tmp_path / "absent"), str(limit)))
    assert host_memory() == 4096
    assert opened(ram_fraction=0.5).tiers[0].max_bytes == 2048
    assert opened(ram_bytes=100).tiers[0].max_bytes == 100
    limit.write_text("max\n")
    assert host_memory() > 4096
    monkeypatch.setattr(
        opening.shutil, "disk_usage", lambda path: SimpleNamespace(total=int(2.5 * SIZE))
    )
    store = opened(disk_fraction=0.9)
    fill(store, 0, 1, 2)
    assert store.stats()["disk"].chunks == 2


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_bytes": -1},
        {"gpu_fraction": 1.1},
        {"ram_fraction": -0.1},
        {"disk_fraction": "half"},
        {"on_miss": "eager"},
    ],
)
def test_an_impossible_option_is_named(options):
    with pytest.raises(ConfigError, match=f"StoreConfig.{next(iter(options))}"):
        StoreConfig(**options)


def test_a_store_without_a_directory_is_its_own(opened):
    one, two = opened(None), opened(None)
    fill(one, 1)
    assert two.get(CHUNKS[1]) is None
    assert same_bits(one.get(CHUNKS[1]), KVS[1])
    one.close()
    with pytest.raises(StoreError, match="closed"):
        fill(one, 2)
    assert two.stats()["host"].chunks == 0


def test_a_directory_is_made_with_all_above_it(opened, tmp_path):
    assert same_bits(fill(opened(tmp_path / "a" / "b"), 1).get(CHUNKS[1]), KVS[1])


PLUGIN = """
from pathlib import Path

from kvrag.store import FileBlobs


class ShelfBlobs(FileBlobs):
    is_remote = True
    expiries = []

    def expire(self, key, seconds):
        self.expiries.append((key, seconds))

    def sweep(self):
        return 7


def open_blobs(url, folder):
    return ShelfBlobs(Path(url.removeprefix("shelf://"), folder), durable=False)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that registers ``shelf_store:open_blobs`` for ``shelf://``."""
    info = tmp_path / "shelf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvrag.stores]\nshelf = shelf_store:open_blobs\nmemory = shelf_store:open_blobs\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shelf_store", None)


def test_a_package_whose_store_is_broken_is_named(installed):
    with pytest.raises(StoreError, match=r"shelf_store:open_blobs.* can't be loaded .*reinstall"):
        opening.open_store("shelf://somewhere", StoreConfig())


def test_an_installed_package_adds_a_store_by_its_address(installed, tmp_path, redis_url):
    """One file and an entry point, no edit in kvrag: chunks go through it."""
    (installed / "shelf_store.py").write_text(PLUGIN)
    importlib.invalidate_caches()
    url = f"shelf://{tmp_path}/shelf"

    writer = opening.open_store(url, StoreConfig(catalog=redis_url))
    fill(writer, 0, 1)
    writer.close()
    for config in (StoreConfig(shared=url, catalog=redis_url), StoreConfig(shared=url)):
        reader = opening.open_store(tmp_path / "copies", config)
        assert same_bits(reader.get(CHUNKS[0]), KVS[0])
        reader.close()
    assert len(list((tmp_path / "shelf").rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("has_copies", [False, True])
def test_a_store_of_your_own_may_do_more_than_it_must(installed, tmp_path, redis_url, has_copies):
    """What it overrides is used, also below local copies."""
    (installed / "shelf_store.py").write_text(PLUGIN)
    importlib.invalidate_caches()
    url = f"shelf://{tmp_path}/shelf"
    config = StoreConfig(catalog=redis_url, shared=url if has_copies else None)
    store = opening.open_store(tmp_path / "copies" if has_copies else url, config)
    fill(store, 0, retention=Retention(duration_s=60))
    fill(store, 1)
    store.retain(KEYS[:1], Retention(90))
    assert store.retain(KEYS[1:2], Retention(90, duration_s=600)) == 1
    expiries = importlib.import_module("shelf_store").ShelfBlobs.expiries
    assert expiries == [(KEYS[0], 60), (KEYS[1], 600)]
    assert check.gc(store).swept == 7
    store.close()


def test_a_store_of_your_own_may_hold_its_catalog(installed, tmp_path):
    """Two machines see each other's chunks and documents, without a Redis; another address may name it as catalog, too."""
    (installed / "shelf_store.py").write_text(
        PLUGIN
        + """
from functools import partial

from kvrag.store.catalog.rows import open_table


class WithRows(ShelfBlobs):
    def catalog(self, store):
        return partial(open_table, self.root / f"rows-{len(store)}")


def open_blobs(url, folder):
    return WithRows(Path(url.removeprefix("shelf://"), folder), durable=False)
"""
    )
    importlib.invalidate_caches()
    url = f"shelf://{tmp_path}/shelf"
    writer = opening.open_store(url, StoreConfig())
    fill(writer, 0, 1)
    reader = opening.open_store(tmp_path / "copies", StoreConfig(shared=url))
    assert same_bits(reader.get(CHUNKS[0]), KVS[0])
    assert reader.catalog.documents(NAMESPACE) == ["doc 0", "doc 1"]
    assert reader.forget(NAMESPACE, "doc 0") == 1
    assert writer.get(CHUNKS[0]) is None
    elsewhere = opening.open_store(url, StoreConfig(catalog=f"shelf://{tmp_path}/other"))
    assert elsewhere.catalog.keys() == []
    assert len(list(tmp_path.glob("*/objects/rows-*"))) == 2
    for store in (writer, reader, elsewhere):
        store.close()


def test_a_package_whose_store_is_none_of_ours_is_refused(installed):
    (installed / "shelf_store.py").write_text("def open_blobs(url, folder):\n    return {}\n")
    importlib.invalidate_caches()
    with pytest.raises(StoreError, match=r"shelf_store:open_blobs.* returns dict; .*Blobs"):
        opening.open_url("shelf://somewhere")


def test_no_package_takes_an_address_of_our_own(installed):
    assert opening.open_url("memory:///").__class__.__module__ == "kvrag_shared.object_store"


def test_an_installation_without_its_stores_says_so(monkeypatch):
    nothing = entry_points(group="kvrag.nothing")
    monkeypatch.setattr(opening, "entry_points", lambda group: nothing)
    with pytest.raises(StoreError, match=r"at redis://; use a directory, .*kvrag\[redis\]"):
        opening.open_url("redis://127.0.0.1:1/0")


def test_an_empty_catalog_is_refused(redis_url):
    with pytest.raises(StoreError, match=r"no catalog at ://"):
        opening.open_store(redis_url, StoreConfig(catalog=""))


def test_stores_of_our_own_are_registered_like_a_packages():
    """An installation that is older than the sources lacks some: ``make setup`` brings it up to date."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = metadata["entry-points"][opening.PLUGINS]
    assert ours.items() <= {(each.name, each.value) for each in entry_points(group=opening.PLUGINS)}
    assert all(issubclass(pkgutil.resolve_name(value), Blobs) for value in ours.values())


def test_an_address_that_no_package_knows_is_refused():
    with pytest.raises(StoreError, match=r"at ftp://.*redis.*s3.*install the package that adds it"):
        opening.open_store("ftp://host/kv", StoreConfig())
