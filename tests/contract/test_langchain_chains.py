"""How many of six retrieved chunks each kind of LangChain application reuses, through the real adapter, and why others reuse none."""

import asyncio
import json
import re
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt, wrap_model_call
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.output_parsers import RegexParser
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import (
    CrossEncoderReranker,
    LLMChainExtractor,
)
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.tools import StructuredTool, create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langgraph.graph import MessagesState, StateGraph
from texts import make_chunks

from langchain_kvrag import ChatKVRag, KVRagLLM, KVRagVectorStore

pytestmark = pytest.mark.filterwarnings(
    "ignore:chunks were encoded behind another prefix", "ignore:no stored chunk"
)

_BODIES = make_chunks(6, words=32)
TEXTS = [
    f"A plain line.\n{_BODIES[0]}",
    f"Quotes \"double\" and 'single'\n{_BODIES[1]}",
    f"Braces {{context}} and {{}}\n{_BODIES[2]}",
    f"Line ends\r\n{_BODIES[3]}\r\nend",
    f"Tabs\tand\ttabs,\u00a0a wide space and  two  spaces. {_BODIES[4]}",
    f"\n  White space at both ends\n{_BODIES[5]} \n",
]
"""What templates, separators and parsers change: every chunk has something of it near its beginning."""
K = len(TEXTS)
ALL = [K]
QUESTION = "Who keeps the ledger?"
CHAT = ChatPromptTemplate([("system", "Use the notes."), ("human", "{context}\n\n{input}")])
TEXT = PromptTemplate.from_template("Use the notes.\n{context}\n\n{input}")


class Parts(NamedTuple):
    """What an application is made of."""

    model: Any
    retriever: Any
    documents: list[Document]


@pytest.fixture(scope="module")
def options(tiny_dir, tmp_path_factory):
    return {
        "model": tiny_dir,
        "kv_dir": str(tmp_path_factory.mktemp("kv")),
        "max_tokens": 4,
        "temperature": 0.0,
    }


@pytest.fixture(scope="module")
def store(options):
    documents = [Document(text, metadata={"source": f"file {i}"}) for i, text in enumerate(TEXTS)]
    return KVRagVectorStore.from_documents(
        documents, DeterministicFakeEmbedding(size=8), llm=ChatKVRag(**options)
    )


@pytest.fixture
def parts(store, options):
    """Make the parts for a class of model; chains that ask about one chunk at a time need ``mode="stitch"``: it doesn't pay."""

    def make(kind: type = ChatKVRag, **more: Any) -> Parts:
        retriever = store.as_retriever(search_kwargs={"k": K})
        return Parts(
            kind(**{**options, "mode": "stitch", **more}), retriever, retriever.invoke(QUESTION)
        )

    return make


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def shown(parts: Parts, render: Callable[[list[Document]], Any], prompt: Any = CHAT) -> Any:
    """Return a chain whose context is made from the documents by a function."""
    return (
        {"context": parts.retriever | render, "input": RunnablePassthrough()} | prompt | parts.model
    )


def stuff(parts: Parts, prompt: Any = CHAT, retriever: Any = None, **options: Any) -> Any:
    chain = create_retrieval_chain(
        retriever or parts.retriever, create_stuff_documents_chain(parts.model, prompt, **options)
    )
    return (lambda question: {"input": question, "chat_history": []}) | RunnableLambda(chain.invoke)


def retrieval_qa(parts: Parts, kind: str = "stuff", **options: Any) -> Any:
    return RetrievalQA.from_chain_type(
        parts.model, chain_type=kind, retriever=parts.retriever, **options
    )


def map_reduce(parts: Parts) -> Any:
    # LangChain's own for LLMs is long.
    prompt = PromptTemplate.from_template("{summaries}\n\n{question}")
    return retrieval_qa(parts, "map_reduce", chain_type_kwargs={"combine_prompt": prompt})


class Scored(RegexParser):
    """Gives each answer the same score: this model gives none."""

    def parse(self, text: str) -> dict[str, str]:
        return {"answer": text, "score": "1"}


def map_rerank(parts: Parts) -> Any:
    parser = Scored(regex="", output_keys=["answer", "score"])
    prompt = PromptTemplate(
        template="{context}\n{question}", input_variables=["context"], output_parser=parser
    )
    return retrieval_qa(parts, "map_rerank", chain_type_kwargs={"prompt": prompt})


def with_history(parts: Parts) -> Any:
    history = [HumanMessage("Who?"), AIMessage("The keeper.")]
    rephrase = ChatPromptTemplate(
        [("placeholder", "{chat_history}"), ("human", "Rephrase: {input}")]
    )
    retriever = create_history_aware_retriever(parts.model, parts.retriever, rephrase)
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(parts.model, CHAT))
    return RunnableLambda(lambda question: {"input": question, "chat_history": history}) | chain


def conversational(parts: Parts) -> Any:
    chain = ConversationalRetrievalChain.from_llm(parts.model, parts.retriever)
    return (
        RunnableLambda(
            lambda question: {"question": question, "chat_history": [("Who?", "The keeper.")]}
        )
        | chain
    )


def parents(parts: Parts) -> Any:
    """Small pieces are searched, whole documents are shown."""
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(DeterministicFakeEmbedding(size=8)),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=60, chunk_overlap=0),
        search_kwargs={"k": 100},
    )
    retriever.add_documents(parts.documents)
    return stuff(parts, retriever=retriever)


class Backwards(BaseCrossEncoder):
    """Finds the last best."""

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        return [float(i) for i in range(len(text_pairs))]


def reranked(parts: Parts) -> Any:
    compressor = CrossEncoderReranker(model=Backwards(), top_n=K - 1)
    return stuff(
        parts,
        retriever=ContextualCompressionRetriever(
            base_compressor=compressor, base_retriever=parts.retriever
        ),
    )


def extracted(parts: Parts) -> Any:
    compressor = LLMChainExtractor.from_llm(parts.model)
    return stuff(
        parts,
        retriever=ContextualCompressionRetriever(
            base_compressor=compressor, base_retriever=parts.retriever
        ),
    )


def shortened(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content[:180] + "..." for document in documents)


def ends_first(documents: list[Document]) -> str:
    """Order documents as ``LongContextReorder`` does: the best at both ends."""
    return join([*documents[1::2], *documents[::2][::-1]])


def answered_by(tool: Any) -> Callable[[Parts], Any]:
    """Return a chain whose model is shown what a tool returned, as an agent's would be."""

    def make(parts: Parts) -> Any:
        def ask(question: str) -> Any:
            call = {"name": "find", "args": {"query": question}, "id": "1", "type": "tool_call"}
            return parts.model.invoke(
                [HumanMessage(question), AIMessage("", tool_calls=[call]), tool(parts).invoke(call)]
            )

        return RunnableLambda(ask)

    return make


def of_documents(parts: Parts) -> Any:
    return StructuredTool.from_function(
        lambda query: parts.retriever.invoke(query), name="find", description="Find."
    )


def graph(parts: Parts) -> Any:
    """Retrieve in one node of a LangGraph, answer in the next."""

    def retrieve(state: Any) -> Any:
        return {
            "messages": [("system", join(parts.retriever.invoke(state["messages"][-1].content)))]
        }

    def answer(state: Any) -> Any:
        return {"messages": [parts.model.invoke(state["messages"])]}

    made = StateGraph(MessagesState).add_node(retrieve).add_node(answer)
    edges = (
        made.add_edge("__start__", "retrieve")
        .add_edge("retrieve", "answer")
        .add_edge("answer", "__end__")
    )
    return RunnableLambda(lambda question: {"messages": [("human", question)]}) | edges.compile()


def agent(parts: Parts) -> Any:
    """An agent whose middleware puts what it retrieved into the system prompt."""

    @dynamic_prompt
    def notes(request: Any) -> str:
        return f"Use the notes.\n{join(parts.retriever.invoke(request.messages[-1].content))}"

    made = create_agent(parts.model, [], middleware=[notes])
    return RunnableLambda(lambda question: {"messages": [("human", question)]}) | made


def tool_agent(parts: Parts) -> Any:
    """An agent that searches first and answers from the tool's result; the call is made up, as this model makes none."""
    tool = create_retriever_tool(
        parts.retriever, "find", "Find notes.", response_format="content_and_artifact"
    )

    @wrap_model_call
    def searches_first(request: Any, handler: Any) -> Any:
        if request.messages[-1].type == "tool":
            return handler(request)
        return AIMessage(
            "",
            tool_calls=[
                {"name": "find", "args": {"query": request.messages[-1].content}, "id": "1"}
            ],
        )

    made = create_agent(parts.model, [tool], middleware=[searches_first])
    return RunnableLambda(lambda question: {"messages": [("human", question)]}) | made


def few_shot(parts: Parts) -> Any:
    example = PromptTemplate.from_template("Note: {context}")
    prompt = FewShotPromptTemplate(
        examples=[{"context": re.sub("([{}])", r"\1\1", d.page_content)} for d in parts.documents],
        example_prompt=example,
        suffix="{input}",
        input_variables=["input"],
    )
    return prompt | parts.model


def blocks(documents: list[Document]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": f"{document.page_content}\n\n"} for document in documents]


def with_blocks(parts: Parts) -> Any:
    made = RunnableLambda(
        lambda found: [HumanMessage([*blocks(found), {"type": "text", "text": QUESTION}])]
    )
    return parts.retriever | made | parts.model


def twice(parts: Parts) -> Any:
    return RunnableParallel(a=shown(parts, join), b=shown(parts, join, TEXT))


def after_a_fault(parts: Parts) -> Any:
    broken = shown(parts._replace(model=parts.model.bind(mode="nonsense")), join)
    return broken.with_fallbacks([shown(parts, join)])


def cached(parts: Parts) -> Any:
    parts.model.cache = InMemoryCache()
    chain = shown(parts, join)
    return RunnableLambda(lambda question: [chain.invoke(question), chain.invoke(question)])


def documented(template: str, separator: str = "\n\n", **options: Any) -> Callable[[Parts], Any]:
    """Return a chain with a document prompt of its own."""
    page = PromptTemplate.from_template(template, **options)
    return lambda parts: stuff(parts, document_prompt=page, document_separator=separator)


def mustache(template: str) -> Callable[[Parts], Any]:
    prompt = ChatPromptTemplate([("human", template)], template_format="mustache")
    return lambda parts: shown(parts, join, prompt)


BOTH: dict[str, tuple[Callable[[Parts], Any], list[int]]] = {
    "create_stuff_documents_chain, chat prompt": (stuff, ALL),
    "create_stuff_documents_chain, text prompt": (lambda parts: stuff(parts, TEXT), ALL),
    "document_prompt and separator": (documented("[{source}] {page_content}", "\n---\n"), ALL),
    "Source and Content, as in the tutorial": (
        documented("Source: {source}\nContent: {page_content}"),
        ALL,
    ),
    "expression with format_docs": (lambda parts: shown(parts, join), ALL),
    "expression with a parser": (lambda parts: shown(parts, join) | StrOutputParser(), ALL),
    "RetrievalQA, stuff": (retrieval_qa, ALL),
    "RetrievalQA, refine": (lambda parts: retrieval_qa(parts, "refine"), [1] * K),
    "RetrievalQA, map_reduce": (map_reduce, [0, *[1] * K]),
    "RetrievalQA, map_rerank": (map_rerank, [1] * K),
    "history-aware retriever": (with_history, [0, K]),
    "ConversationalRetrievalChain": (conversational, [0, K]),
    "MultiQueryRetriever": (
        lambda parts: stuff(
            parts, retriever=MultiQueryRetriever.from_llm(parts.retriever, parts.model)
        ),
        [0, K],
    ),
    "EnsembleRetriever": (
        lambda parts: stuff(
            parts, retriever=EnsembleRetriever(retrievers=[parts.retriever] * 2, weights=[0.5, 0.5])
        ),
        ALL,
    ),
    "ParentDocumentRetriever": (parents, ALL),
    "ContextualCompressionRetriever, best five": (reranked, [K - 1]),
    "order of LongContextReorder": (lambda parts: shown(parts, ends_first), ALL),
    "create_retriever_tool": (
        answered_by(lambda p: create_retriever_tool(p.retriever, "find", "Find.")),
        ALL,
    ),
    "create_retriever_tool, content and artifact": (
        answered_by(
            lambda p: create_retriever_tool(
                p.retriever, "find", "Find.", response_format="content_and_artifact"
            )
        ),
        ALL,
    ),
    "LangGraph": (graph, ALL),
    "content blocks": (with_blocks, ALL),
    "mustache, unescaped": (mustache("{{{context}}}\n\n{{input}}"), ALL),
    "mustache, escaped: not the one with quotes": (mustache("{{context}}\n\n{{input}}"), [K - 1]),
    "braces in the template": (
        lambda parts: shown(
            parts, join, PromptTemplate.from_template('Say {{"a": 1}}. {context}\n{input}')
        ),
        ALL,
    ),
    "few-shot template": (few_shot, ALL),
    "RunnableParallel": (twice, [K, K]),
    "fallbacks": (after_a_fault, ALL),
    "answers from the cache": (cached, ALL),
    "beginnings of documents": (lambda parts: shown(parts, shortened), ALL),
}
"""Applications, and how many chunks each of their requests reuses: with a chat model, and with an LLM."""
AGENTS: dict[str, tuple[Callable[[Parts], Any], list[int]]] = {
    "create_agent, dynamic_prompt": (agent, ALL),
    "create_agent, tool with content and artifact": (tool_agent, ALL),
}
"""The same, with a chat model alone."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [*product((ChatKVRag, KVRagLLM), BOTH), *product((ChatKVRag,), AGENTS)],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_what_reaches_the_model_whole_is_reused(parts, requests, kind, name):
    make, expected = (BOTH | AGENTS)[name]
    make(parts(kind)).invoke(QUESTION)
    assert sorted(requests.reused) == expected


async def streamed(chain: Any) -> Any:
    return [piece async for piece in chain.astream(QUESTION)]


async def events(chain: Any) -> Any:
    return [event async for event in chain.astream_events(QUESTION)]


WAYS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "invoke": (lambda chain: asyncio.to_thread(chain.invoke, QUESTION), [K]),
    "ainvoke": (lambda chain: chain.ainvoke(QUESTION), [K]),
    "batch": (lambda chain: asyncio.to_thread(chain.batch, [QUESTION, "Who?"]), [K, K]),
    "abatch": (lambda chain: chain.abatch([QUESTION, "Who?"]), [K, K]),
    "stream": (lambda chain: asyncio.to_thread(lambda: list(chain.stream(QUESTION))), [K]),
    "astream": (streamed, [K]),
    "astream_events": (events, [K]),
    "transform": (
        lambda chain: asyncio.to_thread(lambda: list(chain.transform(iter([QUESTION])))),
        [K],
    ),
}
"""Ways to run a chain."""


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
@pytest.mark.parametrize("name", WAYS)
async def test_every_way_of_asking_reuses_the_same(parts, requests, kind, name):
    ask, expected = WAYS[name]
    await ask(shown(parts(kind, mode="auto"), join))
    assert requests.reused == expected


def test_an_answer_says_how_much_was_reused(parts):
    """Of the usage that LangChain sums up, what was read from stored KV; repaired rows are not."""
    made = parts(mode="auto")
    message = shown(made, join).invoke(QUESTION)
    info, read = (
        message.response_metadata["kvrag"],
        message.usage_metadata["input_token_details"]["cache_read"],
    )
    tokens = sum(len(made.model.get_token_ids(text.strip())) for text in TEXTS)
    assert info["exactness"] == "repaired"
    assert read == info["cached_tokens"] > 0.75 * tokens
    assert abs(read + info["repaired_tokens"] - tokens) <= 5 * K  # BPE differs at the ends


def upper(documents: list[Document]) -> str:
    return join(documents).upper()


def as_json(documents: list[Document]) -> str:
    return json.dumps([document.page_content for document in documents])


def summarised(parts: Parts) -> Any:
    return shown(
        parts, lambda documents: "Six notes on keepers, boxes and ledgers, all of them made up."
    )


REWRITTEN: dict[str, tuple[Callable[[Parts], Any], list[int], str]] = {
    "repr of the list": (
        lambda parts: shown(parts, lambda found: found),
        [0],
        r"escaped, as by repr\(\)",
    ),
    "json.dumps": (
        lambda parts: shown(parts, as_json),
        [0],
        r"escaped, as by repr\(\), str\(\) of a list, or JSON",
    ),
    "a tool that returns documents": (answered_by(of_documents), [0], r"escaped, as by repr\(\)"),
    "upper case": (lambda parts: shown(parts, upper), [0], "upper-cased or lower-cased"),
    "a summary": (summarised, [0], "this prompt has no known chunk text"),
    "LLMChainExtractor": (extracted, [0, *[1] * K], "this prompt has no known chunk text"),
}
"""Applications that show the model other texts than were stored, and what ``explain`` says of their last request."""


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
@pytest.mark.parametrize("name", REWRITTEN)
def test_what_is_rewritten_is_computed_and_explain_says_why(parts, requests, kind, name):
    make, expected, why = REWRITTEN[name]
    made = parts(kind)
    make(made).invoke(QUESTION)
    assert sorted(requests.reused) == expected
    assert requests.reused[-1] == 0
    explanation = made.model.engine.explain(requests.prompts[-1], mode="stitch")
    assert explanation.hits == 0
    assert re.search(why, str(explanation))
