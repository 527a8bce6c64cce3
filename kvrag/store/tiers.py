"""Store of an engine: memory tiers above blobs, and the catalog of the stored chunks.

Reads look in memory, uppermost tier first, then in the blobs, and keep a copy in the tiers above.
Writes add a pending row, write the blob, and confirm the row. Erasures remove blobs first and rows
last. So a killed process leaves rows without blobs (misses) or pending rows (absent).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from kvrag.config import Retention, StoreConfig
from kvrag.config.address import place
from kvrag.errors import StoreError
from kvrag.kv.crypto import Keys
from kvrag.kv.format import BlobRejected, OtherVersion
from kvrag.store.base import Blobs, Listener, NewKV, StoreEvent, StoreStats
from kvrag.store.blobs import KEY
from kvrag.store.catalog import Catalog
from kvrag.store.eviction import Budget, Evictor
from kvrag.store.memory import MemoryTier, Tiers
from kvrag.store.reading import Reader
from kvrag.store.writing import Writer, in_words
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry

EVERYWHERE = "*"  # stands for all namespaces; it is not a digest


class TieredStore:
    """Chunks in memory tiers above blobs. Thread-safe; processes may share blobs and catalog.

    All tiers return the same bits for a key. Chunks that any process has erased are not answered
    from memory. A :class:`~kvrag.store.reading.Reader` reads and a
    :class:`~kvrag.store.writing.Writer` writes, whose methods the store hands out; erasures are
    here.

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
        config = config or StoreConfig()
        keys = keys or Keys()
        self.config = config
        self.names = keys
        self.blobs = blobs
        self.catalog = catalog
        self.read_only = config.read_only or catalog.read_only
        # Name of the blobs' tier, in statistics and events.
        self.name = blobs.medium
        said_to = config.on_event, place(config.event_log)
        self.memory = Tiers(blobs, catalog, [Listener(*said_to)] if said_to != (None, None) else [])
        for tier in reversed(tiers):
            self.memory.put_above(tier)
        self.reader = Reader(
            self.memory,
            blobs,
            catalog,
            keys,
            self.read_only,
        )
        self.writer = Writer(
            self.reader,
            self.memory,
            blobs,
            catalog,
            keys,
            Evictor(
                budget or Budget(),
                totals=catalog.totals,
                usages=catalog.usages,
                free_bytes=blobs.free_bytes,
                evict=partial(self._erase, reason="evicted"),
            ),
            self.read_only,
        )
        # Returns the stored keys among some; blobs are verified when they are read:
        # :meth:`~kvrag.store.catalog.ledger.Ledger.known`.
        self.known = catalog.known
        # Returns the verified identity of the chunk under a key:
        # :meth:`~kvrag.store.reading.Reader.identity`.
        self.identity = self.reader.identity
        # Returns a chunk's verified KV, or ``None``: :meth:`~kvrag.store.reading.Reader.get`.
        self.get = self.reader.get
        # Loads several chunks in a time limit: :meth:`~kvrag.store.reading.Reader.get_many`.
        self.get_many = self.reader.get_many
        # Starts reading chunks into memory: :meth:`~kvrag.store.reading.Reader.prefetch`.
        self.prefetch = self.reader.prefetch
        # Stores several chunks: :meth:`~kvrag.store.writing.Writer.put_all`.
        self.put_all = self.writer.put_all
        self._is_last = is_last
        self._lock = threading.RLock()

    @property
    def tiers(self) -> tuple[MemoryTier, ...]:
        """Memory tiers, uppermost first."""
        return self.memory.all

    @property
    def claims(self) -> Path | None:
        """File for claims of writers; ``None`` in memory, in stores of machines and read-only."""
        folder = self.catalog.folder
        return None if folder is None or self.read_only else folder.with_name("lock.claims")

    # -- reading -----------------------------------------------------------------------------------

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return the identities of a text's stored KV, verified against their keys.

        A text has a chunk per model, prefix and context.
        """
        return [*filter(None, map(self.identity, self.catalog.text_keys(namespace, digest)))]

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return a chunk's retention, with its remaining duration; ``None`` for the default."""
        return self.catalog.usage(key).retention()

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of the tiers by name, uppermost first.

        Names are ``"gpu"``, ``"host"``, ``"disk"`` and ``"shared"``.
        """
        return {tier.name: tier.stats() for tier in self.tiers} | {self.name: self.reader.stats()}

    def listen(self, on_event: Callable[[StoreEvent], None]) -> None:
        """Call ``on_event`` on every change of a tier, like ``StoreConfig.on_event``."""
        self.memory.listen(Listener(on_event, None))

    # -- writing -----------------------------------------------------------------------------------

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
        reason: str = "put",
    ) -> int:
        """Store a chunk and return the bytes written.

        Returns 0 if the chunk is stored already; then only text and document are added. Raises
        ``StoreError``, and leaves nothing but the document, if the chunk can't be written or finds
        no room.
        """
        [written] = self.put_all([NewKV(identity, kv, text, (doc_id,), retention)], reason=reason)
        if isinstance(written, StoreError):
            raise written
        return written

    def link(
        self,
        identity: ChunkIdentity,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        is_registered: bool = False,
    ) -> bool:
        """Add text and document to a stored chunk, and return whether the chunk is stored.

        With ``is_registered``, the text must have been registered; ``False`` if it was deleted
        since. A dormant blob is adopted: see :meth:`Writer.link`.
        """
        return self.writer.link(identity, text, () if is_registered else (doc_id,))

    def register(self, namespace: str, texts: Sequence[tuple[str | None, TextEntry]]) -> None:
        """Register documents before their KV is computed, so that a deletion from now on wins.

        Prompts are split at registered texts. Nothing happens in a store that takes no chunks.
        Raises ``StoreError``.
        """
        if not self.writer.refusal():
            self.catalog.register(namespace, texts)

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Set the retention of stored chunks in every tier, and return their number.

        A duration moves the expiry of their blobs in stores where blobs expire. A cost that
        ``retention`` omits stays as it was. Raises ``StoreError``.
        """
        self._check_writable()
        keys = list(keys)
        found = self.catalog.retain(keys, retention)
        for tier in self.tiers:
            tier.retain(keys, retention)
        if retention.duration_s is not None:
            for key in keys:
                with suppress(OSError):
                    self.blobs.expire(key, retention.duration_s)
        return found

    # -- erasing -----------------------------------------------------------------------------------

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
        while True:
            if self.catalog.state().dormant:
                self.erase_dormant()
            going = self.catalog.revisions(self.catalog.only_held_by(namespace, doc_id, digests))
            known |= self.catalog.known(going)
            self.delete_blobs(going)
            # Once more if a writer has stored another chunk of the document meanwhile, or if the
            # catalog was lost, whose blobs are dormant then.
            if (
                self.catalog.unlink(namespace, doc_id, going, digests)
                and not self.catalog.state().dormant
            ):
                break
        self.memory.drop(known, "deleted")
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
            self.memory.drop(keys, "deleted")
        else:
            self.memory.drop(None, "cleared")
        self.catalog.scrub()
        return count

    def listed(self) -> set[ChunkKey]:
        """Return the keys of all blobs; raises ``StoreError``."""
        with in_words("stored chunks can't be listed"):
            return self.blobs.keys()

    def delete_blobs(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Erase blobs and return the keys that existed; raises ``StoreError``."""
        with in_words("stored chunks can't be erased"):
            return self.blobs.delete([key for key in keys if KEY.fullmatch(key)])

    def erase_dormant(self, namespace: str | None = None) -> int:
        """Erase blobs without a row, and return their number; raises ``StoreError``.

        With ``namespace``, a digest, only blobs of this namespace are erased; else also all that an
        earlier version of the format has left.
        """
        if self.read_only:
            return 0
        going = set()
        for key in self.listed() - self.catalog.present():
            try:
                if namespace in (None, self.reader.blob(key).header.identity.namespace):
                    going.add(key)
            except BlobRejected as fault:  # blobs of other keys and unreadable blobs stay
                if namespace is None and (fault.hole == "damaged" or type(fault) is OtherVersion):
                    going.add(key)
        self._erase(going, "deleted")
        if namespace is None:
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
        self.writer.evictor.make_room(0, priority=100)

    def close(self) -> None:
        """Release resources; idempotent. Parts that the process's other stores share stay open.

        In a process that was forked since, nothing is released: it is the parent's.
        """
        with self._lock:
            if self.writer.is_closed:
                return
            self.writer.is_closed = True
        self.memory.close()
        self.catalog.flush()
        if self._is_last():
            self.memory.reads.cancel()
            self.catalog.close()
            self.blobs.close()

    def _check_writable(self) -> None:
        if refused := self.writer.refusal():
            raise refused

    def _erase(self, keys: Collection[ChunkKey], reason: str) -> set[ChunkKey]:
        """Erase chunks, blobs first, and return the keys that had a blob."""
        rows = self.catalog.revisions(keys)
        gone = self.delete_blobs(keys)
        self.catalog.remove(rows)
        # A writer may have confirmed a chunk after its blob was erased.
        with in_words("stored chunks can't be erased"):
            found = {
                key: row
                for key, row in self.catalog.revisions(gone).items()
                if row and self.blobs.read(key, 0, 1) is None
            }
            if found:
                self.catalog.remove(found)
        self.memory.drop(keys, reason, gone)
        return gone


class Stopped(Exception):
    """The engine was closed, or documents were erased, after the chunks were missed."""


class Erasures:
    """Count erasures per namespace, so chunks missed before an erasure are not stored after it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, namespace: str) -> int:
        """Return the number of erasures of a namespace so far."""
        return self._counts[namespace] + self._counts[EVERYWHERE]

    @contextmanager
    def erasing(self, namespace: str) -> Iterator[None]:
        """Count an erasure and block writes during it, so that it finds all written chunks.

        ``namespace`` is a digest or :data:`EVERYWHERE`.
        """
        with self._lock:
            self._counts[namespace] += 1
            yield

    @contextmanager
    def unless_any_since(self, namespace: str, count: int) -> Iterator[None]:
        """Block erasures; raise :class:`Stopped` if there were any since ``count``."""
        with self._lock:
            if self.count(namespace) != count:
                raise Stopped
            yield


# Counter of all engines of this process: those of a directory must share one.
ERASURES = Erasures()
# The thread that holds the lock may be the parent's.
os.register_at_fork(after_in_child=lambda: vars(ERASURES).update(vars(Erasures())))
