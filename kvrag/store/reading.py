"""Read chunks from memory, else from the blobs of chunks in the catalog, and keep them in memory.

A fault of stored data is a miss, never an error: a blob that fails verification is erased, and the
row of an absent blob is removed.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TypeVar

from kvrag.config import Retention, StoreConfig
from kvrag.config.address import place
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.buffers import arrived
from kvrag.kv.crypto import Keys
from kvrag.kv.format import Blob, BlobRejected, Bytes
from kvrag.runtime import Deadline
from kvrag.store.base import Blobs, Listener, StoreEvent, StoreStats
from kvrag.store.blobs import KEY
from kvrag.store.catalog import Catalog
from kvrag.store.catalog.ledger import ChunkRow
from kvrag.store.eviction import Usage
from kvrag.store.memory import Loaded, MemoryTier, Prefetch, Read, Reads, emit
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, HoleReason

log = logging.getLogger(__name__)
T = TypeVar("T")
Epochs = list[tuple[MemoryTier, int]]

AT_ONCE_BYTES = 16 * 2**20
"""Size of KV up to which a remote blob is read in a single round trip.

The layers of a larger blob are read in parallel.
"""
LOOK_S = 0.05
"""Minimum time for a look into memory: chunks there are returned however short the timeout is."""


class Reader:
    """Reading half of a :class:`~kvrag.store.tiers.TieredStore`."""

    def __init__(
        self,
        tiers: Sequence[MemoryTier],
        blobs: Blobs,
        catalog: Catalog,
        config: StoreConfig,
        keys: Keys,
    ) -> None:
        self.catalog = catalog
        self.blobs = blobs
        self.config = config
        self.keys = keys
        self.names = keys
        self.read_only = config.read_only or catalog.read_only
        self.name = blobs.medium
        """Name of the blobs' tier, in statistics and events."""
        said_to = config.on_event, place(config.event_log)
        self.listeners = [Listener(*said_to)] if said_to != (None, None) else []
        self.tiers = tuple[MemoryTier, ...]()
        self.reads = Reads(0)
        for tier in reversed(tiers):
            self.put_above(tier)
        self._lock = threading.RLock()
        self._counts = Counter[str]()
        self._has_warned = False
        # The catalog's generation when memory was last compared with it.
        self._followed: int | None = None

    def put_above(self, tier: MemoryTier) -> None:
        """Add a memory tier above all other tiers."""
        tier.listeners += self.listeners
        self.tiers = (tier, *self.tiers)
        self.reads = tier.reads

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return the stored keys among ``keys``; blobs are verified when they are read."""
        return self.catalog.known(keys)

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return the identities of a text's stored KV, verified against their keys.

        A text has a chunk per model, prefix and context.
        """
        found = (self.identity(key) for key in self.catalog.text_keys(namespace, digest))
        return [identity for identity in found if identity is not None]

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return the verified identity of the chunk that is stored under a key."""
        self._follow()
        for tier in self.tiers:
            identity = tier.identity(key)
            if identity is not None:
                return identity
        chunk = self.catalog.stored_row(key)
        if chunk is None:
            self._hole(key)
            return None
        found = self._from_blob(key, chunk, lambda blob: blob.header.identity)
        if isinstance(found, Hole):
            return None
        return found

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return a chunk's retention, with its remaining duration; ``None`` for the default."""
        return self.catalog.usage(key).retention()

    def listen(self, on_event: Callable[[StoreEvent], None]) -> None:
        """Call ``on_event`` on every change of a tier, like ``StoreConfig.on_event``."""
        listener = Listener(on_event, None)
        for listeners in (self.listeners, *[tier.listeners for tier in self.tiers]):
            listeners.append(listener)

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of the tiers by name, uppermost first.

        Names are ``"gpu"``, ``"host"``, ``"disk"`` and ``"shared"``.
        """
        counts = (self._counts[what] for what in ("hits", "misses", "damaged"))
        lowest = StoreStats(*self.catalog.totals(), *counts)
        return {**{tier.name: tier.stats() for tier in self.tiers}, self.name: lowest}

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return a chunk's verified KV, or ``None``; a fault of stored data never raises.

        The tensors are read-only by convention: they may be shared with the memory tiers.
        """
        self._follow()
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
            dict[ChunkIdentity, Loaded | Read | None](),
            what="the KV store",
        )
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
        self._follow()
        found = 0
        reads = list[Read]()
        for each in dict.fromkeys(wanted):
            identity = each if isinstance(each, ChunkIdentity) else self.identity(each)
            if identity is None or (record := self.catalog.get(chunk_key(identity))) is None:
                continue
            found += 1
            if all(tier.identity(record.key) != identity for tier in self.tiers[:1]):
                read = self.reads.ahead(
                    record.key, partial(self._load, identity, record.key), record.num_bytes
                )
                if read is not None:
                    reads.append(read)
        return Prefetch(found, reads)

    def _look(
        self, keys: Mapping[ChunkIdentity, ChunkKey]
    ) -> dict[ChunkIdentity, Loaded | Read | None]:
        """Return chunks in memory, holes for missing chunks and started reads for the rest.

        ``None`` stands for a read that no thread can do.
        """
        self._follow()
        epochs = self._epochs()
        found: dict[ChunkIdentity, Loaded | Read | None]
        found = {identity: self._in_memory(identity, key) for identity, key in keys.items()}
        rest = {identity: key for identity, key in keys.items() if found[identity] is None}
        stored = self.catalog.stored(rest.values())
        for identity, key in rest.items():
            if key in stored:
                load = partial(self._load, identity, key, stored[key], epochs)
                found[identity] = self.reads.read(key, load)
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
        kv = self._in_memory(identity, key)
        if kv is not None:
            return kv
        if epochs is None:
            epochs = self._epochs()
            chunk = self.catalog.stored_row(key)
        if chunk is None:
            return self._hole(key)
        found = self._from_blob(key, chunk, lambda blob: blob.load(), identity)
        if isinstance(found, Hole):
            return found
        with self._lock:
            self._counts["hits"] += 1
        self.catalog.touch(key)
        return self._lift(identity, found, epochs, chunk.usage)

    def _in_memory(self, identity: ChunkIdentity, key: ChunkKey) -> ChunkKV | None:
        """Return a chunk from the uppermost tier that has it, and keep it in the tiers above."""
        epochs = self._epochs()
        for number, (tier, _) in enumerate(epochs):
            kv = tier.get(key, identity)
            if kv is not None:
                self.catalog.touch(key)
                usage = self.catalog.usage(key) if number else Usage()
                return self._lift(identity, kv, epochs[:number], usage)
        return None

    def _from_blob(
        self,
        key: ChunkKey,
        chunk: ChunkRow,
        take: Callable[[Blob], T],
        identity: ChunkIdentity | None = None,
    ) -> T | Hole:
        """Return ``take`` of a chunk's blob.

        A blob that is rejected gives a hole, and is handled by :meth:`_reject`.
        """
        try:
            return self._taken(key, take, identity, chunk.num_bytes)
        except BlobRejected as fault:
            self._reject({key: chunk.revision}, fault)
            return self._hole(key, fault.hole, fault.layer)
        except (MemoryError, RuntimeError) as error:
            log.warning("a stored chunk could not be read (%s); computing instead", error)
            return self._hole(key, "unreadable")

    def _taken(
        self,
        key: ChunkKey,
        take: Callable[[Blob], T],
        identity: ChunkIdentity | None,
        num_bytes: int,
    ) -> T:
        """Return ``take`` of a blob; if the local copy is damaged, of the shared blob."""
        try:
            return take(self.blob(key, identity, num_bytes))
        except BlobRejected as fault:
            if fault.hole != "damaged" or self.blobs.shared is None:
                raise
            with suppress(OSError):
                self.blobs.forget([key])
            return take(self.blob(key, identity, num_bytes))

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
                self.catalog.remove(row)
                self._drop(row, "rejected", gone)

    def _epochs(self) -> Epochs:
        """Return the tiers with their epochs, which change when a chunk is erased."""
        return [(tier, tier.epoch) for tier in self.tiers]

    def _lift(self, identity: ChunkIdentity, kv: ChunkKV, epochs: Epochs, usage: Usage) -> ChunkKV:
        """Keep a chunk in some tiers, lowest first; return it as the uppermost tier returns it."""
        for tier, epoch in reversed(epochs):
            kv = tier.keep(identity, kv, usage, epoch=epoch)
        return kv

    def _follow(self) -> None:
        """Drop chunks from memory that any process has erased."""
        generation = self.catalog.state().generation
        if generation == self._followed:
            return
        for tier in self.tiers:
            keys = tier.keys()
            known = self.catalog.known(keys)
            tier.drop([key for key in keys if key not in known], "evicted")
        self.blobs.follow(self.catalog.absent)
        self._followed = generation

    def _drop(
        self, keys: Collection[ChunkKey], reason: str, gone: Collection[ChunkKey] | None = None
    ) -> None:
        for tier in self.tiers:
            tier.drop(keys, reason)
        emit(self.listeners, self.name, sorted(keys if gone is None else gone), reason)

    def _hole(self, key: ChunkKey, reason: HoleReason = "absent", layer: int | None = None) -> Hole:
        with self._lock:
            self._counts.update(["misses", reason])
        return Hole(key, reason, layer)
