"""Store of an engine: memory tiers above blobs, and the catalog of the stored chunks.

Reads look in memory, uppermost tier first, then in the blobs, and keep a copy in the tiers above.
Writes add a pending row, write the blob, and confirm the row. Erasures remove blobs first and rows
last. So a killed process leaves rows without blobs (misses) or pending rows (absent).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NoReturn
from weakref import WeakSet

from kvrag.config import Retention, StoreConfig
from kvrag.errors import StoreError
from kvrag.kv.crypto import Keys
from kvrag.kv.format import BlobRejected
from kvrag.store.base import Blobs
from kvrag.store.catalog import Catalog
from kvrag.store.eviction import Budget, Evictor, check_retention
from kvrag.store.memory import MemoryTier, emit
from kvrag.store.writing import StoreWriter, refusal
from kvrag.types import ChunkKey

STORES = WeakSet["TieredStore"]()
"""Stores that this process has opened."""


class Inherited:
    """Catalog of a store in a process that was forked since the store was opened."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreError(
            "this KV store was opened before the process was forked; open it after the fork "
            "(gunicorn: without --preload; celery: in worker_process_init), or start processes "
            "by 'spawn'"
        )


class TieredStore(StoreWriter):
    """Chunks in memory tiers above blobs. Thread-safe; processes may share blobs and catalog.

    All tiers return the same bits for a key. Chunks that any process has erased are not answered
    from memory.

    Parameters
    ----------
    tiers, blobs, catalog
        Memory tiers, uppermost first (may be empty); the stored blobs; and their catalog.
    config, keys, budget
        Limits, the keys derived from the config's key, and the budget of the blobs.
    is_last
        Called when the store is closed; returns whether to close catalog and blobs with it.
    """

    def __init__(
        self,
        tiers: Sequence[MemoryTier],
        blobs: Blobs,
        catalog: Catalog,
        config: StoreConfig | None = None,
        *,
        keys: Keys | None = None,
        budget: Budget | None = None,
        is_last: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(tiers, blobs, catalog, config or StoreConfig(), keys or Keys())
        self._is_last = is_last
        self._is_closed = False
        self._evictor = Evictor(
            budget or Budget(),
            totals=catalog.totals,
            usages=catalog.usages,
            free_bytes=blobs.free_bytes,
            evict=partial(self._erase, reason="evicted"),
        )
        STORES.add(self)

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Set the retention of stored chunks in every tier, and return their number.

        A cost that ``retention`` omits stays as it was. Raises ``StoreError``.
        """
        check_retention(retention, is_needed=True)
        self._check_writable()
        keys = list(dict.fromkeys(keys))
        found = self.catalog.retain(keys, retention)
        for tier in self.tiers:
            tier.retain(keys, retention)
        return found

    def delete(self, keys: Collection[ChunkKey]) -> int:
        """Erase chunks from every tier and return how many were stored; raises ``StoreError``.

        Documents that refer to them stay.
        """
        self._check_writable()
        known = self.catalog.known(keys)
        return len(self._erase(set(keys), reason="deleted") | known)

    def forget(self, namespace: str, doc_id: str, digests: Sequence[str] | None = None) -> int:
        """Erase a document and all chunks that only it refers to; return their number.

        With ``digests``, erase only these of its texts. As long as there may be dormant blobs,
        these are erased, too: any might be the document's. Raises ``StoreError``.
        """
        self._check_writable()
        known = set[ChunkKey]()
        is_over = False
        while not is_over:
            if self.catalog.state().dormant:
                self.erase_dormant()
            going = self.catalog.revisions(self.catalog.only_held_by(namespace, doc_id, digests))
            known |= self.catalog.known(going)
            self.delete_blobs(going)
            is_over = (
                self.catalog.unlink(namespace, doc_id, going, digests)
                and not self.catalog.state().dormant
            )
        self._drop(known, "deleted")
        self.catalog.scrub()
        return len(known)

    def clear(self, namespace: str | None = None) -> int:
        """Erase all chunks, texts and documents of every model, in every tier.

        With ``namespace``, a digest, only this namespace is erased. Returns the number of chunks.
        Data encrypted with other keys stays. Raises ``StoreError``.
        """
        self._check_writable()
        keys = self.catalog.present(namespace)
        self.delete_blobs(keys)
        count = self.catalog.clear(namespace)
        self.erase_dormant(namespace)
        if namespace is not None:
            self._drop(keys, "deleted")
        else:
            for tier in self.tiers:
                tier.drop(tier.keys(), "cleared")
            emit(self.listeners, self.name, (), "cleared")
        self._followed = None  # chunks kept meanwhile are compared with the catalog again
        self.catalog.scrub()
        return count

    def listed(self) -> set[ChunkKey]:
        """Return the keys of all blobs; raises ``StoreError``."""
        with refusal("stored chunks can't be listed"):
            return self.blobs.keys()

    def erase_dormant(self, namespace: str | None = None) -> int:
        """Erase blobs without a row, and return their number; raises ``StoreError``.

        With ``namespace``, a digest, only blobs of this namespace are erased.
        """
        going = set()
        for key in self.listed() - self.catalog.present():
            try:
                is_going = namespace in (None, self.blob(key).header.identity.namespace)
            except BlobRejected as fault:  # blobs of other keys and unreadable blobs stay
                is_going = fault.hole == "damaged" and namespace is None
            if is_going:
                going.add(key)
        self._erase(going, "deleted")
        if namespace is None and self.catalog.state().dormant:
            self.catalog.no_dormant()
        return len(going)

    def release(self) -> int:
        """Empty the uppermost memory tier to free its memory, and return its bytes.

        Its chunks are still stored below.
        """
        if self.tiers:
            return self.tiers[0].release()
        return 0

    def make_room(self) -> None:
        """Evict the bytes over the budget; raises ``StoreError`` if that is not enough."""
        self._check_writable()
        self._evictor.make_room(0, priority=100)

    def close(self) -> None:
        """Release resources; idempotent. Parts that the process's other stores share stay open.

        In a process that was forked since, nothing is released: it is the parent's.
        """
        if isinstance(self.catalog, Inherited):
            return
        with self._lock:
            was_closed = self._is_closed
            self._is_closed = True
            tiers = self.tiers
            self.tiers = ()
        if was_closed:
            return
        for tier in tiers:
            for each in self.listeners:
                tier.listeners.remove(each)
        self.catalog.flush()
        if self._is_last():
            self.reads.cancel()
            self.catalog.close()
            self.blobs.close()

    def _erase(self, keys: Collection[ChunkKey], reason: str) -> set[ChunkKey]:
        """Erase chunks, blobs first, and return the keys that had a blob."""
        rows = self.catalog.revisions(keys)
        gone = self.delete_blobs(keys)
        self.catalog.remove(rows)
        # A writer may have confirmed a chunk after its blob was erased.
        with refusal("stored chunks can't be erased"):
            left = [(key, row) for key, row in self.catalog.revisions(gone).items() if row]
            found = {key: row for key, row in left if self._read(key, 0, 1) is None}
            if found:
                self.catalog.remove(found)
        self._drop(keys, reason, gone)
        return gone
