"""Ask a vector store which documents it holds.

The arguments of a call are no proof, because stores interpret them differently.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any, TypeVar
from uuid import UUID

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from kvrag import InputError
from kvrag.adapters import DocumentKV
from langchain_kvrag._faiss import FaissStore

logger = logging.getLogger(__name__)
T = TypeVar("T")


def as_list(given: Iterable[T] | None) -> list[T] | None:
    """Return the items as a list; a string is a single item, not its characters."""
    if given is None:
        return None
    if isinstance(given, str):
        return [given]  # type: ignore[list-item]  # T is a string then
    return list(given)


def as_ids(store: VectorStore, given: Any, *, may_lack: bool = False) -> list[Any] | None:
    """Return ids in the form in which a store takes them: as strings.

    A whole number and a UUID become their text, so ``1`` and ``"1"`` are the same id. Qdrant takes
    numbers, so there both become the number. With ``may_lack``, ``None`` is an id that the store
    makes. Raises :class:`InputError` for ids of other types.
    """
    if isinstance(given, (Integral, UUID)):
        given = [given]
    ids = as_list(given)
    if ids is None:
        return None
    return [None if name is None and may_lack else _as_id(store, name) for name in ids]


def _as_id(store: VectorStore, name: Any) -> str | int:
    text = DocumentKV.id_text(name)
    if hasattr(store, "content_payload_key") and text.isdecimal():
        return int(text)
    return text


def held_documents(store: VectorStore) -> list[Document]:
    """List a store's documents; raise :class:`InputError` if the store can't list them."""
    if isinstance(store, FaissStore):
        return store.documents()
    return list(DocumentKV.listed(store))


def listed_id(store: VectorStore, name: Any) -> str:
    """Return an id in the form in which a store lists it.

    Qdrant writes UUIDs with hyphens, however they were given.
    """
    with suppress(ValueError):
        if hasattr(store, "content_payload_key"):
            return str(UUID(str(name)))
    return str(name)


def held_by_id(store: VectorStore, ids: Sequence[str]) -> dict[str, Document] | None:
    """Return documents in a store by their ids; ``None`` if it can't be asked by id."""
    try:
        found = store.get_by_ids(as_ids(store, ids) or [])
    except Exception:  # not implemented, or an id that the store rejects
        logger.debug("%s was not asked by id", type(store).__name__, exc_info=True)
        return None
    return {
        listed_id(store, document.metadata["_id"] if document.id is None else document.id): document
        for document in found
    }


def held_ids(store: VectorStore, ids: Sequence[str] | None = None) -> set[str] | None:
    """Return the ids of the documents in a store, all or among ``ids``; ``None`` if unknown."""
    if ids is not None:
        found = held_by_id(store, ids)
        if found is not None:
            return set(found)
    try:
        return {str(document.id) for document in held_documents(store)}
    except InputError:
        return None
