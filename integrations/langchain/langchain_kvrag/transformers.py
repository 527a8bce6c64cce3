"""Precompute KV as a step of a document pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document

from kvrag.adapters import AdapterOptions, DocumentKV, parameters_of


class KVPrecompute(BaseDocumentTransformer):
    """Precompute the KV of documents that pass through; the documents stay unchanged.

    A transformer does not see deletions. If documents are deleted, use
    :class:`~langchain_kvrag.KVRagVectorStore`, or :func:`kvrag.sync_kv` now and then.

    Parameters
    ----------
    llm
        A :class:`~langchain_kvrag.ChatKVRag`, :class:`~langchain_kvrag.KVRagLLM`,
        :class:`kvrag.KVRagEngine` or :class:`kvrag.KVRagClient`.
    **options
        As for :func:`kvrag.precompute_kv`, but ``on_error`` is ``"warn"`` by default.

    Raises
    ------
    ConfigError
        If ``llm`` is another kind of model.
    InputError
        If ``collection`` is not a name.
    """

    @parameters_of(AdapterOptions)
    def __init__(self, llm: Any = None, **options: Any) -> None:
        self._kv = DocumentKV(llm, **options)
        self._kv.host  # noqa: B018 - raises

    def transform_documents(
        self, documents: Sequence[Document], **kwargs: Any
    ) -> Sequence[Document]:
        """Precompute KV and return the same documents; options override the constructor's."""
        self._kv.precompute(documents, **kwargs)
        return documents
