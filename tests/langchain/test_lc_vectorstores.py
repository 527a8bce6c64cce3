"""KVRagVectorStore: LangChain's contract, and KV in step with documents."""

from typing import Any

import numpy as np
import pytest
from kit import kept, noted, raising
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.language_models import FakeListLLM
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from kvrag import ConfigError, InputError, Retention, StoreError
from kvrag.store import TieredStore
from langchain_kvrag import KVRagVectorStore


class Normalised(Embeddings):
    """Unit vectors, for the inner product."""

    def __init__(self, inner: Embeddings) -> None:
        self.inner = inner

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [(np.array(v) / np.linalg.norm(v)).tolist() for v in self.inner.embed_documents(texts)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class TestStores(VectorStoreIntegrationTests):
    @pytest.fixture(params=["own", "inner product", "wrapped", "with KV"])
    def vectorstore(self, request):
        embeddings = self.get_embeddings()
        if request.param == "wrapped":
            return KVRagVectorStore(InMemoryVectorStore(embeddings))
        if request.param == "inner product":
            return KVRagVectorStore(embedding=Normalised(embeddings), metric="ip")
        llm = request.getfixturevalue("chat") if request.param == "with KV" else None
        return KVRagVectorStore(embedding=embeddings, llm=llm)


@pytest.fixture(params=["own", "wrapped"])
def store(request, chat, embedding):
    if request.param == "own":
        return KVRagVectorStore(embedding=embedding, llm=chat)
    return KVRagVectorStore(InMemoryVectorStore(embedding), llm=chat)


# -- KV in step ----------------------------------------------------------------------------------------------------------


def test_kv_comes_and_goes_with_documents(store, chat, chunks):
    names = store.add_texts(chunks[:3], ids=["a", "b", "c"])
    assert names == ["a", "b", "c"]
    assert kept(chat, chunks) == [0, 1, 2]
    assert chat.engine.document_ids() == ["a", "b", "c"]
    store.delete(["b", "unknown"])
    assert kept(chat, chunks) == [0, 2]
    names = store.add_documents([Document(page_content=chunks[3])])
    assert kept(chat, chunks) == [0, 2, 3]
    assert chat.engine.document_ids() == sorted(["a", "c", *names])
    assert {d.id for d in store.kv_documents()} == {"a", "c", *names}


async def test_kv_comes_and_goes_in_an_event_loop(store, chat, chunks):
    await store.aadd_documents([Document(page_content=c, id=str(i)) for i, c in enumerate(chunks[:3])])
    assert kept(chat, chunks) == [0, 1, 2]
    await store.adelete(["1"])
    assert kept(chat, chunks) == [0, 2]


def test_an_upsert_drops_the_kv_of_the_old_text(store, chat, chunks):
    store.add_texts(chunks[:2], ids=["a", "b"])
    store.add_texts([chunks[2], chunks[1]], ids=["a", "b"])
    assert kept(chat, chunks) == [1, 2]
    store.add_texts(["short"], ids=["b"])
    assert kept(chat, chunks) == [2]
    store.delete(["a", "b"])
    assert kept(chat, chunks) == []


def test_an_upsert_of_the_same_text_computes_nothing(store, chunks, monkeypatch):
    store.add_texts(chunks[:2], ids=["a", "b"])
    writes = noted(monkeypatch, TieredStore, "put")
    store.add_texts(chunks[:2], ids=["a", "b"])
    assert writes == []


def test_two_ids_of_one_text_share_its_kv(store, chat, chunks):
    store.add_texts([chunks[0], chunks[0]], ids=["a", "b"])
    store.delete(["a"])
    assert kept(chat, chunks) == [0]
    store.add_texts([chunks[1]], ids=["b"])
    assert kept(chat, chunks) == [1]


def test_of_equal_ids_the_last_text_stays(store, chat, chunks):
    store.add_texts(chunks[:2], ids=["a", "a"])
    assert [d.page_content for d in store.get_by_ids(["a"])] == [chunks[1]]
    assert kept(chat, chunks) == [1]


def test_deleting_everything(chat, embedding, chunks):
    store = KVRagVectorStore.from_texts(chunks[:2], embedding, llm=chat)
    store.delete()
    assert (kept(chat, chunks), store.kv_documents()) == ([], [])
    other = KVRagVectorStore(InMemoryVectorStore(embedding), llm=chat)
    other.add_texts(chunks[:2])
    other.delete()  # which InMemoryVectorStore takes for nothing
    assert (kept(chat, chunks), len(other.kv_documents())) == ([0, 1], 2)


def test_namespaces_are_apart(chat, embedding, chunks):
    store = KVRagVectorStore.from_texts(chunks[:1], embedding, llm=chat, namespace="tenant", ids=["a"])
    assert kept(chat, chunks) == []
    assert chat.explain(chunks[0], namespace="tenant").hits == 1
    store.delete(["a"])
    assert chat.explain(chunks[0], namespace="tenant").hits == 0


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["own", "wrapped"])
def test_stores_of_one_namespace_have_collections(chat, embedding, chunks, is_wrapped):
    def make(**options):
        inner: dict[str, Any] = {"inner": InMemoryVectorStore(embedding)} if is_wrapped else {"embedding": embedding}
        return KVRagVectorStore(**inner, llm=chat, **options)

    manuals, letters = make(collection="manuals", retention=Retention(60)), make(collection="letters")
    (named,) = manuals.add_texts(chunks[:1])  # by an id that nobody chose
    manuals.add_texts(chunks[1:2], ids=["a"])
    letters.add_texts(chunks[2:3], ids=["a"])
    assert set(chat.engine.document_ids()) == {f"manuals/{named}", "manuals/a", "letters/a"}
    index, space = chat.engine.store.catalog, chat.engine.store.names.namespace(chat.engine.namespace)
    (key,) = index.document_keys(space, "manuals/a")
    told = chat.engine.store.retention(key)
    assert told is not None
    assert told.priority == 60
    manuals.delete(["a"])
    assert kept(chat, chunks) == [0, 2]
    manuals.delete([named])
    assert chat.engine.document_ids() == ["letters/a"]
    with pytest.raises(InputError, match="collection is"):
        make(collection="/")


@pytest.mark.parametrize("cleanup", ["full", "incremental"])
def test_index_keeps_kv_in_step(store, chat, chunks, cleanup):
    records = InMemoryRecordManager("test")
    records.create_schema()

    def run(*numbers):
        documents = [Document(page_content=chunks[n], metadata={"source": f"s{n % 2}"}) for n in numbers]
        return dict(index(documents, records, store, cleanup=cleanup, source_id_key="source", key_encoder="sha256"))

    assert run(0, 1, 2)["num_added"] == 3
    assert kept(chat, chunks) == [0, 1, 2]
    assert run(0, 1, 2)["num_skipped"] == 3
    changed = run(0, 3)  # of source s0, 2 is gone; of s1, 3 stands for 1
    assert (changed["num_added"], changed["num_deleted"]) == (1, 2)
    assert kept(chat, chunks) == [0, 3]
    assert len(chat.engine.document_ids()) == 2
    if cleanup == "full":
        assert run()["num_deleted"] == 2
        assert (kept(chat, chunks), chat.engine.document_ids()) == ([], [])


async def test_aindex_shares_the_kv_of_one_text_in_two_sources(store, chat, chunks):
    records = InMemoryRecordManager("test")
    await records.acreate_schema()

    async def run(*sources):
        documents = [Document(page_content=chunks[0], metadata={"source": source}) for source in sources]
        await aindex(documents, records, store, cleanup="full", source_id_key="source", key_encoder="sha256")

    await run("x", "y")
    assert len(chat.engine.document_ids()) == 2
    await run("y")
    assert (kept(chat, chunks), len(chat.engine.document_ids())) == ([0], 1)
    await run()
    assert kept(chat, chunks) == []


def test_a_fault_of_kv_does_not_lose_documents(store, chat, chunks, monkeypatch):
    monkeypatch.setattr(chat.engine, "precompute", raising(StoreError, "the disk is full"))
    with pytest.warns(UserWarning, match="the disk is full"):
        store.add_texts(chunks[:2], ids=["a", "b"])
    assert len(store.get_by_ids(["a", "b"])) == 2
    strict = KVRagVectorStore(store.inner, llm=chat, on_error="raise")
    with pytest.raises(StoreError, match="the disk is full"):
        strict.add_texts(chunks[:1], ids=["c"])


def test_what_was_there_before_is_precomputed_on_demand(chat, embedding, chunks):
    inner = InMemoryVectorStore(embedding)
    inner.add_texts(chunks[:2], ids=["a", "b"])
    store = KVRagVectorStore(inner, llm=chat)
    assert chat.precompute_kv(store).stored == 2
    assert sorted(chat.engine.document_ids()) == ["a", "b"]
    assert chat.sync_kv(store).removed == 0


def test_which_models_are_taken(embedding, chat):
    assert KVRagVectorStore(embedding=embedding).add_texts(["no KV"])
    assert KVRagVectorStore(embedding=embedding, llm=chat.engine)
    assert KVRagVectorStore(embedding=embedding, llm=chat.bind(mode="full"))
    with pytest.raises(ConfigError, match="FakeListLLM; pass a KVRagEngine, ChatKVRag or KVRagLLM"):
        KVRagVectorStore(embedding=embedding, llm=FakeListLLM(responses=["x"]))
    with pytest.raises(ConfigError, match="either"):
        KVRagVectorStore()
    with pytest.raises(ConfigError, match="DeterministicFakeEmbedding"):
        KVRagVectorStore(embedding, llm=chat)
