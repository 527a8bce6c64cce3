"""Fixtures for the LangChain adapter: models on tiny directories, embeddings without a network."""

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from texts import make_chunks

from kvrag import KVRagEngine
from kvrag.testing.models import save_tiny_model
from langchain_kvrag import ChatKVRag, KVRagLLM


@pytest.fixture(scope="session")
def other_tiny_dir(tmp_path_factory):
    """A second tiny Llama with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("other-llama"), seed=1)


@pytest.fixture(autouse=True)
def _no_shared_engines():
    """Close the engines that a test made: they are process-wide and would live on."""
    before = set(KVRagEngine._shared.values())
    yield
    for engine in set(KVRagEngine._shared.values()) - before:
        engine.close()


@pytest.fixture
def options(tiny_dir, tmp_path):
    """Options of a model with a store of its own."""
    return {"model": tiny_dir, "kv_dir": str(tmp_path / "kv"), "max_tokens": 8}


@pytest.fixture
def chat(options):
    return ChatKVRag(**options)


@pytest.fixture
def llm(options):
    return KVRagLLM(**options)


@pytest.fixture
def embedding():
    return DeterministicFakeEmbedding(size=8)


@pytest.fixture(scope="session")
def chunks():
    """Distinct chunk texts of well over the smallest size that is stored."""
    return make_chunks(6, words=42)
