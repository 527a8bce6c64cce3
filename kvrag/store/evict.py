"""Make room on the disk: what is worth least leaves first, until the store is below its low watermark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from kvrag.errors import StoreError
from kvrag.store import files
from kvrag.store.base import Record
from kvrag.store.directory import Directory
from kvrag.store.fork import ForkAware
from kvrag.store.store_index import StoreIndex
from kvrag.store.usage import Usage, order
from kvrag.types import ChunkKey

LOCK_FILE = "evict.lock"


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
        Eviction begins above ``high`` × ``disk_bytes`` and ends below ``low`` × ``disk_bytes``.
    """

    disk_bytes: int | None = None
    min_free_bytes: int = 0
    high: float = 0.95
    low: float = 0.85

    def excess(self, stored: int, free: int, need: int) -> int:
        """Return how many bytes must leave before ``need`` more are written; 0 or less: none."""
        over = 0
        if self.disk_bytes is not None and stored + need > self.high * self.disk_bytes:
            over = stored + need - int(self.low * self.disk_bytes)
        return max(over, self.min_free_bytes + need - free) if self.min_free_bytes else over

    def fits(self, stored: int, free: int, need: int) -> bool:
        """Whether ``need`` more bytes may be written."""
        is_within = self.disk_bytes is None or stored + need <= self.disk_bytes
        return is_within and (not self.min_free_bytes or free - need >= self.min_free_bytes)


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
        """Evict until ``need`` bytes fit; chunks of a higher priority than the new one stay.

        Raises
        ------
        StoreError
            If they can't be made to fit.
        """
        budget = self._budget
        could_ever_fit = budget.disk_bytes is None or need <= budget.disk_bytes
        while could_ever_fit:
            if self._excess(need) <= 0:
                return
            with files.locked(self._directory.root / LOCK_FILE):
                excess = self._excess(need)
                evicted = 0 if excess <= 0 else self.evict(excess, max_priority=priority)
            if budget.fits(self._index.totals()[1], self._free(), need):
                return
            if not evicted and excess > 0:
                break
            # Another writer took the room that was made.
        raise StoreError(
            f"{need} bytes don't fit into the store {self._directory.root}, and nothing more may leave it; "
            "raise StoreConfig.disk_bytes, lower StoreConfig.min_free_bytes, or free space on the disk"
        )

    def evict(self, num_bytes: int, *, max_priority: int = 100) -> int:
        """Evict at least ``num_bytes``, if there are, and return how many chunks left."""
        now, chunks = self._index.usage()
        evicted = freed = 0
        for record, _ in self._victims(now, chunks, max_priority):
            if freed >= num_bytes:
                break
            with suppress(OSError):
                if self._index.drop(record.key, partial(self._erase, record.key)):
                    self._removed(record.key)
                    evicted += 1
                freed += record.num_bytes
        return evicted

    def _victims(
        self, now: int, chunks: list[tuple[Record, Usage]], max_priority: int
    ) -> Iterator[tuple[Record, Usage]]:
        for record, usage in sorted(chunks, key=order(now)):
            if usage.priority_now() <= max_priority and self._pins[record.key] <= 0 and not self._is_held(record.key):
                yield record, usage

    def _excess(self, need: int) -> int:
        return self._budget.excess(self._index.totals()[1], self._free(), need)

    def _free(self) -> int:
        try:
            return self._directory.free_bytes()
        except OSError:
            return 2**62  # the write will tell
