"""Load the KV of retrieved chunks while the prompt is still being built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document

from kvrag.adapters import DocumentKV


class KVPrefetchHandler(BaseCallbackHandler):
    """Load the KV of retrieved chunks from disk into memory, in the background.

    This pays if something slow (a reranker, a rewritten question, a network) runs between retrieval
    and the answer. It does nothing for a store without ``kv_dir``, which is in memory anyway. A
    request waits for unfinished reads until ``load_timeout_s`` of :class:`kvrag.StoreConfig`.

    Parameters
    ----------
    llm
        Model that will answer, or its :class:`kvrag.KVRagEngine`.
    namespace
        Namespace of the KV; default: the engine's.

    Raises
    ------
    ConfigError
        If ``llm`` is another kind of model.

    Examples
    --------
    >>> chain.invoke("Who?", config={"callbacks": [KVPrefetchHandler(llm)]})  # doctest: +SKIP
    """

    def __init__(self, llm: Any, *, namespace: str | None = None) -> None:
        self._kv = DocumentKV(llm, namespace=namespace)
        self._kv.engine  # noqa: B018 - raises for another kind of model

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Start loading and return at once."""
        self._kv.prefetch(documents)
