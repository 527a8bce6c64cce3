"""Chunks in memory, the host's or an accelerator's, and chunks that are being read into it. A copy in memory is a copy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvrag.config import Retention
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.layers import own_kv
from kvrag.store.base import Events, StoreStats
from kvrag.store.worth import Sized, Usage, leaving
from kvrag.threads import Pool, fork_lock
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole

log = logging.getLogger(__name__)

SHARE = 16
"""One byte of so many leaves at least, so that not every chunk that comes has to rank all."""

READERS = Pool("kvrag-read", 4)
"""Threads that read for requests."""

AHEAD = Pool("kvrag-read-ahead", 2)
"""Threads that prefetch: few, so that a request that comes meanwhile finds the disk free enough for its own reads."""

Loaded = ChunkKV | Hole


@dataclass(slots=True, eq=False)
class _Entry:
    identity: ChunkIdentity
    kv: ChunkKV
    usage: Usage
    num_bytes: int
    num_tokens: int
    hits: int = 0
    last: int = 0

    def used(self) -> Usage:
        """Return the usage, with the hits since it was last asked for."""
        if self.hits:
            self.usage, self.hits = self.usage.touched(self.hits, self.last), 0
        return self.usage


class MemoryTier:
    """Chunks in one memory, up to a budget; what is worth least leaves first. Safe to use from several threads.

    Parameters
    ----------
    max_bytes, name
        The budget, and what statistics and events call the tier.
    device
        Where the tensors are.
    convert
        Changes how chunks are kept, and so how they are given; raises ``StoreError`` if it can't. ``None``: as they come.
    keeps_puts
        Whether a chunk that is put is kept at once, and not only when it is read.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        name: str = "host",
        device: torch.device | str = "cpu",
        convert: Callable[[ChunkKV], ChunkKV] | None = None,
        keeps_puts: bool = True,
    ) -> None:
        self.max_bytes, self.name, self.device, self.keeps_puts = max_bytes, name, torch.device(device), keeps_puts
        self._convert, self.events, self.reads = convert, Events(), Reads(max_bytes)
        self._lock, self._entries = fork_lock(), dict[ChunkKey, _Entry]()
        self._num_bytes = self._hits = self._misses = self._now = 0
        self.epoch = 0
        """Changes when something was erased: a read that was begun before must not be kept."""

    def get(self, key: ChunkKey, identity: ChunkIdentity) -> ChunkKV | None:
        """Return a chunk's KV, and count the use."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.identity != identity:
                self._misses += 1
                return None
            self._hits, self._now = self._hits + 1, self._now + 1
            entry.hits, entry.last = entry.hits + 1, self._now
            return entry.kv

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is kept under a key."""
        entry = self._entries.get(key)
        return None if entry is None else entry.identity

    def keys(self) -> list[ChunkKey]:
        """Return the keys of all chunks."""
        with self._lock:
            return list(self._entries)

    def keep(
        self, identity: ChunkIdentity, kv: ChunkKV, usage: Usage, *, epoch: int, reason: str = "promoted"
    ) -> ChunkKV:
        """Keep a chunk if there is, or can be made, room for it, and return it as this tier gives it; as it came if it can't be kept so.

        With the reason ``"put"`` its tensors are copied: the caller may change them. If :attr:`epoch` is not any more what it was before
        the chunk was read, the chunk may have been erased, and is not kept.
        """
        try:
            given = kv if self._convert is None else self._convert(kv)
            entry = _Entry(identity, given, usage, given.num_bytes, len(identity.token_ids))
            if self.device.type != "cpu" or (reason == "put" and given is kv and entry.num_bytes <= self.max_bytes):
                entry.kv = given = own_kv(given, device=self.device, copy=reason == "put")
        except (StoreError, RuntimeError, MemoryError) as error:  # memory is short, or the type can't hold it
            log.debug("a chunk is not kept in the tier %s: %s", self.name, error)
            return kv
        key = chunk_key(identity)
        with self._lock:
            gone = self._take(key, entry) if epoch == self.epoch else None
        if gone is not None:
            self.events.stored(self.name, key, reason, entry.num_tokens, entry.num_bytes)
            self.events.removed(self.name, gone, "evicted")
        return given

    def drop(self, keys: Iterable[ChunkKey], reason: str | None) -> None:
        """Forget chunks that were erased below, and what is being read; without a reason, tell nobody."""
        with self._lock:
            self.epoch += 1
            gone = [key for key in keys if self._remove(key)]
        self.events.removed(self.name, gone if reason else (), reason or "")

    def release(self) -> int:
        """Forget all chunks for the sake of their memory, and return their bytes."""
        freed = self._num_bytes
        self.drop(self.keys(), "evicted")
        return freed

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> None:
        """Set the retention of chunks."""
        with self._lock:
            self.epoch += 1  # a read that has begun would bring what the chunk was worth before
            for entry in filter(None, map(self._entries.get, keys)):
                entry.usage = entry.used().retained(retention)

    def stats(self) -> StoreStats:
        """Return size and counters."""
        with self._lock:
            return StoreStats(len(self._entries), self._num_bytes, self._hits, self._misses, 0)

    def _take(self, key: ChunkKey, entry: _Entry) -> list[ChunkKey] | None:
        """Take a chunk, and return what had to leave for it; ``None`` if it finds no room, and then nothing has left."""
        self._now += 1
        known = self._entries.get(key)
        hits = 0.0 if known is None else known.used().recent_hits(self._now)
        entry.usage = entry.usage._replace(hits=max(hits, entry.usage.hits), last=self._now)
        victims = self._leaving(key, entry)
        if victims is not None:
            for old in (key, *victims):
                self._remove(old)
            self._entries[key] = entry
            self._num_bytes += entry.num_bytes
        return victims

    def _leaving(self, key: ChunkKey, new: _Entry) -> list[ChunkKey] | None:
        """Choose what leaves for a chunk; ``None`` if that is not enough."""
        known = self._entries.get(key)
        must = self._num_bytes + new.num_bytes - self.max_bytes - (0 if known is None else known.num_bytes)
        if must <= 0:
            return []
        if new.num_bytes > self.max_bytes:
            return None
        others = [Sized(k, e.num_tokens, e.num_bytes, e.used()) for k, e in self._entries.items() if k != key]
        should = max(must, self._num_bytes // SHARE)
        going = leaving(others, self._now, priority=new.usage.priority_now(), must=must, should=should)
        return None if going is None else [each.key for each in going]

    def _remove(self, key: ChunkKey) -> bool:
        entry = self._entries.pop(key, None)
        self._num_bytes -= 0 if entry is None else entry.num_bytes
        return entry is not None


@dataclass(slots=True, eq=False)
class Read:
    """One chunk's read; ``wanted`` counts the prefetches that have not been cancelled, and is 0 for a request's own."""

    future: Future[Loaded]
    num_bytes: int
    wanted: int = 0


class Prefetch:
    """Reads that were asked for together.

    Parameters
    ----------
    found
        Chunks that are stored; those that are in memory already need no read.
    reads
        The reads begun or joined for the others; what found no room is not among them.
    """

    def __init__(self, found: int, reads: Sequence[Read]) -> None:
        self.found, self.reads, self._reads, self._wanted = found, len(reads), reads, list(reads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no read is left, or the time is over; return whether none is."""
        wait([read.future for read in self._reads], timeout_s)
        return all(read.future.done() for read in self._reads)

    def cancel(self) -> int:
        """Withdraw what nobody has begun and no other prefetch wants, and return how many reads that was; idempotent."""
        count = 0
        while self._wanted:
            read = self._wanted.pop()
            read.wanted -= 1
            count += read.wanted <= 0 and read.future.cancel()
        return count


class Reads:
    """Reads under way, each done once however often it is asked for; a forked child has none of its parent's.

    Parameters
    ----------
    max_bytes
        Most bytes that are prefetched together: what a read beyond them brought would push out what the others brought.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, fork_lock()
        self._pid, self._reads = os.getpid(), dict[ChunkKey, Read]()

    def ahead(self, key: ChunkKey, load: Callable[[], Loaded], num_bytes: int) -> Read | None:
        """Begin to prefetch a chunk, or join its read; ``None`` if there is no room, or no thread."""
        with self._lock:
            if (read := self._mine().get(key)) is None:
                if num_bytes + sum(each.num_bytes for each in self._reads.values()) > self._max_bytes:
                    return None
                read = self._begin(AHEAD, key, load, num_bytes)
            if read is not None:
                read.wanted += 1
            return read

    def read(self, key: ChunkKey, load: Callable[[], Loaded], policy: str) -> Read | None:
        """Return a chunk's read for a request, begun or joined; ``None`` if there is no thread.

        A prefetch that no thread has begun is withdrawn and read at once. With the policy ``"best_effort"``, ``None`` for a chunk that is
        being prefetched.
        """
        with self._lock:
            read = self._mine().get(key)
            if read is not None and read.wanted and policy == "best_effort":
                return None
            if read is None or (read.wanted and policy == "timeout" and read.future.cancel()):
                read = self._begin(READERS, key, load, 0)
            return read

    def cancel(self) -> None:
        """Withdraw all reads that nobody has begun."""
        for read in list(self._mine().values()):
            read.future.cancel()

    def _mine(self) -> dict[ChunkKey, Read]:
        if self._pid != os.getpid():
            self._pid, self._reads = os.getpid(), {}
        return self._reads

    def _begin(self, pool: Pool, key: ChunkKey, load: Callable[[], Loaded], num_bytes: int) -> Read | None:
        with suppress(RuntimeError):  # no thread can be had
            read = self._reads[key] = Read(pool.submit(load), num_bytes)
            read.future.add_done_callback(lambda _: self._end(key, read))
            return read
        return None

    def _end(self, key: ChunkKey, read: Read) -> None:
        with self._lock:
            if self._reads.get(key) is read:
                del self._reads[key]
