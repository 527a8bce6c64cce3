"""What a LlamaIndex retriever returned is in memory before it is asked for."""

import pytest
from kit import raising, settle
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import MockLLM
from llama_index_kit import documents

from kvrag import ConfigError, precompute_kv
from llama_index.llms.kvrag import KVPrefetchHandler, KVRagLLM

TOP_K = 3


@pytest.fixture
def index(llm):
    """An index whose KV is on disk only, as after a restart, and a handler that hears of its retrievals."""
    index = VectorStoreIndex.from_documents(documents(6))
    assert precompute_kv(index, llm=llm).stored == 6
    llm.engine.store.release()
    handlers = get_dispatcher().event_handlers
    get_dispatcher().add_event_handler(KVPrefetchHandler(llm=llm))
    yield index
    del handlers[-1]


def in_memory(llm: KVRagLLM) -> int:
    return llm.engine.stats()["store"]["host"].chunks


def test_retrieved_nodes_are_loaded(llm, index):
    index.as_retriever(similarity_top_k=TOP_K).retrieve("Who keeps the ledger?")
    settle()
    assert in_memory(llm) == 1 + TOP_K  # and the prefix
    reads = llm.engine.stats()["store"]["disk"].hits
    nodes = (
        index.as_query_engine(similarity_top_k=TOP_K).query("Who keeps the ledger?").source_nodes
    )
    settle()
    assert len(nodes) == TOP_K
    assert llm.engine.stats()["cached_tokens"] > 0
    assert llm.engine.stats()["store"]["disk"].hits == reads


async def test_it_works_in_an_event_loop(llm, index):
    await index.as_retriever(similarity_top_k=TOP_K).aretrieve("Who?")
    settle()
    assert in_memory(llm) == 1 + TOP_K


def test_a_fault_is_logged_and_harms_nobody(llm, index, monkeypatch, caplog):
    monkeypatch.setattr(llm.engine.store, "prefetch", raising(OSError, "the disk is gone"))
    assert len(index.as_retriever(similarity_top_k=TOP_K).retrieve("x")) == TOP_K
    settle()
    assert "could not be prefetched" in caplog.text


def test_other_models_are_refused(llm):
    with pytest.raises(ConfigError, match="MockLLM"):
        KVPrefetchHandler(llm=MockLLM())
    assert KVPrefetchHandler().llm is Settings.llm
