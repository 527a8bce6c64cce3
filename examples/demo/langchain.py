"""The demo in LangChain: a vector store that keeps KV, and an ordinary chain ``retriever | prompt | model``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from demo.embeddings import SentenceEmbeddings
from demo.pipeline import HUMAN, STORE, SYSTEM, Answer, DemoConfig, answer_of, join_chunks
from kvrag.cli.documents import DocumentChunk
from kvrag.types import PrecomputeReport
from langchain_kvrag import ChatKVRag, KVRagVectorStore


class LangChainPipeline:
    """``KVRagVectorStore`` as the retriever and ``ChatKVRag`` as the model.

    Parameters
    ----------
    config
        The demo's parts.
    """

    name = "LangChain"

    def __init__(self, config: DemoConfig) -> None:
        self._config = config
        self._prompt = ChatPromptTemplate([("system", SYSTEM), ("human", HUMAN)])
        self._embeddings = LangChainEmbeddings(config.embeddings)
        self._to_prompt: Runnable[str, Any] | None = None
        self.llm = ChatKVRag(
            model=config.model,
            kv_dir=config.kv_dir,
            prefix=self._prompt,
            store_config=STORE,
            **config.options,
        )
        self.engine = self.llm.engine

    def index(self, chunks: Sequence[DocumentChunk]) -> PrecomputeReport:
        """Embed the chunks, and keep their KV."""
        documents = [Document(chunk.text, id=chunk.id) for chunk in chunks]
        # The vector store would do this by itself; done first, it says what it did.
        report = self.llm.precompute_kv(documents)
        store = KVRagVectorStore.from_documents(documents, self._embeddings, llm=self.llm)
        retriever = store.as_retriever(search_kwargs={"k": self._config.top_k})
        self._to_prompt = {
            "context": retriever | _join,
            "question": RunnablePassthrough(),
        } | self._prompt
        return report

    def ask(self, question: str, *, max_new_tokens: int) -> Answer:
        """Retrieve chunks and answer from them."""
        assert self._to_prompt is not None, "index first"
        # The two halves of the chain ``to_prompt | llm``, apart because the demo answers the same prompt without reuse.
        prompt = self._to_prompt.invoke(question)
        message = self.llm.invoke(prompt, max_tokens=max_new_tokens)
        roles = {"human": "user", "system": "system"}
        messages = [{"role": roles[m.type], "content": m.content} for m in prompt.to_messages()]
        made = message.response_metadata
        return answer_of(
            str(message.content),
            messages,
            {**made["kvrag"], "finish_reason": made["finish_reason"]},
        )


class LangChainEmbeddings(Embeddings):
    """:class:`SentenceEmbeddings` as LangChain calls them."""

    def __init__(self, path: str) -> None:
        self._embeddings = SentenceEmbeddings(path)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents."""
        return [list(map(float, row)) for row in self._embeddings.embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        """Embed a question."""
        return self.embed_documents([text])[0]


def _join(documents: list[Document]) -> str:
    return join_chunks([document.page_content for document in documents])
