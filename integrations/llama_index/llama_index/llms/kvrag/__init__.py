"""LlamaIndex's LLM over kvrag, and the transformation that precomputes KV in ingestion pipelines.

::

    Settings.llm = KVRagLLM(model="Qwen/Qwen2.5-7B-Instruct", kv_dir="./kv")
    index = VectorStoreIndex.from_documents(documents, transformations=[SentenceSplitter(), PrecomputeKV()])
    index.as_query_engine(similarity_top_k=8).query("What changed in 2024?")

To have KV deleted with its documents, use ``llama_index.vector_stores.kvrag.KVRagVectorStore`` instead of
:class:`PrecomputeKV`.
"""

from llama_index.llms.kvrag.base import KVRagLLM
from llama_index.llms.kvrag.transform import PrecomputeKV

__all__ = ["KVRagLLM", "PrecomputeKV"]
