"""Documents that are too short to have KV, or empty: every way in says so, and explain does, too."""

import logging

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from llama_index.core.schema import TextNode
from texts import make_chunks

from kvrag import precompute_kv, sync_kv
from langchain_kvrag import KVPrecompute as LangChainPrecompute
from langchain_kvrag import KVRagVectorStore as LangChainStore
from llama_index.llms.kvrag import KVPrecompute as LlamaIndexPrecompute
from llama_index.vector_stores.kvrag import KVRagVectorStore as LlamaIndexStore

LONG = make_chunks(2, words=42)
NOTED = "Paris is the capital of <s> France."
TINY = "Paris."
TEXTS = [LONG[0], NOTED, TINY, ""]
IDS = ["long", "noted", "tiny", "empty"]


def documents():
    return [Document(text, id=name) for name, text in zip(IDS, TEXTS, strict=True)]


def nodes():
    return [
        TextNode(text=text, id_=name, embedding=[0.1] * 4)
        for name, text in zip(IDS, TEXTS, strict=True)
    ]


WAYS = {
    "precompute_kv": lambda engine: precompute_kv(TEXTS, ids=IDS, llm=engine),
    "sync_kv": lambda engine: sync_kv(TEXTS, ids=IDS, llm=engine).precompute,
    "LangChain store": lambda engine: LangChainStore(
        embedding=DeterministicFakeEmbedding(size=4), llm=engine
    ).add_documents(documents()),
    "LangChain transformer": lambda engine: LangChainPrecompute(engine).transform_documents(
        documents()
    ),
    "LlamaIndex store": lambda engine: LlamaIndexStore(llm=engine).add(nodes()),
    "LlamaIndex transformation": lambda engine: LlamaIndexPrecompute(engine)(nodes()),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_tells_of_short_documents_once(way, engine, caplog):
    with caplog.at_level(logging.WARNING, logger="kvrag"):
        reports = [WAYS[way](engine) for _ in range(2)]
    told = [record.getMessage() for record in caplog.records if "too short" in record.getMessage()]
    assert len(told) == 1
    assert "2 document(s) are too short to have KV and are computed with each prompt" in told[0]
    assert "fewer than 32 (StoreConfig.min_chunk_tokens)" in told[0]
    if way in ("precompute_kv", "sync_kv"):
        for report in reports:
            assert [name for name, _ in report.short] == ["noted", "tiny", "empty"]
            assert dict(report.short)["empty"] == "no text"
    assert engine.document_ids() == ["long", "noted"]


def test_every_document_of_a_short_text_is_listed(engine):
    report = engine.precompute([TINY, TINY, NOTED, "x" * 31], ids=["a", "b", None, "d"])
    assert [name for name, _ in report.short][:2] == ["a", "b"]
    assert len(report.short) == 4


@pytest.mark.parametrize("ids", [["noted"], None])
def test_explain_says_that_a_text_is_short(ids, engine):
    prompt = f"{LONG[0]}\n\n{NOTED}\n\nWho?"
    engine.precompute(LONG)
    assert [span.text for span in engine.explain(prompt).spans if span.kind == "chunk"] == [LONG[0]]
    engine.precompute([NOTED], ids=ids)
    count = len(engine.loaded.encoder.chunk_ids(NOTED))
    explained = engine.explain(prompt)
    (short,) = [span for span in explained.spans if span.text == NOTED]
    assert (short.kind, short.hit, short.stop - short.start) == ("chunk", False, count)
    assert (
        short.reason == f"{count} tokens, fewer than min_chunk_tokens=32: computed with each prompt"
    )
    assert explained.hits == 1


def test_control_tokens_of_a_short_document_stay_text(engine):
    encoder = engine.loaded.encoder
    (begin,) = encoder.live_ids("<s>")
    engine.precompute([NOTED], ids=["noted"])
    found = list(engine.prefill(f"{NOTED}\n\nWho?", mode="full").prompt_ids)
    own = list(encoder.chunk_ids(NOTED))
    assert begin not in own
    assert any(found[at : at + len(own)] == own for at in range(len(found)))


@pytest.mark.parametrize("named", [True, False])
def test_short_documents_go_as_others_do(named, engine):
    engine.precompute([NOTED], ids=["noted"] if named else None)
    catalog, space = engine.store.catalog, engine.store.names.namespace(engine.namespace)
    assert len(catalog.texts(space, 0)[0]) == 1
    if named:
        assert engine.delete(["noted"]) == 0
    else:
        engine.clear(namespace=engine.namespace)
    assert (engine.document_ids(), catalog.texts(space, 0)[0]) == ([], [])


def test_a_document_that_becomes_short_loses_its_kv_and_back(engine):
    for text, has_kv in ((LONG[0], True), (NOTED, False), (LONG[1], True), (TINY, False)):
        engine.precompute([text], ids=["a"])
        held = [bool(engine.explain(f"{long}\n\nWho?").hits) for long in LONG]
        assert held == [text == long for long in LONG]
        assert any(held) == has_kv


def test_short_chunks_of_prompts_are_not_noted(engine_of):
    engine = engine_of(store_config={"on_miss": "store"})
    from kvrag import Chunk

    engine.generate([Chunk(NOTED), "\n\nWho?"], max_new_tokens=1)
    assert engine.flush_write_back(60)
    space = engine.store.names.namespace(engine.namespace)
    assert engine.store.catalog.texts(space, 0)[0] == []
