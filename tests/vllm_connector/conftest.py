"""Fixtures of the connector's tests: the connector on a stand-in for vLLM, and an engine with stored chunks."""

import pytest
from texts import make_chunks
from vllm_kit import Setting, connector_module

from kvrag import KVRagEngine
from kvrag.testing.models import save_tiny_model

CHUNKS = [text.partition(": ")[2] for text in make_chunks(4, words=60)]


@pytest.fixture
def connector(monkeypatch):
    return connector_module(monkeypatch)


@pytest.fixture
def setting(tmp_path):
    save_tiny_model(tmp_path / "model", "llama")
    engine = KVRagEngine.from_pretrained(tmp_path / "model", kv_dir=tmp_path / "kv", context=None)
    assert not engine.precompute(CHUNKS, ids=list("abcd")).failed
    yield Setting(engine, str(tmp_path / "model"))
    engine.close()
