"""Which documents a call means that names ids, or a collection, or both; and which chunks.

A document of a collection is stored as ``collection/id``: collections are paths, and there is nothing else to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvrag.errors import InputError
from kvrag.store import Catalog, below_collection, members
from kvrag.types import ChunkKey


def in_collection(ids: Iterable[str | None], collection: str | None) -> list[str]:
    """Return how documents of a collection are stored, those without one as they are.

    Raises
    ------
    InputError
        If ``collection`` is no name, or an id is none.
    """
    below = "" if collection is None else below_collection(collection)
    found = []
    for number, doc_id in enumerate(ids):
        if not isinstance(doc_id, str):
            what = "has no id" if doc_id is None else f"has the id {doc_id!r}"
            where = "" if collection is None else f", and is to be in the collection {collection!r}"
            raise InputError(f"document {number} {what}{where}; give each document an id, a string")
        found.append(below + doc_id)
    return found


def items_in(items: list[tuple[str | None, str]], collection: str | None) -> list[tuple[str | None, str]]:
    """Put ``(id, text)`` pairs into a collection, if there is one; raises as :func:`in_collection`."""
    if collection is None:
        return items
    ids = in_collection((name for name, _ in items), collection)
    return [(name, text) for name, (_, text) in zip(ids, items, strict=True)]


def named(index: Catalog, namespace: str, ids: Sequence[str] | None, collection: str | None) -> list[str]:
    """Return the stored ids of documents, each once: those given, of a collection if there is one, or without any given all of it.

    Parameters
    ----------
    index
        The store's.
    namespace
        Digest of the namespace.
    ids
        ``None``: none are given. An empty list means no document, and never a whole collection.
    collection
        Where the documents are.

    Raises
    ------
    InputError
        If ``collection`` is no name, or an id is no string.
    """
    if ids is None:
        return [] if collection is None else members(index.documents(namespace), collection)
    return list(dict.fromkeys(in_collection([ids] if isinstance(ids, str) else ids, collection)))


def keys_of(index: Catalog, namespace: str, ids: Iterable[str], keys: Iterable[ChunkKey]) -> list[ChunkKey]:
    """Return the keys of all KV of some documents, and those of ``keys`` that are of the namespace."""
    found = dict.fromkeys(key for doc_id in ids for key in index.document_keys(namespace, doc_id))
    keys = [ChunkKey(keys)] if isinstance(keys, str) else keys
    records = {key: index.get(key) for key in keys}
    found.update(dict.fromkeys(key for key, record in records.items() if record and record.namespace == namespace))
    return list(found)
