"""The store of an engine: memory above blobs, and the catalog that says what is where.

Reading looks in memory first, uppermost tier first, then in the blobs, and keeps a copy in each tier above. Writing notes the chunk in the
catalog as pending, writes its blob, and confirms it. Erasing takes blobs first and rows last. So whoever is killed in between leaves rows
without blobs, which are misses, or pending rows, which count as absent; and an erasure that is run again finishes the first one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import Blobs, Events, Record, StoreStats
from kvrag.store.blobs import KEY, MemoryBlobs
from kvrag.store.catalog import Catalog
from kvrag.store.crypto import Keys
from kvrag.store.format import Blob, BlobRejected, Encoded, Foreign, OtherVersion, encode, record_of
from kvrag.store.memory import Loaded, MemoryTier, Prefetch, Read, Reads
from kvrag.store.worth import Budget, Evictor, Retention, Usage, check_retention, priority_of
from kvrag.threads import Deadline, fork_lock
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, HoleReason, TextEntry

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 3
"""Times that a chunk is written that others erase meanwhile."""

WARN_S = 60.0
"""Seconds between two warnings that chunks can't be read."""

LOOK_S = 0.05
"""Seconds that a look into memory is given in any case, so that what is there comes however little time is left."""


class TieredStore:
    """Chunks in memory tiers above blobs. Safe to use from several threads; blobs and catalog may be shared with other processes.

    Every tier gives the same bits for the same key, but for what a tier rounds. What any process erases is not answered from memory.

    Parameters
    ----------
    tiers
        Memory, uppermost first; may be empty.
    blobs, catalog
        What is stored, and who has it.
    config
        Budgets and limits.
    keys
        The keys derived from the config's key.
    budget
        What the blobs may take; default: no limit.
    is_last
        Asked when the store is closed: whether catalog, blobs and tiers are to be closed with it.
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
        self.config, self.keys, self._is_last = config or StoreConfig(), keys or Keys(), is_last
        self.catalog, self.blobs, self.names = catalog, blobs, self.keys.names
        self.name = "host" if isinstance(blobs, MemoryBlobs) else "disk"
        """Name of the blobs' tier, for statistics and events."""
        self.read_only = self.config.read_only or catalog.read_only
        self.events = Events(self.config.on_event, self.config.event_log)
        self._evictor = Evictor(
            budget or Budget(),
            totals=catalog.totals,
            usages=catalog.usages,
            free_bytes=getattr(blobs, "free_bytes", lambda: 2**62),
            evict=partial(self._erase, reason="evicted"),
        )
        self._lock, self._counts, self._is_closed, self._warned_at = fork_lock(), Counter[str](), False, -WARN_S
        self._followed: int | None = None  # the catalog's generation when memory was last compared with it
        self.tiers, self.reads = tuple(tiers), tiers[0].reads if tiers else Reads(0)
        for tier in tiers:
            tier.events = self.events

    def put_above(self, tier: MemoryTier) -> None:
        """Add an uppermost memory tier."""
        tier.events = self.events
        self.tiers, self.reads = (tier, *self.tiers), tier.reads

    # -- questions -------------------------------------------------------------------------------------------------------

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
        return self.catalog.retention(key)

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name (``"gpu"``, ``"host"``, ``"disk"``), uppermost first."""
        counts = (self._counts[what] for what in ("hits", "misses", "rejected"))
        lowest = StoreStats(*self.catalog.totals(), *counts)
        return {**{tier.name: tier.stats() for tier in self.tiers}, self.name: lowest}

    # -- reading ---------------------------------------------------------------------------------------------------------

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
        found = look.ask(partial(self._look, keys), dict[ChunkIdentity, Loaded | Read](), what="the KV store")
        reading, loaded = Deadline(max(0.0, look.left_s - look_s + timeout_s)), dict[ChunkIdentity, Loaded]()
        for identity, key in keys.items():
            each, late = found.get(identity), Hole(key, "late", None)
            if isinstance(each, Read):
                is_patient = each.wanted and self.config.prefetch == "wait"
                deadline = Deadline(float("inf")) if is_patient else reading
                each = deadline.result(each.future, late, what="a stored chunk")
            loaded[identity] = each or late
        return [loaded[identity] for identity in identities]

    def prefetch(self, wanted: Iterable[ChunkIdentity | ChunkKey]) -> Prefetch:
        """Begin to read chunks into memory, and return while they are read; those of several calls are read once."""
        self._follow()
        found, reads = 0, list[Read | None]()
        for each in dict.fromkeys(wanted):
            identity = each if isinstance(each, ChunkIdentity) else self.identity(each)
            record = None if identity is None else self.catalog.get(chunk_key(identity))
            if identity is None or record is None:
                continue
            found += 1
            if all(tier.identity(record.key) != identity for tier in self.tiers[:1]):
                reads.append(self.reads.ahead(record.key, partial(self._load, identity, record.key), record.num_bytes))
        return Prefetch(found, [read for read in reads if read is not None])

    def _look(self, keys: Mapping[ChunkIdentity, ChunkKey]) -> dict[ChunkIdentity, Loaded | Read]:
        """Return what is in memory, holes for what is not stored, and reads, begun, of the rest; nothing for what nobody can read."""
        self._follow()
        found: dict[ChunkIdentity, Loaded | Read | None]
        found = {identity: self._in_memory(identity, key) for identity, key in keys.items()}
        rest = {identity: key for identity, key in keys.items() if found[identity] is None}
        known = self.catalog.known(rest.values())
        for identity, key in rest.items():
            load = partial(self._load, identity, key)
            is_known = key in known
            found[identity] = (
                self.reads.read(key, load, self.config.prefetch) if is_known else self._hole(key, "absent")
            )
        return {identity: each for identity, each in found.items() if each is not None}

    def _load(self, identity: ChunkIdentity, key: ChunkKey) -> Loaded:
        """Return a chunk from memory or, if the catalog knows it, from the blobs, and keep it in the tiers above."""
        epochs = self._epochs()
        if (kv := self._in_memory(identity, key)) is not None:
            return kv
        found = self._from_blob(key, lambda blob: blob.load(), identity)
        if isinstance(found, Hole):
            return found
        self._count("hits")
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

    def _from_blob(self, key: ChunkKey, take: Callable[[Blob], T], identity: ChunkIdentity | None = None) -> T | Hole:
        """Take something from the blob of a chunk that the catalog knows; one that is not what it should be is forgotten."""
        since = self._followed
        if not self.catalog.known([key]):
            return self._hole(key, "absent")
        try:
            return take(self.blob(key, identity))
        except BlobRejected as fault:
            self._reject(key, fault, since)
            return self._hole(key, fault.hole, fault.layer)
        except (MemoryError, RuntimeError) as error:
            log.warning("a stored chunk could not be read (%s); computing instead", error)
            return self._hole(key, "unreadable")

    def blob(self, key: ChunkKey, identity: ChunkIdentity | None = None) -> Blob:
        """Return the blob under a key, its header proven to be that of this chunk; raises ``BlobRejected``."""
        if not KEY.fullmatch(key):  # who can write to a catalog that is not encrypted can name any file in it
            raise BlobRejected("it is absent", "absent")
        blob = Blob(partial(self.blobs.read, key), identity, self.keys.cipher)
        if chunk_key(blob.header.identity) != key:
            raise BlobRejected("it belongs to another chunk")
        return blob

    def _reject(self, key: ChunkKey, fault: BlobRejected, since: int | None) -> None:
        """Erase a damaged blob, and forget a chunk without one, unless something was erased since: then it may be stored again."""
        if fault.hole == "unreadable":
            if time.monotonic() - self._warned_at >= WARN_S:
                self._warned_at = time.monotonic()
                log.warning("stored chunks can't be read: %s; computing instead", fault.reason)
            return
        if fault.hole == "damaged":
            log.warning("the stored chunk %s is rejected: %s; computing instead", key[:12], fault.reason)
            self._count("rejected")
        if not self.read_only:
            with suppress(OSError):
                gone = self.blobs.delete([key]) if fault.hole == "damaged" else set()
                self.catalog.remove([key], unless=lambda: self.catalog.generation() != since)
                self._drop([key], "rejected", gone)

    def _epochs(self) -> list[tuple[MemoryTier, int]]:
        """Return the tiers, each with what says later whether something was erased meanwhile."""
        return [(tier, tier.epoch) for tier in self.tiers]

    def _lift(self, identity: ChunkIdentity, kv: ChunkKV, epochs: list[tuple[MemoryTier, int]]) -> ChunkKV:
        """Keep a chunk in some tiers, lowest first; return it as the uppermost gives it."""
        usage = self.catalog.usage(chunk_key(identity)) if epochs else Usage()
        for tier, epoch in reversed(epochs):
            kv = tier.keep(identity, kv, usage, epoch=epoch)
        return kv

    def _follow(self) -> None:
        """Drop from memory what any process has erased."""
        generation = self.catalog.generation()
        if generation == self._followed:
            return
        for tier in self.tiers:
            keys = tier.keys()
            known = self.catalog.known(keys)
            tier.drop([key for key in keys if key not in known], "evicted")
        self._followed = generation

    # -- writing ---------------------------------------------------------------------------------------------------------

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
        """Store a chunk and return the bytes written; 0 if it was there already (then only text and document are added).

        Raises
        ------
        StoreError
            If it can't be written, or there is no room for it. Nothing of it is left then.
        """
        self._check_writable()
        check_retention(retention)
        key, epochs = chunk_key(identity), self._epochs()
        if self.catalog.link(key, text, doc_id):
            return 0
        encoded = encode(identity, kv, self.keys.cipher)
        record = record_of(identity, encoded.header.num_bytes)
        self._evictor.make_room(record.num_bytes, priority=priority_of(retention))
        written = self._write(record, encoded, text, doc_id, retention)
        if written is None:
            return 0
        self.events.stored(self.name, key, reason, record.num_tokens, record.num_bytes)
        usage = Usage() if retention is None else Usage().retained(retention)
        for tier, epoch in epochs:
            if tier.keeps_puts:
                tier.keep(identity, kv, usage, epoch=epoch, reason="put")
        return record.num_bytes if written else 0

    def _write(
        self, record: Record, encoded: Encoded, text: TextEntry | None, doc_id: str | None, retention: Retention | None
    ) -> int | None:
        """Write a chunk's rows and its blob; ``None`` if another writer was first."""
        key = record.key
        for _ in range(ATTEMPTS):
            if not self.catalog.begin(record, text, doc_id, retention):
                return None
            try:
                with refusal("the chunk can't be written to the KV store"):
                    written = self._write_blob(key, encoded)
                    if self.catalog.confirm(key):
                        return written
                    self.blobs.delete([key])
            except StoreError:
                with suppress(OSError):
                    self.catalog.cancel(key, text, doc_id)
                with suppress(OSError):
                    if not self.catalog.known([key]):
                        self.blobs.delete([key])
                raise
        raise StoreError("the chunk is erased from the KV store as fast as it is written; try again later")

    def _write_blob(self, key: ChunkKey, encoded: Encoded) -> int:
        """Write a blob, also in the place of one that is not this chunk's; 0 if this chunk's is there."""
        if written := self.blobs.write(key, encoded.parts):
            return written
        try:
            self.blob(key, encoded.header.identity)
        except BlobRejected:
            self.blobs.delete([key])
            return self.blobs.write(key, encoded.parts)
        return 0

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add text and document to a stored chunk, and return whether it is stored.

        A dormant blob, one that a lost catalog left behind, is adopted: it is stored again without being computed.
        """
        if self.read_only or self._is_closed:
            return False
        key = chunk_key(identity)
        if self.catalog.link(key, text, doc_id):
            return True
        try:
            record = record_of(identity, self.blob(key, identity).header.num_bytes)
        except BlobRejected:
            return False
        if not self.catalog.begin(record, text, doc_id, None):
            return True
        is_stored = self.catalog.confirm(key)
        if is_stored:
            self.events.stored(self.name, key, "adopted", record.num_tokens, record.num_bytes)
        return is_stored

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Update the retention of stored chunks in every tier, and return how many there are.

        A cost that ``retention`` does not name stays what it was. Raises ``StoreError`` if the store can't be written to.
        """
        check_retention(retention, is_needed=True)
        self._check_writable()
        keys = list(dict.fromkeys(keys))
        found = self.catalog.retain(keys, retention)
        for tier in self.tiers:
            tier.retain(keys, retention)
        return found

    # -- erasing ---------------------------------------------------------------------------------------------------------

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
            if self.catalog.may_have_dormant():
                self.erase_dormant()
            going = self.catalog.only_held_by(namespace, doc_id)
            known |= self.catalog.known(going)
            self.delete_blobs(going)
            is_over = self.catalog.unlink(namespace, doc_id, going) and not self.catalog.may_have_dormant()
        self._drop(known, "deleted")
        self.catalog.scrub()
        return len(known)

    def clear(self, namespace: str | None = None) -> int:
        """Erase all chunks, texts and documents, of every model, in every tier; return how many chunks there were.

        What is encrypted with other keys is left alone. Raises ``StoreError`` if the store can't be written to.

        Parameters
        ----------
        namespace
            Digest of the one that is erased; ``None``: every one.
        """
        self._check_writable()
        keys = self.catalog.present() if namespace is None else self.catalog.of_namespace(namespace)
        self.delete_blobs(keys)
        count = self.catalog.clear(namespace)
        self.erase_dormant(namespace)
        if namespace is None:
            for tier in self.tiers:
                tier.drop(tier.keys(), None)
            for name in (self.name, *(tier.name for tier in self.tiers)):
                self.events.cleared(name)
        else:
            self._drop(keys, "deleted")
        self._followed = None  # what was kept meanwhile is looked up
        self.catalog.scrub()
        return count

    def dormant(self) -> set[ChunkKey]:
        """Return the keys of blobs without a row, some of which may be protected by other keys; raises ``StoreError``."""
        with refusal("stored chunks can't be listed"):
            return self.blobs.keys() - self.catalog.present()

    def erase_dormant(self, namespace: str | None = None) -> int:
        """Erase the blobs without a row, of a namespace if its digest is given, and return how many; raises ``StoreError``."""
        going = set()
        for key in self.dormant():
            try:
                if namespace in (None, self.blob(key).header.identity.namespace):
                    going.add(key)
            except (Foreign, OtherVersion):
                continue
            except BlobRejected as fault:
                if fault.hole == "damaged" and namespace is None:
                    going.add(key)
        self.delete_blobs(going)
        if namespace is None and self.catalog.may_have_dormant():
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
            if self._is_closed:
                return
            self._is_closed, self.tiers = True, ()
        self.catalog.flush()
        if self._is_last():
            self.reads.cancel()
            self.catalog.close()
            self.blobs.close()

    # -- internals -------------------------------------------------------------------------------------------------------

    def _erase(self, keys: Collection[ChunkKey], reason: str) -> set[ChunkKey]:
        """Erase chunks, blobs first, and return those that had a blob."""
        gone = self.delete_blobs(keys)
        self.catalog.remove(keys)
        self._drop(keys, reason, gone)
        return gone

    def delete_blobs(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Erase blobs, and return those that were there; raises ``StoreError``."""
        with refusal("stored chunks can't be erased"):
            return self.blobs.delete([key for key in keys if KEY.fullmatch(key)])

    def _drop(self, keys: Collection[ChunkKey], reason: str, gone: Collection[ChunkKey] | None = None) -> None:
        for tier in self.tiers:
            tier.drop(keys, reason)
        self.events.removed(self.name, sorted(keys if gone is None else gone), reason)

    def _hole(self, key: ChunkKey, reason: HoleReason, layer: int | None = None) -> Hole:
        self._count("misses")
        return Hole(key, reason, layer)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _check_writable(self) -> None:
        if self._is_closed:
            raise StoreError("the KV store is closed; open it again")
        if self.read_only:
            raise StoreError(
                "the KV store is open for reading only; open it without read_only, or make its directory writable"
            )


@contextmanager
def refusal(what: str) -> Iterator[None]:
    """Turn an ``OSError`` of blobs into a ``StoreError`` that says what can't be done."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        remedy = "make sure that its directory exists, is writable and has free space, then try again"
        raise StoreError(f"{what}: {error}; {remedy}") from error
