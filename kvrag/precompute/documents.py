"""Check texts, document ids and collections, before anything is computed or erased.

A document of a collection is stored as ``collection/id``. A collection is only this prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakSet

from kvrag.errors import ConfigError, InputError
from kvrag.prompt.messages import check_chunk_text
from kvrag.prompt.spans import text_entry
from kvrag.prompt.tokenizer import check_encodable
from kvrag.store import Catalog, TieredStore
from kvrag.types import ChunkKey, TextEntry

logger = logging.getLogger(__name__)


class Item(NamedTuple):
    """A text to store, stripped, with its document's id, if any, and its scanner entry.

    ``entry`` is ``None`` if the text is too short for the span scanner. ``fault`` is the reason why
    UTF-8 can't encode the id or the text; such an item is reported and not stored.
    """

    doc_id: str | None
    text: str
    entry: TextEntry | None
    fault: str = ""

    @classmethod
    def of(cls, doc_id: str | None, text: str) -> Item:
        """Make an item."""
        try:
            if doc_id and not doc_id.isascii():
                check_encodable(doc_id)
            return cls(doc_id, text.strip(), text_entry(text))
        except InputError as error:
            shown = None if doc_id is None else escaped(doc_id)
            return cls(shown, escaped(text).strip(), None, str(error))


def escaped(text: str) -> str:
    """Return a text with escapes for characters that UTF-8 can't encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def unreadable(items: Iterable[Item]) -> list[str]:
    """Return the ids of documents whose new text UTF-8 can't encode: their former KV must go."""
    return [item.doc_id for item in items if item.fault and item.doc_id is not None]


def faults(items: Iterable[Item]) -> list[tuple[str, str]]:
    """Return ``(id, reason)`` of items that UTF-8 can't encode, as in a report."""
    numbered = enumerate(items)
    return [
        (item.doc_id or f"text {number}", item.fault) for number, item in numbered if item.fault
    ]


def in_collection(ids: Iterable[str | None], collection: str | None) -> list[str]:
    """Return the ids that documents are stored by: ``collection/id``, or ``id`` if no collection.

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
        found.append(below + doc_id)
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


def check_items(
    texts: Sequence[str],
    ids: Sequence[str | None] | None,
    collection: str | None,
    batch_size: object,
) -> list[Item]:
    """Check the arguments of :meth:`kvrag.engine.KVRagEngine.precompute`.

    Returns an item per text, with its id in the collection.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size!r}; it must be a whole number of at least 1")
    if not isinstance(texts, Iterable) or isinstance(texts, (Mapping, bytes)):
        raise InputError(f"texts is of type {type(texts).__name__}; pass a list of strings")
    texts = [texts] if isinstance(texts, str) else list(texts)
    if ids is None:
        ids = [None] * len(texts)
    names = [ids] if isinstance(ids, str) else list(ids)
    if len(names) != len(texts):
        raise InputError(
            f"{len(texts)} texts came with {len(names)} ids; pass one id per text, or none"
        )
    found = list[Item]()
    seen = dict[str, str]()
    for number, (name, text) in enumerate(zip(names, texts, strict=True)):
        try:
            item = Item.of(name, check_chunk_text(text))
        except InputError as error:
            raise InputError(f"chunk {number} (id {name!r}): {error}") from None
        if name is not None:
            if not isinstance(name, str):
                raise InputError(f"chunk {number} has the id {name!r}; ids must be strings")
            if seen.setdefault(name, item.text) != item.text:
                raise InputError(
                    f"the id {name!r} has two different texts; give each text its own id"
                )
        found.append(item)
    if collection is None:
        return found
    stored = in_collection([item.doc_id for item in found], collection)
    return [item._replace(doc_id=name) for name, item in zip(stored, found, strict=True)]


def replaced_ids(store: TieredStore, items: Sequence[Item], namespace: str) -> list[str]:
    """Return the ids of texts that changed since they were stored.

    The KV of the old texts must be erased.
    """
    return [
        item.doc_id
        for item in items
        if item.doc_id is not None
        and store.catalog.document_texts(namespace, item.doc_id)
        not in ([], [item.entry.digest if item.entry else None])
    ]


def tell_short(store: object, short: Sequence[tuple[str, str]]) -> None:
    """Log the number of documents that are too short to have KV, and the first of them.

    ``short`` is :attr:`PrecomputeReport.short`. The first log per store (or client of one) is a
    warning, later logs are INFO.
    """
    if not short:
        return
    level = logging.INFO if store in _told else logging.WARNING
    _told.add(store)
    what = (
        "%d document(s) are too short to have KV and are computed with each prompt "
        "(PrecomputeReport.short): %r, %s"
    )
    logger.log(level, what, len(short), *short[0])


_told: WeakSet[object] = WeakSet()  # stores whose users have seen the warning
