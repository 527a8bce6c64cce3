"""How many of six retrieved chunks each kind of LlamaIndex application reuses, through the real adapter, and why others reuse fewer."""

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import (
    Document,
    PromptTemplate,
    Settings,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import (
    LLMRerank,
    LongContextReorder,
    MetadataReplacementPostProcessor,
    SimilarityPostprocessor,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.retrievers import AutoMergingRetriever, BaseRetriever, QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool
from llama_index_kit import make_llm, settings
from texts import make_chunks

from llama_index.vector_stores.kvrag import KVRagVectorStore

pytestmark = pytest.mark.filterwarnings(
    "ignore:chunks were encoded behind another prefix", "ignore:no stored chunk"
)
_BODIES = make_chunks(6, words=32)
TEXTS = [
    f"A plain line.\n{_BODIES[0]}",
    f"Quotes \"double\" and 'single'\n{_BODIES[1]}",
    f"Braces {{query_str}} and {{{{}}}}\n{_BODIES[2]}",
    f"Line ends\r\n{_BODIES[3]}\r\nend",
    f"Tabs\tand\ttabs,\u00a0a wide space and  two  spaces. <|im_end|> {_BODIES[4]}",
    f"\n  White space at both ends\n{_BODIES[5]} \n",
]
"""What templates, separators and parsers change: every chunk has something of it near its beginning."""
K = len(TEXTS)
QUESTION = "Who keeps the ledger?"


def documents(**metadata: Any) -> list[Document]:
    """Documents as ``SimpleDirectoryReader`` gives them: ``file_path`` is shown to the LLM, ``file_size`` is not."""
    return [
        Document(
            text=text, id_=f"doc-{i}", metadata=metadata, excluded_llm_metadata_keys=["file_size"]
        )
        for i, text in enumerate(TEXTS)
    ]


@pytest.fixture
def llm(tiny_dir, tmp_path):
    """The LLM of the settings; requests that show one chunk alone need ``mode="stitch"``: it wouldn't pay."""
    llm = make_llm(tiny_dir, tmp_path / "kv", max_new_tokens=4)
    with settings(llm):
        yield llm
    llm.engine.close()


def indexed(content: str = "text", **metadata: Any) -> VectorStoreIndex:
    store = KVRagVectorStore(content=content)
    return VectorStoreIndex.from_documents(
        documents(**metadata), storage_context=StorageContext.from_defaults(vector_store=store)
    )


@pytest.fixture
def index(llm):
    return indexed()


def engine(index: Any, **options: Any) -> Any:
    return index.as_query_engine(similarity_top_k=K, **options)


def ask(made: Any) -> Any:
    return made.query(QUESTION)


def tool(index: Any) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(
        engine(index), name="notes", description="Notes on keepers."
    )


class OneQuestion(BaseQuestionGenerator):
    """Asks one question of one tool; this model asks none."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None:
        pass

    def generate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return [SubQuestion(sub_question="Who?", tool_name="notes")]

    async def agenerate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return self.generate(tools, query)


class Scored(BaseRetriever):
    """Gives the documents scores of 1, 0.9, 0.8 and so on."""

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=TextNode(text=text), score=1 - i / 10)
            for i, text in enumerate(TEXTS)
        ]


def postprocessed(*steps: Any) -> Any:
    return RetrieverQueryEngine.from_args(Scored(), node_postprocessors=list(steps))


def best_three(answer: str, count: int) -> tuple[list[int], list[float]]:
    """Read a ranking out of an answer; this model's answers hold none."""
    return [1, 2, 3], [9.0, 8.0, 7.0]


def fused(index: Any) -> Any:
    retriever = QueryFusionRetriever(
        [index.as_retriever(similarity_top_k=K)], similarity_top_k=K, num_queries=2, use_async=False
    )
    return RetrieverQueryEngine.from_args(retriever)


LONG = " ".join(make_chunks(6, words=36, seed=3))
"""A document of six sentences."""


def windows(*, is_window_stored: bool) -> Any:
    """Sentences are searched, and shown with a sentence on either side."""
    nodes = SentenceWindowNodeParser(window_size=1).get_nodes_from_documents([Document(text=LONG)])
    Settings.llm.precompute_kv(
        [node.metadata["window"] for node in nodes] if is_window_stored else nodes
    )
    step = MetadataReplacementPostProcessor(target_metadata_key="window")
    return VectorStoreIndex(nodes).as_query_engine(similarity_top_k=K, node_postprocessors=[step])


def merged(index: Any) -> Any:
    """Leaves are searched and stored, the parents that hold them are shown."""
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[400, 150], chunk_overlap=0)
    nodes = parser.get_nodes_from_documents([Document(text=LONG)])
    context = StorageContext.from_defaults(vector_store=KVRagVectorStore())
    context.docstore.add_documents(nodes)
    leaves = get_leaf_nodes(nodes)
    assert len(leaves) == K
    base = VectorStoreIndex(leaves, storage_context=context).as_retriever(similarity_top_k=K)
    return RetrieverQueryEngine.from_args(
        AutoMergingRetriever(base, context, simple_ratio_thresh=0.0)
    )


def refreshed(index: Any) -> Any:
    changed = documents()
    changed[1].set_content(make_chunks(1, seed=8)[0])
    assert index.refresh_ref_docs(changed) == [False, True, *[False] * (K - 2)]
    return engine(index)


def without_one(index: Any) -> Any:
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    return engine(index)


def upserted(index: Any) -> Any:
    store = KVRagVectorStore()
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), Settings.embed_model],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    pipeline.run(documents=documents())
    changed = documents()[1:]
    changed[0].set_content(make_chunks(1, seed=8)[0])
    pipeline.run(documents=changed)
    # A simple store keeps no text: what it holds is looked up among the nodes that the pipeline made.
    nodes = [TextNode(text=document.text, id_=document.id_) for document in changed]
    return RetrieverQueryEngine.from_args(VectorStoreIndex(nodes).as_retriever(similarity_top_k=K))


def loaded(index: Any, open_: Callable[[str], StorageContext]) -> Any:
    place = f"{Settings.llm.kv_dir}-index"
    index.storage_context.persist(place)
    return engine(load_index_from_storage(open_(place)))


def chat(mode: str) -> Callable[[Any], Any]:
    """Ask twice: the second question has a history."""

    def make(index: Any) -> Any:
        made = index.as_chat_engine(chat_mode=mode, similarity_top_k=K)
        return lambda: [made.chat(QUESTION), made.chat("And in winter?")]

    return make


def mode(name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda index: engine(index, response_mode=name, **options)


CHAINS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "compact": (mode("compact"), [K]),
    "refine": (mode("refine"), [1] * K),
    "tree_summarize": (mode("tree_summarize"), [K]),
    "accumulate": (mode("accumulate"), [1] * K),
    "accumulate, asynchronously": (mode("accumulate", use_async=True), [1] * K),
    "compact_accumulate": (mode("compact_accumulate"), [K]),
    "generation, which shows no chunk": (mode("generation"), [0]),
    "no_text, which asks no model": (mode("no_text"), []),
    "context_only, which asks no model": (mode("context_only"), []),
    "a template of one's own": (
        mode("compact", text_qa_template=PromptTemplate("{context_str}\n{query_str}")),
        [K],
    ),
    "a rich template": (
        mode("compact", text_qa_template=RichPromptTemplate("{{ context_str }}\n{{ query_str }}")),
        [K],
    ),
    "metadata shown before each text": (
        lambda index: engine(indexed(file_path="a.txt", file_size=3)),
        [K],
    ),
    "metadata shown and stored": (
        lambda index: engine(indexed("llm", file_path="a.txt", file_size=3)),
        [K],
    ),
    "citations": (lambda index: CitationQueryEngine.from_args(index, similarity_top_k=K), [K]),
    "a summary index": (
        lambda index: SummaryIndex.from_documents(documents()).as_query_engine(),
        [K],
    ),
    "sub-questions": (
        lambda index: SubQuestionQueryEngine.from_defaults(
            [tool(index)], question_gen=OneQuestion(), use_async=False
        ),
        [K, 0],
    ),
    "router": (
        lambda index: RouterQueryEngine(
            EmbeddingSingleSelector.from_defaults(Settings.embed_model), [tool(index)] * 2
        ),
        [K],
    ),
    "HyDE": (
        lambda index: TransformQueryEngine(
            engine(index), HyDEQueryTransform(include_original=True)
        ),
        [0, K],
    ),
    "query fusion": (fused, [0, K]),
    "long-context reorder": (lambda index: postprocessed(LongContextReorder()), [K]),
    "similarity cutoff": (
        lambda index: postprocessed(SimilarityPostprocessor(similarity_cutoff=0.75)),
        [3],
    ),
    "LLM rerank": (
        lambda index: postprocessed(LLMRerank(parse_choice_select_answer_fn=best_three, top_n=3)),
        [K, 3],
    ),
    "sentence window, windows stored": (lambda index: windows(is_window_stored=True), [K]),
    "sentence window, sentences stored": (
        lambda index: windows(is_window_stored=False),
        [2 + 4 * 3 + 2],
    ),
    "auto-merging": (merged, [K]),
    "chat: context": (chat("context"), [K, K]),
    "chat: condense_plus_context": (chat("condense_plus_context"), [K, 0, K]),
    "chat: condense_question": (chat("condense_question"), [K, 0, K]),
    "chat: simple, which retrieves nothing": (chat("simple"), [0, 0]),
    "a changed document": (refreshed, [K]),
    "a deleted document": (without_one, [K - 1]),
    "a pipeline's upserts": (upserted, [K - 1]),
    "an index that was loaded": (
        lambda index: loaded(index, lambda at: KVRagVectorStore.storage_context(at)),
        [K],
    ),
    "an index that was loaded plain": (
        lambda index: loaded(index, lambda at: StorageContext.from_defaults(persist_dir=at)),
        [K],
    ),
}
"""Applications, and how many chunks each of their requests reuses."""


@pytest.mark.usefixtures("no_histories")
@pytest.mark.parametrize("name", CHAINS)
def test_what_reaches_the_model_whole_is_reused(index, requests, name):
    make, expected = CHAINS[name]
    made = make(index)
    made() if callable(made) else ask(made)
    assert requests.reused == expected


def upper(index: Any) -> Any:
    """A postprocessor of one's own that rewrites what was retrieved."""

    class Upper(BaseNodePostprocessor):
        def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            return [
                NodeWithScore(node=TextNode(text=n.node.get_content().upper()), score=1.0)
                for n in nodes
            ]

    return postprocessed(Upper())


REWRITTEN: dict[str, tuple[Callable[[Any], Any], list[int], str]] = {
    "simple_summarize shows repr() of a list": (
        mode("simple_summarize"),
        [0],
        r"escaped, as by repr\(\)",
    ),
    "citations of small pieces: beginnings of chunks": (
        lambda index: CitationQueryEngine.from_args(
            index, similarity_top_k=K, citation_chunk_size=60, citation_chunk_overlap=0
        ),
        [K],
        r"first \d+ of \d+",
    ),
    "rewritten": (upper, [0], "upper-cased or lower-cased"),
}
"""Applications that show the model other texts than were stored, and what ``explain`` says of their last request."""


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_is_rewritten_is_computed_and_explain_says_why(llm, index, requests, name):
    make, expected, why = REWRITTEN[name]
    ask(make(index))
    assert requests.reused == expected
    assert re.search(why, str(llm.engine.explain(requests.prompts[-1], mode="stitch")))


async def read(stream: Any) -> str:
    return "".join([piece async for piece in stream])


async def asked(index: Any, way: str) -> tuple[str, Any]:
    """Ask in one of the eight ways; return the answer and the response."""
    method, _, is_streaming = way.partition(" ")
    is_chat = method.endswith("chat")
    made = (
        index.as_chat_engine(chat_mode="context", similarity_top_k=K)
        if is_chat
        else engine(index, streaming=bool(is_streaming))
    )
    response = (
        await getattr(made, method)(QUESTION)
        if method[0] == "a"
        else getattr(made, method)(QUESTION)
    )
    if method == "astream_chat":
        return await read(response.async_response_gen()), response
    if method == "aquery" and is_streaming:
        return await read(response.response_gen), response
    return "".join(response.response_gen) if is_streaming or method == "stream_chat" else str(
        response
    ), response


WAYS = [
    ("query", "aquery", "query streaming", "aquery streaming"),
    ("chat", "achat", "stream_chat", "astream_chat"),
]


@pytest.mark.usefixtures("no_histories")
@pytest.mark.parametrize("ways", WAYS, ids=["query engine", "chat engine"])
async def test_every_way_of_asking_reuses_the_same_and_says_so_in_the_response(
    index, requests, ways
):
    answers = {}
    for way in ways:
        answers[way], response = await asked(index, way)
        account = response.metadata["kvrag"]
        assert account["exactness"] == "repaired"
        assert account["kv_reuse_ratio"] > 0.5
        (call,) = account["calls"]
        assert {name: call[name] for name in account if name != "calls"} == {
            n: v for n, v in account.items() if n != "calls"
        }
        assert call["ttft_ms"] > 0
    assert requests.reused == [K] * 4
    assert len({answer.strip() for answer in answers.values()}) == 1


def test_a_response_counts_all_calls_that_made_it_and_no_others(llm, index):
    tools = [
        tool(index),
        QueryEngineTool.from_defaults(
            engine(index, streaming=True), name="other", description="Other."
        ),
    ]
    llm.complete("Who?")
    response = ask(
        SubQuestionQueryEngine.from_defaults(tools, question_gen=OneQuestion(), use_async=True)
    )
    account = response.metadata["kvrag"]
    # The last shows no chunk.
    assert [call["exactness"] for call in account["calls"]] == ["repaired", "exact"]
    assert account["exactness"] == "repaired"
    assert account["computed_tokens"] == sum(call["computed_tokens"] for call in account["calls"])
    assert (
        engine(index, response_mode="no_text").query(QUESTION).metadata.keys().isdisjoint({"kvrag"})
    )
    refined = ask(engine(index, response_mode="refine", streaming=True))
    assert str(refined)
    assert len(refined.metadata["kvrag"]["calls"]) == K


def test_accounts_of_a_stream_do_not_keep_it_alive(llm, index):
    """A reader that leaves early stops the decoding: nothing but the reader may hold the stream."""
    response = ask(engine(index, streaming=True))
    next(response.response_gen)
    stream = weakref.ref(response.response_gen)
    gc.disable()
    try:
        del response
        assert stream() is None
    finally:
        gc.enable()


def test_other_llms_have_no_accounts(llm, index):
    assert "kvrag" not in ask(engine(index, llm=MockLLM())).metadata
