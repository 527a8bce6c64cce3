"""Chunks in memory, the host's or an accelerator's, and chunks that are being read into it.

A copy in memory is a copy: what leaves is still below. What is worth least leaves when another chunk needs its room.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import Events, StoreStats
from kvrag.store.worth import Retention, Usage, order, token_ms
from kvrag.threads import Pool
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole

SHARE = 16
"""One chunk of so many leaves with those that must, so that not every chunk that comes has to rank all."""

Convert = Callable[[ChunkKV], ChunkKV]
"""Returns a chunk as a tier keeps it; raises ``StoreError`` if that is impossible."""


@dataclass(slots=True, eq=False)
class _Entry:
    identity: ChunkIdentity
    kv: ChunkKV
    usage: Usage
    num_bytes: int
    num_tokens: int


class MemoryTier:
    """Chunks in one memory, up to a budget. Safe to use from several threads.

    Parameters
    ----------
    max_bytes
        The budget.
    name
        For statistics and events.
    device
        Where the tensors are.
    convert
        Changes how chunks are kept, and so how they are given; ``None``: as they come.
    keeps_puts
        Whether a chunk that is put is kept at once, and not only when it is read.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        name: str = "host",
        device: torch.device | str = "cpu",
        convert: Convert | None = None,
        keeps_puts: bool = True,
    ) -> None:
        self.max_bytes, self.name, self.device, self.keeps_puts = max_bytes, name, torch.device(device), keeps_puts
        self._convert = convert
        self.events = Events()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[ChunkKey, _Entry] = {}
        self._pins: Counter[ChunkKey] = Counter()
        self._num_bytes = self._hits = self._misses = self._now = 0
        self.epoch = 0
        """Changes when something is dropped for good: a read that was begun before must not be kept."""

    def reset_after_fork(self) -> None:
        """Forget everything: a thread of the parent may have been in the midst of a change."""
        self._reset()

    def get(self, identity: ChunkIdentity, *, counts: bool = True) -> ChunkKV | None:
        """Return a chunk's KV, and count the use."""
        with self._lock:
            entry = self._entries.get(chunk_key(identity))
            if entry is None or entry.identity != identity:
                self._misses += counts
                return None
            self._hits += counts
            self._now += 1
            entry.usage = entry.usage.touched(1, self._now)
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
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        usage: Usage,
        *,
        epoch: int,
        reason: str = "promoted",
        own: bool = False,
    ) -> ChunkKV:
        """Keep a chunk if there is, or can be made, room for it, and return it as this tier gives it.

        Parameters
        ----------
        identity, kv
            The chunk; its tensors are copied if they are elsewhere, or if ``own`` is false and they share memory with others.
        usage
            What is known of its worth.
        epoch
            Value of :attr:`epoch` before the chunk was read; if it is another one now, the chunk may have been erased, and is not kept.
        reason
            For the event.
        own
            Copy the tensors: the caller may change them.

        Raises
        ------
        StoreError
            If it can't be converted.
        """
        given = kv if self._convert is None else self._convert(kv)
        if own and given is kv:
            given = kv.map(
                lambda tensor: tensor.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
            )
        elif self.device.type != "cpu":
            given = given.map(lambda tensor: tensor.to(self.device))
        entry = _Entry(identity, given, usage, given.num_bytes, len(identity.token_ids))
        with self._lock:
            key = chunk_key(identity)
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
        with self._lock:
            going = [key for key, entry in self._entries.items() if namespace in (None, entry.identity.namespace)]
            self.drop(going if namespace is not None else [], "deleted")
            for key in going:
                self._remove(key)
        if namespace is None:
            self.events.cleared(self.name)

    def release(self) -> int:
        """Forget all chunks for the sake of their memory, and return their bytes."""
        with self._lock:
            freed, gone = self._num_bytes, list(self._entries)
            for key in gone:
                self._remove(key)
        self.events.removed(self.name, gone, "evicted")
        return freed

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> None:
        """Set the retention of chunks."""
        with self._lock:
            self.epoch += 1  # a read that has begun would bring what the chunk was worth before
            for key in keys:
                if (entry := self._entries.get(key)) is not None:
                    entry.usage = entry.usage.retained(retention)

    def stats(self) -> StoreStats:
        """Return size and counters."""
        with self._lock:
            return StoreStats(len(self._entries), self._num_bytes, self._hits, self._misses, 0)

    @contextmanager
    def pinned(self, keys: Collection[ChunkKey]) -> Iterator[None]:
        """Keep chunks, there or yet to come, from leaving as long as a request needs them."""
        with self._lock:
            self._pins.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._pins -= Counter(keys)

    def _take(self, key: ChunkKey, entry: _Entry) -> list[ChunkKey] | None:
        """Take a chunk, and return what had to leave for it; ``None`` if it finds no room, and then nothing has left."""
        self._now += 1
        known = self._entries.get(key)
        hits = 0.0 if known is None else known.usage.recent_hits(self._now)
        entry.usage = replace(entry.usage, hits=max(hits, entry.usage.hits), last=self._now)
        excess = self._num_bytes + entry.num_bytes - self.max_bytes - (0 if known is None else known.num_bytes)
        victims = self._victims(key, entry, excess) if excess > 0 else []
        if victims is None:
            return None
        for old in (key, *victims):
            self._remove(old)
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        return victims

    def _victims(self, key: ChunkKey, new: _Entry, excess: int) -> list[ChunkKey] | None:
        """Choose what leaves; ``None`` if that is not enough."""
        if new.num_bytes > self.max_bytes:
            return None
        priority = new.usage.priority_now()
        rank = order(self._now, token_ms((entry, entry.usage) for entry in (new, *self._entries.values())))
        going = [
            (other, entry)
            for other, entry in self._entries.items()
            if other != key and not self._pins[other] and entry.usage.priority_now() <= priority
        ]
        going.sort(key=lambda item: rank((item[1], item[1].usage)))
        chosen, spare = list[ChunkKey](), len(self._entries) // SHARE
        for other, entry in going:
            if excess <= 0 and len(chosen) >= spare:
                break
            chosen.append(other)
            excess -= entry.num_bytes
        return chosen if excess <= 0 else None

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

    future: Future[Loaded]
    num_bytes: int = 0
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


@dataclass(slots=True)
class _UnderWay:
    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    reads: dict[ChunkKey, Read] = field(default_factory=dict)


class Reads:
    """Reads under way, each done once however often it is asked for; a forked child has none of its parent's.

    Parameters
    ----------
    max_bytes
        Most bytes that are prefetched together: what a read beyond them brought would push out what the others brought.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._own = max_bytes, _UnderWay()

    @property
    def _state(self) -> _UnderWay:
        if self._own.pid != os.getpid():
            self._own = _UnderWay()
        return self._own

    def ahead(self, key: ChunkKey, load: Callable[[], Loaded], num_bytes: int) -> Read | None:
        """Begin to prefetch a chunk, or join its read; ``None`` if there is no room. Raises ``RuntimeError`` if there is no thread."""
        state = self._state
        with state.lock:
            read = self._current(state, key)
            if read is None:
                if num_bytes + sum(each.num_bytes for each in state.reads.values()) > self._max_bytes:
                    return None
                read = self._begin(state, AHEAD, key, load, num_bytes)
            read.wanted += 1
        return read

    def read(self, key: ChunkKey, load: Callable[[], Loaded], policy: str) -> Future[Loaded] | None:
        """Return a chunk's read for a request, begun or joined; raises ``RuntimeError`` if there is no thread.

        A prefetch that no thread has begun is withdrawn and read at once. With the policy ``"best_effort"``, ``None`` for a chunk that is
        being prefetched.
        """
        state = self._state
        with state.lock:
            read = self._current(state, key)
            if read is not None and read.wanted and policy == "best_effort":
                return None
            if read is None or (read.wanted > 0 and policy == "timeout" and read.future.cancel()):
                read = self._begin(state, READERS, key, load, 0)
            return read.future

    def cancel(self) -> None:
        """Withdraw all reads that nobody has begun."""
        state = self._state
        with state.lock:
            for read in list(state.reads.values()):
                read.future.cancel()

    def _current(self, state: _UnderWay, key: ChunkKey) -> Read | None:
        """Return the read of a chunk; those that were withdrawn are forgotten."""
        for other in [other for other, read in state.reads.items() if read.future.cancelled()]:
            del state.reads[other]
        return state.reads.get(key)

    def _begin(self, state: _UnderWay, pool: Pool, key: ChunkKey, load: Callable[[], Loaded], num_bytes: int) -> Read:
        read = state.reads[key] = Read(Future(), num_bytes)

        def work() -> None:
            if not read.future.set_running_or_notify_cancel():
                return
            try:
                result, error = load(), None
            except BaseException as raised:
                error = raised
            with state.lock:
                if state.reads.get(key) is read:
                    del state.reads[key]
            if error is None:
                read.future.set_result(result)
            else:
                read.future.set_exception(error)

        try:
            pool.submit(work)
        except RuntimeError:
            del state.reads[key]
            raise
        return read


def result_of(future: Future[Loaded], timeout_s: float | None) -> Loaded | None:
    """Return what a read gives within a time; ``None`` if it is late, or was withdrawn."""
    try:
        return future.result(None if timeout_s is None else max(0.0, min(timeout_s, threading.TIMEOUT_MAX)))
    except (TimeoutError, CancelledError):
        return None
