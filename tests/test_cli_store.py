"""What the commands that load a model do to a store: its documents, its budgets, its priorities."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from texts import make_chunks
from typer.testing import CliRunner, Result

from kvrag.cli.app import app
from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import FileBlobs, Retention, TieredStore, open_store
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text
from kvrag.types import ChunkKey

Run = Callable[..., Result]
CHUNKS = make_chunks(4, words=30, seed=7)
ONE = make_identity(1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def run(tiny_dir: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``kvrag`` with the tiny model and a store of its own."""
    monkeypatch.setenv("KVRAG_MODEL", tiny_dir)
    monkeypatch.setenv("KVRAG_KV_DIR", str(root))
    monkeypatch.delenv("KVRAG_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *args, **options: CliRunner().invoke(app, [str(arg) for arg in args], **options)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A file whose paragraphs are the chunks."""
    file = tmp_path / "notes.md"
    file.write_text("\n\n".join(CHUNKS), "utf-8")
    return file


def test_commands_that_load_a_model_change_nothing_else(run: Run, root: Path, notes: Path) -> None:
    live = open_store(root, StoreConfig(min_free_bytes=0))
    live.put(ONE, make_kv(ONE), text=make_text("a"), doc_id="a", retention=Retention(90))
    commands: dict[str, dict[str, Any]] = {
        f"precompute {notes} --chunk-tokens 100": {},
        "explain": {"input": "Who?"},
        "ask Who? --max-new-tokens 1": {},
    }
    for command, options in commands.items():
        done = run(*command.split(), **options)
        assert done.exit_code == 0, done.output
        assert live.retention(chunk_key(ONE)) == Retention(90)
        assert "a" in live.catalog.documents(NAMESPACE)
    assert live.delete([chunk_key(ONE)]) == 1
    live.close()


def test_precompute_keeps_to_the_limits_of_the_application(run: Run, notes: Path) -> None:
    first = json.loads(run("precompute", notes, "--chunk-tokens", 100, "--kv-dir", "unlimited", "--json").stdout)
    assert (first["stored"], first["failed"]) == (4, [])
    limit = first["stored_bytes"] * 2 // 3
    done = run("precompute", notes, "--chunk-tokens", 100, "--disk-bytes", limit, "--min-free-bytes", 0, "--json")
    assert done.exit_code in (0, 1), done.output
    kept = json.loads(run("stats", "--json").stdout)["tiers"]["disk"]
    assert 0 < kept["num_bytes"] <= limit
    none = run("precompute", notes, "--chunk-tokens", 100, "--kv-dir", "full", "--min-free-bytes", 2**62)
    assert none.exit_code == 1, none.output


def test_limits_may_stand_in_the_environment(run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAG_MIN_FREE_BYTES", str(2**62))
    assert run("precompute", notes, "--chunk-tokens", 100).exit_code == 1
    assert json.loads(run("stats", "--json").stdout)["tiers"]["disk"]["chunks"] == 0


def test_precompute_asks_for_the_priority_and_the_durability_given(
    run: Run, root: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = FileBlobs.__init__

    def init(blobs: FileBlobs, path: Path, *, durable: bool = True) -> None:
        asked.append(durable)
        real(blobs, path, durable=durable)

    monkeypatch.setattr(FileBlobs, "__init__", init)
    done = run("precompute", notes, "--chunk-tokens", 100, "--priority", 60, "--durability", "cache")
    assert done.exit_code == 0, done.output
    assert asked == [False]
    store = open_store(root, StoreConfig())
    assert sorted(priority(store, key) for key in store.catalog.keys()) == [60, 60, 60, 60, 85]  # noqa: SIM118 - a catalog is no dict; with the prefix
    store.close()


def priority(store: TieredStore, key: ChunkKey) -> int:
    retention = store.retention(key)
    assert retention is not None
    return retention.priority


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--durability", "maybe"], "StoreConfig.durability is 'maybe'"),
        (["--priority", "101"], "--priority"),
        (["--disk-bytes", "-1"], "--disk-bytes"),
        (["--min-free-bytes", "much"], "--min-free-bytes"),
    ],
)
def test_a_limit_out_of_range_is_refused_by_name(run: Run, notes: Path, options: list[str], words: str) -> None:
    refused = run("precompute", notes, *options)
    assert refused.exit_code == 2
    assert words in refused.stderr


def test_the_package_runs_as_a_module(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrag", "stats", "--kv-dir", str(root)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert f"there is no KV store {str(root)!r}" in done.stderr
