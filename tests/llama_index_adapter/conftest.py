"""Fixtures of the LlamaIndex tests: LLMs on the tiny model, with a store of their own."""

import pytest
from llama_index_kit import make_llm, settings

from llama_index.llms.kvrag import KVRagLLM


@pytest.fixture
def make(tiny_dir, tmp_path):
    """Make LLMs; at the end their engines are closed, and the settings are what they were."""
    made: list[KVRagLLM] = []

    def make(source=tiny_dir, **options):
        made.append(make_llm(source, tmp_path / "kv", **options))
        return made[-1]

    with settings():
        yield make
    for llm in made:
        llm.engine.close()


@pytest.fixture
def llm(make):
    """The LLM of the settings."""
    llm = make()
    llm.apply_settings()
    return llm
