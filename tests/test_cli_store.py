"""What the commands that load a model do to a store: its kind of index, its budgets, its priorities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from texts import make_chunks
from typer.testing import CliRunner, Result

from kvrag.cli import app
from kvrag.config import StoreConfig
from kvrag.fingerprint import chunk_key
from kvrag.store import DiskStore, Retention
from kvrag.store.index_kinds import FILES
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text

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


@pytest.mark.parametrize("kind", FILES)
def test_commands_that_load_a_model_use_the_index_that_is_there(run: Run, root: Path, notes: Path, kind: str) -> None:
    live = DiskStore(root, StoreConfig(index=kind, min_free_bytes=0))
    live.put(ONE, make_kv(ONE), text=make_text("a"), doc_id="a", retention=Retention(90))
    commands: dict[str, dict[str, Any]] = {
        f"precompute {notes} --chunk-tokens 100": {},
        "explain": {"input": "Who?"},
        "ask Who? --max-new-tokens 1": {},
    }
    for command, options in commands.items():
        done = run(*command.split(), **options)
        assert done.exit_code == 0, done.output
        assert [name for name in FILES.values() if (root / "index" / name).exists()] == [FILES[kind]]
        assert live.priority(chunk_key(ONE)) == 90
        assert "a" in live.index.documents(NAMESPACE)
    assert live.delete([chunk_key(ONE)]) == 1
    live.close()
