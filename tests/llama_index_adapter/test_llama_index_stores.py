"""KV comes and goes with the documents of an index, and through ingestion pipelines.

Any sequence of changes of a vector store is tested in tests/engine/test_kv_in_step.py.
"""

import asyncio
import copy
import os
import pickle
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Forwards, raising
from llama_index.core import (
    Document,
    MockEmbedding,
    Settings,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    IndexNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index_kit import (
    Listing,
    chunks,
    documents,
    hit_texts,
    make_llm,
    record_prompts,
    settings,
)

from kvrag import ConfigError, InputError, KVRagEngine, Retention, StoreError
from kvrag.identity.fingerprint import namespace_digest
from kvrag.testing.models import tiny_model
from llama_index.llms.kvrag import KVPrecompute, KVRagLLM
from llama_index.vector_stores.kvrag import KVRagVectorStore

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")


@pytest.fixture
def store(llm):
    return KVRagVectorStore()


def node(text: str, *, id_: str, document: str | None = None, **metadata: Any) -> TextNode:
    links = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)} if document else {}
    return TextNode(
        text=text, id_=id_, relationships=links, metadata=metadata, embedding=[0.1, 0.2, 0.3, 0.4]
    )


def kept(llm: KVRagLLM, texts: list[str], **options: Any) -> list[bool]:
    """Which of the texts have KV, as a prompt finds it."""
    return [llm.explain(text, **options).hits == 1 for text in texts]


def in_step(llm: KVRagLLM, store: KVRagVectorStore) -> set[str]:
    """Check that documents with KV, table and vector store are the same; return their ids."""
    ids = set(llm.engine.document_ids())
    assert ids == set(store.inner.data.embedding_dict)
    assert ids == set(store._table().nodes(namespace_digest(llm.namespace)))
    return ids


class ForgetfulStore(Listing):
    """A store that can delete by a filter and tells nobody what."""

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[Any]:
        raise NotImplementedError

    def delete_nodes(self, node_ids: Any = None, filters: Any = None, **kwargs: Any) -> None:
        self.rows.clear()


# -- an index over the vector store ------------------------------------------------------------------------------------


def test_an_index_keeps_kv_in_step(llm, store, monkeypatch):
    docs = documents(4)
    index = VectorStoreIndex.from_documents(
        docs, storage_context=StorageContext.from_defaults(vector_store=store)
    )
    assert len(in_step(llm, store)) == 4

    late = Document(text=chunks(1, seed=9)[0], id_="late")
    index.insert(late)
    assert len(in_step(llm, store)) == 5

    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert len(in_step(llm, store)) == 4

    changed = Document(text=chunks(1, seed=8)[0], id_="doc-1")
    assert index.refresh_ref_docs([changed, docs[2]]) == [True, False]
    assert len(in_step(llm, store)) == 4
    assert kept(llm, [d.text for d in (*docs, late, changed)]) == [False] * 2 + [True] * 4

    seen = record_prompts(monkeypatch)
    index.as_query_engine(similarity_top_k=4).query("Who?")
    assert hit_texts(llm.engine, seen) == {d.text for d in (docs[2], docs[3], late, changed)}


async def test_an_index_keeps_kv_in_step_asynchronously(llm, store):
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex([], storage_context=context)
    texts = chunks(3)
    await index.ainsert_nodes([TextNode(text=text, id_=f"n{i}") for i, text in enumerate(texts)])
    assert in_step(llm, store) == {"n0", "n1", "n2"}
    await index.adelete_nodes(["n1"])
    assert in_step(llm, store) == {"n0", "n2"}
    assert len(await index.as_retriever(similarity_top_k=2).aretrieve("Who?")) == 2
    await store.aclear()
    assert in_step(llm, store) == set()
    assert kept(llm, texts) == [False] * 3


def test_deletion_by_document_works_after_a_restart(tiny_dir, tmp_path):
    def open_llm():
        return make_llm(tiny_dir, tmp_path / "kv")

    docs = documents(2)
    with settings():
        llm = Settings.llm = open_llm()
        context = StorageContext.from_defaults(vector_store=KVRagVectorStore())
        VectorStoreIndex.from_documents(docs, storage_context=context)
        context.persist(str(tmp_path / "index"))
        llm.engine.close()

        llm = Settings.llm = open_llm()
        store = KVRagVectorStore.from_persist_dir(str(tmp_path / "index"))
        context = StorageContext.from_defaults(
            vector_store=store, persist_dir=str(tmp_path / "index")
        )
        index = load_index_from_storage(context)
        assert kept(llm, [d.text for d in docs]) == [True, True]
        index.delete_ref_doc("doc-0")
        assert kept(llm, [d.text for d in docs]) == [False, True]
        assert len(in_step(llm, store)) == 1
        llm.engine.close()


def test_the_table_is_private(llm, store):
    store.add([node(chunks(1)[0], id_="a", document="d")])
    path = Path(llm.kv_dir, "llama_index", "refs.sqlite")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700


# -- the vector store itself -------------------------------------------------------------------------------------------


def test_copies_of_a_store_know_its_documents(llm, store):
    texts = chunks(2)
    store.add([node(texts[0], id_="a", document="d"), node(texts[1], id_="b", document="e")])
    copy.deepcopy(store).delete("d")
    pickle.loads(pickle.dumps(store)).delete("e")
    assert kept(llm, texts) == [False, False]


def test_a_node_that_comes_back_unchanged_is_not_computed_again(llm, store, monkeypatch):
    same = node(chunks(1)[0], id_="a", document="d")
    store.add([same])
    stored = llm.engine.store.stats()["disk"].chunks
    monkeypatch.setattr(
        KVRagEngine, "delete", lambda *args, **kwargs: pytest.fail("KV was deleted")
    )
    store.add([same])
    assert llm.engine.store.stats()["disk"].chunks == stored


def test_metadata_is_not_part_of_the_kv_unless_asked_for(llm, store):
    text, other = chunks(2)
    store.add([node(text, id_="a", file_path="x.txt")])
    assert kept(llm, [text]) == [True]
    KVRagVectorStore(content="llm").add([node(other, id_="b", file_path="x.txt")])
    assert kept(llm, [other, f"file_path: x.txt\n\n{other}"]) == [False, True]


def test_any_vector_store_can_be_wrapped(llm):
    store = KVRagVectorStore(Listing())
    texts = chunks(3)
    index = VectorStoreIndex([], storage_context=StorageContext.from_defaults(vector_store=store))
    index.insert_nodes([node(t, id_=f"n{i}", document=f"d{i}", row=i) for i, t in enumerate(texts)])
    assert store.stores_text
    assert store.client == "the client"
    assert store.rows is store.inner.rows  # what the wrapper doesn't have
    with pytest.raises(AttributeError, match="no attribute 'columns'"):
        store.columns  # noqa: B018
    assert {n.node_id for n in store.get_nodes()} == {"n0", "n1", "n2"}
    assert len(index.as_retriever(similarity_top_k=3).retrieve("Who?")) == 3
    store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="row", value=1)]))
    asyncio.run(store.adelete("d2"))
    assert kept(llm, texts) == [True, False, False]
    assert llm.sync_kv(store).removed == 0


def test_a_store_that_does_not_tell_what_it_deletes_is_reported(llm):
    store = KVRagVectorStore(ForgetfulStore())
    store.add([node(chunks(1)[0], id_="a", colour="red")])
    with pytest.warns(UserWarning, match="can't list the nodes that the filters match"):
        store.delete_nodes(
            filters=MetadataFilters(filters=[MetadataFilter(key="colour", value="red")])
        )


def test_namespaces_are_kept_apart(llm):
    mine, yours = KVRagVectorStore(namespace="mine"), KVRagVectorStore(namespace="yours")
    text = chunks(1)[0]
    mine.add([node(text, id_="a", document="d")])
    yours.add([node(text, id_="a", document="d")])
    yours.clear()
    assert kept(llm, [text], namespace="mine") == [True]
    assert kept(llm, [text], namespace="yours") == [False]
    assert kept(llm, [text]) == [False]


def worth(llm: KVRagLLM, doc_id: str) -> int:
    engine = llm.engine
    space = engine.store.names.namespace(engine.namespace)
    (key,) = engine.store.catalog.document_keys(space, doc_id)
    return (engine.store.retention(key) or Retention()).priority


def test_collections_are_kept_apart(llm):
    manuals = KVRagVectorStore(Listing(), collection="manuals", retention=Retention(60))
    letters, plain = KVRagVectorStore(collection="letters/"), KVRagVectorStore()
    texts = chunks(4)
    for store, text in zip((manuals, letters, plain), texts, strict=False):
        store.add([node(text, id_="a", document="d")])
    assert llm.engine.document_ids() == ["a", "letters/a", "manuals/a"]
    assert (worth(llm, "manuals/a"), worth(llm, "letters/a")) == (60, 35)
    manuals.add([node(texts[3], id_="a", document="d")])  # another text by the same id
    assert kept(llm, texts) == [False, True, True, True]
    plain.clear()
    manuals.delete("d")
    assert llm.engine.document_ids() == ["letters/a"]
    KVRagVectorStore(letters.inner, collection="letters").delete("d")  # as after a restart
    assert kept(llm, texts) == [False] * 4
    for cls in (KVRagVectorStore, KVPrecompute):
        with pytest.raises(InputError, match="collection is"):
            cls(collection="/")


def test_a_text_of_a_collection_that_changed_leaves_no_old_kv_whatever_fails(llm, monkeypatch):
    store, texts = KVRagVectorStore(collection="manuals"), chunks(2)
    store.add([node(texts[0], id_="a")])
    monkeypatch.setattr(KVRagEngine, "precompute", raising(StoreError, "the disk is full"))
    with pytest.warns(UserWarning, match="the disk is full"):
        store.add([node(texts[1], id_="a")])
    assert (kept(llm, texts), llm.engine.document_ids()) == ([False, False], [])


def test_the_transformation_passes_collection_and_worth_on(llm):
    step = KVPrecompute(collection="manuals", retention=Retention(60))
    step([node(chunks(1)[0], id_="a")])
    assert llm.engine.document_ids() == ["manuals/a"]
    assert worth(llm, "manuals/a") == 60
    assert (
        step.to_dict() != KVPrecompute(collection="manuals").to_dict() != KVPrecompute().to_dict()
    )
    assert KVPrecompute.from_dict(
        KVPrecompute(retention=Retention(60, 5.0)).model_dump()
    ).retention == Retention(60, 5.0)


def test_an_engine_will_do_as_llm(engine):
    store = KVRagVectorStore(llm=engine)
    store.add([node(chunks(1)[0], id_="a", document="d")])
    assert engine.document_ids() == ["a"]
    store.delete("d")
    assert engine.document_ids() == []


@pytest.mark.parametrize(
    ("kind", "names"), [(KVRagEngine, ("precompute", "delete")), (KVRagLLM, ("open_engine",))]
)
def test_faults_of_kv_are_warnings_unless_asked_for(llm, monkeypatch, kind, names):
    for name in names:
        monkeypatch.setattr(kind, name, raising(StoreError, "the disk is full"))
    store = KVRagVectorStore()
    with pytest.warns(UserWarning, match=r"was not precomputed .* the disk is full"):
        store.add([node(chunks(1)[0], id_="a", document="d")])
    with pytest.warns(UserWarning, match="could not be deleted: the disk is full"):
        store.delete("d")
    assert not store.inner.data.embedding_dict
    strict = KVRagVectorStore(on_error="raise")
    with pytest.raises(StoreError, match="the disk is full"):
        strict.add([node(chunks(1)[0], id_="a", document="d")])


def test_a_damaged_table_costs_no_answer(llm, store):
    path = Path(llm.kv_dir, "llama_index", "refs.sqlite")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a database" * 100)
    text, other = chunks(2)
    store.add([node(text, id_="a", document="d")])
    assert kept(llm, [text]) == [True]
    store.delete("d")
    assert kept(llm, [text]) == [False]
    store.add([node(other, id_="b", document="e")])
    assert in_step(llm, store) == {"b"}  # a new table has taken its place


def test_wrong_parts_are_refused(llm):
    with pytest.raises(ConfigError, match="inner is of type str"):
        KVRagVectorStore("faiss")
    with pytest.raises(ConfigError, match="can't use KV"):
        KVRagVectorStore(llm=MockLLM())
    with pytest.raises(ConfigError, match="no option 'name_space'"):
        KVRagVectorStore(name_space="x")


# -- ingestion pipelines -----------------------------------------------------------------------------------------------


def test_precompute_kv_as_the_last_transformation(llm):
    docs = documents(3)
    nodes = IngestionPipeline(transformations=[SentenceSplitter(), KVPrecompute()]).run(
        documents=docs
    )
    assert [n.text for n in nodes] == [d.text for d in docs]
    assert all(n.metadata == {} for n in nodes)
    assert set(llm.engine.document_ids()) == {n.node_id for n in nodes}
    index = VectorStoreIndex.from_documents(
        documents(1, seed=5),
        transformations=[SentenceSplitter(), KVPrecompute(show_progress=False)],
    )
    index.insert(documents(1, seed=6)[0])
    assert kept(llm, chunks(1, seed=5) + chunks(1, seed=6)) == [True, True]


async def test_precompute_kv_in_an_asynchronous_pipeline(llm):
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(), KVPrecompute(llm)])
    assert len(await pipeline.arun(documents=documents(2))) == 2
    assert kept(llm, chunks(2)) == [True, True]


def test_a_pipeline_with_upserts_keeps_the_vector_store_in_step(llm, store):
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), MockEmbedding(embed_dim=4)],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    docs = documents(3)
    pipeline.run(documents=docs)
    assert len(in_step(llm, store)) == 3
    changed = Document(text=chunks(1, seed=4)[0], id_="doc-1")
    pipeline.run(documents=[docs[0], changed])
    assert len(in_step(llm, store)) == 2
    assert kept(llm, [d.text for d in (*docs, changed)]) == [True, False, False, True]


def test_a_cache_of_a_pipeline_knows_whom_the_kv_is_for(llm, monkeypatch):
    cache, docs = IngestionCache(), documents(2)

    def ingest(**options):
        IngestionPipeline(
            transformations=[SentenceSplitter(), KVPrecompute(**options)], cache=cache
        ).run(documents=docs)

    ingest()
    llm.engine.delete(llm.engine.document_ids())
    ingest()  # the cache has seen all of it, and the KV is gone
    assert kept(llm, chunks(2)) == [True, True]
    forwards = Forwards(monkeypatch)
    ingest()
    assert forwards.count == 0
    ingest(namespace="other")
    assert kept(llm, chunks(2), namespace="other") == [True, True]
    ingest(prefix="Notes: ")
    assert kept(llm, chunks(2)) == [True, True]


def test_a_cache_of_a_pipeline_does_not_hit_for_another_model(tmp_path, tokenizer):
    """Of the same name, in the same store: other weights, ids, template, prefix or context."""

    def description(model, tokenizer=tokenizer, **options):
        llm = KVRagLLM.from_pretrained_model(model, tokenizer, kv_dir=tmp_path, **options)
        return str(KVPrecompute(llm).to_dict()["kv_of"])

    model = tiny_model()
    found = [description(model)]
    assert description(tiny_model()) == found[0], "the same weights"
    found.append(description(tiny_model(seed=1)))
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["ledger"])
    found.append(description(model, other))
    found.append(description(model, context=None))
    found.append(description(model, prefix="Notes: "))
    for mark in ("# ", "* "):
        lines = lambda asked, mark=mark: "\n".join(f"{mark}{each.content}" for each in asked)  # noqa: E731
        found.append(description(model, messages_to_prompt=lines))
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    found.append(description(model))
    assert len(set(found)) == len(found)


def test_an_ingestion_survives_a_model_that_can_not_be_loaded(tmp_path, tiny_dir):
    folder = shutil.copytree(tiny_dir, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"damaged")
    llm = KVRagLLM(model=str(folder), kv_dir=tmp_path / "kv")
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), KVPrecompute(llm)], cache=IngestionCache()
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"not .*precomputed"):
            assert len(pipeline.run(documents=documents(2))) == 2


def test_making_a_component_opens_no_engine(tmp_path):
    """Documents are deleted even where the LLM can't be opened."""
    llm = KVRagLLM(str(tmp_path / "missing"), kv_dir=str(tmp_path / "kv"))
    KVPrecompute(llm)
    inner = SimpleVectorStore()
    inner.add([TextNode(text="Text.", id_="a", embedding=[1.0])])
    with pytest.warns(UserWarning, match="missing"):
        KVRagVectorStore(inner, llm=llm, namespace="n").delete_nodes(["a"])
    assert inner.data.embedding_dict == {}


class Counting(KVPrecompute):
    extra: int = 3


def test_a_component_comes_back_from_its_description(llm):
    made = KVPrecompute(llm, batch_size=2)
    for again in (
        KVPrecompute.model_validate(made.model_dump()),
        KVPrecompute.model_validate_json(made.model_dump_json()),
    ):
        assert again.batch_size == 2
    assert Counting(llm, extra=5).extra == 5
    with pytest.raises(ConfigError, match=r"KVPrecompute has no option 'batch_sise'.*batch_size"):
        KVPrecompute(llm, batch_sise=2)


def test_an_ingestion_survives_a_fault_of_kv(llm, monkeypatch):
    monkeypatch.setattr(KVRagEngine, "precompute", raising(RuntimeError, "no such kernel"))
    with pytest.warns(UserWarning, match=r"was not precomputed .* no such kernel"):
        nodes = IngestionPipeline(transformations=[SentenceSplitter(), KVPrecompute()]).run(
            documents=documents(2)
        )
    assert len(nodes) == 2
    with pytest.raises(RuntimeError, match="no such kernel"):
        KVPrecompute(on_error="raise")(nodes)


def test_worker_processes_are_refused(llm):
    with pytest.raises(ConfigError, match="can't be sent to worker processes"):
        pickle.dumps(KVPrecompute())


def test_an_llm_that_can_not_use_kv_is_refused(llm):
    with pytest.raises(ConfigError, match="can't use KV"):
        KVPrecompute(MockLLM())
    Settings._llm = None
    with pytest.raises(ConfigError, match="no LLM to precompute KV for"):
        KVPrecompute()(documents(1))
    Settings.llm = MockLLM()
    store = KVRagVectorStore()
    for add in (KVPrecompute(), store.add, lambda nodes: asyncio.run(store.async_add(nodes))):
        with pytest.raises(ConfigError, match="MockLLM, which can't use KV"):
            add([node("Text.", id_="a")])
    assert not store.inner.data.embedding_dict
    with pytest.raises(ConfigError, match="no option 'content_mode'"):
        KVPrecompute(content_mode="llm")


def test_an_index_can_be_precomputed_and_synchronised(llm):
    index = VectorStoreIndex.from_documents(documents(3))
    assert llm.sync_kv(index).added == 3
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert llm.sync_kv(index).removed == 1
    assert kept(llm, chunks(3)) == [False, True, True]
    assert llm.delete_kv(index) == 2


@pytest.mark.parametrize("cls", [VectorStoreIndex, SummaryIndex])
def test_a_document_that_only_the_document_store_has_is_not_the_indexs(llm, cls):
    shared = StorageContext.from_defaults()
    docs = documents(4)
    index = cls.from_documents(docs[:3], storage_context=shared)
    cls.from_documents(docs[3:], storage_context=shared)
    parent = node(chunks(5)[4], id_="parent", document="doc-1")
    shared.docstore.add_documents([parent])
    assert llm.sync_kv(index).added == 4
    index.delete_ref_doc("doc-0")
    assert llm.sync_kv(index).removed == 1
    assert kept(llm, chunks(5)) == [False, True, True, False, True]


def test_nodes_of_a_store_with_text_are_the_indexs_beside_those_of_its_docstore(llm):
    context = StorageContext.from_defaults(vector_store=Listing())
    parent = node(chunks(2)[1], id_="parent", document="doc-0")
    context.docstore.add_documents([*documents(1), parent])
    other = IndexNode(text=chunks(3)[2], id_="ix", index_id="i", embedding=[0.1] * 4)
    leaf = node(chunks(1)[0], id_="a", document="doc-0")
    index = VectorStoreIndex([leaf, other], storage_context=context)
    assert llm.sync_kv(index).added == 3
    assert llm.engine.document_ids() == ["a", "ix", "parent"]
    index.delete_nodes(["ix"])
    assert llm.sync_kv(index).removed == 1
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert llm.sync_kv(index).removed == 2


@pytest.mark.parametrize("error", [NotImplementedError, AssertionError])
def test_a_store_with_text_that_lists_no_nodes_is_refused_unless_the_docstore_has_all(
    llm, error, monkeypatch
):
    monkeypatch.setattr(ForgetfulStore, "get_nodes", raising(error, "no ids"))
    for has_all in (True, False):
        context = StorageContext.from_defaults(vector_store=ForgetfulStore())
        other = IndexNode(text=chunks(3)[2], id_="ix", index_id="i", embedding=[0.1] * 4)
        index = VectorStoreIndex(
            [node(chunks(1)[0], id_="a"), other],
            storage_context=context,
            store_nodes_override=has_all,
        )
        with nullcontext() if has_all else pytest.raises(InputError, match="can't list"):
            llm.sync_kv(index)
        assert llm.engine.document_ids() == ["a", "ix"]


def test_one_node_and_a_vector_store_are_items(llm, store):
    text, other = chunks(2)
    assert llm.precompute_kv(node(text, id_="a")).stored == 1
    assert llm.delete_kv(node(text, id_="a")) == 1
    listing = Listing()
    listing.add([node(other, id_="b")])
    assert llm.precompute_kv(listing).stored == 1
    assert llm.sync_kv([node(text, id_="a")]).removed == 1
    assert kept(llm, [text, other]) == [True, False]


def test_an_index_that_was_loaded_deletes_kv_too(llm, tmp_path):
    docs, place = documents(3, has_metadata=True), str(tmp_path / "index")
    context = StorageContext.from_defaults(vector_store=KVRagVectorStore(content="llm"))
    VectorStoreIndex.from_documents(docs, storage_context=context).storage_context.persist(place)
    index = load_index_from_storage(KVRagVectorStore.storage_context(place, content="llm"))
    index.delete_ref_doc("doc-1", delete_from_docstore=True)
    shown = [document.get_content(metadata_mode=MetadataMode.LLM) for document in docs]
    assert kept(llm, shown) == [True, False, True]
    # Without a word on the content, what was stored with its metadata stays so.
    report = llm.sync_kv(index)
    assert (report.precompute.stored, report.removed) == (0, 0)
    assert kept(llm, shown) == [True, False, True]
    assert llm.sync_kv(index, content="text").precompute.stored == 2
