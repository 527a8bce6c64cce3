"""Which chunks a call means that names documents, or chunks by their keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvrag.store.base import Index, members
from kvrag.types import ChunkKey


def named(index: Index, namespace: str, ids: Sequence[str] | None, collection: str | None) -> list[str]:
    """Return the ids of documents, each once: those given, and all of a collection; ``namespace`` is a digest."""
    found = [ids] if isinstance(ids, str) else list(ids or ())
    if collection is not None:
        found += members(index.documents(namespace), collection)
    return list(dict.fromkeys(found))


def keys_of(index: Index, namespace: str, ids: Iterable[str], keys: Iterable[ChunkKey]) -> list[ChunkKey]:
    """Return the keys of all KV of some documents, and those of ``keys`` that are of the namespace."""
    found = dict.fromkeys(key for doc_id in ids for key in index.document_keys(namespace, doc_id))
    keys = [ChunkKey(keys)] if isinstance(keys, str) else keys
    records = {key: index.get(key) for key in keys}
    found.update(dict.fromkeys(key for key, record in records.items() if record and record.namespace == namespace))
    return list(found)
