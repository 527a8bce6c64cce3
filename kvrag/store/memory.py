"""Memory tiers (host or accelerator) and the reads that fill them.

The tiers hold only copies of stored chunks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch

from kvrag.config import Retention
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.buffers import copy_stream, held
from kvrag.kv.layers import own_kv
from kvrag.runtime import Pool
from kvrag.store.base import Blobs, EventType, Listener, StoreEvent, StoreStats
from kvrag.store.catalog import Catalog
from kvrag.store.eviction import SHARE, Sized, Usage, leaving
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole

log = logging.getLogger(__name__)

READERS = Pool("kvrag-read", 4)  # threads that read for requests

# Threads that prefetch: few, so that a new request finds the disk free enough for its reads.
AHEAD = Pool("kvrag-read-ahead", 2)

Loaded = ChunkKV | Hole


def emit(
    listeners: list[Listener], medium: str, keys: Iterable[ChunkKey], reason: str, *size: int
) -> None:
    """Emit an event per chunk to the listeners; equal listeners, of several stores, get it once.

    ``size`` is the number of tokens and of bytes of a stored chunk; removals have no size.
    """
    known = list(listeners)
    if not known:
        return
    kind: EventType = "BlockRemoved"
    each_hashes: list[tuple[str, ...]] = [(key,) for key in keys]
    if size:
        kind = "BlockStored"
    elif reason == "cleared":
        kind = "AllBlocksCleared"
        each_hashes = [()]
    for hashes in each_hashes:
        event = StoreEvent(kind, medium, hashes, reason, *size)
        for number, each in enumerate(known):
            if each not in known[:number]:
                each.receive(event)


@dataclass(slots=True, eq=False)
class _Entry:
    identity: ChunkIdentity
    kv: ChunkKV
    usage: Usage
    num_bytes: int


class MemoryTier:
    """Chunks in a single memory, up to a budget; the least valuable are evicted first. Thread-safe.

    Parameters
    ----------
    max_bytes, name, device
        Budget in bytes, name of the tier in statistics and events, and device of the tensors.
    """

    def __init__(
        self, max_bytes: int, *, name: str = "host", device: torch.device | str = "cpu"
    ) -> None:
        self.max_bytes = max_bytes
        self.name = name
        self.device = torch.device(device)
        self.listeners = list[Listener]()
        self.reads = Reads(max_bytes)
        self._lock = threading.RLock()
        self._entries = dict[ChunkKey, _Entry]()
        self._num_bytes = self._hits = self._misses = self._now = 0
        # Changes with every erasure and change of retention; reads begun before are not kept.
        self.epoch = 0

    def get(self, key: ChunkKey, identity: ChunkIdentity) -> ChunkKV | None:
        """Return a chunk's KV; count a hit or a miss."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.identity != identity:
                self._misses += 1
                return None
            self._hits += 1
            self._now += 1
            entry.usage = entry.usage.touched(1, self._now)
            return entry.kv

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return the identity of the chunk under a key."""
        entry = self._entries.get(key)
        return entry.identity if entry else None

    def keys(self) -> list[ChunkKey]:
        """Return the keys of all chunks."""
        with self._lock:
            return list(self._entries)

    def keep(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        usage: Usage,
        *,
        epoch: int,
        reason: str = "promoted",
    ) -> ChunkKV:
        """Keep a chunk if it fits, or fits after evictions.

        Returns the chunk on this tier's device, kept or not; unchanged if memory is short. With the
        reason ``"put"`` its tensors are copied: the caller may change them. If :attr:`epoch` has
        changed since before the chunk was read, the chunk may be erased, and is not kept.
        """
        try:
            given = kv
            num_bytes = kv.num_bytes
            is_new = reason == "put"
            # On the host, chunks that were read are copies already.
            if self.device.type != "cpu" or (is_new and num_bytes <= self.max_bytes):
                with held(kv, copy_stream(self.device)):
                    given = own_kv(kv, self.device, copy=is_new)
        except (RuntimeError, MemoryError) as error:  # memory is short
            log.debug("a chunk is not kept in the tier %s: %s", self.name, error)
            return kv
        key = chunk_key(identity)
        gone = None
        with self._lock:
            if epoch == self.epoch:
                gone = self._take(key, _Entry(identity, given, usage, num_bytes))
        if gone is not None:
            emit(
                self.listeners,
                self.name,
                [key],
                reason,
                len(identity.token_ids),
                num_bytes,
            )
            emit(self.listeners, self.name, gone, "evicted")
        return given

    def drop(self, keys: Iterable[ChunkKey], reason: str) -> None:
        """Drop chunks that were erased below; chunks of reads under way will not be kept."""
        with self._lock:
            self.epoch += 1
            gone = self._remove(keys)
        emit(self.listeners, self.name, gone, reason)

    def release(self) -> int:
        """Drop all chunks to free their memory, and return their bytes."""
        freed = self._num_bytes
        self.drop(self.keys(), "evicted")
        return freed

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> None:
        """Set the retention of chunks."""
        with self._lock:
            self.epoch += 1  # a read under way would bring the old retention
            for entry in filter(None, map(self._entries.get, keys)):
                entry.usage = entry.usage.retained(retention)

    def stats(self) -> StoreStats:
        """Return size and counters."""
        with self._lock:
            return StoreStats(len(self._entries), self._num_bytes, self._hits, self._misses, 0)

    def _take(self, key: ChunkKey, new: _Entry) -> list[ChunkKey] | None:
        """Add a chunk and return the keys evicted for it; ``None``, without evictions, if full."""
        self._now += 1
        must = self._num_bytes + new.num_bytes - self.max_bytes
        hits = new.usage.hits
        gone = list[ChunkKey]()
        known = self._entries.get(key)
        if known is not None:
            must -= known.num_bytes
            # Memory knows hits that are not written to the catalog yet.
            hits = max(hits, known.usage.hits)
        new.usage = new.usage._replace(hits=hits, last=self._now)
        if must > 0:
            others = [
                Sized(k, len(e.identity.token_ids), e.num_bytes, e.usage)
                for k, e in self._entries.items()
                if k != key
            ]
            found = leaving(
                others,
                self._now,
                priority=new.usage.priority_now(),
                must=must,
                share=self._num_bytes // SHARE,
            )
            if found is None:
                return None
            gone = [each.key for each in found]
        # The chunk itself, too: its bytes would count twice.
        self._remove([key, *gone])
        self._entries[key] = new
        self._num_bytes += new.num_bytes
        return gone

    def _remove(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        gone = {key: entry.num_bytes for key in keys if (entry := self._entries.pop(key, None))}
        self._num_bytes -= sum(gone.values())
        return list(gone)


@dataclass(slots=True, eq=False)
class Read:
    """Read of a chunk for prefetches, of which ``wanted`` are not cancelled.

    A request's read has 0 ``num_bytes``, and is not cancelled for a prefetch that joined it.
    """

    future: Future[Loaded]
    num_bytes: int
    wanted: int = 0


class Prefetch:
    """Reads that were prefetched together: ``found`` chunks are stored, ``reads`` are being read.

    The rest of the found chunks is in memory already, or found no room.
    """

    def __init__(self, found: int, reads: list[Read]) -> None:
        self.found = found
        self.reads = len(reads)
        self._reads = reads
        self._wanted = list(reads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all reads are done or the timeout is over; return whether all are done."""
        return not wait([read.future for read in self._reads], timeout_s).not_done

    def cancel(self) -> int:
        """Cancel the reads that have not begun and that nothing else wants; idempotent.

        Returns the number of cancelled reads.
        """
        count = 0
        while self._wanted:
            read = self._wanted.pop()
            read.wanted -= 1
            count += read.wanted <= 0 < read.num_bytes and read.future.cancel()
        return count


class Reads:
    """Reads under way: requests for the same chunk share a read.

    At most ``max_bytes`` are prefetched at a time: more would evict chunks that were just read.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._reads = dict[ChunkKey, Read]()

    def ahead(self, key: ChunkKey, load: Callable[[], Loaded], num_bytes: int) -> Read | None:
        """Start prefetching a chunk, or join its read; ``None`` without room or a thread."""
        with self._lock:
            read = self._reads.get(key)
            if (
                read is None
                and num_bytes + sum(each.num_bytes for each in self._reads.values())
                <= self._max_bytes
            ):
                read = self._begin(AHEAD, key, load, num_bytes)
            if read is not None:
                read.wanted += 1
            return read

    def read(self, key: ChunkKey, load: Callable[[], Loaded]) -> Read | None:
        """Start a chunk's read for a request, or join it; ``None`` if there is no thread.

        A prefetch that no thread has begun is cancelled and read at once.
        """
        with self._lock:
            read = self._reads.get(key)
            if read is None or (read.num_bytes and read.future.cancel()):
                read = self._begin(READERS, key, load, 0)
            return read

    def cancel(self) -> None:
        """Cancel all reads that no thread has begun."""
        for read in list(self._reads.values()):
            read.future.cancel()

    def _begin(
        self, pool: Pool, key: ChunkKey, load: Callable[[], Loaded], num_bytes: int
    ) -> Read | None:
        def end(_: object) -> None:
            with self._lock:
                # A cancelled prefetch may have made way for the read of a request.
                if self._reads.get(key) is read:
                    del self._reads[key]

        try:
            read = self._reads[key] = Read(pool.submit(load), num_bytes)
        except RuntimeError:  # no thread can be started
            return None
        read.future.add_done_callback(end)
        return read


# Tiers, each with its epoch before a chunk was looked up below: see :meth:`MemoryTier.keep`.
Epochs = list[tuple[MemoryTier, int]]


@dataclass(slots=True, eq=False)
class Tiers:
    """Memory tiers of a store, uppermost first, with copies of chunks that its catalog knows.

    ``blobs`` and ``catalog`` are the stored chunks below. ``listeners`` are told of every change of
    the tiers, and of the blobs by :meth:`tell`. Stores of a directory share tiers.
    """

    blobs: Blobs
    catalog: Catalog
    listeners: list[Listener]
    all: tuple[MemoryTier, ...] = ()
    reads: Reads = field(default_factory=lambda: Reads(0))
    # The catalog's generation when memory was last compared with it.
    _followed: int | None = None

    def put_above(self, tier: MemoryTier) -> None:
        """Add a memory tier above all other tiers."""
        tier.listeners += self.listeners
        self.all = (tier, *self.all)
        self.reads = tier.reads

    def listen(self, listener: Listener) -> None:
        """Add a listener."""
        for listeners in (self.listeners, *[tier.listeners for tier in self.all]):
            listeners.append(listener)

    def tell(self, keys: Iterable[ChunkKey], reason: str, *size: int) -> None:
        """Tell the listeners of a change of the blobs; see :func:`emit`."""
        emit(self.listeners, self.blobs.medium, keys, reason, *size)

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return the identity of the chunk under a key."""
        return next(filter(None, (tier.identity(key) for tier in self.all)), None)

    def get(self, identity: ChunkIdentity, key: ChunkKey) -> ChunkKV | None:
        """Return a chunk from the uppermost tier that has it, and keep it in the tiers above."""
        epochs = self.epochs()
        for number, (tier, _) in enumerate(epochs):
            kv = tier.get(key, identity)
            if kv is not None:
                self.catalog.touch(key)
                if number:
                    kv = self.keep(identity, kv, epochs[:number], self.catalog.usage(key))
                return kv
        return None

    def epochs(self) -> Epochs:
        """Return the tiers with their epochs, which change when a chunk is erased."""
        return [(tier, tier.epoch) for tier in self.all]

    def keep(self, identity: ChunkIdentity, kv: ChunkKV, epochs: Epochs, usage: Usage) -> ChunkKV:
        """Keep a chunk in some tiers, lowest first; return it as the uppermost tier returns it."""
        for tier, epoch in reversed(epochs):
            kv = tier.keep(identity, kv, usage, epoch=epoch)
        return kv

    def follow(self) -> None:
        """Drop chunks that any process has erased."""
        # Read first: what is erased while chunks are compared is found at the next call.
        generation = self.catalog.state().generation
        if generation == self._followed:
            return
        for tier in self.all:
            keys = tier.keys()
            known = self.catalog.known(keys)
            tier.drop([key for key in keys if key not in known], "evicted")
        self.blobs.follow(self.catalog.absent)
        self._followed = generation

    def drop(
        self,
        keys: Collection[ChunkKey] | None,
        reason: str,
        gone: Collection[ChunkKey] | None = None,
    ) -> None:
        """Drop chunks that were erased below, or all; tell that their blobs, or ``gone``, are gone.

        Chunks that are kept meanwhile are compared with the catalog at the next :meth:`follow`.
        """
        for tier in self.all:
            tier.drop(tier.keys() if keys is None else keys, reason)
        self.tell(sorted((keys or ()) if gone is None else gone), reason)
        self._followed = None

    def close(self) -> None:
        """Leave the tiers to the other stores that share them."""
        tiers = self.all
        self.all = ()
        for tier in tiers:
            for each in self.listeners:
                tier.listeners.remove(each)
