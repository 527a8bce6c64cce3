"""Chunks in memory, the host's or an accelerator's, and chunks that are being read into it. A copy in memory is a copy."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch

from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import Events, StoreStats
from kvrag.store.layers import own_kv
from kvrag.store.worth import Retention, Sized, Usage, leaving
from kvrag.threads import Pool
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole

SHARE = 16
"""One byte of so many leaves at least, so that not every chunk that comes has to rank all."""


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
    max_bytes
        The budget.
    name
        For statistics and events.
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
        self._convert, self.events = convert, Events()
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Forget everything: a thread of the parent may have been in the midst of a change."""
        self._lock = threading.RLock()
        self._entries: dict[ChunkKey, _Entry] = {}
        self._num_bytes = self._hits = self._misses = self._now = 0
        self.epoch = 0
        """Changes when something was erased: a read that was begun before must not be kept."""

    def get(self, key: ChunkKey, identity: ChunkIdentity, *, counts: bool = True) -> ChunkKV | None:
        """Return a chunk's KV, and count the use."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.identity != identity:
                self._misses += counts
                return None
            if counts:
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
        """Keep a chunk if there is, or can be made, room for it, and return it as this tier gives it.

        Parameters
        ----------
        identity, kv
            The chunk. With the reason ``"put"`` its tensors are copied: the caller may change them.
        usage
            What is known of its worth.
        epoch
            Value of :attr:`epoch` before the chunk was read; if it is another one now, the chunk may have been erased, and is not kept.
        reason
            For the event.

        Raises
        ------
        StoreError
            If it can't be converted.
        """
        given, key = kv if self._convert is None else self._convert(kv), chunk_key(identity)
        entry = _Entry(identity, given, usage, given.num_bytes, len(identity.token_ids))
        if self.device.type != "cpu":
            given = own_kv(given, device=self.device)
        elif reason == "put" and given is kv and entry.num_bytes <= self.max_bytes:
            given = own_kv(kv, copy=True)
        entry.kv = given
        with self._lock:
            gone = self._take(key, entry) if epoch == self.epoch else None
        if gone is not None:
            self.events.stored(self.name, key, reason, entry.num_tokens, entry.num_bytes)
            self.events.removed(self.name, gone, "evicted")
        return given

    def drop(self, keys: Iterable[ChunkKey], reason: str) -> None:
        """Forget chunks that were erased below."""
        with self._lock:
            self.epoch += 1
            gone = [key for key in keys if self._remove(key)]
        self.events.removed(self.name, gone, reason)

    def clear(self, namespace: str | None = None) -> None:
        """Forget all chunks, or those of a namespace, because they were erased below."""
        going = [k for k in self.keys() if namespace in (None, (e := self.identity(k)) and e.namespace)]
        self.drop(going if namespace is not None else (), "deleted")
        if namespace is None:
            with self._lock:
                self._entries.clear()
                self._num_bytes = 0
            self.events.cleared(self.name)

    def release(self) -> int:
        """Forget all chunks for the sake of their memory, and return their bytes."""
        with self._lock:
            freed, gone = self._num_bytes, list(self._entries)
            self._entries.clear()
            self._num_bytes = 0
        self.events.removed(self.name, gone, "evicted")
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


READERS = Pool("kvrag-read", 4)
"""Threads that read for requests."""

AHEAD = Pool("kvrag-read-ahead", 2)
"""Threads that prefetch: few, so that a request that comes meanwhile finds the disk free enough for its own reads."""

Loaded = ChunkKV | Hole


@dataclass(slots=True, eq=False)
class Read:
    """One chunk's read; ``wanted`` counts the prefetches that have not been cancelled, and is 0 for a request's own."""

    num_bytes: int
    future: Future[Loaded] = field(default_factory=Future)
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

    def __init__(self, found: int, reads: Collection[Read] = ()) -> None:
        self.found, self._reads, self._cancelled = found, list(reads), False

    @property
    def reads(self) -> int:
        """Reads that were begun or joined."""
        return len(self._reads)

    @property
    def is_over(self) -> bool:
        """Whether no read is left."""
        return all(read.future.done() for read in self._reads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no read is left, or the time is over; return whether none is."""
        wait([read.future for read in self._reads], timeout_s)
        return self.is_over

    def cancel(self) -> int:
        """Withdraw what nobody has begun and no other prefetch wants, and return how many reads that was; idempotent."""
        count = 0
        for read in () if self._cancelled else self._reads:
            read.wanted -= 1
            count += read.wanted <= 0 and read.future.cancel()
        self._cancelled = True
        return count


class Reads:
    """Reads under way, each done once however often it is asked for; a forked child has none of its parent's.

    Parameters
    ----------
    max_bytes
        Most bytes that are prefetched together: what a read beyond them brought would push out what the others brought.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._reset()

    def _reset(self) -> None:
        self._pid, self._lock, self._reads = os.getpid(), threading.Lock(), dict[ChunkKey, Read]()

    def ahead(self, key: ChunkKey, load: Callable[[], Loaded], num_bytes: int) -> Read | None:
        """Begin to prefetch a chunk, or join its read; ``None`` if there is no room. Raises ``RuntimeError`` if there is no thread."""
        with self._locked():
            read = self._current(key)
            if read is None:
                if num_bytes + sum(each.num_bytes for each in self._reads.values()) > self._max_bytes:
                    return None
                read = self._begin(AHEAD, key, load, num_bytes)
            read.wanted += 1
            return read

    def read(self, key: ChunkKey, load: Callable[[], Loaded], policy: str) -> Future[Loaded] | None:
        """Return a chunk's read for a request, begun or joined; raises ``RuntimeError`` if there is no thread.

        A prefetch that no thread has begun is withdrawn and read at once. With the policy ``"best_effort"``, ``None`` for a chunk that is
        being prefetched.
        """
        with self._locked():
            read = self._current(key)
            if read is not None and read.wanted and policy == "best_effort":
                return None
            if read is None or (read.wanted and policy == "timeout" and read.future.cancel()):
                read = self._begin(READERS, key, load, 0)
            return read.future

    def cancel(self) -> None:
        """Withdraw all reads that nobody has begun."""
        with self._locked():
            for read in list(self._reads.values()):
                read.future.cancel()

    def _locked(self) -> threading.Lock:
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    def _current(self, key: ChunkKey) -> Read | None:
        """Return the read of a chunk; those that were withdrawn are forgotten."""
        for other in [other for other, read in self._reads.items() if read.future.cancelled()]:
            del self._reads[other]
        return self._reads.get(key)

    def _begin(self, pool: Pool, key: ChunkKey, load: Callable[[], Loaded], num_bytes: int) -> Read:
        read = self._reads[key] = Read(num_bytes)

        def work() -> None:
            if not read.future.set_running_or_notify_cancel():
                return
            try:
                result: Loaded = load()
            except Exception as error:
                self._end(key, read)
                read.future.set_exception(error)
            else:
                self._end(key, read)
                read.future.set_result(result)

        try:
            pool.submit(work)
        except RuntimeError:
            del self._reads[key]
            raise
        return read

    def _end(self, key: ChunkKey, read: Read) -> None:
        with self._lock:
            if self._reads.get(key) is read:
                del self._reads[key]
