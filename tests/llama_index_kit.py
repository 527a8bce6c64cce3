"""What the LlamaIndex tests share. Not a conftest: two modules of that name hide each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llama_index.core
from llama_index.core import Document, MockEmbedding, Settings
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from pydantic import Field
from texts import make_chunks as chunks

from kvrag import KVRagEngine
from llama_index.llms.kvrag import KVRagLLM


def documents(count: int, *, has_metadata: bool = False, seed: int = 0) -> list[Document]:
    """Documents as ``SimpleDirectoryReader`` gives them: ``file_path`` is shown to the LLM, other entries are not."""
    out = []
    for i, text in enumerate(chunks(count, seed=seed)):
        metadata = {"file_path": f"/data/note-{i}.txt", "file_size": 12} if has_metadata else {}
        out.append(
            Document(
                text=text,
                id_=f"doc-{i}",
                metadata=metadata,
                excluded_llm_metadata_keys=["file_size"],
            )
        )
    return out


@contextmanager
def settings(llm: KVRagLLM | None = None) -> Iterator[None]:
    """Use an LLM and a mock embedding as defaults, and put back what was there."""
    names = (
        "_llm",
        "_embed_model",
        "_node_parser",
        "_transformations",
        "_callback_manager",
        "_prompt_helper",
    )
    before = {name: getattr(Settings, name) for name in names}
    tokenizer = llama_index.core.global_tokenizer
    Settings.embed_model = MockEmbedding(embed_dim=4)
    if llm is not None:
        llm.apply_settings()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(Settings, name, value)
        llama_index.core.global_tokenizer = tokenizer


def record_prompts(monkeypatch: Any) -> list[str]:
    """Write down every prompt that reaches an engine."""
    seen: list[str] = []
    for name in ("generate", "stream", "astream"):
        original = getattr(KVRagEngine, name)

        def recording(
            self: KVRagEngine, prompt: str, _original: Any = original, **options: Any
        ) -> Any:
            seen.append(prompt)
            return _original(self, prompt, **options)

        monkeypatch.setattr(KVRagEngine, name, recording)
    return seen


def hit_texts(engine: KVRagEngine, prompts: list[str]) -> set[str]:
    """Texts of the chunks that some prompt has stored KV for."""
    found = [engine.explain(prompt, mode="stitch").spans for prompt in prompts]
    return {span.text for spans in found for span in spans if span.kind == "chunk" and span.hit}


def make_llm(source: Any, kv_dir: Any, **options: Any) -> KVRagLLM:
    """Make an LLM for tests: reuse always, short answers, and no context, so that a first chunk is exact."""
    return KVRagLLM(
        source, kv_dir=kv_dir, **{"mode": "stitch", "max_new_tokens": 6, "context": None, **options}
    )


Make = Callable[..., KVRagLLM]


class Listing(BasePydanticVectorStore):
    """A store of LlamaIndex that keeps text; ``delete_nodes()`` without arguments deletes nothing."""

    stores_text: bool = True
    rows: dict[str, TextNode] = Field(default_factory=dict)

    @property
    def client(self) -> str:
        return "the client"

    def add(self, nodes: Any, **_: Any) -> list[str]:
        self.rows.update({node.node_id: node for node in nodes})
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        for gone in [node for node in self.rows.values() if node.ref_doc_id == ref_doc_id]:
            del self.rows[gone.node_id]

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[Any]:
        wanted = {f.key: f.value for f in filters.filters} if filters else {}

        def told(node: TextNode) -> dict[str, Any]:
            return {**node.metadata, "document_id": node.ref_doc_id}

        found = [node for node in self.rows.values() if wanted.items() <= told(node).items()]
        return [node for node in found if node_ids is None or node.node_id in node_ids]

    def delete_nodes(self, node_ids: Any = None, filters: Any = None, **_: Any) -> None:
        for node in self.get_nodes(node_ids, filters) if node_ids or filters else []:
            del self.rows[node.node_id]

    def clear(self) -> None:
        self.rows.clear()

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        nodes = list(self.rows.values())[: query.similarity_top_k]
        ids = [node.node_id for node in nodes]
        return VectorStoreQueryResult(nodes=nodes, ids=ids, similarities=[1.0] * len(nodes))
