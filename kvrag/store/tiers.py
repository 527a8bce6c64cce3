"""The store of an engine: memory above blobs, and the catalog that says what is where.

Reading looks in memory first, uppermost tier first, then in the blobs, and keeps a copy in each tier above. Writing notes the chunk in the
catalog as pending, writes its blob, and confirms it. Erasing takes blobs first and rows last. So whoever is killed in between leaves rows
without blobs, which are misses, or pending rows, which count as absent; and an erasure that is run again finishes the first one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import Blobs, Events, StoreStats
from kvrag.store.catalog import Catalog
from kvrag.store.crypto import Keys
from kvrag.store.format import Blob, BlobRejected, Encoded, Foreign, OtherVersion, encode, record_of
from kvrag.store.memory import Loaded, MemoryTier, Prefetch, Read, Reads
from kvrag.store.worth import Budget, Evictor, Retention, Usage, check_retention, priority_of
from kvrag.threads import POOL, Deadline
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, TextEntry

log = logging.getLogger(__name__)

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
    name
        Name of the blobs' tier, for statistics and events.
    free_bytes
        Returns the free bytes below the blobs; ``None``: not limited.
    reads
        Reads under way, shared by the stores that share ``tiers``.
    on_close
        Called once, by :meth:`close`; default: close catalog and blobs.
    """

    def __init__(
        self,
        tiers: Sequence[MemoryTier],
        blobs: Blobs,
        catalog: Catalog,
        config: StoreConfig | None = None,
        *,
        keys: Keys | None = None,
        name: str = "disk",
        budget: Budget | None = None,
        free_bytes: Callable[[], int] | None = None,
        reads: Reads | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.config = config or StoreConfig()
        self.catalog, self.blobs, self.tiers, self.name = catalog, blobs, tuple(tiers), name
        self.keys = keys or Keys()
        self.names = self.keys.names
        """The names of namespaces and texts."""
        self.read_only = self.config.read_only or catalog.read_only
        self.events = Events(self.config.on_event, self.config.event_log)
        self.reads = reads or Reads(tiers[0].max_bytes if tiers else 0)
        self._on_close, self._budget, self._free_bytes = on_close, budget, free_bytes
        self._evictor = Evictor(
            budget or Budget(),
            totals=catalog.totals,
            usages=catalog.usages,
            free_bytes=free_bytes or (lambda: 2**62),
            evict=partial(self._erase, reason="evicted"),
        )
        self._lock = threading.Lock()
        self._hits = self._misses = self._rejected = 0
        self._followed = catalog.state().generation if tiers and not any(tier.keys() for tier in tiers) else None
        self._is_closed, self._warned_at = False, -WARN_S
        for tier in tiers:
            tier.events = self.events
        _open.add(self)

    # -- questions -------------------------------------------------------------------------------------------------------

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those keys whose chunks are stored; their integrity is proven when they are read."""
        return self.catalog.known(keys)

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV is stored for a text: one identity per model, prefix and context, each proven to be that of its key."""
        found = (self.identity(key) for key in self.catalog.text_keys(namespace, digest))
        return [identity for identity in found if identity is not None]

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return a chunk's retention, with what is left of its duration; ``None`` if it was given none."""
        return self.catalog.usage(key).retention()

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name (``"gpu"``, ``"host"``, ``"disk"``), uppermost first."""
        chunks, num_bytes = self.catalog.totals()
        lowest = StoreStats(chunks, num_bytes, self._hits, self._misses, self._rejected)
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
        deadline, found = Deadline(look_s), dict[ChunkIdentity, Loaded]()
        try:
            found = deadline.result(POOL.submit(partial(self._look, keys)), {}, what="the KV store")
        except RuntimeError as error:
            log.warning("the KV store could not be asked (%s); computing instead", error)
        rest = {identity: key for identity, key in keys.items() if identity not in found}
        found |= self._wait_for(rest, Deadline(max(0.0, deadline.left_s - look_s + timeout_s)))
        return [found.get(identity) or Hole(keys[identity], "late", None) for identity in identities]

    def _look(self, keys: Mapping[ChunkIdentity, ChunkKey]) -> dict[ChunkIdentity, Loaded]:
        """Return what is in memory, and what is known to be absent."""
        self._follow()
        found: dict[ChunkIdentity, Loaded] = {}
        for identity, key in keys.items():
            if (kv := self._in_memory(identity, key)) is not None:
                found[identity] = kv
        known = self.catalog.known([key for identity, key in keys.items() if identity not in found])
        absent = [i for i, key in keys.items() if i not in found and key not in known]
        self._count(misses=len(absent))
        return found | {identity: Hole(keys[identity], "absent", None) for identity in absent}

    def _wait_for(self, keys: Mapping[ChunkIdentity, ChunkKey], deadline: Deadline) -> dict[ChunkIdentity, Loaded]:
        """Read chunks from the blobs, several at a time."""
        policy, found, futures = self.config.prefetch, dict[ChunkIdentity, Loaded](), {}
        for identity, key in keys.items():
            with suppress(RuntimeError):  # no thread can be had
                if future := self.reads.read(key, partial(self._load, identity, key), policy):
                    futures[identity] = future
        for identity, future in futures.items():
            left = Deadline(float("inf")) if policy == "wait" else deadline
            hole = Hole(keys[identity], "late", None)
            found[identity] = left.result(future, hole, what="a stored chunk")
        return found

    def prefetch(self, wanted: Iterable[ChunkIdentity | ChunkKey]) -> Prefetch:
        """Begin to read chunks into memory, and return while they are read; those of several calls are read once."""
        self._follow()
        found, reads = 0, list[Read]()
        for each in dict.fromkeys(wanted):
            identity = each if isinstance(each, ChunkIdentity) else self.identity(each)
            record = None if identity is None else self.catalog.get(chunk_key(identity))
            if identity is None or record is None:
                continue
            found += 1
            if self.tiers and self.tiers[0].get(record.key, identity, counts=False) is None:
                with suppress(RuntimeError):
                    load = partial(self._load, identity, record.key)
                    if (read := self.reads.ahead(record.key, load, record.num_bytes)) is not None:
                        reads.append(read)
        return Prefetch(found, reads)

    def _in_memory(self, identity: ChunkIdentity, key: ChunkKey) -> ChunkKV | None:
        """Return a chunk from the uppermost tier that has it, and keep it in those above."""
        for number, tier in enumerate(self.tiers):
            epochs = [above.epoch for above in self.tiers[:number]]
            if (kv := tier.get(key, identity)) is not None:
                self.catalog.touch(key)
                return self._lift(identity, kv, epochs, key) if number else kv
        return None

    def _load(self, identity: ChunkIdentity, key: ChunkKey) -> Loaded:
        """Return a chunk from memory or, if the catalog knows it, from the blobs, and keep it in the tiers above."""
        if (kv := self._in_memory(identity, key)) is not None:
            return kv
        epochs = [tier.epoch for tier in self.tiers]
        if not self.catalog.known([key]):
            self._count(misses=1)
            return Hole(key, "absent", None)
        try:
            kv = Blob(partial(self.blobs.read, key), identity, self.keys.cipher).load()
        except BlobRejected as fault:
            self._reject(key, fault)
            return Hole(key, fault.hole, fault.layer)
        except (MemoryError, RuntimeError) as error:
            log.warning("a stored chunk could not be read (%s); computing instead", error)
            return Hole(key, "unreadable", None)
        self._count(hits=1)
        self.catalog.touch(key)
        return self._lift(identity, kv, epochs, key) if epochs else kv

    def _lift(self, identity: ChunkIdentity, kv: ChunkKV, epochs: list[int], key: ChunkKey) -> ChunkKV:
        """Keep a chunk in as many upper tiers as there are epochs, lowest first; return it as the uppermost gives it."""
        usage = self.catalog.usage(key)
        for tier, epoch in reversed(list(zip(self.tiers, epochs, strict=False))):
            kv = self._keep(tier, identity, kv, usage, epoch, reason="promoted")
        return kv

    def _keep(
        self, tier: MemoryTier, identity: ChunkIdentity, kv: ChunkKV, usage: Usage, epoch: int, *, reason: str
    ) -> ChunkKV:
        try:
            return tier.keep(identity, kv, usage, epoch=epoch, reason=reason)
        except (StoreError, RuntimeError, MemoryError) as error:  # it can't be kept so, or memory is short
            log.debug("a chunk is not kept in the tier %s: %s", tier.name, error)
            return kv

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is stored under a key, proven."""
        for tier in self.tiers:
            if (identity := tier.identity(key)) is not None:
                return identity
        blob = self._blob(key) if self.catalog.known([key]) else None
        return None if blob is None else blob.header.identity

    def _blob(self, key: ChunkKey, identity: ChunkIdentity | None = None) -> Blob | None:
        """Return the blob under a key, its header proven; ``None`` if there is none. What is damaged is erased."""
        try:
            blob = Blob(partial(self.blobs.read, key), identity, self.keys.cipher)
            if chunk_key(blob.header.identity) != key:
                raise BlobRejected("it belongs to another chunk")
        except BlobRejected as fault:
            self._reject(key, fault)
            return None
        return blob

    def _reject(self, key: ChunkKey, fault: BlobRejected) -> None:
        """Erase a blob that is not what its key says, and forget one that is gone."""
        self._count(misses=1)
        if fault.hole == "unreadable":
            self._warn_unreadable(fault.reason)
            return
        is_ours = fault.hole != "absent"
        if is_ours:
            log.warning("the stored chunk %s is rejected: %s; computing instead", key[:12], fault.reason)
            self._count(rejected=1)
        if self.read_only:
            return
        with suppress(OSError):
            if is_ours:
                self.blobs.delete([key])
                self.events.removed(self.name, [key], "rejected")
            if self.catalog.known([key]):  # unless another process has stored it again meanwhile
                is_foreign = isinstance(fault, (Foreign, OtherVersion))
                self.catalog.remove([key], unless=lambda: not is_foreign and self.blobs.read(key, 0, 0) is not None)
        for tier in self.tiers:
            tier.drop([key], "rejected")

    def _warn_unreadable(self, reason: str) -> None:
        if time.monotonic() - self._warned_at >= WARN_S:
            self._warned_at = time.monotonic()
            log.warning("stored chunks can't be read: %s; computing instead", reason)

    def _follow(self) -> None:
        """Drop from memory what any process has erased."""
        generation = self.catalog.state().generation if self.tiers else None
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
        key, epochs = chunk_key(identity), [tier.epoch for tier in self.tiers]
        if self.catalog.link(key, text, doc_id):
            return 0
        encoded = encode(identity, kv, self.keys.cipher)
        written = self._write(encoded, text, doc_id, retention)
        if written is None:
            return 0
        record = record_of(identity, encoded.header.num_bytes)
        self.events.stored(self.name, key, reason, record.num_tokens, record.num_bytes)
        usage = Usage() if retention is None else Usage().retained(retention)
        for tier, epoch in zip(self.tiers, epochs, strict=True):
            if tier.keeps_puts:
                self._keep(tier, identity, kv, usage, epoch, reason="put")
        return encoded.header.num_bytes if written else 0

    def _write(
        self, encoded: Encoded, text: TextEntry | None, doc_id: str | None, retention: Retention | None
    ) -> int | None:
        """Write a chunk's rows and its blob; ``None`` if another writer was first."""
        record = record_of(encoded.header.identity, encoded.header.num_bytes)
        self._evictor.make_room(record.num_bytes, priority=priority_of(retention))
        for _ in range(ATTEMPTS):
            if not self.catalog.begin(record, text, doc_id, retention):
                return None
            try:
                written = self.blobs.write(record.key, encoded.parts)
                if not written and self._blob(record.key, encoded.header.identity) is None:
                    self.blobs.delete([record.key])  # what has this name is not this chunk
                    written = self.blobs.write(record.key, encoded.parts)
                if self.catalog.confirm(record.key):
                    return written
                self.blobs.delete([record.key])
            except OSError as error:
                with suppress(OSError):
                    self.catalog.cancel(record.key, text, doc_id)
                with suppress(OSError):
                    if not self.catalog.known([record.key]):
                        self.blobs.delete([record.key])
                if isinstance(error, StoreError):
                    raise
                raise StoreError(
                    f"the chunk can't be written to the KV store: {error}; make sure that its directory exists, is writable and has free "
                    "space, then try again"
                ) from error
        raise StoreError("the chunk is erased from the KV store as fast as it is written; try again later")

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add text and document to a stored chunk, and return whether it is stored.

        A dormant blob, one that a lost catalog left behind, is adopted: it is stored again without being computed.
        """
        if self.read_only or self._is_closed:
            return False
        key = chunk_key(identity)
        if self.catalog.link(key, text, doc_id):
            return True
        blob = self._blob(key, identity)
        if blob is None:
            return False
        if self.catalog.begin(record_of(identity, blob.header.num_bytes), text, doc_id, None):
            if not self.catalog.confirm(key):
                return False
            self.events.stored(self.name, key, "adopted", len(identity.token_ids), blob.header.num_bytes)
        return True

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Update the retention of stored chunks in every tier, and return how many there are.

        A cost that ``retention`` does not name stays what it was.

        Raises
        ------
        StoreError
            If the store can't be written to.
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
        keys = list(dict.fromkeys(keys))
        known = self.catalog.known(keys)
        return len(self._erase(keys, reason="deleted") | known)

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to; return how many chunks were erased. Raises ``StoreError``.

        While there may be dormant blobs, those are erased, too: any of them might be the document's.
        """
        self._check_writable()
        known = set[ChunkKey]()
        while True:
            if self.catalog.state().dormant:
                self.erase_dormant()
            going = self.catalog.only_held_by(namespace, doc_id)
            known |= self.catalog.known(going)
            self._delete_blobs(going)
            if self.catalog.unlink(namespace, doc_id, going) and not self.catalog.state().dormant:
                break
        self._drop(known, "deleted")
        self.catalog.scrub()
        return len(known)

    def clear(self, namespace: str | None = None) -> int:
        """Erase all chunks, texts and documents, of every model, in every tier; return how many chunks there were.

        What is encrypted with other keys is left alone.

        Parameters
        ----------
        namespace
            Digest of the one that is erased; ``None``: every one.

        Raises
        ------
        StoreError
            If the store can't be written to.
        """
        self._check_writable()
        catalog = self.catalog
        keys = catalog.present(namespace)
        self._delete_blobs(keys)
        count = catalog.clear(namespace)
        self.erase_dormant(namespace)
        for tier in self.tiers:
            tier.clear(namespace)
        if namespace is None:
            for name in (self.name, *(tier.name for tier in self.tiers)):
                self.events.cleared(name)
        else:
            self.events.removed(self.name, sorted(keys), "deleted")
        catalog.scrub()
        return count

    def dormant(self) -> set[ChunkKey]:
        """Return the keys of blobs without a row, some of which may be protected by other keys; raises ``StoreError``."""
        try:
            return self.blobs.keys() - self.catalog.present()
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"stored chunks can't be listed: {error}; try again") from error

    def erase_dormant(self, namespace: str | None = None) -> int:
        """Erase the blobs without a row, of a namespace if its digest is given, and return how many; raises ``StoreError``."""
        going = set()
        for key in self.dormant():
            try:
                identity = Blob(partial(self.blobs.read, key), None, self.keys.cipher).header.identity
                if namespace in (None, identity.namespace):
                    going.add(key)
            except (Foreign, OtherVersion):
                continue
            except BlobRejected as fault:
                if fault.hole == "damaged" and namespace is None:
                    going.add(key)
        self._delete_blobs(going)
        if namespace is None and self.catalog.state().dormant:
            self.catalog.no_dormant()
        return len(going)

    def release(self) -> int:
        """Empty the uppermost memory tier for the sake of its memory, and return its bytes; what was in it is still below."""
        return self.tiers[0].release() if self.tiers else 0

    def below(self, tier: MemoryTier) -> TieredStore:
        """Return this store with a memory tier above it; it is closed with the one that is returned."""
        return TieredStore(
            [tier, *self.tiers],
            self.blobs,
            self.catalog,
            self.config,
            keys=self.keys,
            name=self.name,
            budget=self._budget,
            free_bytes=self._free_bytes,
            on_close=self.close,
        )

    def make_room(self) -> None:
        """Evict what is over the budget; raises ``StoreError`` if that is not enough."""
        self._check_writable()
        self._evictor.make_room(0, priority=100)

    def close(self) -> None:
        """Release resources; idempotent. What other stores of the process share stays open for them."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.catalog.flush()
        if self._on_close is not None:
            self._on_close()
            return
        self.reads.cancel()
        self.catalog.close()
        self.blobs.close()
        for tier in self.tiers:
            tier.release()

    # -- internals -------------------------------------------------------------------------------------------------------

    def _erase(self, keys: Collection[ChunkKey], reason: str) -> set[ChunkKey]:
        """Erase chunks, blobs first, and return those that had a blob."""
        gone = self._delete_blobs(keys)
        self.catalog.remove(keys)
        self._drop(keys, reason, gone)
        return gone

    def _delete_blobs(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        try:
            return self.blobs.delete(keys)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"stored chunks can't be erased: {error}; make sure that the directory is writable, then try again"
            ) from error

    def _drop(self, keys: Collection[ChunkKey], reason: str, gone: Collection[ChunkKey] | None = None) -> None:
        for tier in self.tiers:
            tier.drop(keys, reason)
        self.events.removed(self.name, sorted(keys if gone is None else gone), reason)

    def _count(self, hits: int = 0, misses: int = 0, rejected: int = 0) -> None:
        with self._lock:
            self._hits, self._misses, self._rejected = (
                self._hits + hits,
                self._misses + misses,
                self._rejected + rejected,
            )

    def _check_writable(self) -> None:
        if self._is_closed:
            raise StoreError("the KV store is closed; open it again")
        if self.read_only:
            raise StoreError(
                "the KV store is open for reading only; open it without read_only, or make its directory writable"
            )

    def reset_after_fork(self) -> None:
        """Let go of what threads of the parent may be in the midst of."""
        self._lock = threading.Lock()
        for tier in self.tiers:
            tier.reset_after_fork()


_open: weakref.WeakSet[TieredStore] = weakref.WeakSet()


def _in_child() -> None:
    for store in list(_open):
        store.reset_after_fork()


os.register_at_fork(after_in_child=_in_child)
