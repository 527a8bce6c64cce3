"""Read chunks before a request asks for them: each once, by a few threads, and no more bytes at a time than the tier can take."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvrag.types import ChunkKey, ChunkKV

log = logging.getLogger(__name__)

THREADS = 2
"""Readers: a request that comes meanwhile shall find the disk free enough for its own reads."""

Load = Callable[[], ChunkKV | None]


@dataclass(slots=True, eq=False)
class Read:
    """One chunk's read: ``kv`` holds once ``is_over`` is set; ``wanted`` counts the prefetches that have not been cancelled."""

    key: ChunkKey
    load: Load
    num_bytes: int
    wanted: int = 0
    kv: ChunkKV | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False)
class _State:
    """One process's reads: those nobody has begun, in order, and those under way."""

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    queued: dict[ChunkKey, Read] = field(default_factory=dict)
    running: dict[ChunkKey, Read] = field(default_factory=dict)
    threads: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(read.num_bytes for reads in (self.queued, self.running) for read in reads.values())


class Prefetch:
    """Reads that were asked for together.

    Parameters
    ----------
    found
        Chunks that are stored; those in the uppermost tier already need no read.
    reads
        The reads begun or joined for the others. What found no room is not among them.
    cancel
        Withdraws a read that nobody has begun.
    """

    def __init__(self, found: int, reads: Iterable[Read] = (), cancel: Callable[[Read], bool] | None = None) -> None:
        self.found = found
        self._reads = list(reads)
        self._cancel = cancel

    @property
    def reads(self) -> int:
        """Reads that were begun or joined."""
        return len(self._reads)

    @property
    def is_over(self) -> bool:
        """Whether no read is left."""
        return all(read.is_over.is_set() for read in self._reads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no read is left, or the time is over; return whether none is."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for read in self._reads:
            read.is_over.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self.is_over

    def cancel(self) -> int:
        """Withdraw what nobody has begun and no other prefetch wants, and return how many reads that was; idempotent."""
        reads, cancel, self._cancel = self._reads, self._cancel, None
        return 0 if cancel is None else sum(cancel(read) for read in reads)


class Prefetcher:
    """Runs reads in daemon threads that live as long as there is work.

    Parameters
    ----------
    max_bytes
        Most bytes queued and under way together; a read beyond them is left out, because what it brought would push out what the
        others brought.
    policy
        What a request does about reads that are not over; see :class:`kvrag.StoreConfig`.
    """

    def __init__(self, max_bytes: int, policy: str = "timeout") -> None:
        self._max_bytes = max_bytes
        self._policy = policy
        self._own = _State()

    @property
    def _state(self) -> _State:
        """Reads of this process: a forked child has no threads of its parent's, and none of its locks."""
        if self._own.pid != os.getpid():
            self._own = _State()
        return self._own

    def start(self, loads: Mapping[ChunkKey, tuple[Load, int]], *, found: int) -> Prefetch:
        """Begin to read chunks, and return at once.

        Parameters
        ----------
        loads
            What reads each chunk, and its bytes.
        found
            For :class:`Prefetch`.
        """
        state, reads = self._state, []
        with state.lock:
            num_bytes = state.num_bytes
            for key, (load, size) in loads.items():
                read = state.running.get(key) or state.queued.get(key)
                if read is None and num_bytes + size <= self._max_bytes:
                    read = state.queued[key] = Read(key, load, size)
                    num_bytes += size
                if read is not None:
                    read.wanted += 1
                    reads.append(read)
            missing = min(len(state.queued), THREADS) - state.threads
            state.threads += max(0, missing)
        for _ in range(missing):
            self._add_thread(state)
        return Prefetch(found, reads, self._cancel)

    def begun(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Read]:
        """Return the reads of these chunks that a request must not do again.

        With a deadline, those that no thread has begun are withdrawn: the request reads these at once itself.
        """
        state, keys = self._state, list(keys)
        with state.lock:
            if self._policy != "timeout":
                both = {**state.queued, **state.running}
                return {key: both[key] for key in keys if key in both}
            withdrawn = [state.queued.pop(key) for key in keys if key in state.queued]
            reads = {key: state.running[key] for key in keys if key in state.running}
        for read in withdrawn:
            read.is_over.set()
        return reads

    def result(self, read: Read, deadline: float) -> ChunkKV | None:
        """Return what a read brings, if the policy waits for it; ``deadline`` is on ``time.monotonic``'s clock."""
        if self._policy == "wait":
            read.is_over.wait()
        elif self._policy == "timeout":
            read.is_over.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        return read.kv

    def clear(self) -> None:
        """Withdraw all reads that nobody has begun."""
        state = self._state
        with state.lock:
            reads = list(state.queued.values())
            state.queued.clear()
        for read in reads:
            read.is_over.set()

    def _add_thread(self, state: _State) -> None:
        try:
            threading.Thread(target=self._work, args=(state,), name="kvrag-read-ahead", daemon=True).start()
        except RuntimeError as error:  # too many threads, or the interpreter is about to exit
            log.warning("a read-ahead could not be started: %s", error)
            with state.lock:
                state.threads -= 1
            if not state.threads:
                self.clear()

    def _work(self, state: _State) -> None:
        while True:
            with state.lock:
                key = next(iter(state.queued), None)
                if key is None:
                    state.threads -= 1
                    return
                read = state.running[key] = state.queued.pop(key)
            try:
                read.kv = read.load()
            except Exception:
                log.warning("a chunk could not be prefetched", exc_info=True)
            with state.lock:
                del state.running[key]
            read.is_over.set()

    def _cancel(self, read: Read) -> bool:
        state = self._state
        with state.lock:
            read.wanted -= 1
            if read.wanted > 0 or state.queued.get(read.key) is not read:
                return False
            del state.queued[read.key]
        read.is_over.set()
        return True
