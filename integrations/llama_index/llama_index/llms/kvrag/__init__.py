"""LlamaIndex's LLM over kvrag, and the transformation that precomputes KV in ingestion pipelines.

::

    Settings.llm = KVRagLLM(model="Qwen/Qwen2.5-7B-Instruct", kv_dir="./kv")
    context = StorageContext.from_defaults(vector_store=KVRagVectorStore(content="llm"))
    index = VectorStoreIndex.from_documents(documents, storage_context=context)
    index.as_query_engine(similarity_top_k=8).query("What changed in 2024?")

``llama_index.vector_stores.kvrag.KVRagVectorStore`` deletes KV with its documents, which
:class:`KVPrecompute` can't.
"""

from kvrag import require

require("llama_index.core", extra="llama-index", purpose="kvrag's LlamaIndex classes")

from llama_index.llms.kvrag.base import KVRagLLM  # noqa: E402
from llama_index.llms.kvrag.prefetch import KVPrefetchHandler  # noqa: E402
from llama_index.llms.kvrag.transform import KVPrecompute  # noqa: E402

PrecomputeKV = KVPrecompute
"""Alias of :class:`KVPrecompute`."""

__all__ = ["KVPrecompute", "KVPrefetchHandler", "KVRagLLM", "PrecomputeKV"]
