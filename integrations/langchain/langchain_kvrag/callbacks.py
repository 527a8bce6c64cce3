"""Load the KV of retrieved chunks while the prompt is still being built."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document

from kvrag import Chunk, KVRagEngine
from kvrag.fingerprint import namespace_digest
from kvrag.hooks import engine_of
from kvrag.plan import plan_prompt
from kvrag.spans import SpanIndex

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
            prefetch(engine_of(self.llm), texts, namespace=self.namespace)
        except Exception:  # the answer does without
            logger.warning("the KV of %d retrieved documents could not be prefetched", len(texts), exc_info=True)


def prefetch(engine: KVRagEngine, texts: Sequence[str], *, namespace: str | None = None) -> int:
    """Load the KV of chunks into the memory tier, as a prompt with these chunks would, and return how many were found.

    Parameters
    ----------
    engine
        Whose store.
    texts
        Chunk texts.
    namespace
        Default: the engine's.
    """
    prompt: list[str | Chunk] = [engine.prefix_text, *map(Chunk, texts)]
    plan = plan_prompt(
        prompt,
        engine.loaded.encoder,
        scanner=SpanIndex(),
        store=engine.store,
        model=engine.loaded.fingerprint,
        namespace=namespace_digest(engine.namespace if namespace is None else namespace),
        prefixes=[engine.prefix_text],
        min_chunk_tokens=engine.store_config.min_chunk_tokens,
    )
    loaded = engine.store.get_many(plan.identities, timeout_s=engine.store_config.load_timeout_s)
    return sum(kv is not None for kv in loaded)
