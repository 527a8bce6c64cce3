"""kvrag for LangChain: a chat model, an LLM and a vector store that reuse the KV of your chunks.

Examples
--------
>>> from langchain_kvrag import ChatKVRag, KVRagVectorStore
>>> llm = ChatKVRag(model="Qwen/Qwen2.5-0.5B-Instruct", kv_dir="./kv")  # doctest: +SKIP
>>> store = KVRagVectorStore.from_documents(splits, embeddings, llm=llm)  # doctest: +SKIP
>>> context = store.as_retriever() | format_docs  # doctest: +SKIP
>>> inputs = {"context": context, "question": RunnablePassthrough()}  # doctest: +SKIP
>>> chain = inputs | prompt | llm  # doctest: +SKIP
>>> chain.invoke("Who opens the archive?").usage_metadata["input_token_details"]  # doctest: +SKIP
"""

from kvrag import require

require("langchain_core", extra="langchain", purpose="kvrag's LangChain classes")

from langchain_kvrag.callbacks import KVPrefetchHandler  # noqa: E402
from langchain_kvrag.chat_models import ChatKVRag  # noqa: E402
from langchain_kvrag.llms import KVRagLLM  # noqa: E402
from langchain_kvrag.transformers import KVPrecompute  # noqa: E402
from langchain_kvrag.vectorstores import KVRagVectorStore  # noqa: E402

PrecomputeKV = KVPrecompute
"""Alias of :class:`KVPrecompute`."""

__all__ = [
    "ChatKVRag",
    "KVPrecompute",
    "KVPrefetchHandler",
    "KVRagLLM",
    "KVRagVectorStore",
    "PrecomputeKV",
]
