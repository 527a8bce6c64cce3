"""The store of an engine: memory above blobs, and the catalog that says what is where.

Reading looks in memory first, uppermost tier first, then in the blobs, and keeps a copy in each tier above. Writing notes a pending row,
writes the blob, and confirms. Erasing takes blobs first, rows last. So a kill leaves rows without blobs (misses) or pending ones (absent).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from kvrag.config import Retention, StoreConfig
from kvrag.store.base import Blobs
from kvrag.store.catalog import Catalog
from kvrag.store.crypto import Keys
from kvrag.store.format import BlobRejected
from kvrag.store.memory import MemoryTier, tell
from kvrag.store.worth import Budget, Evictor, check_retention
from kvrag.store.writing import Writer, refusal
from kvrag.types import ChunkKey


class TieredStore(Writer):
    """Chunks in memory tiers above blobs. Safe to use from several threads; blobs and catalog may be shared with other processes.

    Every tier gives the same bits for the same key. What any process erases is not answered from memory.

    Parameters
    ----------
    tiers, blobs, catalog
        Memory, uppermost first, may be empty; what is stored, and who has it.
    config, keys, budget
        Limits, the keys derived from the config's key, and what the blobs may take.
    is_last
        Asked when the store is closed: whether catalog and blobs are to be closed with it.
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
        self._is_last, self._is_closed = is_last, False
        self._evictor = Evictor(
            budget or Budget(),
            totals=catalog.totals,
            usages=catalog.usages,
            free_bytes=getattr(blobs, "free_bytes", lambda: 2**62),
            evict=partial(self._erase, reason="evicted"),
        )

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Update the retention of stored chunks in every tier, and return how many there are.

        A cost that ``retention`` does not name stays what it was. Raises ``StoreError``.
        """
        check_retention(retention, is_needed=True)
        self._check_writable()
        keys = list(dict.fromkeys(keys))
        found = self.catalog.retain(keys, retention)
        for tier in self.tiers:
            tier.retain(keys, retention)
        return found

    def delete(self, keys: Collection[ChunkKey]) -> int:
        """Erase chunks from every tier and return how many were there. Documents that refer to them stay. Raises ``StoreError``."""
        self._check_writable()
        known = self.catalog.known(keys)
        return len(self._erase(set(keys), reason="deleted") | known)

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to; return how many chunks were erased. Raises ``StoreError``.

        While there may be dormant blobs, those are erased, too: any of them might be the document's.
        """
        self._check_writable()
        known, is_over = set[ChunkKey](), False
        while not is_over:
            if self.catalog.state().dormant:
                self.erase_dormant()
            going = self.catalog.revisions(self.catalog.only_held_by(namespace, doc_id))
            known |= self.catalog.known(going)
            self.delete_blobs(going)
            is_over = (
                self.catalog.unlink(namespace, doc_id, going) and not self.catalog.state().dormant
            )
        self._drop(known, "deleted")
        self.catalog.scrub()
        return len(known)

    def clear(self, namespace: str | None = None) -> int:
        """Erase all chunks, texts and documents, of every model (and namespace, unless one's digest is given), in every tier.

        Returns how many chunks there were. What is encrypted with other keys is left alone. Raises ``StoreError``.
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
            tell(self.listeners, self.name, (), "cleared")
        self._followed = None  # what was kept meanwhile is looked up
        self.catalog.scrub()
        return count

    def listed(self) -> set[ChunkKey]:
        """Return the keys of all blobs; raises ``StoreError``."""
        with refusal("stored chunks can't be listed"):
            return self.blobs.keys()

    def erase_dormant(self, namespace: str | None = None) -> int:
        """Erase the blobs without a row, of a namespace if its digest is given, and return how many; raises ``StoreError``."""
        going = set()
        for key in self.listed() - self.catalog.present():
            try:
                is_going = namespace in (None, self.blob(key).header.identity.namespace)
            except BlobRejected as fault:  # what other keys protect, or can't be read, stays
                is_going = fault.hole == "damaged" and namespace is None
            going |= {key} if is_going else set()
        self._erase(going, "deleted")
        if namespace is None and self.catalog.state().dormant:
            self.catalog.no_dormant()
        return len(going)

    def release(self) -> int:
        """Empty the uppermost memory tier for the sake of its memory, and return its bytes; what was in it is still below."""
        return self.tiers[0].release() if self.tiers else 0

    def make_room(self) -> None:
        """Evict what is over the budget; raises ``StoreError`` if that is not enough."""
        self._check_writable()
        self._evictor.make_room(0, priority=100)

    def close(self) -> None:
        """Release resources; idempotent. What other stores of the process share stays open for them."""
        with self._lock:
            was_closed, self._is_closed, tiers, self.tiers = self._is_closed, True, self.tiers, ()
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
        """Erase chunks, blobs first, and return those that had a blob."""
        rows = self.catalog.revisions(keys)
        gone = self.delete_blobs(keys)
        self.catalog.remove(rows)
        with refusal(
            "stored chunks can't be erased"
        ):  # what a writer confirms meanwhile may have gone before
            left = [(key, row) for key, row in self.catalog.revisions(gone).items() if row]
            if found := {key: row for key, row in left if self._read(key, 0, 1) is None}:
                self.catalog.remove(found)
        self._drop(keys, reason, gone)
        return gone
