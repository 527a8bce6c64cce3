"""KVRagVectorStore: LangChain's contract, and KV in step where LangChain has ways of its own.

Any sequence of changes is tested in tests/engine/test_kv_in_step.py.
"""

import copy
import inspect
import os
import re
import uuid
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
from kit import kept, noted, raising
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.language_models import FakeListLLM
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import (
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
    vectorstores,
)
from texts import make_chunks

from kvrag import ConfigError, InputError, Retention, StoreError
from langchain_kvrag import ChatKVRag, KVRagVectorStore


class Normalised(Embeddings):
    """Unit vectors, for the inner product."""

    def __init__(self, inner: Embeddings) -> None:
        self.inner = inner

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [
            (np.array(v) / np.linalg.norm(v)).tolist() for v in self.inner.embed_documents(texts)
        ]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class FirstWord(Embeddings):
    """Every text is where its first word is: the suites' documents are made long enough to have KV."""

    inner = DeterministicFakeEmbedding(size=6)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.inner.embed_documents([text.split(maxsplit=1)[0] for text in texts])

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def long_document(page_content: str, **options: Any) -> Document:
    return Document(
        page_content=f"{page_content} {make_chunks(1, seed=len(page_content))[0]}", **options
    )


def chroma(embeddings: Embeddings) -> VectorStore:
    made = pytest.importorskip("langchain_chroma").Chroma("kvrag", embeddings)
    made.reset_collection()  # clients in memory share one
    return made


def qdrant_models() -> Any:
    return pytest.importorskip("qdrant_client").models


def qdrant(embeddings: Embeddings) -> VectorStore:
    module, models = pytest.importorskip("langchain_qdrant"), qdrant_models()
    client = pytest.importorskip("qdrant_client").QdrantClient(":memory:")
    client.create_collection("kvrag", models.VectorParams(size=6, distance=models.Distance.COSINE))
    return module.QdrantVectorStore(client, "kvrag", embeddings)


OTHERS: dict[str, Callable[[Embeddings], VectorStore]] = {
    "InMemoryVectorStore": InMemoryVectorStore,
    "Chroma": chroma,
    "Qdrant": qdrant,
}
OWN: dict[str, dict[str, Any]] = {"own FAISS": {}, "own FAISS, inner product": {"metric": "ip"}}
BARE = [f"{name}, bare" for name in OTHERS] if os.environ.get("KVRAG_BARE_STORES") else []
"""For the table of `make suites`: what these stores fail by themselves."""


@pytest.fixture(scope="module")
def kept_llm(tiny_dir):
    return ChatKVRag(model=tiny_dir, context=None)


def make_store(name: str, llm: Any = None, **options: Any) -> VectorStore:
    embeddings = FirstWord()
    if name in OWN:
        mine = Normalised(embeddings) if OWN[name] else embeddings
        return KVRagVectorStore(embedding=mine, llm=llm, **OWN[name], **options)
    inner = OTHERS[name.removesuffix(", bare")](embeddings)
    return inner if name in BARE else KVRagVectorStore(inner, llm=llm, **options)


class TestStores(VectorStoreIntegrationTests):
    @pytest.fixture(params=[*OWN, *OTHERS, *BARE])
    def vectorstore(self, request, kept_llm, monkeypatch):
        """A store whose KV is exactly that of the documents in it, whatever a test did."""
        if request.param.startswith("Qdrant") and re.search(
            r"documents|get_by_ids(?!_missing)", request.node.name
        ):
            request.applymarker(
                pytest.mark.xfail(
                    reason="Qdrant takes UUIDs, and the suite's ids are none", strict=True
                )
            )
        monkeypatch.setattr(vectorstores, "Document", long_document)
        namespace = request.node.nodeid
        store = make_store(request.param, kept_llm, namespace=namespace)
        yield store
        if isinstance(store, KVRagVectorStore):
            held = {str(d.id): d.page_content for d in store.kv_documents()}
            assert kept_llm.engine.document_ids(namespace=namespace) == sorted(held)
            for word in ("foo", "bar", "baz", "new foo"):
                text = long_document(word).page_content
                assert kept_llm.explain(text, namespace=namespace).hits == (text in held.values())


class TestRetrievers(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True, params=[*OWN, *OTHERS])
    def _store(self, request):
        self._store = make_store(request.param)
        self._store.add_texts([f"{word} and more" for word in ("foo", "bar", "baz", "boo")])

    @property
    def retriever_constructor(self):
        return lambda k=2: self._store.as_retriever(search_kwargs={"k": k})

    @property
    def retriever_query_example(self) -> str:
        return "foo"


@pytest.fixture(params=["own", "wrapped"])
def store(request, chat, embedding):
    if request.param == "own":
        return KVRagVectorStore(embedding=embedding, llm=chat)
    return KVRagVectorStore(InMemoryVectorStore(embedding), llm=chat)


def kept_here(llm, namespace, texts):
    return [
        i for i, text in enumerate(texts) if llm.explain(f"{text}\n\n?", namespace=namespace).hits
    ]


# -- over stores of other packages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_kv_is_in_step_over_a_store_of_another_package(name, kept_llm, chunks, request):
    namespace = request.node.nodeid
    store = make_store(name, kept_llm, namespace=namespace)
    named = store.add_texts(chunks[:3])  # Qdrant lists ids otherwise than it returns them
    listed = {d.page_content: d.id for d in store.kv_documents()}
    assert kept_llm.engine.document_ids(namespace=namespace) == sorted(listed.values())
    store.delete([named[0]])
    store.delete([listed[chunks[1]]])
    assert kept_here(kept_llm, namespace, chunks) == [2]
    assert kept_llm.sync_kv(store, namespace=namespace).removed == 0
    chosen = str(uuid.uuid4())
    for text in (chunks[3], chunks[4]):  # an upsert
        store.add_texts([text], ids=[chosen])
    assert kept_here(kept_llm, namespace, chunks) == [2, 4]


FILTERS: dict[str, Callable[[], Any]] = {
    "InMemoryVectorStore": lambda: lambda document: document.metadata["n"] == 1,
    "Chroma": lambda: {"n": 1},
    "Qdrant": lambda: qdrant_models().Filter(
        must=[
            qdrant_models().FieldCondition(
                key="metadata.n", match=qdrant_models().MatchValue(value=1)
            )
        ]
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_searches_of_another_store_are_there(name):
    store = make_store(name)
    inner, metadatas = store.inner, [{"n": n} for n in range(4)]
    store.add_texts([f"text{n}" for n in range(4)], metadatas)
    query, vector = "text1", FirstWord().embed_query("text1")
    calls: list[tuple[str, Any, dict[str, Any]]] = [
        ("similarity_search", query, {"k": 2}),
        ("similarity_search", query, {"filter": FILTERS[name]()}),
        ("search", query, {"search_type": "mmr", "k": 2}),
        ("similarity_search_with_score", query, {"k": 3}),
        ("similarity_search_with_relevance_scores", query, {"k": 4}),
        ("similarity_search_by_vector", vector, {"k": 2}),
        ("max_marginal_relevance_search", query, {"k": 2, "fetch_k": 4}),
        ("max_marginal_relevance_search_by_vector", vector, {"k": 2}),
    ]
    kinds: dict[str, dict[str, Any]] = {"similarity": {}, "mmr": {}}
    if name == "InMemoryVectorStore":  # which has no relevance scores
        calls.pop(4)
    else:
        kinds["similarity_score_threshold"] = {"score_threshold": 0.9}
    for method, given, options in calls:
        found, expected = (getattr(each, method)(given, **options) for each in (store, inner))
        if "score" in method:  # which Qdrant computes in any order
            assert [score for _, score in found] == pytest.approx(
                [score for _, score in expected], abs=1e-5
            )
            found, expected = ([document for document, _ in each] for each in (found, expected))
        assert found == expected != []
    assert [d.metadata["n"] for d in store.similarity_search(query, filter=FILTERS[name]())] == [1]
    for kind, options in kinds.items():
        found = store.as_retriever(search_type=kind, search_kwargs={"k": 2, **options}).invoke(
            query
        )
        assert found[0].page_content == query
    assert store.as_retriever().vectorstore is store  # documents that are added through it have KV


def test_what_only_another_store_has_is_there_but_for_changes_behind_the_back_of_kv(embedding):
    store = make_store("Chroma")
    store.add_texts(["text1"], ids=["a"])
    assert store.get(ids=["a"])["documents"] == ["text1"]
    assert store._collection.count() == 1
    assert [len(vector) for _, vector in store.similarity_search_with_vectors("text1")] == [6]
    for name in ("update_document", "delete_collection", "reset_collection", "add_images"):
        with pytest.raises(
            AttributeError, match=f"{name} of Chroma .* and not their KV; use .*sync_kv"
        ):
            getattr(store, name)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = store.absent
    own = copy.copy(KVRagVectorStore(embedding=embedding))
    assert own.embeddings is embedding
    assert inspect.signature(own.asimilarity_search) == inspect.signature(
        VectorStore.asimilarity_search
    ).replace(
        parameters=list(inspect.signature(VectorStore.asimilarity_search).parameters.values())[1:]
    )


# -- KV in step ----------------------------------------------------------------------------------------------------------


def test_an_upsert_of_the_same_text_computes_nothing(store, chat, chunks, monkeypatch):
    store.add_texts(chunks[:2], ids=["a", "b"])
    writes = noted(monkeypatch, chat.engine.store, "put_all")
    store.add_texts(chunks[:2], ids=["a", "b"])
    assert writes == []


def test_of_equal_ids_the_last_text_stays(store, chat, chunks):
    store.add_texts(chunks[:2], ids=["a", "a"])
    assert [d.page_content for d in store.get_by_ids(["a"])] == [chunks[1]]
    assert kept(chat, chunks) == [1]


def test_namespaces_are_apart(chat, embedding, chunks):
    store = KVRagVectorStore.from_texts(
        chunks[:1], embedding, llm=chat, namespace="tenant", ids=["a"]
    )
    assert kept(chat, chunks) == []
    assert chat.explain(chunks[0], namespace="tenant").hits == 1
    store.delete(["a"])
    assert chat.explain(chunks[0], namespace="tenant").hits == 0


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["own", "wrapped"])
def test_stores_of_one_namespace_have_collections(chat, embedding, chunks, is_wrapped):
    def make(**options):
        inner: dict[str, Any] = (
            {"inner": InMemoryVectorStore(embedding)} if is_wrapped else {"embedding": embedding}
        )
        return KVRagVectorStore(**inner, llm=chat, **options)

    manuals, letters = (
        make(collection="manuals", retention=Retention(60)),
        make(collection="letters"),
    )
    (named,) = manuals.add_texts(chunks[:1])  # by an id that nobody chose
    manuals.add_texts(chunks[1:2], ids=["a"])
    letters.add_texts(chunks[2:3], ids=["a"])
    assert set(chat.engine.document_ids()) == {f"manuals/{named}", "manuals/a", "letters/a"}
    index, space = (
        chat.engine.store.catalog,
        chat.engine.store.names.namespace(chat.engine.namespace),
    )
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
        documents = [
            Document(page_content=chunks[n], metadata={"source": f"s{n % 2}"}) for n in numbers
        ]
        return dict(
            index(
                documents,
                records,
                store,
                cleanup=cleanup,
                source_id_key="source",
                key_encoder="sha256",
            )
        )

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


@pytest.mark.parametrize("name", ["precompute", "store.catalog.document_texts"])
def test_a_fault_of_kv_does_not_lose_documents(store, chat, chunks, monkeypatch, name):
    *path, last = name.split(".")
    part = reduce(getattr, path, chat.engine)
    monkeypatch.setattr(part, last, raising(StoreError, "the disk is full"))
    with pytest.warns(UserWarning, match="the disk is full"):
        store.add_texts(chunks[:2], ids=["a", "b"])
    assert len(store.get_by_ids(["a", "b"])) == 2
    strict = KVRagVectorStore(store.inner, llm=chat, on_error="raise")
    with pytest.raises(StoreError, match="the disk is full"):
        strict.add_texts(chunks[:1], ids=["c"])


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
