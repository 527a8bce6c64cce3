"""The own FAISS index of KVRagVectorStore: searches, filters, files."""

import copy
import json
import pickle
import sys

import numpy as np
import pytest
from kit import kept
from langchain_core.documents import Document
from langchain_core.embeddings import FakeEmbeddings
from langchain_core.vectorstores import InMemoryVectorStore

from kvrag import ConfigError, InputError, MissingDependencyError, StoreError
from langchain_kvrag import KVRagVectorStore

# -- the own index -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(embedding):
    texts = [f"text {i}" for i in range(10)]
    metadatas = [{"n": i, "even": i % 2 == 0} for i in range(10)]
    return KVRagVectorStore.from_texts(
        texts, embedding, metadatas, ids=[f"id{i}" for i in range(10)]
    )


def test_searches(own, embedding):
    documents, scores = zip(*own.similarity_search_with_score("text 3", k=10), strict=True)
    assert documents[0].id == "id3"
    assert scores[0] == pytest.approx(0, abs=1e-4)
    assert list(scores) == sorted(scores)
    vectors = np.array(embedding.embed_documents([d.page_content for d in documents]))
    assert np.allclose(
        scores, ((vectors - np.array(embedding.embed_query("text 3"))) ** 2).sum(-1), atol=1e-3
    )
    assert own.similarity_search("text 3", k=0) == []
    assert len(own.similarity_search("text 3", k=99)) == 10
    assert own.similarity_search_by_vector(embedding.embed_query("text 4"), k=1)[0].id == "id4"
    relevant = own.similarity_search_with_relevance_scores("text 3", k=10)
    assert all(0 <= score <= 1 for _, score in relevant)
    assert relevant[0][1] == pytest.approx(1, abs=1e-3)
    assert (
        own.as_retriever(search_type="mmr", search_kwargs={"k": 3}).invoke("text 3")[0].id == "id3"
    )


SHARED = {"k": 3, "fetch_k": 9, "lambda_mult": 0.3, "filter": {"even": True}}


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize(
    ("kind", "least"),
    [("similarity", None), ("similarity", 0.5), ("mmr", None), ("similarity_score_threshold", 0.5)],
)
def test_retrievers_take_each_others_options(kind, least, metric, embedding):
    texts, metadatas = [f"text {i}" for i in range(10)], [{"even": i % 2 == 0} for i in range(10)]
    store = KVRagVectorStore.from_texts(texts, embedding, metadatas, metric=metric)
    options = SHARED if least is None else {**SHARED, "score_threshold": least}
    found = store.as_retriever(search_type=kind, search_kwargs=options).invoke("text 4")
    assert found
    assert all(document.metadata["even"] for document in found)
    if kind == "similarity" and least is not None:
        # In the metric's own units, as in other FAISS stores.
        scored = store.similarity_search_with_score("text 4", k=3, filter={"even": True})
        kept = [
            d.id for d, score in scored if (score <= least if metric == "l2" else score >= least)
        ]
        assert [document.id for document in found] == kept
    with pytest.raises(
        ConfigError, match="the search has no option 'fetchk'; did you mean 'fetch_k'"
    ):
        store.as_retriever(search_kwargs={"fetchk": 3}).invoke("text 4")


def test_filters_find_k_where_k_exist(own):
    def found(where, k=4):
        return {d.metadata["n"] for d in own.similarity_search("text 1", k=k, filter=where)}

    assert found({"n": 7}) == {7}
    assert found({"n": [2, 3]}) == {2, 3}
    assert found({"even": True}, k=5) == {0, 2, 4, 6, 8}
    assert found({"even": True, "n": [3, 4]}) == {4}
    assert found(lambda metadata: metadata["n"] > 7) == {8, 9}
    assert found({"absent": 1}) == set()
    retriever = own.as_retriever(
        search_type="mmr", search_kwargs={"k": 2, "filter": {"even": False}}
    )
    assert all(not d.metadata["even"] for d in retriever.invoke("text 1"))
    with pytest.raises(ConfigError, match="operators"):
        own.similarity_search("text 1", filter={"n": {"$gt": 3}})


def test_returned_documents_are_copies(own):
    own.similarity_search("text 1", k=1)[0].metadata["n"] = "changed"
    assert own.get_by_ids(["id1"])[0].metadata["n"] == 1


def test_saving_and_loading(own, embedding, tmp_path):
    own.delete(["id0", "id5"])
    own.save_local(tmp_path / "store")
    names = sorted(p.name for p in (tmp_path / "store").iterdir())
    assert names == ["documents.json", "index.faiss"]
    again = KVRagVectorStore.load_local(tmp_path / "store", embedding)
    assert again.kv_documents() == own.kv_documents()
    for ask in ("text 1", "text 7"):
        first, second = (s.similarity_search_with_score(ask, k=8) for s in (own, again))
        assert first == second
    again.add_texts(["text 1 changed"], ids=["id1"])
    assert len(again.kv_documents()) == 8
    empty = KVRagVectorStore(embedding=embedding)
    empty.save_local(tmp_path / "empty")
    assert KVRagVectorStore.load_local(tmp_path / "empty", embedding).similarity_search("x") == []
    with pytest.raises(ConfigError, match="metric can't be chosen for a store that exists"):
        KVRagVectorStore.load_local(tmp_path / "empty", embedding, metric="ip")


def test_copies_share_the_index_and_pickles_refuse_it(own):
    retriever = own.as_retriever(search_kwargs={"k": 1})
    copied = copy.deepcopy(retriever)
    assert copy.copy(own.inner) is copied.vectorstore.inner is own.inner
    own.add_texts(["late"], ids=["late"])
    assert copied.invoke("late")[0].id == "late"
    with pytest.raises(ConfigError, match="use save_local and load_local"):
        pickle.dumps(retriever)


def test_loading_keeps_kv_in_step(chat, embedding, chunks, tmp_path):
    KVRagVectorStore.from_texts(chunks[:2], embedding, ids=["a", "b"], llm=chat).save_local(
        tmp_path
    )
    again = KVRagVectorStore.load_local(tmp_path, embedding, llm=chat)
    assert kept(chat, chunks) == [0, 1]
    again.delete(["a"])
    assert kept(chat, chunks) == [1]


def test_unusable_files_are_refused(own, embedding, tmp_path):
    with pytest.raises(StoreError, match="no usable vector store"):
        KVRagVectorStore.load_local(tmp_path / "nothing", embedding)
    own.save_local(tmp_path)
    rows = json.loads((tmp_path / "documents.json").read_text())
    rows["documents"].pop()
    (tmp_path / "documents.json").write_text(json.dumps(rows))
    with pytest.raises(StoreError, match="belong together"):
        KVRagVectorStore.load_local(tmp_path, embedding)
    (tmp_path / "documents.json").write_text(json.dumps({**rows, "format": 99}))
    with pytest.raises(StoreError, match="newer kvrag"):
        KVRagVectorStore.load_local(tmp_path, embedding)
    (tmp_path / "index.faiss").write_bytes(b"broken")
    (tmp_path / "documents.json").write_text(json.dumps(rows))
    with pytest.raises(StoreError):
        KVRagVectorStore.load_local(tmp_path, embedding)


def test_metadata_that_json_can_not_hold(embedding, tmp_path):
    store = KVRagVectorStore.from_texts(["a"], embedding, [{"x": object()}])
    with pytest.raises(InputError, match="metadata"):
        store.save_local(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="InMemoryVectorStore"):
        KVRagVectorStore(InMemoryVectorStore(embedding)).save_local(tmp_path)


def test_vectors_of_another_model_change_nothing(own):
    own.inner._embedding = FakeEmbeddings(size=3)
    with pytest.raises(InputError, match=r"3 dimensions.* has 8"):
        own.add_texts(["new"], ids=["id1"])
    with pytest.raises(InputError, match="dimensions"):
        own.similarity_search("text 1")
    assert own.get_by_ids(["id1"])[0].page_content == "text 1"


def test_ids_that_do_not_fit(own):
    with pytest.raises(InputError, match="2 documents came with 1 ids"):
        own.add_documents([Document(page_content="a"), Document(page_content="b")], ids=["x"])


def test_a_missing_faiss_is_named(embedding, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match=r"'faiss'.*pip install 'kvrag\[langchain\]'"):
        KVRagVectorStore(embedding=embedding)
