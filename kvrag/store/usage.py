"""What a chunk is worth: its priority, and what it would cost to compute it again.

Time is logical where it can be (accesses counted by the index) and otherwise the time since the machine's start: a
clock that is set to another year changes nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvrag.store.retention import DEFAULT_PRIORITY, Retention, Worth

HALF_LIFE = 4096
"""Accesses of the store after which a hit counts half."""

TOKEN_MS = 1.0
"""Assumed cost of a token where none was measured in the whole store. Only ratios matter, and only among chunks of one store."""

KINDS = (int, str, float, float, float, int, float)
BOUNDS: tuple[tuple[int, int] | None, ...] = ((0, 100), None, *((-1, 2**63),) * 2, *((0, 2**63),) * 2, (-1, 2**63))
"""Types and bounds of a row's fields: a row from elsewhere must not make a chunk one that never leaves."""


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
    """What is known of a chunk's size: a row of the index, or a chunk in memory."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its KV."""


@dataclass(frozen=True, slots=True)
class Usage:
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

    priority: int = DEFAULT_PRIORITY
    boot: str = ""
    deadline: float = -1.0
    duration_s: float = -1.0
    hits: float = 0.0
    last: int = 0
    cost_ms: float = -1.0

    @classmethod
    def of(cls, value: object) -> Usage:
        """Parse a row; one that is not of this form is that of a chunk nobody said anything about."""
        if not isinstance(value, list) or len(value) != len(KINDS):
            return cls()
        for item, kind, bounds in zip(value, KINDS, BOUNDS, strict=True):
            if type(item) is not kind:
                return cls()
            if bounds is not None and not (isinstance(item, (int, float)) and bounds[0] <= item <= bounds[1]):
                return cls()
        return cls(*value)

    @classmethod
    def brought(cls, worth: Worth) -> Usage:
        """Return the usage of a chunk that comes from elsewhere, of which this is known."""
        return cls(hits=worth.hits, cost_ms=-1.0 if worth.cost_ms is None else worth.cost_ms)

    def row(self) -> list[object]:
        """Value of the row."""
        return [self.priority, self.boot, self.deadline, self.duration_s, self.hits, self.last, self.cost_ms]

    def retained(self, retention: Retention) -> Usage:
        """With another priority, from now on."""
        duration = -1.0 if retention.duration_s is None else float(retention.duration_s)
        return replace(
            self,
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
        return replace(self, hits=self.recent_hits(now) + hits, last=now)

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
