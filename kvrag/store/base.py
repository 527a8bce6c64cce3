"""The store's contract: what the engine relies on, and what a third-party tier must keep.

Blobs are the truth, the index is a rebuildable cache of them. A fault of a stored chunk is a miss, never an exception and never
an answer: every read proves identity and integrity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvrag.errors import InputError
from kvrag.store.layers import Layers
from kvrag.store.retention import Retention, Worth
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, TextEntry


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the index.

    Parameters
    ----------
    key
        Address of the blob, :func:`kvrag.identity.fingerprint.chunk_key`.
    content
        Address without the prefix, :func:`kvrag.identity.fingerprint.content_key`: shared by the variants of one chunk behind several prefixes.
    model, namespace, prefix
        Fields of the :class:`~kvrag.types.ChunkIdentity`.
    num_tokens, num_bytes
        Size of the chunk's KV.
    text
        What the span scanner needs; ``None`` for the KV of a prefix, which is never searched for.
    """

    key: ChunkKey
    content: str
    model: str
    namespace: str
    prefix: str
    num_tokens: int
    num_bytes: int
    text: TextEntry | None


def members(doc_ids: Iterable[str], collection: str) -> list[str]:
    """Return the documents of a collection: ids are paths, and those below ``collection/`` are in it.

    Raises
    ------
    InputError
        If ``collection`` is no name: every document would be below it, or none.
    """
    below = below_collection(collection)
    return [doc_id for doc_id in doc_ids if doc_id.startswith(below)]


def below_collection(collection: str) -> str:
    """Return what the ids of a collection's documents begin with; raises as :func:`members`."""
    if not isinstance(collection, str) or not collection.strip("/"):
        raise InputError(f"collection is {collection!r}; pass the part of the document ids that stands before a slash")
    return collection.rstrip("/") + "/"


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a store since it was opened, and its present size."""

    chunks: int
    num_bytes: int
    hits: int
    misses: int
    rejected: int
    """Blobs that failed the proof of identity or integrity and were quarantined."""
    unwritten: int = 0
    """Chunks of this tier that the writer in the background has yet to bring to it."""
    failed_writes: int = 0
    """Chunks that it could not bring to it."""


class Index(Protocol):
    """Small rows about stored chunks; holds no tensors and may be lost at any time."""

    def add(self, record: Record, *, doc_id: str | None) -> None:
        """Insert or update the row of ``record.key``; with ``doc_id``, let that document hold a reference. Idempotent."""

    def get(self, key: ChunkKey) -> Record | None:
        """Return the row of ``key``."""

    def variants(self, content: str) -> list[Record]:
        """Return the rows with this content key (the same chunk behind other prefixes), oldest first."""

    def texts(self, namespace: str, after: int) -> tuple[list[TextEntry], int]:
        """Return the texts of ``namespace`` added after cursor ``after`` (0: all), and the new cursor.

        A text that was removed meanwhile may be missing from the list or still be in it; a hit on it is then a miss of the store.
        """

    def documents(self, namespace: str) -> list[str]:
        """Return the ids of all documents that hold a reference in ``namespace``."""

    def document_texts(self, namespace: str, doc_id: str) -> list[str]:
        """Return the text digests that document ``doc_id`` references."""

    def document_keys(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Return the keys of all KV of a document's texts."""

    def unlink(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Drop document ``doc_id`` and return the keys (all models, all prefixes) that no document references any more.

        The rows of the returned keys are removed. Keys that were added without a document id don't hold on to anything. 0 keys for
        an unknown document.
        """

    def unlink_text(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Drop every reference to the text with this digest; return and remove all its keys."""

    def remove(self, key: ChunkKey) -> None:
        """Remove one row; unknown keys are fine."""

    def keys(self) -> list[ChunkKey]:
        """Return all keys."""

    def close(self) -> None:
        """Release resources; idempotent."""


class KVStore(Protocol):
    """What the engine talks to. Safe to use from several threads; a directory may be shared by several processes."""

    index: Index

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV, proven to be that of ``identity``, or ``None``. Never raises for a fault of the stored data.

        The tensors are read-only by convention: they may be shared with the memory tier.
        """

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Load several chunks at once; one that is not there in time is ``None``. Repeated identities are loaded once."""

    def stream(self, identity: ChunkIdentity) -> Layers | None:
        """Return the chunk's layers in order, layer 0 first, each proven when it is given; ``None`` for a miss.

        All together have the bits that :meth:`get` gives. What is erased meanwhile may still be given, and is not kept.
        """

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Store a chunk and return the bytes written; 0 if it was there already (then only the reference is added).

        A store that does not evict by priority may ignore ``retention``.

        Raises
        ------
        StoreError
            If it can't be written. Nothing half-written is ever visible.
        """

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""

    def contains(self, key: ChunkKey) -> bool:
        """Whether a chunk is stored, without proving its integrity."""

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, with what is left of its duration; ``None`` if nothing was."""

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Say anew what chunks are worth, in every tier that has them, and return how many there are; unknown ones are left out.

        A cost that ``retention`` does not name stays what it was.

        Raises
        ------
        StoreError
            If the store can't be written to.
        """

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Erase chunks from every tier and return how many were there."""

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to; return how many chunks were erased."""

    def clear(self, namespace: str | None = None) -> int:
        """Erase all chunks, texts and documents, of every model, in every tier; return how many chunks there were.

        ``namespace`` is the digest of the one that is erased; ``None``: every one.
        """

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name (``"gpu"``, ``"host"``, ``"disk"``)."""

    def close(self) -> None:
        """Release resources; idempotent."""


@runtime_checkable
class TextLookup(Protocol):
    """What a :class:`KVStore` may offer besides; without it, chunks are reused as a whole or not at all."""

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV is stored for a text: one identity per model and prefix. Empty for a text that is unknown or has no KV.

        The KV itself is not read. An identity that is returned was proven to be that of its key.
        """

    def knows(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered now, with or without KV; not any more once its last document was erased."""


@runtime_checkable
class Tier(KVStore, Protocol):
    """A store that tiers above it can do more with. Those of this package are; a store need not be one."""

    def touch(self, key: ChunkKey) -> None:
        """Count a hit that a tier above has answered."""

    def worth(self, key: ChunkKey) -> Worth:
        """Return what is known of a chunk; the hits are those that tiers above have answered, too."""

    def pinned(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[None]:
        """Keep chunks from being pushed out by this process, as long as a request needs them."""

    def priority(self, key: ChunkKey) -> int:
        """Return a chunk's priority, 0 to 100."""

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is stored under a key; ``None`` if there is none."""

    def hole(self, identity: ChunkIdentity) -> Hole | None:
        """Return what is known of the chunk's latest read, if that gave nothing or is not over; else ``None``."""

    def flush(self) -> dict[ChunkKey, str]:
        """Wait until all that was put has reached the lowest tier; return what could not since the last call, and why."""


@runtime_checkable
class Shared(Protocol):
    """A store that other processes erase from, so that copies in memory above it must be asked about."""

    def erasure_mark(self) -> str | None:
        """Return what is another value after each erasure or eviction by any process; ``None``: ask :meth:`is_known` about each chunk."""

    def is_known(self, key: ChunkKey) -> bool:
        """Whether a copy of a chunk may be answered with; not once it was erased."""

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those of many keys that :meth:`is_known` is true of."""

    def hold(self, record: Record, doc_id: str | None) -> None:
        """Give a chunk that is in this process's memory alone its row, so that it is found and erased like any other.

        Raises
        ------
        StoreError
            If it can't be written.
        """
