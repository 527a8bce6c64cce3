"""What a chunk is worth keeping, and which chunks leave when room is short.

Time is logical where it can be (accesses counted by the catalog) and otherwise the time since the machine's start: a clock that is set to
another year changes nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

from pydantic import Field

from kvrag.config import config_class
from kvrag.errors import ConfigError, StoreError
from kvrag.store.base import Record
from kvrag.types import ChunkKey

DEFAULT_PRIORITY = 35

HALF_LIFE = 4096
"""Accesses of the store after which a hit counts half."""

TOKEN_MS = 1.0
"""Assumed cost of a token where none was measured in the whole store; only ratios matter."""

PROBE = 4
"""Chunks that leave for the sake of free space before it is checked whether any came of it: snapshots and open files keep theirs."""

PASSES = 8
"""Times that room is made for one chunk."""

RETRY_S = 600.0
"""Seconds for which nothing more leaves for the sake of free space after none came of it."""

Since = Annotated[float, Field(ge=-1, lt=2**63)]

IN_VAIN = "evicting chunks has freed no space on its disk (snapshots, or open files?)"


@config_class
class Retention:
    """How much a chunk is worth keeping."""

    priority: Annotated[int, Field(strict=True, ge=0, le=100)] = DEFAULT_PRIORITY
    """0 to 100; the lowest leaves first. System prompts 80 to 90, documents 35 to 60, one-off texts 20 to 30."""
    duration_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """After this many seconds the priority is :data:`DEFAULT_PRIORITY` again; ``None``: never."""
    cost_ms: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """Milliseconds that computing it took; ``None``: what precompute measured, else as much per token as the store's other chunks."""


def check_retention(value: object, *, is_needed: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a :class:`Retention`, or ``None`` where that is not needed."""
    if not isinstance(value, Retention) and (is_needed or value is not None):
        raise ConfigError(f"retention is {value!r}; pass a kvrag.Retention, for example Retention(priority=90)")


def priority_of(retention: Retention | None) -> int:
    """Priority that a chunk is stored with; raises ``ConfigError`` if ``retention`` is not one."""
    check_retention(retention)
    return DEFAULT_PRIORITY if retention is None else retention.priority


def since_boot() -> float:
    """Seconds since the machine's start, standby included."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@functools.cache
def boot_id() -> str:
    """Name of the machine's present run; empty where the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Sized(Protocol):
    """A chunk's size."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its KV."""


class Usage(NamedTuple):
    """What eviction must know of one chunk.

    Parameters
    ----------
    priority
        0 to 100.
    boot, deadline, duration_s
        The priority lasts until ``deadline`` (seconds since the start named ``boot``), ``duration_s`` in all; -1: for ever. After a
        restart of the machine the duration begins anew.
    hits, last
        Hits, halved every :data:`HALF_LIFE` accesses, as of access ``last``.
    cost_ms
        Time that computing it took; -1 if nobody said.
    """

    # A row from elsewhere must not make a chunk one that never leaves.
    priority: Annotated[int, Field(ge=0, le=100)] = DEFAULT_PRIORITY
    boot: str = ""
    deadline: Since = -1.0
    duration_s: Since = -1.0
    hits: Annotated[float, Field(ge=0, lt=2**63)] = 0.0
    last: Annotated[int, Field(ge=0, lt=2**63)] = 0
    cost_ms: Since = -1.0

    def retained(self, retention: Retention) -> Usage:
        """With another priority, from now on."""
        duration = -1.0 if retention.duration_s is None else float(retention.duration_s)
        return self._replace(
            priority=retention.priority,
            boot=boot_id(),
            deadline=-1.0 if duration < 0 else since_boot() + duration,
            duration_s=duration,
            cost_ms=self.cost_ms if retention.cost_ms is None else float(retention.cost_ms),
        )

    def retention(self) -> Retention:
        """Return what :meth:`retained` would be told now: the priority with the time that is left of it."""
        cost = None if self.cost_ms < 0 else self.cost_ms
        if self.deadline < 0:
            return Retention(self.priority, None, cost)
        left = self._ends_at() - since_boot()
        return Retention(self.priority, left, cost) if left > 0 else Retention(cost_ms=cost)

    def touched(self, hits: int, now: int) -> Usage:
        """With more hits, at access ``now``."""
        return self._replace(hits=self.recent_hits(now) + hits, last=now)

    def recent_hits(self, now: int) -> float:
        """Hits, decayed to access ``now``."""
        return float(self.hits * 0.5 ** (min(max(now - self.last, 0), 2**20) / HALF_LIFE))

    def priority_now(self) -> int:
        """Priority at present; the default again when its duration is over."""
        return self.priority if self.deadline < 0 or since_boot() < self._ends_at() else DEFAULT_PRIORITY

    def _ends_at(self) -> float:
        """Seconds since the machine's start at which the priority ends, if it does; after a restart its duration begins anew."""
        return self.deadline if self.boot == boot_id() else since_boot() + self.duration_s

    def worth(self, chunk: Sized, now: int, token_ms: float = TOKEN_MS) -> float:
        """Milliseconds of computing that a byte saves: cost × (1 + recent hits) ÷ bytes. ``token_ms`` stands in for an unknown cost."""
        cost = self.cost_ms if self.cost_ms >= 0 else chunk.num_tokens * token_ms
        return cost * (1.0 + self.recent_hits(now)) / max(1, chunk.num_bytes)


def token_ms(chunks: Iterable[tuple[Sized, Usage]]) -> float:
    """Mean cost of a token of those chunks whose cost is known: chunks of which it is not must not seem dearer or cheaper."""
    known = [(usage.cost_ms, chunk.num_tokens) for chunk, usage in chunks if usage.cost_ms >= 0]
    tokens = sum(count for _, count in known)
    return sum(cost for cost, _ in known) / tokens if tokens else TOKEN_MS


def order(now: int, token_ms: float = TOKEN_MS) -> Callable[[tuple[Sized, Usage]], tuple[int, float, int]]:
    """Sort key: what is to be evicted first comes first."""

    def key(item: tuple[Sized, Usage]) -> tuple[int, float, int]:
        chunk, usage = item
        return usage.priority_now(), usage.worth(chunk, now, token_ms), usage.last

    return key


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the lowest tier; see :class:`kvrag.StoreConfig`.

    Parameters
    ----------
    max_bytes
        Most bytes of KV; ``None``: no limit.
    min_free_bytes
        Bytes of the file system that are left to others; 0: never evict for others.
    high, low
        Eviction begins above ``high`` × ``max_bytes`` and ends below ``low`` × ``max_bytes``. Where free space is short, it begins at
        once, and ends when ``high`` - ``low`` of what is stored left beyond that.
    """

    max_bytes: int | None = None
    min_free_bytes: int = 0
    high: float = 0.95
    low: float = 0.85

    def short(self, stored: int, free: int, need: int) -> tuple[int, int]:
        """Return the bytes that must leave before ``need`` more are written: for the budget, and for the file system."""
        kv = 0 if self.max_bytes is None else stored + need - self.max_bytes
        return max(0, kv), max(0, self.min_free_bytes + need - free if self.min_free_bytes else 0)

    def excess(self, stored: int, free: int, need: int) -> tuple[int, int]:
        """Return the bytes that should leave then: more than must, so that not every write has to evict."""
        kv, disk = 0, self.short(stored, free, need)[1]
        if self.max_bytes is not None and stored + need > self.high * self.max_bytes:
            kv = stored + need - int(self.low * self.max_bytes)
        return kv, disk and disk + int((self.high - self.low) * stored)


class Evictor:
    """Makes room: what is worth least leaves first, until the store is below its low watermark; or nothing, where that is not enough.

    Parameters
    ----------
    budget
        The limits.
    totals
        Returns chunks and bytes stored.
    usages
        Returns the number of accesses so far, and every chunk with its usage.
    free_bytes
        Returns the free bytes of the file system.
    evict
        Erases chunks; raises ``OSError`` if they can't be.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        totals: Callable[[], tuple[int, int]],
        usages: Callable[[], tuple[int, list[tuple[Record, Usage]]]],
        free_bytes: Callable[[], int],
        evict: Callable[[list[ChunkKey]], object],
    ) -> None:
        self._budget, self._totals, self._usages, self._evict = budget, totals, usages, evict
        self._free_bytes, self._in_vain_until = free_bytes, 0.0

    def make_room(self, need: int, *, priority: int) -> None:
        """Evict until ``need`` bytes fit; chunks of a higher priority stay. Where that is not enough, all stay.

        Raises
        ------
        StoreError
            If they can't be made to fit.
        """
        budget = self._budget
        if budget.max_bytes is not None and need > budget.max_bytes:
            raise self._no_room(need, "they are more than its whole budget")
        for _ in range(PASSES):  # others may take the room that was made
            state = self._state()
            excess, short = budget.excess(*state, need), budget.short(*state, need)
            if not any(excess):
                return
            if short[1] and time.monotonic() < self._in_vain_until:
                raise self._no_room(need, IN_VAIN)
            victims = self._victims(priority)
            there = sum(record.num_bytes for record in victims)
            if there < max(short):
                raise self._no_room(need, "nothing more may leave it that would be enough")
            # A watermark that can't be reached is no reason to take everything: half of it will do for a while.
            goal = max(excess) if max(excess) <= there else max(*short, there // 2)
            sizes = accumulate((record.num_bytes for record in victims), initial=0)
            chosen = [record for record, size in zip(victims, sizes, strict=False) if size < goal]
            self._leave(chosen[:PROBE])
            if short[1] and self._state()[1] <= state[1] + sum(record.num_bytes for record in chosen[:PROBE]) // 4:
                self._in_vain_until = time.monotonic() + RETRY_S
                raise self._no_room(need, IN_VAIN)
            self._leave(chosen[PROBE:])
            if not any(budget.short(*self._state(), need)):
                return
        raise self._no_room(need, "what left it was not enough")

    def _leave(self, chunks: list[Record]) -> None:
        with suppress(OSError):
            self._evict([record.key for record in chunks])

    def _victims(self, max_priority: int) -> list[Record]:
        """Return what may leave, what is worth least first."""
        now, chunks = self._usages()
        going = [(record, usage) for record, usage in chunks if usage.priority_now() <= max_priority]
        return [record for record, _ in sorted(going, key=order(now, token_ms(chunks)))]

    def _state(self) -> tuple[int, int]:
        """Return the bytes that are stored, and those that are free."""
        free = 2**62
        with suppress(OSError):  # the write will tell
            free = self._free_bytes() if self._budget.min_free_bytes else free
        return self._totals()[1], free

    def _no_room(self, need: int, why: str) -> StoreError:
        return StoreError(
            f"{need} bytes don't fit into the KV store: {why}; raise StoreConfig.disk_bytes (ram_bytes without kv_dir), lower "
            "StoreConfig.min_free_bytes, or free space on the disk"
        )
