"""Vector store that adds and deletes the KV of its nodes with them.

::

    store = KVRagVectorStore(llm=Settings.llm)  # or KVRagVectorStore(your_store)
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex.from_documents(documents, storage_context=context)
    index.delete_ref_doc("report-2023")  # deletes its KV, too
"""

from kvrag import require

require("llama_index.core", extra="llama-index", purpose="kvrag's LlamaIndex classes")

from llama_index.vector_stores.kvrag.base import KVRagVectorStore  # noqa: E402

__all__ = ["KVRagVectorStore"]
