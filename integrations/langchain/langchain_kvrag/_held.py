"""Which documents a vector store holds, asked of the store itself: what a call says and what a store makes of it are two things."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast
from uuid import UUID

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from kvrag import InputError
from kvrag.hooks import documents_in
from langchain_kvrag._faiss import FaissStore

logger = logging.getLogger(__name__)
T = TypeVar("T")


def as_list(given: Iterable[T] | None) -> list[T] | None:
    """Return what was given as a list; a string is one item, not its characters."""
    if given is None:
        return None
    return [cast(T, given)] if isinstance(given, str) else list(given)


def held_documents(store: VectorStore) -> list[Document]:
    """List a store's documents; raises :class:`InputError` if it can't."""
    return store.documents() if isinstance(store, FaissStore) else list(documents_in(store))


def listed_id(store: VectorStore, name: Any) -> str:
    """Return an id as a store lists it: Qdrant writes UUIDs with hyphens, however they were given."""
    with suppress(ValueError):
        return str(UUID(name)) if hasattr(store, "content_payload_key") else str(name)
    return str(name)


def held_ids(store: VectorStore, ids: Sequence[str] | None = None) -> set[str] | None:
    """Return the ids of all documents in a store, or of some that are in it; ``None`` if it can't say."""
    if ids is not None:
        try:
            found = store.get_by_ids(ids)
            return {
                str(document.metadata["_id"] if document.id is None else document.id)
                for document in found
            }
        except Exception:  # not implemented, or an id that it doesn't take
            logger.debug("%s was not asked by id", type(store).__name__, exc_info=True)
    try:
        return {str(document.id) for document in held_documents(store)}
    except InputError:
        return None
