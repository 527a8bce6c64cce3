"""Chains that cut documents to a length: what is left of them is reused."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate

from langchain_kvrag import ChatKVRag, KVRagVectorStore

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")
PROMPT = ChatPromptTemplate.from_messages([("system", "Use the notes."), ("human", "{context}\n\n{input}")])


def shortened(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content[:160] + "..." for document in documents)


def test_a_chain_that_shortens_documents_reuses_their_beginnings(chat: ChatKVRag, chunks: list[str]) -> None:
    texts = [text for text in chunks if len(text) > 160]
    store = KVRagVectorStore.from_texts(texts, DeterministicFakeEmbedding(size=8), llm=chat)
    retriever = store.as_retriever(search_kwargs={"k": 3})
    seen: list[Any] = []
    model = chat.bind(mode="stitch")
    chain = {"context": (lambda x: x) | retriever | shortened, "input": lambda x: x} | PROMPT | seen_by(seen) | model
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
