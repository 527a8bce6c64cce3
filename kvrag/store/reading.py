"""Reading: what is in memory first, then what the catalog knows, from the blobs; what is read is kept in the memory above.

A fault of stored data is a miss, never an error: what fails its proof is erased, and what is gone is forgotten.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvrag.config import Retention, StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import Blobs, Bytes, Listener, MemoryBlobs, StoreEvent, StoreStats
from kvrag.store.blobs import KEY, FileBlobs
from kvrag.store.catalog import Catalog
from kvrag.store.copies import CopiedBlobs
from kvrag.store.crypto import Keys
from kvrag.store.format import Blob, BlobRejected
from kvrag.store.memory import Loaded, MemoryTier, Prefetch, Read, Reads, tell
from kvrag.store.worth import Usage
from kvrag.threads import Deadline, fork_lock
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, HoleReason

log = logging.getLogger(__name__)
T = TypeVar("T")

AT_ONCE_BYTES = 16 * 2**20
"""Bytes of KV up to which a blob of another machine is read in one round trip; layers of a longer one are read beside each other."""
LOOK_S = 0.05
"""Seconds that a look into memory is given in any case, so that what is there comes however little time is left."""


class Reader:
    """The half of a :class:`~kvrag.store.tiers.TieredStore` that reads."""

    def __init__(
        self,
        tiers: Sequence[MemoryTier],
        blobs: Blobs,
        catalog: Catalog,
        config: StoreConfig,
        keys: Keys,
    ) -> None:
        self.catalog, self.blobs, self.config, self.keys, self.names = (
            catalog,
            blobs,
            config,
            keys,
            keys,
        )
        self.read_only = config.read_only or catalog.read_only
        self.name = (
            "host"
            if isinstance(blobs, MemoryBlobs)
            else "disk"
            if isinstance(blobs, FileBlobs)
            else "shared"
        )
        """Name of the blobs' tier, for statistics and events."""
        said_to = config.on_event, config.event_log
        self.listeners = [Listener(*said_to)] if any(each is not None for each in said_to) else []
        self.tiers, self.reads = tuple[MemoryTier, ...](), Reads(0)
        for tier in reversed(tiers):
            self.put_above(tier)
        self._lock, self._counts, self._has_warned = fork_lock(), Counter[str](), False
        self._followed: int | None = (
            None  # the catalog's generation when memory was last compared with it
        )

    def put_above(self, tier: MemoryTier) -> None:
        """Add an uppermost memory tier."""
        tier.listeners += self.listeners
        self.tiers, self.reads = (tier, *self.tiers), tier.reads

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those keys whose chunks are stored; their integrity is proven when they are read."""
        return self.catalog.known(keys)

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV is stored for a text: one identity per model, prefix and context, each proven to be that of its key."""
        found = (self.identity(key) for key in self.catalog.text_keys(namespace, digest))
        return [identity for identity in found if identity is not None]

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is stored under a key, proven."""
        self._follow()
        for tier in self.tiers:
            if (identity := tier.identity(key)) is not None:
                return identity
        found = self._from_blob(key, lambda blob: blob.header.identity)
        return None if isinstance(found, Hole) else found

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return a chunk's retention, with what is left of its duration; ``None`` if it was given none."""
        return self.catalog.usage(key).retention()

    def listen(self, hear: Callable[[StoreEvent], None]) -> None:
        """Have each change of a tier told to ``hear``, as to ``StoreConfig.on_event``."""
        listener = Listener(hear, None)
        for listeners in (self.listeners, *[tier.listeners for tier in self.tiers]):
            listeners.append(listener)

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name (``"gpu"``, ``"host"``, ``"disk"``), uppermost first."""
        counts = (self._counts[what] for what in ("hits", "misses", "damaged"))
        lowest = StoreStats(*self.catalog.totals(), *counts)
        return {**{tier.name: tier.stats() for tier in self.tiers}, self.name: lowest}

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return a chunk's KV, proven to be that of ``identity``, or ``None``; a fault of stored data never raises.

        The tensors are read-only by convention: they may be shared with the memory tiers.
        """
        self._follow()
        loaded = self._load(identity, chunk_key(identity))
        return loaded if isinstance(loaded, ChunkKV) else None

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[Loaded]:
        """Load several chunks at once; in the place of one that can't be had in time is a :class:`~kvrag.types.Hole`.

        Repeated identities are loaded once. What is in memory comes however little time there is.
        """
        keys = {identity: chunk_key(identity) for identity in identities}
        look_s = max(timeout_s, LOOK_S)
        look = Deadline(look_s)
        found = look.ask(
            partial(self._look, keys),
            dict[ChunkIdentity, Loaded | Read | None](),
            what="the KV store",
        )
        reading, loaded = (
            Deadline(max(0.0, look.left_s - look_s + timeout_s)),
            dict[ChunkIdentity, Loaded](),
        )
        for identity, key in keys.items():
            each, late = found.get(identity), Hole(key, "late", None)
            if isinstance(each, Read):
                each = reading.result(each.future, late, what="a stored chunk")
            loaded[identity] = each or late
        return [loaded[identity] for identity in identities]

    def prefetch(self, wanted: Iterable[ChunkIdentity | ChunkKey]) -> Prefetch:
        """Begin to read chunks into memory, and return while they are read; those of several calls are read once."""
        self._follow()
        found, reads = 0, list[Read]()
        for each in dict.fromkeys(wanted):
            identity = each if isinstance(each, ChunkIdentity) else self.identity(each)
            if identity is None or (record := self.catalog.get(chunk_key(identity))) is None:
                continue
            found += 1
            if all(tier.identity(record.key) != identity for tier in self.tiers[:1]):
                read = self.reads.ahead(
                    record.key, partial(self._load, identity, record.key), record.num_bytes
                )
                reads += [] if read is None else [read]
        return Prefetch(found, reads)

    def _look(
        self, keys: Mapping[ChunkIdentity, ChunkKey]
    ) -> dict[ChunkIdentity, Loaded | Read | None]:
        """Return what is in memory, holes for what is not stored, and reads, begun, of the rest; ``None`` for what nobody can read."""
        self._follow()
        found: dict[ChunkIdentity, Loaded | Read | None]
        found = {identity: self._in_memory(identity, key) for identity, key in keys.items()}
        rest = {identity: key for identity, key in keys.items() if found[identity] is None}
        known = self.catalog.known(rest.values())
        for identity, key in rest.items():
            load = partial(self._load, identity, key)
            found[identity] = self.reads.read(key, load) if key in known else self._hole(key)
        return found

    def _load(self, identity: ChunkIdentity, key: ChunkKey) -> Loaded:
        """Return a chunk from memory or, if the catalog knows it, from the blobs, and keep it in the tiers above."""
        epochs = self._epochs()
        if (kv := self._in_memory(identity, key)) is not None:
            return kv
        found = self._from_blob(key, lambda blob: blob.load(), identity)
        if isinstance(found, Hole):
            return found
        with self._lock:
            self._counts["hits"] += 1
        self.catalog.touch(key)
        return self._lift(identity, found, epochs)

    def _in_memory(self, identity: ChunkIdentity, key: ChunkKey) -> ChunkKV | None:
        """Return a chunk from the uppermost tier that has it, and keep it in those above."""
        epochs = self._epochs()
        for number, (tier, _) in enumerate(epochs):
            if (kv := tier.get(key, identity)) is not None:
                self.catalog.touch(key)
                return self._lift(identity, kv, epochs[:number])
        return None

    def _from_blob(
        self, key: ChunkKey, take: Callable[[Blob], T], identity: ChunkIdentity | None = None
    ) -> T | Hole:
        """Take something from the blob of a chunk that the catalog knows; one that is not what it should be is forgotten."""
        row = self.catalog.revisions(self.catalog.known([key]))
        if not row:
            return self._hole(key)
        try:
            return self._taken(key, take, identity)
        except BlobRejected as fault:
            self._reject(row, fault)
            return self._hole(key, fault.hole, fault.layer)
        except (MemoryError, RuntimeError) as error:
            log.warning("a stored chunk could not be read (%s); computing instead", error)
            return self._hole(key, "unreadable")

    def _taken(self, key: ChunkKey, take: Callable[[Blob], T], identity: ChunkIdentity | None) -> T:
        """Take something from a blob; from the shared one, where the copy on this machine is damaged."""
        try:
            return take(self.blob(key, identity))
        except BlobRejected as fault:
            if fault.hole != "damaged" or not isinstance(self.blobs, CopiedBlobs):
                raise
            with suppress(OSError):
                self.blobs.forget([key])
            return take(self.blob(key, identity))

    def blob(self, key: ChunkKey, identity: ChunkIdentity | None = None) -> Blob:
        """Return the blob under a key, its header proven to be that of this chunk; raises ``BlobRejected``."""
        read: Callable[[int, int], Bytes | None] = partial(self._read, key)
        if identity is not None and getattr(self.blobs, "is_far", False):
            record = self.catalog.get(key)
            read = (
                self._at_once(key)
                if record is not None and record.num_bytes <= AT_ONCE_BYTES
                else read
            )
        blob = Blob(read, identity, self.keys.cipher)
        if chunk_key(blob.header.identity) != key:
            raise BlobRejected("it belongs to another chunk")
        return blob

    def _read(self, key: ChunkKey, start: int, length: int) -> Bytes | None:
        # Who can write to a catalog that is not encrypted can name any file in it.
        return self.blobs.read(key, start, length) if KEY.fullmatch(key) else None

    def _at_once(self, key: ChunkKey) -> Callable[[int, int], Bytes | None]:
        """Return what reads parts of a blob, and asks for all of it once."""
        found: list[memoryview | None] = []

        def read(start: int, length: int) -> Bytes | None:
            if not found:
                whole = self.blobs.read(key) if KEY.fullmatch(key) else None
                found.append(None if whole is None else memoryview(whole))
            return None if found[0] is None else found[0][start : start + length]

        return read

    def _reject(self, row: Mapping[ChunkKey, int], fault: BlobRejected) -> None:
        """Erase a damaged blob, and forget a chunk without one; what other keys or versions protect stays in its place."""
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

    def _epochs(self) -> list[tuple[MemoryTier, int]]:
        """Return the tiers, each with what says later whether something was erased meanwhile."""
        return [(tier, tier.epoch) for tier in self.tiers]

    def _lift(
        self, identity: ChunkIdentity, kv: ChunkKV, epochs: list[tuple[MemoryTier, int]]
    ) -> ChunkKV:
        """Keep a chunk in some tiers, lowest first; return it as the uppermost gives it."""
        usage = self.catalog.usage(chunk_key(identity)) if epochs else Usage()
        for tier, epoch in reversed(epochs):
            kv = tier.keep(identity, kv, usage, epoch=epoch)
        return kv

    def _follow(self) -> None:
        """Drop from memory what any process has erased."""
        generation = self.catalog.state().generation
        if generation == self._followed:
            return
        for tier in self.tiers:
            keys = tier.keys()
            known = self.catalog.known(keys)
            tier.drop([key for key in keys if key not in known], "evicted")
        self._followed = generation

    def _drop(
        self, keys: Collection[ChunkKey], reason: str, gone: Collection[ChunkKey] | None = None
    ) -> None:
        for tier in self.tiers:
            tier.drop(keys, reason)
        tell(self.listeners, self.name, sorted(keys if gone is None else gone), reason)

    def _hole(self, key: ChunkKey, reason: HoleReason = "absent", layer: int | None = None) -> Hole:
        with self._lock:
            self._counts.update(["misses", reason])
        return Hole(key, reason, layer)
