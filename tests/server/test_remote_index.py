"""Indexes of both frameworks whose model is behind a server: its KV goes with their documents, and clients of OpenAI's API reuse it."""

import asyncio
import warnings

import pytest
from kv_client_kit import Tenant
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from llama_index.core import Document as LlamaDocument
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike
from server_kit import served
from texts import make_chunks

from kvrag import (
    ConfigError,
    InputError,
    KVRagClient,
    KVRagEngine,
    Retention,
    StoreError,
    delete_kv,
    precompute_kv,
    sync_kv,
)
from kvrag_server import ServerConfig
from langchain_kvrag import KVPrecompute, KVPrefetchHandler, KVRagVectorStore
from llama_index.llms.kvrag import KVPrecompute as LlamaPrecompute
from llama_index.llms.kvrag import KVPrefetchHandler as LlamaPrefetch
from llama_index.vector_stores.kvrag import KVRagVectorStore as LlamaStore

NAMES = [f"team{n}" for n in range(40)]
DOWN = "http://127.0.0.1:9"
EMBEDDING = DeterministicFakeEmbedding(size=8)
STITCH = {"kvrag": {"mode": "stitch"}}
_FREE = pytest.StashKey()


@pytest.fixture(scope="module")
def chunks():
    return make_chunks(8, words=42, seed=5)


@pytest.fixture(scope="module")
def server(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir, context=None)
    keys = {f"secret-{name}": name for name in NAMES}
    with served(engine, ServerConfig(model_name="tiny", api_keys=keys)) as (_, url):
        yield engine, url
    engine.close()


@pytest.fixture
def tenant(server, request):
    """A tenant for this test alone."""
    return Tenant(*server, next(request.config.stash.setdefault(_FREE, iter(NAMES))))


@pytest.fixture
def down():
    """A client of a server that is not there."""
    return KVRagClient(DOWN, max_retries=0)


class LengthEmbedding(Embeddings):
    """Vectors of any text, also of a text that UTF-8 can't encode."""

    def embed_documents(self, texts):
        return [[1.0, len(text)] for text in texts]

    def embed_query(self, text):
        return [1.0, len(text)]


def documents(chunks, *numbers):
    return [Document(chunks[number], id=f"d{number}") for number in numbers]


def nodes(chunks, *numbers, **metadata):
    return [
        TextNode(text=chunks[number], id_=f"d{number}", embedding=[0.1] * 4, metadata=metadata)
        for number in numbers
    ]


# -- LangChain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_own", [True, False], ids=["faiss", "in memory"])
@pytest.mark.parametrize("collection", [None, "manuals"])
def test_langchains_documents_come_and_go(tenant, chunks, is_own, collection):
    kept = {"embedding": EMBEDDING} if is_own else {"inner": InMemoryVectorStore(EMBEDDING)}
    store = KVRagVectorStore(**kept, llm=tenant.client, collection=collection, on_error="raise")
    below = "" if collection is None else "manuals/"
    store.add_documents(documents(chunks, 0, 1, 2))
    assert tenant.ids() == [f"{below}d{n}" for n in range(3)]
    assert tenant.kept(chunks) == [0, 1, 2]
    store.add_documents([Document(chunks[3], id="d1")])  # replaced
    assert tenant.kept(chunks) == [0, 2, 3]
    store.add_documents([Document(" ", id="d1")])  # emptied
    assert tenant.kept(chunks) == [0, 2]
    store.delete(["d0"])
    assert (tenant.ids(), tenant.kept(chunks)) == ([f"{below}d2"], [2])


async def test_langchains_documents_come_and_go_in_an_event_loop(tenant, chunks):
    store = KVRagVectorStore(InMemoryVectorStore(EMBEDDING), llm=tenant.client, on_error="raise")
    adding = asyncio.create_task(store.aadd_documents(documents(chunks, 0, 1)))
    ticks = 0
    while not adding.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 2
    await store.adelete(["d0"])
    assert (tenant.ids(), tenant.kept(chunks)) == (["d1"], [1])


def test_chat_openai_reuses_what_the_store_sent(tenant, chunks):
    store = KVRagVectorStore.from_texts(
        chunks[:4], EMBEDDING, ids=["a", "b", "c", "d"], llm=tenant.client
    )
    chat = ChatOpenAI(
        model="tiny", base_url=f"{tenant.url}/v1", api_key=tenant.key, max_tokens=4, temperature=0
    )

    def cached():
        found = store.similarity_search("Who?", k=3)
        asked = "\n\n".join([*(each.page_content for each in found), "Who?"])
        return chat.invoke(asked).usage_metadata["input_token_details"]["cache_read"]

    assert cached() > 100
    store.delete(["a", "b", "c", "d"])
    store.inner.add_texts(chunks[:4])
    assert cached() < 10  # the prefix


def test_a_text_that_cannot_be_sent_costs_its_own_kv_alone(tenant, chunks):
    inner = InMemoryVectorStore(LengthEmbedding())
    store = KVRagVectorStore(inner, llm=tenant.client)
    store.add_documents(documents(chunks, 0, 1, 2))
    changed = [Document("a\ud800" * 80, id="d0"), Document(chunks[4], id="d1")]
    with pytest.warns(UserWarning, match="UTF-8 can't encode"):
        store.add_documents(changed)
    assert tenant.kept(chunks) == [2, 4]


def test_a_pipeline_step_sends_documents(tenant, chunks):
    step = KVPrecompute(tenant.client, collection="c", on_error="raise")
    assert step.transform_documents(documents(chunks, 0, 1)) == documents(chunks, 0, 1)
    assert tenant.ids() == ["c/d0", "c/d1"]


# -- LlamaIndex --------------------------------------------------------------------------------------------------------


def index_of(store, *docs):
    return VectorStoreIndex.from_documents(
        docs,
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=MockEmbedding(4),
    )


def test_llama_indexs_documents_come_and_go(tenant, chunks):
    docs = [LlamaDocument(text=text, id_=f"doc-{n}") for n, text in enumerate(chunks[:3])]
    store = LlamaStore(llm=tenant.client, on_error="raise")
    index = index_of(store, *docs)
    assert (len(tenant.ids()), tenant.kept(chunks)) == (3, [0, 1, 2])
    index.insert(LlamaDocument(text=chunks[3], id_="late"))
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert tenant.kept(chunks) == [1, 2, 3]
    changed = LlamaDocument(text=chunks[4], id_="doc-1")
    assert index.refresh_ref_docs([changed, docs[2]]) == [True, False]
    assert tenant.kept(chunks) == [2, 3, 4]
    assert set(tenant.ids()) == set(store.inner.data.embedding_dict)
    store.clear()
    assert (tenant.ids(), tenant.kept(chunks)) == ([], [])


def test_llama_indexs_nodes_are_replaced(tenant, chunks):
    store = LlamaStore(llm=tenant.client, content="llm", on_error="raise")
    store.add(nodes(chunks, 0, 1, page="3"))
    shown = [node.get_content("llm") for node in nodes(chunks, 0, 1, page="3")]
    assert tenant.kept(shown) == [0, 1]
    store.add(nodes(chunks, 0, page="4"))
    assert tenant.kept(shown) == [1]
    store.delete_nodes(["d0", "d1"])
    assert tenant.ids() == []


@pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")
def test_openai_like_reuses_what_the_index_sent(tenant, chunks):
    store = LlamaStore(llm=tenant.client, on_error="raise")
    index = index_of(store, *[LlamaDocument(text=text) for text in chunks[:3]])
    llm = OpenAILike(
        model="tiny",
        api_base=f"{tenant.url}/v1",
        api_key=tenant.key,
        is_chat_model=True,
        max_tokens=4,
        context_window=4096,
        additional_kwargs={"extra_body": STITCH},
    )
    before = tenant.engine.stats().get("cached_tokens", 0)
    index.as_query_engine(llm=llm, similarity_top_k=3).query("Who?")
    assert tenant.engine.stats().get("cached_tokens", 0) > before


def test_a_pipeline_sends_nodes_again_after_an_erasure_although_it_has_a_cache(tenant, chunks):
    step = LlamaPrecompute(llm=tenant.client, on_error="raise")
    pipeline = IngestionPipeline(transformations=[step], cache=IngestionCache())
    for _ in range(2):
        pipeline.run(nodes=nodes(chunks, 0, 1))
        assert tenant.kept(chunks) == [0, 1]
        tenant.client.delete(["d0", "d1"])


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_the_hooks_take_a_server(tenant, chunks):
    server = tenant.client
    assert precompute_kv(documents(chunks, 0, 1), server=server).stored == 2
    assert precompute_kv(documents(chunks, 1, 2), llm=server, collection="c").stored == 1
    assert tenant.ids() == ["c/d1", "c/d2", "d0", "d1"]
    report = sync_kv(documents(chunks, 1, 3), server=server, collection="c")
    assert (report.added, report.removed) == (1, 1)
    assert tenant.kept(chunks) == [0, 1, 3]
    assert delete_kv(["d0", "d1"], server=server) == 1
    assert delete_kv(documents(chunks, 1), server=server, collection="c") == 1
    assert tenant.ids() == ["c/d3"]


def test_an_address_is_enough_for_a_server_without_keys(tiny_dir, chunks):
    engine = KVRagEngine.from_pretrained(tiny_dir, context=None)
    store = InMemoryVectorStore(EMBEDDING)
    store.add_documents(documents(chunks, 0, 1))
    index = VectorStoreIndex(nodes(chunks, 2, 3), embed_model=MockEmbedding(4))
    with served(engine) as (_, url):
        assert precompute_kv(store, server=url).stored == 2
        assert precompute_kv(index, server=f"{url}/v1").stored == 2
        assert engine.document_ids() == ["d0", "d1", "d2", "d3"]
        assert delete_kv(index, server=url) == 2
        assert sync_kv(chunks[:1], server=url, ids=["d0"]).removed == 1
    assert engine.document_ids() == ["d0"]
    engine.close()


def test_a_server_is_told_which_content_of_nodes_it_keeps(tenant, chunks):
    with pytest.raises(ConfigError, match="content='llm'"):
        sync_kv(nodes(chunks, 0, page="3"), server=tenant.client)
    assert tenant.ids() == []
    assert sync_kv(nodes(chunks, 0, page="3"), server=tenant.client, content="llm").added == 1
    assert sync_kv(nodes(chunks, 1), server=tenant.client).removed == 1


@pytest.mark.parametrize("hook", [precompute_kv, sync_kv, delete_kv])
def test_a_hook_needs_a_model_or_a_server_and_not_both(hook, tenant):
    for given in ({}, {"llm": tenant.engine, "server": tenant.url}):
        with pytest.raises(ConfigError, match=r"either llm=\.\.\., or server="):
            hook(["text"], **given)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_documents_are_added_although_the_server_is_down(down, chunks):
    store = KVRagVectorStore(InMemoryVectorStore(EMBEDDING), llm=down)
    with pytest.warns(UserWarning, match=f"{DOWN} can't be reached"):
        store.add_documents(documents(chunks, 0, 1))
    with pytest.warns(UserWarning, match=f"{DOWN} can't be reached.*run sync_kv"):
        store.delete(["d0"])
    assert [each.id for each in store.get_by_ids(["d0", "d1"])] == ["d1"]
    held = LlamaStore(llm=down)
    with pytest.warns(UserWarning, match=f"{DOWN} can't be reached"):
        held.add(nodes(chunks, 0, 1))
    with pytest.warns(UserWarning, match=f"{DOWN} can't be reached.*run sync_kv"):
        held.delete_nodes(["d0"])
    assert list(held.inner.data.embedding_dict) == ["d1"]


def test_a_server_that_is_down_raises_if_asked(down, chunks):
    store = KVRagVectorStore(InMemoryVectorStore(EMBEDDING), llm=down, on_error="raise")
    with pytest.raises(StoreError, match="can't be reached"):
        store.add_documents(documents(chunks, 0))
    with pytest.raises(StoreError, match="can't be reached"):
        store.delete(["d0"])
    with pytest.raises(StoreError, match="can't be reached"):
        LlamaStore(llm=down, on_error="raise").add(nodes(chunks, 0))
    with pytest.raises(StoreError, match="can't be reached"):
        precompute_kv(chunks, server=down)


def test_a_wrong_key_is_a_warning_without_the_key(tenant, chunks):
    client = KVRagClient(tenant.url, api_key="no-such-secret")
    store = KVRagVectorStore(InMemoryVectorStore(EMBEDDING), llm=client)
    with pytest.warns(UserWarning, match="refuses the API key") as told:
        store.add_documents(documents(chunks, 0))
    assert "no-such-secret" not in str(told[0].message)
    assert store.get_by_ids(["d0"])


@pytest.mark.parametrize(
    "options",
    [{"namespace": "n"}, {"retention": Retention(90)}, {"batch_size": 2}, {"prefix": "You"}],
    ids=str,
)
def test_options_that_a_server_lacks_are_refused_when_a_store_is_made(options, tenant):
    for make in (LlamaStore, LlamaPrecompute):
        with pytest.raises(ConfigError, match="no effect on a server"):
            make(llm=tenant.client, **options)
    if "prefix" not in options:
        with pytest.raises(ConfigError, match="no effect on a server"):
            KVRagVectorStore(InMemoryVectorStore(EMBEDDING), llm=tenant.client, **options)
        with pytest.raises(ConfigError, match="no effect on a server"):
            KVPrecompute(tenant.client, **options)


def test_clients_of_openais_api_hold_no_kv_and_the_error_says_what_does():
    chat = ChatOpenAI(model="tiny", base_url="http://127.0.0.1:9/v1", api_key="none")
    like = OpenAILike(model="tiny", api_base="http://127.0.0.1:9/v1", api_key="none")
    for make in (
        lambda: KVRagVectorStore(InMemoryVectorStore(EMBEDDING), llm=chat),
        lambda: KVPrecompute(chat),
        lambda: LlamaStore(llm=like),
        lambda: precompute_kv(["text"], llm=chat),
    ):
        with pytest.raises(ConfigError, match=r"can't use KV.*KVRagClient"):
            make()


@pytest.mark.parametrize("handler", [KVPrefetchHandler, LlamaPrefetch])
def test_a_server_prefetches_itself(handler, tenant):
    with pytest.raises(ConfigError, match="reads KV when the prompt arrives"):
        handler(tenant.client)


def test_a_text_that_the_server_refuses_is_named(tenant, chunks):
    with pytest.raises(InputError, match="two different texts"):
        precompute_kv(chunks[:2], ids=["a", "a"], server=tenant.client)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = precompute_kv(["too short", chunks[0]], ids=["a", "b"], server=tenant.client)
    assert ([name for name, _ in report.short], report.stored) == (["a"], 1)
