"""Read chunks from memory, else from the blobs of chunks in the catalog, and keep them in memory.

A fault of stored data is a miss, never an error: a blob that fails verification is erased, and the
row of an absent blob is removed.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.buffers import arrived
from kvrag.kv.crypto import Keys
from kvrag.kv.format import Blob, BlobRejected, Bytes
from kvrag.runtime import Deadline
from kvrag.store.base import Blobs, StoreStats
from kvrag.store.blobs import KEY
from kvrag.store.catalog import Catalog
from kvrag.store.catalog.ledger import ChunkRow
from kvrag.store.memory import Epochs, Loaded, Prefetch, Read, Tiers
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, HoleReason

log = logging.getLogger(__name__)
T = TypeVar("T")

# Size of KV up to which a remote blob is read in a single round trip.
# The layers of a larger blob are read in parallel.
AT_ONCE_BYTES = 16 * 2**20
# Minimum time for a look into memory: chunks there are returned however short the timeout is.
LOOK_S = 0.05

# Chunks in memory, holes of missing chunks, started reads; ``None``: no thread can read it.
Looked = dict[ChunkIdentity, Loaded | Read | None]


@dataclass(slots=True, eq=False)
class Reader:
    """Reads of a store: from ``memory``, else from verified ``blobs`` of chunks in ``catalog``."""

    memory: Tiers
    blobs: Blobs
    catalog: Catalog
    # Decrypt blobs.
    keys: Keys
    # Whether damaged blobs, and rows of absent blobs, stay.
    read_only: bool
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _counts: Counter[str] = field(default_factory=Counter)
    _has_warned: bool = False

    def stats(self) -> StoreStats:
        """Return the statistics of the blobs."""
        counts = self._counts
        return StoreStats(
            *self.catalog.totals(), counts["hits"], counts["misses"], counts["damaged"]
        )

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return the verified identity of the chunk that is stored under a key."""
        self.memory.follow()
        known = self.memory.identity(key)
        if known is not None:
            return known
        chunk = self.catalog.stored_row(key)
        if chunk is None:
            self._hole(key)
            return None
        found = self._from_blob(key, chunk, lambda blob: blob.header.identity)
        if isinstance(found, Hole):
            return None
        return found

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return a chunk's verified KV, or ``None``; a fault of stored data never raises.

        The tensors are read-only by convention: they may be shared with the memory tiers.
        """
        self.memory.follow()
        loaded = self._load(identity, chunk_key(identity))
        if isinstance(loaded, ChunkKV):
            return arrived(loaded)
        return None

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[Loaded]:
        """Load several chunks; a :class:`~kvrag.types.Hole` stands for a chunk that is not loaded.

        Repeated identities are loaded once. Chunks in memory are returned however short the timeout
        is. A chunk may still be on its way to a device (:func:`~kvrag.kv.buffers.arrived`).
        """
        keys = {identity: chunk_key(identity) for identity in identities}
        look_s = max(timeout_s, LOOK_S)
        look = Deadline(look_s)
        found = look.ask(
            partial(self._look, keys),
            Looked(),
            what="the KV store",
        )
        # What the look took counts, but a look may take LOOK_S at any timeout.
        reading = Deadline(max(0.0, look.left_s - look_s + timeout_s))
        loaded = dict[ChunkIdentity, Loaded]()
        for identity, key in keys.items():
            each = found.get(identity)
            late = Hole(key, "late", None)
            if isinstance(each, Read):
                each = reading.result(each.future, late, what="a stored chunk")
            loaded[identity] = each or late
        return [loaded[identity] for identity in identities]

    def prefetch(self, wanted: Iterable[ChunkIdentity | ChunkKey]) -> Prefetch:
        """Start reading chunks into memory, and return without waiting; calls share their reads."""
        self.memory.follow()
        found = 0
        reads = list[Read]()
        for each in dict.fromkeys(wanted):
            identity = each if isinstance(each, ChunkIdentity) else self.identity(each)
            if identity is None or (record := self.catalog.get(chunk_key(identity))) is None:
                continue
            found += 1
            # A chunk in the uppermost tier needs no read.
            if all(tier.identity(record.key) != identity for tier in self.memory.all[:1]):
                read = self.memory.reads.ahead(
                    record.key, partial(self._load, identity, record.key), record.num_bytes
                )
                if read is not None:
                    reads.append(read)
        return Prefetch(found, reads)

    def blob(
        self, key: ChunkKey, identity: ChunkIdentity | None = None, num_bytes: int = 2**62
    ) -> Blob:
        """Return the blob under a key, with a verified header; raises ``BlobRejected``.

        The header must match the key, and ``identity`` if given. With ``num_bytes``, the size of
        its KV, a small remote blob is read in a single round trip.
        """
        if identity is not None and self.blobs.is_remote and num_bytes <= AT_ONCE_BYTES:
            read = self._at_once(key)
        else:
            read = partial(self._read, key)
        blob = Blob(read, identity, self.keys.cipher)
        if chunk_key(blob.header.identity) != key:
            raise BlobRejected("it belongs to another chunk")
        return blob

    def _look(self, keys: Mapping[ChunkIdentity, ChunkKey]) -> Looked:
        """Return chunks in memory, holes for missing chunks and started reads for the rest.

        ``None`` stands for a read that no thread can do.
        """
        self.memory.follow()
        # Before the rows are read: a chunk that is erased from now on is not kept in memory.
        epochs = self.memory.epochs()
        found: Looked = {identity: self.memory.get(identity, key) for identity, key in keys.items()}
        rest = {identity: key for identity, key in keys.items() if found[identity] is None}
        stored = self.catalog.stored(rest.values())
        for identity, key in rest.items():
            if key in stored:
                found[identity] = self.memory.reads.read(
                    key, partial(self._load, identity, key, stored[key], epochs)
                )
            else:
                found[identity] = self._hole(key)
        return found

    def _load(
        self,
        identity: ChunkIdentity,
        key: ChunkKey,
        chunk: ChunkRow | None = None,
        epochs: Epochs | None = None,
    ) -> Loaded:
        """Return a chunk from memory, else from its blob, and keep it in the tiers above.

        ``chunk`` is its row, and ``epochs`` are those of the tiers before the row was read.
        """
        kv = self.memory.get(identity, key)
        if kv is not None:
            return kv
        if epochs is None:
            epochs = self.memory.epochs()
            chunk = self.catalog.stored_row(key)
        if chunk is None:
            return self._hole(key)
        found = self._from_blob(key, chunk, lambda blob: blob.load(), identity)
        if isinstance(found, Hole):
            return found
        # It may have been erased before it was copied.
        if self.blobs.shared and epochs != self.memory.epochs():
            self.blobs.follow(lambda _: self.catalog.absent([key]))
        with self._lock:
            self._counts["hits"] += 1
        self.catalog.touch(key)
        return self.memory.keep(identity, found, epochs, chunk.usage)

    def _from_blob(
        self,
        key: ChunkKey,
        chunk: ChunkRow,
        take: Callable[[Blob], T],
        identity: ChunkIdentity | None = None,
    ) -> T | Hole:
        """Return ``take`` of a chunk's blob; if the local copy is damaged, of the shared blob.

        A blob that is rejected gives a hole, and is handled by :meth:`_reject`.
        """
        try:
            try:
                return take(self.blob(key, identity, chunk.num_bytes))
            except BlobRejected as fault:
                if fault.hole != "damaged" or self.blobs.shared is None:
                    raise
                with suppress(OSError):
                    self.blobs.forget([key])
                return take(self.blob(key, identity, chunk.num_bytes))
        except BlobRejected as fault:
            self._reject({key: chunk.revision}, fault)
            return self._hole(key, fault.hole, fault.layer)
        except (MemoryError, RuntimeError) as error:
            log.warning("a stored chunk could not be read (%s); computing instead", error)
            return self._hole(key, "unreadable")

    def _read(self, key: ChunkKey, start: int, length: int | None) -> Bytes | None:
        # Rows of an unencrypted catalog can be forged to name any file.
        if KEY.fullmatch(key):
            return self.blobs.read(key, start, length)
        return None

    def _at_once(self, key: ChunkKey) -> Callable[[int, int], Bytes | None]:
        """Return a reader of parts of a blob that fetches the whole blob at its first call."""
        fetch = cache(partial(self._read, key, 0, None))

        def read(start: int, length: int) -> Bytes | None:
            whole = fetch()
            return whole and memoryview(whole)[start : start + length]

        return read

    def _reject(self, row: Mapping[ChunkKey, int], fault: BlobRejected) -> None:
        """Erase a damaged blob, and remove the row of a damaged or absent blob.

        Blobs of other keys or versions stay in place. An unreadable blob keeps its row.
        """
        if fault.hole == "unreadable":
            if not self._has_warned:
                self._has_warned = True
                log.warning("stored chunks can't be read: %s; computing instead", fault.reason)
            return
        [key] = row
        if fault.hole == "damaged":
            log.warning(
                "the stored chunk %s is rejected: %s; computing instead", key[:12], fault.reason
            )
        if not self.read_only:
            with suppress(OSError):
                gone = self.blobs.delete([key]) if fault.hole == "damaged" else set()
                # By the revision that was read: a chunk that was written again since keeps its row.
                self.catalog.remove(row)
                self.memory.drop(row, "rejected", gone)

    def _hole(self, key: ChunkKey, reason: HoleReason = "absent", layer: int | None = None) -> Hole:
        with self._lock:
            self._counts.update(["misses", reason])
        return Hole(key, reason, layer)
