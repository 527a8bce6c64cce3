"""The demo on the engine alone: FAISS for retrieval, no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from demo.embeddings import SentenceEmbeddings
from demo.pipeline import HUMAN, STORE, SYSTEM, Answer, DemoConfig, answer_of, join_chunks
from kvrag.cli.documents import DocumentChunk
from kvrag.engine import KVRagEngine
from kvrag.errors import require
from kvrag.types import PrecomputeReport


class DirectPipeline:
    """Chunks in a FAISS index, prompts put together by hand.

    Parameters
    ----------
    config
        The demo's parts.
    """

    name = "the engine alone"

    def __init__(self, config: DemoConfig) -> None:
        self._faiss = require("faiss", extra="demo", purpose="the demo's retrieval")
        self._config = config
        self._embeddings = SentenceEmbeddings(config.embeddings)
        self._chunks: list[str] = []
        self._index: Any = None
        self.engine = KVRagEngine.get(
            config.model,
            kv_dir=config.kv_dir,
            prefix=_messages("{context}", ""),
            store_config=STORE,
            **config.options,
        )

    def index(self, chunks: Sequence[DocumentChunk]) -> PrecomputeReport:
        """Embed the chunks, and keep their KV."""
        self._chunks = [chunk.text for chunk in chunks]
        report = self.engine.precompute(self._chunks, ids=[chunk.id for chunk in chunks])
        vectors = self._embeddings.embed(self._chunks)
        self._index = self._faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)
        return report

    def ask(self, question: str, *, max_new_tokens: int) -> Answer:
        """Retrieve chunks and answer from them."""
        _, nearest = self._index.search(
            self._embeddings.embed([question]), min(self._config.top_k, len(self._chunks))
        )
        context = join_chunks([self._chunks[position] for position in nearest[0]])
        prompt = _messages(context, question)
        result = self.engine.generate(prompt, max_new_tokens=max_new_tokens)
        return answer_of(result.text, prompt, asdict(result))


def _messages(context: str, question: str) -> list[dict[str, str]]:
    human = HUMAN.replace("{context}", context).replace("{question}", question)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": human}]
