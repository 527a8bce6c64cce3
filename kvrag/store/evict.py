"""Make room on the disk: what is worth least leaves first, until the store is below its low watermark; or nothing, where that won't do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvrag.errors import StoreError
from kvrag.store import files
from kvrag.store.base import Record
from kvrag.store.directory import Directory
from kvrag.store.fork import ForkAware
from kvrag.store.header import ALIGNMENT
from kvrag.store.store_index import StoreIndex
from kvrag.store.usage import order, token_ms
from kvrag.types import ChunkKey

LOCK_FILE = "evict.lock"

PROBE = 4
"""Chunks that leave for the sake of free space before it is looked whether any came of it: snapshots and open files keep theirs."""

RETRY_S = 600.0
"""Seconds for which nothing more leaves for the sake of free space after none came of it, unless it comes late."""


class Bytes(NamedTuple):
    """Bytes of KV, as ``disk_bytes`` counts, and of the file system, as ``min_free_bytes`` does: files have headers."""

    kv: int
    disk: int

    @classmethod
    def of(cls, chunks: int, num_bytes: int) -> Bytes:
        """Return what chunks take."""
        return cls(num_bytes, num_bytes + ALIGNMENT * chunks)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the disk tier; see :class:`kvrag.StoreConfig`.

    Parameters
    ----------
    disk_bytes
        Most bytes of KV; ``None``: no limit.
    min_free_bytes
        Bytes of the file system that are left to others; 0: never evict for others.
    high, low
        Eviction begins above ``high`` × ``disk_bytes`` and ends below ``low`` × ``disk_bytes``. Where free space is short, it begins at
        once, and ends when ``high`` - ``low`` of what is stored left beyond that.
    """

    disk_bytes: int | None = None
    min_free_bytes: int = 0
    high: float = 0.95
    low: float = 0.85

    def short(self, stored: Bytes, free: int, need: int) -> Bytes:
        """Return what must leave before ``need`` more bytes may be written."""
        kv = 0 if self.disk_bytes is None else stored.kv + need - self.disk_bytes
        disk = self.min_free_bytes + need - free if self.min_free_bytes else 0
        return Bytes(max(0, kv), max(0, disk))

    def excess(self, stored: Bytes, free: int, need: int) -> Bytes:
        """Return what had better leave then: more than what must, so that not every write has to look for it."""
        kv, disk = 0, self.short(stored, free, need).disk
        if self.disk_bytes is not None and stored.kv + need > self.high * self.disk_bytes:
            kv = stored.kv + need - int(self.low * self.disk_bytes)
        return Bytes(kv, disk and disk + int((self.high - self.low) * stored.disk))


class Evictor(ForkAware):
    """Frees space in a store.

    Parameters
    ----------
    directory, index
        The store's.
    budget
        Its limits.
    erase
        Erases a chunk's file and returns whether it was there; ``OSError`` if it still is.
    removed
        Told the key of each chunk that left.
    is_held
        Whether a chunk has no file and is in a live process's memory: nothing is freed by taking its row.
    """

    def __init__(
        self,
        directory: Directory,
        index: StoreIndex,
        budget: Budget,
        erase: Callable[[ChunkKey], bool],
        removed: Callable[[ChunkKey], None],
        is_held: Callable[[ChunkKey], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        self._directory, self._index, self._budget = directory, index, budget
        self._erase, self._removed, self._is_held = erase, removed, is_held
        self._pins: Counter[ChunkKey] = Counter()
        # Until then, or until so much is free, nothing leaves for the sake of free space.
        self._in_vain: tuple[float, int] = (0.0, 0)

    @contextmanager
    def pinned(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Keep chunks from being evicted by this process, as long as a request needs them."""
        keys = list(keys)
        with self._lock:
            self._pins.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._pins -= Counter(keys)

    def make_room(self, need: int, *, priority: int) -> None:
        """Evict until ``need`` bytes fit; chunks of a higher priority than the new one stay. Where that is not enough, all stay.

        Raises
        ------
        StoreError
            If they can't be made to fit.
        """
        budget, why = self._budget, ""
        if budget.disk_bytes is not None and need > budget.disk_bytes:
            why = "they are more than its whole budget"
        while not why and any(budget.excess(*self._state(), need)):
            with files.locked(self._directory.root / LOCK_FILE):
                why = self._pass(need, priority)
            if not any(budget.short(*self._state(), need)):
                return
            # Without a reason, another writer took the room that was made.
        if why:
            raise StoreError(
                f"{need} bytes don't fit into the store {self._directory.root}: {why}; "
                "raise StoreConfig.disk_bytes, lower StoreConfig.min_free_bytes, or free space on the disk"
            )

    def evict(self, num_bytes: int, *, max_priority: int = 100) -> int:
        """Evict at least ``num_bytes``, if there are, and return how many chunks left."""
        return self._evict(self._victims(max_priority), Bytes(num_bytes, 0))

    def _pass(self, need: int, priority: int) -> str:
        """Evict what must leave and a margin, or nothing where there is not enough; return why another pass is of no use, if so."""
        stored, free = self._state()
        short, excess = self._budget.short(stored, free, need), self._budget.excess(stored, free, need)
        if not any(excess):
            return ""
        until, enough = self._in_vain
        if short.disk and free < enough and time.monotonic() < until:
            return "evicting chunks has freed no space on its disk (snapshots, or open files?)"
        victims = self._victims(priority)
        held = Bytes.of(len(victims), sum(record.num_bytes for record in victims))
        if held.kv < short.kv or held.disk < short.disk:
            return "nothing more may leave it that would be enough"
        # A watermark that can't be reached is no reason to take everything: half of it will do for a while.
        wanted = zip(short, excess, held, strict=True)
        goal = Bytes(*(better if better <= there else max(must, there // 2) for must, better, there in wanted))
        evicted = self._evict(victims, goal, free if short.disk else None)
        return "" if evicted else "nothing more may leave it"

    def _evict(self, victims: list[Record], goal: Bytes, free: int | None = None) -> int:
        """Evict chunks in their order until ``goal`` is reached, and return how many left.

        With ``free``, what was free before, it is done for more of that, and ends where nothing comes of it.
        """
        gone, evicted = Bytes(0, 0), 0
        with self._marked() as dropped:
            for record in victims:
                is_enough = gone.kv >= goal.kv and gone.disk >= goal.disk
                if is_enough or (evicted == PROBE and self._is_in_vain(free, gone.disk)):
                    break
                with suppress(OSError):
                    is_erased = self._index.drop(record.key, partial(self._erase, record.key))
                    dropped()
                    if is_erased:
                        self._removed(record.key)
                        evicted += 1
                    gone = Bytes(gone.kv + record.num_bytes, gone.disk + record.num_bytes + ALIGNMENT)
        if evicted < PROBE:
            self._is_in_vain(free, gone.disk)
        return evicted

    @contextmanager
    def _marked(self) -> Iterator[Callable[[], None]]:
        """Give what is to be called after each chunk that left; let memory look for them after the first and after the last one.

        Each mark makes every process look up all that it has in memory. Killed in between, what left stays in memory until the next
        mark, and an erasure always sets one.
        """
        count = 0

        def dropped() -> None:
            nonlocal count
            count += 1
            if count == 1:
                mark()

        def mark() -> None:
            with suppress(OSError):  # the room is made all the same
                self._index.mark_eviction()

        try:
            yield dropped
        finally:
            if count > 1:
                mark()

    def _is_in_vain(self, free: int | None, erased: int) -> bool:
        """Whether next to none of what was erased is free now; that is remembered for a while."""
        if free is None or not erased or self._free() > free + erased // 4:
            return False
        self._in_vain = (time.monotonic() + RETRY_S, free + erased // 2)
        return True

    def _victims(self, max_priority: int) -> list[Record]:
        """Return what may leave, what is worth least first."""
        now, chunks = self._index.usage()
        free_to_go = [
            (record, usage)
            for record, usage in chunks
            if usage.priority_now() <= max_priority and self._pins[record.key] <= 0 and not self._is_held(record.key)
        ]
        return [record for record, _ in sorted(free_to_go, key=order(now, token_ms(chunks)))]

    def _state(self) -> tuple[Bytes, int]:
        """Return what is stored, and what is free."""
        return Bytes.of(*self._index.totals()), self._free()

    def _free(self) -> int:
        try:
            return self._directory.free_bytes()
        except OSError:
            return 2**62  # the write will tell
