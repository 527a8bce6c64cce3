"""The demo in LlamaIndex: a vector store that keeps KV, and an ordinary index, retriever, template and LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core import ChatPromptTemplate, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import TextNode

from demo.embeddings import SentenceEmbeddings
from demo.pipeline import HUMAN, STORE, SYSTEM, Answer, DemoConfig, answer_of, join_chunks
from kvrag import TemplatePrefix
from kvrag.cli.documents import DocumentChunk
from kvrag.types import PrecomputeReport
from llama_index.llms.kvrag import KVRagLLM
from llama_index.vector_stores.kvrag import KVRagVectorStore


class LlamaIndexPipeline:
    """``KVRagVectorStore`` behind the index and ``KVRagLLM`` as the model.

    Parameters
    ----------
    config
        The demo's parts.
    """

    name = "LlamaIndex"

    def __init__(self, config: DemoConfig) -> None:
        self._template = ChatPromptTemplate(
            [ChatMessage(SYSTEM, role="system"), ChatMessage(HUMAN, role="user")]
        )
        self._embeddings = LlamaIndexEmbeddings(config.embeddings)
        self._top_k = config.top_k
        self._retriever: Any = None
        self.llm = KVRagLLM(
            model=config.model,
            kv_dir=config.kv_dir,
            prefix=TemplatePrefix(self._template, "context"),
            store_config=STORE,
            **config.options,
        )
        self.engine = self.llm.engine

    def index(self, chunks: Sequence[DocumentChunk]) -> PrecomputeReport:
        """Embed the chunks, and keep their KV."""
        nodes = [TextNode(id_=chunk.id, text=chunk.text) for chunk in chunks]
        # The vector store would do this by itself; done first, it says what it did.
        report = self.llm.precompute_kv(nodes)
        index = VectorStoreIndex(
            nodes,
            storage_context=StorageContext.from_defaults(
                vector_store=KVRagVectorStore(llm=self.llm)
            ),
            embed_model=self._embeddings,
        )
        self._retriever = index.as_retriever(similarity_top_k=self._top_k)
        return report

    def ask(self, question: str, *, max_new_tokens: int) -> Answer:
        """Retrieve chunks and answer from them."""
        context = join_chunks(
            [found.node.get_content() for found in self._retriever.retrieve(question)]
        )
        messages = self._template.format_messages(context=context, question=question)
        response = self.llm.chat(messages, max_new_tokens=max_new_tokens)
        prompt = [
            {"role": message.role.value, "content": message.content or ""} for message in messages
        ]
        return answer_of(response.message.content or "", prompt, response.raw["kvrag"])


class LlamaIndexEmbeddings(BaseEmbedding):
    """:class:`SentenceEmbeddings` as LlamaIndex calls them."""

    _embeddings: SentenceEmbeddings = PrivateAttr()

    def __init__(self, path: str) -> None:
        super().__init__(model_name=path)
        self._embeddings = SentenceEmbeddings(path)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [list(map(float, row)) for row in self._embeddings.embed(texts)]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)
