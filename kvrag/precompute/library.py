"""The documents of a store: listed, deleted and retained, without a model.

A document of a collection is stored as ``collection/id``. A collection is only this prefix.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any

from kvrag.config import Retention, StoreConfig, as_config, check_namespace
from kvrag.config.address import check_kv_dir
from kvrag.errors import ConfigError, InputError
from kvrag.prompt.tokenizer import check_encodable
from kvrag.store import Catalog, TieredStore, open_store
from kvrag.store.tiers import ERASURES, EVERYWHERE
from kvrag.types import ChunkKey, StrPath


class Library:
    """Documents of a store, by namespace. Every engine is one, with a model.

    Options are as for :meth:`kvrag.engine.KVRagEngine.from_pretrained`.
    """

    def __init__(
        self,
        kv_dir: StrPath | None = None,
        *,
        namespace: str = "default",
        store_config: StoreConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self.namespace = check_namespace(namespace)
        self.kv_dir = check_kv_dir(kv_dir)
        self.store_config = (
            as_config(StoreConfig, store_config, option="store_config") or StoreConfig()
        )
        self.store: TieredStore = open_store(self.kv_dir, self.store_config)
        self.resources = ExitStack()
        self.resources.callback(self.store.close)
        weakref.finalize(self, self.resources.close).atexit = False
        self._digest_of = lru_cache(maxsize=1024)(self.store.names.namespace)
        self.space = self._digest_of(self.namespace)

    def space_of(self, namespace: str | None) -> str:
        """Return the digest of a namespace; ``None``: of the library's own."""
        return self.space if namespace is None else self._digest_of(check_namespace(namespace))

    def close(self) -> None:
        """Close the store."""
        self.resources.close()

    def delete(
        self,
        ids: Sequence[str] | None = None,
        *,
        collection: str | None = None,
        namespace: str | None = None,
    ) -> int:
        """Delete documents, and erase KV that no other document refers to.

        Without ``ids``, delete the whole collection. Return the number of chunks erased.
        """
        space = self.space_of(namespace)
        chosen = chosen_documents(self.store.catalog, space, ids, collection)
        with self.erasing(space):
            return sum(self.store.forget(space, doc_id) for doc_id in chosen)

    def retain(
        self,
        ids: Sequence[str] | None = None,
        *,
        keys: Sequence[ChunkKey] = (),
        collection: str | None = None,
        retention: Retention,
        namespace: str | None = None,
    ) -> int:
        """Update the retention of stored chunks, of all models and prefixes.

        Chunks are given by document ``ids`` and ``collection``, as for :meth:`delete`, or by
        ``keys`` of this namespace; other keys are ignored. The duration of ``retention`` starts
        now; without a cost, chunks keep theirs. Return the number of chunks found.
        """
        checked = as_config(Retention, retention, option="retention")
        if checked is None:
            raise ConfigError("retention is None; pass a kvrag.Retention")
        space = self.space_of(namespace)
        catalog = self.store.catalog
        return self.store.retain(
            chosen_keys(catalog, space, chosen_documents(catalog, space, ids, collection), keys),
            checked,
        )

    def clear(self, *, namespace: str | None = None) -> int:
        """Erase all documents and KV of a namespace, by default of **every** namespace.

        KV that was encrypted with another key is not touched. Return the number of chunks erased.
        """
        space = None if namespace is None else self.space_of(namespace)
        with self.erasing(space):
            return self.store.clear(space)

    def erasing(self, space: str | None) -> AbstractContextManager[None]:
        """Erase documents of a namespace (``None``: of all): chunks missed before are not stored.

        Nothing is written meanwhile.
        """
        return ERASURES.erasing(space or EVERYWHERE)

    def document_ids(
        self, *, collection: str | None = None, namespace: str | None = None
    ) -> list[str]:
        """Return the ids of all documents (of a collection) that were precomputed and not deleted.

        Documents with evicted KV are included.
        """
        found = self.store.catalog.documents(self.space_of(namespace))
        if collection is None:
            return found
        return members(found, collection)


def escaped(text: str) -> str:
    """Return a text with escapes for characters that UTF-8 can't encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def in_collection(ids: Iterable[str | None], collection: str | None) -> list[str]:
    """Return the ids that documents are stored by: ``collection/id``, or ``id`` if no collection.

    Characters that UTF-8 can't encode are escaped: no store and no request can hold them.
    Raises :class:`InputError` if an id is not a string, or as :func:`below_collection`.
    """
    below = where = ""
    if collection is not None:
        below = below_collection(collection)
        where = f", and is to be in the collection {collection!r}"
    found = []
    for number, doc_id in enumerate(ids):
        if not isinstance(doc_id, str):
            what = "has no id" if doc_id is None else f"has the id {doc_id!r}"
            raise InputError(f"document {number} {what}{where}; give each document an id, a string")
        found.append(below + escaped(doc_id))
    return found


def chosen_documents(
    catalog: Catalog, namespace: str, ids: Sequence[str] | None, collection: str | None
) -> list[str]:
    """Return the stored ids of documents, without duplicates; raises as :func:`in_collection`.

    If ``ids`` is not given, these are all documents of the collection, or no documents without a
    collection. An empty list selects no documents. ``namespace`` is a digest.
    """
    if ids is None:
        if collection is None:
            return []
        return members(catalog.documents(namespace), collection)
    if isinstance(ids, str):
        ids = [ids]
    return list(dict.fromkeys(in_collection(ids, collection)))


def chosen_keys(
    catalog: Catalog,
    namespace: str,
    ids: Iterable[str],
    keys: Iterable[ChunkKey],
    *,
    model: str | None = None,
) -> list[ChunkKey]:
    """Return the chunk keys of documents, plus the given ``keys``, without duplicates.

    Of ``keys``, only keys of the namespace count and, if ``model`` is given, of this model.
    """
    found = [key for doc_id in ids for key in catalog.document_keys(namespace, doc_id)]
    if isinstance(keys, str):
        keys = [ChunkKey(keys)]
    for key in keys:
        record = catalog.get(key)
        if record is not None and record.namespace == namespace and model in (None, record.model):
            found.append(key)
    return list(dict.fromkeys(found))


def members(doc_ids: Iterable[str], collection: str) -> list[str]:
    """Return the ids that begin with ``collection/``; raises as :func:`below_collection`."""
    below = below_collection(collection)
    return [doc_id for doc_id in doc_ids if doc_id.startswith(below)]


def below_collection(collection: str) -> str:
    """Return the prefix of the ids of a collection's documents: ``collection/``.

    Raises ``InputError`` for an empty name, which would select all documents or no document.
    """
    if not isinstance(collection, str) or not collection.strip("/"):
        raise InputError(
            f"collection is {collection!r}; pass the part of the document ids before a slash"
        )
    check_encodable(collection)
    return collection.rstrip("/") + "/"
