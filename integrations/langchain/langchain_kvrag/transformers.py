"""Precompute KV as a step of a document pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document

from kvrag import Retention
from kvrag.adapters import DocumentKV, OnError


class KVPrecompute(BaseDocumentTransformer):
    """Precompute the KV of documents that pass through; the documents stay unchanged.

    A transformer does not see deletions. If documents are deleted, use
    :class:`~langchain_kvrag.KVRagVectorStore`, or :func:`kvrag.sync_kv` now and then.

    Parameters
    ----------
    llm
        A :class:`~langchain_kvrag.ChatKVRag`, :class:`~langchain_kvrag.KVRagLLM`,
        :class:`kvrag.KVRagEngine` or :class:`kvrag.KVRagClient`.
    namespace, batch_size, show_progress, retention, collection
        As for :meth:`kvrag.KVRagEngine.precompute`.
    on_error
        ``"warn"`` and go on without KV, or ``"raise"``.

    Raises
    ------
    ConfigError
        If ``llm`` is another kind of model.
    InputError
        If ``collection`` is not a name.
    """

    def __init__(
        self,
        llm: Any,
        *,
        namespace: str | None = None,
        batch_size: int = 8,
        show_progress: bool | None = None,
        on_error: OnError = "warn",
        retention: Retention | None = None,
        collection: str | None = None,
    ) -> None:
        self._kv = DocumentKV(
            llm,
            namespace=namespace,
            batch_size=batch_size,
            show_progress=show_progress,
            on_error=on_error,
            retention=retention,
            collection=collection,
        )

    def transform_documents(
        self, documents: Sequence[Document], **kwargs: Any
    ) -> Sequence[Document]:
        """Precompute KV and return the same documents; options override the constructor's."""
        self._kv.precompute(documents, **kwargs)
        return documents
