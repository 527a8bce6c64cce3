"""Which chains let chunks through to the model verbatim, so that their KV is reused, and which do not."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough

from kvrag.testing.tokenizers import tiny_tokenizer
from langchain_kvrag import ChatKVRag, KVRagLLM, KVRagVectorStore

_BODY = " ".join(f"the keeper of box {i} reads" for i in range(12))
PROBES = [
    f"Plain. {_BODY}",
    f"Quotes \"double\" and 'single'. {_BODY}",
    f"Braces {{context}} and {{}}. {_BODY}",
    f"Lines.\r\n{_BODY}\r\nend",
    f"Tabs\tand\ttabs. {_BODY}",
    f"A\u00a0space that does not break, and  two  spaces. {_BODY}",
    f"\n  White space at both ends. {_BODY} \n",
]
assert all(len(tiny_tokenizer()(probe)["input_ids"]) > 64 for probe in PROBES)

CHAT = ChatPromptTemplate.from_messages([("system", "Use the notes."), ("human", "{context}\n\n{input}")])
TEXT = PromptTemplate.from_template("Use the notes.\n{context}\n\n{input}")


pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")


class Watch(BaseCallbackHandler):
    """Keeps the accounting of every answer."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        generation = response.generations[0][0]
        message = getattr(generation, "message", None)
        info = generation.generation_info if message is None else message.response_metadata
        self.made.append(info["kvrag"])


@pytest.fixture
def store(chat):
    documents = [Document(page_content=probe, metadata={"source": f"file {i}"}) for i, probe in enumerate(PROBES)]
    return KVRagVectorStore.from_documents(documents, DeterministicFakeEmbedding(size=8), llm=chat)


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def stuff(model: Any, prompt: Any, retriever: Any, **options: Any) -> Any:
    return create_retrieval_chain(retriever, create_stuff_documents_chain(model, prompt, **options))


def sourced(model: Any, retriever: Any) -> Any:
    page = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")
    return stuff(model, CHAT, retriever, document_prompt=page, document_separator="\n---\n")


def expression(model: Any, retriever: Any) -> Any:
    return {"context": (lambda x: x["input"]) | retriever | join, "input": lambda x: x["input"]} | CHAT | model


def retrieval_qa(model: Any, retriever: Any, kind: str = "stuff") -> Any:
    chain = RetrievalQA.from_chain_type(model, chain_type=kind, retriever=retriever)
    return RunnablePassthrough() | (lambda x: {"query": x["input"]}) | chain


CHAINS: dict[str, Callable[[Any, Any], Any]] = {
    "stuff, chat prompt": lambda model, retriever: stuff(model, CHAT, retriever),
    "stuff, text prompt": lambda model, retriever: stuff(model, TEXT, retriever),
    "stuff, sources and separator": sourced,
    "expression": expression,
    "RetrievalQA": retrieval_qa,
}


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
@pytest.mark.parametrize("name", CHAINS)
def test_every_chunk_survives(store, options, kind, name):
    model, watch = kind(**options), Watch()
    chain = CHAINS[name](model, store.as_retriever(search_kwargs={"k": len(PROBES)}))
    chain.invoke({"input": "Who reads?"}, config={"callbacks": [watch]})
    [made] = watch.made
    tokens = sum(len(model.get_token_ids(probe.strip())) for probe in PROBES)
    assert made["exactness"] == "repaired"
    assert made["cached_tokens"] + made["repaired_tokens"] >= tokens - 5 * len(PROBES)  # BPE differs at stripped ends


@pytest.mark.parametrize("kind", ["refine", "map_reduce"])
def test_chains_that_ask_per_chunk_reuse_too(store, options, kind):
    model, watch = ChatKVRag(**options, mode="stitch"), Watch()  # one small chunk at a time would not pay by itself
    chain = retrieval_qa(model, store.as_retriever(search_kwargs={"k": 3}), kind)
    chain.invoke({"input": "Who reads?"}, config={"callbacks": [watch]})
    assert sum(made["cached_tokens"] > 0 for made in watch.made) >= 3


def test_escaped_chunks_are_misses_and_explain_says_so(store, chat):
    documents = store.similarity_search("x", k=len(PROBES))
    value = CHAT.invoke({"context": documents, "input": "Who reads?"})  # the beginner's slip: repr() of a list
    explanation = chat.explain(value)
    assert explanation.hits < len(PROBES) / 2
    assert CHAT.pipe(chat).invoke({"context": documents, "input": "Who?"}).content is not None


def test_any_order_hits(store, chat):
    for order in (PROBES, PROBES[::-1], PROBES[3:] + PROBES[:3]):
        assert chat.explain(CHAT.invoke({"context": "\n\n".join(order), "input": "?"})).hits == len(PROBES)


def shortened(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content[:160] + "..." for document in documents)


def test_a_chain_that_shortens_documents_reuses_their_beginnings(chat, chunks):
    texts = [text for text in chunks if len(text) > 160]
    store = KVRagVectorStore.from_texts(texts, DeterministicFakeEmbedding(size=8), llm=chat)
    retriever = store.as_retriever(search_kwargs={"k": 3})
    seen: list[Any] = []
    model = chat.bind(mode="stitch")
    chain = {"context": (lambda x: x) | retriever | shortened, "input": lambda x: x} | CHAT | seen_by(seen) | model
    info = chain.invoke("Who?").response_metadata["kvrag"]
    assert info["exactness"] == "repaired"
    used = [s for s in chat.engine.explain(seen[0]).spans if s.kind == "chunk" and s.hit]
    assert len(used) == 3
    for span in used:
        assert any(text.startswith(span.text) and len(span.text) > 140 for text in texts)
        assert "tokens of a stored chunk" in str(span.reason)


def seen_by(seen: list[Any]) -> Any:
    """Note the messages that pass, as the engine takes them."""
    roles = {"human": "user", "system": "system"}

    def look(value: Any) -> Any:
        seen.append([{"role": roles[m.type], "content": m.content} for m in value.to_messages()])
        return value

    return look
