"""Fixtures: tiny random models and a tokenizer made on the spot; nothing is fetched."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag import KVRagEngine
from kvrag.testing.models import save_tiny_model, tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what kvrag remembers for this run, away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.delenv("KVRAG_CACHE_DIR", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tiny Llama and its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def engine(tiny_dir: str, tmp_path: Path) -> Iterator[KVRagEngine]:
    """A fresh engine on the tiny Llama with its own store."""
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv")
    yield engine
    engine.close()


@pytest.fixture
def engine_of(tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., KVRagEngine]]:
    """Make engines on tiny models by architecture name."""
    made: list[KVRagEngine] = []

    def make(name: str = "llama", *, seed: int = 0, **options: Any) -> KVRagEngine:
        options.setdefault("kv_dir", tmp_path / f"kv-{name}")
        made.append(KVRagEngine.from_pretrained(tiny_model(name, seed=seed), tokenizer=tokenizer, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
