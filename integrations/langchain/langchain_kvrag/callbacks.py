"""Load the KV of retrieved chunks while the prompt is still being built."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document

from kvrag.hooks import engine_of

logger = logging.getLogger(__name__)


class KVPrefetchHandler(BaseCallbackHandler):
    """Load the KV of what a retriever returns from disk into memory, in the background.

    It pays where something slow (a reranker, a rewritten question, a network) stands between retrieval and the answer,
    and does nothing for a store without ``kv_dir``, which is in memory anyway.

    Parameters
    ----------
    llm
        The model that will answer, or its :class:`kvrag.KVRagEngine`.
    namespace
        Default: the engine's.

    Raises
    ------
    ConfigError
        If ``llm`` is another kind of model.

    Examples
    --------
    >>> chain.invoke("Who?", config={"callbacks": [KVPrefetchHandler(llm)]})  # doctest: +SKIP
    """

    def __init__(self, llm: Any, *, namespace: str | None = None) -> None:
        engine_of(llm)
        self.llm = llm
        self.namespace = namespace

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Start loading and return at once."""
        texts = [document.page_content for document in documents if document.page_content.strip()]
        if texts:
            threading.Thread(target=self._run, args=(texts,), name="kvrag-prefetch", daemon=True).start()

    def _run(self, texts: list[str]) -> None:
        try:
            engine_of(self.llm).prefetch(texts, namespace=self.namespace)
        except Exception:  # the answer does without
            logger.warning("the KV of %d retrieved documents could not be prefetched", len(texts), exc_info=True)
