"""What a chunk is worth keeping, and which chunks leave when room is short. Hits fade with the accesses that the catalog counts."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, NamedTuple

from pydantic import Field

from kvrag.config import DEFAULT_PRIORITY, MOST, Retention
from kvrag.errors import ConfigError, StoreError
from kvrag.types import ChunkKey

HALF_LIFE = 4096  # accesses of the store after which a hit counts half
TOKEN_MS = (
    1.0  # assumed cost of a token where none was measured in the whole store; only ratios matter
)
PROBE = 4  # chunks that leave for free space before it is checked whether any came of it: snapshots and open files keep theirs
PASSES = 8  # times that room is made for one chunk: others may take it
RETRY_S = 600.0  # seconds for which nothing more leaves for free space after none came of it

Known = Annotated[float, Field(ge=-1, le=MOST)]


def check_retention(value: object, *, is_needed: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a :class:`Retention`, or ``None`` where that is not needed."""
    if not isinstance(value, Retention) and (is_needed or value is not None):
        raise ConfigError(
            f"retention is {value!r}; pass a kvrag.Retention, for example Retention(priority=90)"
        )


class Usage(NamedTuple):
    """What eviction must know of one chunk.

    ``priority`` ends at ``until``, in seconds since 1970 (UTC; -1: never). ``hits`` are halved every :data:`HALF_LIFE` accesses, as of
    access ``last``. ``cost_ms`` is the time that computing it took, or -1 if nobody said.
    """

    # A row from elsewhere must not make a chunk one that never leaves.
    priority: Annotated[int, Field(ge=0, le=100)] = DEFAULT_PRIORITY
    until: Known = -1.0
    hits: Annotated[float, Field(ge=0, lt=2**63)] = 0.0
    last: Annotated[int, Field(ge=0, lt=2**63)] = 0
    cost_ms: Known = -1.0

    def retained(self, retention: Retention) -> Usage:
        """With another priority, from now on."""
        until = (
            -1.0 if retention.duration_s is None else min(time.time() + retention.duration_s, MOST)
        )
        cost = self.cost_ms if retention.cost_ms is None else float(retention.cost_ms)
        return self._replace(priority=retention.priority, until=until, cost_ms=cost)

    def retention(self) -> Retention | None:
        """Return what :meth:`retained` would be told now, with the time that is left of the priority; ``None`` for the default."""
        left, cost = (
            None if self.until < 0 else self.until - time.time(),
            None if self.cost_ms < 0 else self.cost_ms,
        )
        found = (
            Retention(cost_ms=cost)
            if left is not None and left <= 0
            else Retention(self.priority, left, cost)
        )
        return None if found == Retention() else found

    def touched(self, hits: int, now: int) -> Usage:
        """With more hits, at access ``now``."""
        return self._replace(hits=self.recent_hits(now) + hits, last=now)

    def recent_hits(self, now: int) -> float:
        """Hits, decayed to access ``now``."""
        return float(self.hits * 0.5 ** (min(max(now - self.last, 0), 2**20) / HALF_LIFE))

    def priority_now(self) -> int:
        """Priority at present; the default again when its time is over."""
        return self.priority if self.until < 0 or time.time() < self.until else DEFAULT_PRIORITY


class Sized(NamedTuple):
    """A chunk that may leave."""

    key: ChunkKey
    num_tokens: int
    num_bytes: int
    usage: Usage

    def worth(self, now: int, token_ms: float = TOKEN_MS) -> float:
        """Milliseconds of computing that a byte saves: cost × (1 + recent hits) ÷ bytes. ``token_ms`` stands in for an unknown cost."""
        cost = self.usage.cost_ms if self.usage.cost_ms >= 0 else self.num_tokens * token_ms
        return cost * (1.0 + self.usage.recent_hits(now)) / max(1, self.num_bytes)


def token_ms(chunks: Iterable[Sized]) -> float:
    """Mean cost of a token of those chunks whose cost is known: chunks of which it is not must not seem dearer or cheaper."""
    known = [chunk for chunk in chunks if chunk.usage.cost_ms >= 0]
    tokens = sum(chunk.num_tokens for chunk in known)
    return sum(chunk.usage.cost_ms for chunk in known) / tokens if tokens else TOKEN_MS


def leaving(
    chunks: list[Sized], now: int, *, priority: int, must: int, should: int
) -> list[Sized] | None:
    """Choose what leaves, what is worth least first and nothing above a priority; ``None`` if all of it is less than ``must`` bytes.

    ``should`` bytes leave if there are as many. Else half will do, but ``must``: it is no reason to take everything.
    """
    mean = token_ms(chunks)
    ranks = (
        (each.usage.priority_now(), each.worth(now, mean), each.usage.last, each) for each in chunks
    )
    going = [rank[-1] for rank in sorted(ranks) if rank[0] <= priority]
    there = sum(chunk.num_bytes for chunk in going)
    if there < must:
        return None
    goal = should if should <= there else max(must, there // 2)
    sizes = accumulate((chunk.num_bytes for chunk in going), initial=0)
    return [chunk for chunk, size in zip(going, sizes, strict=False) if size < goal]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the lowest tier, as of :class:`kvrag.StoreConfig`; ``max_bytes`` of ``None`` and ``min_free_bytes`` of 0 are none.

    Eviction begins above ``high`` × ``max_bytes`` and ends below ``low`` × ``max_bytes``. Where free space is short, it begins at once, and
    ends when ``high`` - ``low`` of what is stored left beyond that.
    """

    max_bytes: int | None = None
    min_free_bytes: int = 0
    high: float = 0.95
    low: float = 0.85

    def excess(self, stored: int, free: int, need: int) -> tuple[int, int, int]:
        """Return the bytes that must leave before ``need`` more are written, that should, and that must for the file system's sake.

        More should than must, so that not every write has to evict.
        """
        must, should, full = 0, 0, stored + need
        if self.max_bytes is not None and full > self.high * self.max_bytes:
            must, should = max(0, full - self.max_bytes), full - int(self.low * self.max_bytes)
        if disk := max(0, self.min_free_bytes + need - free):
            must, should = max(must, disk), max(should, disk + int((self.high - self.low) * stored))
        return must, should, disk


@dataclass(slots=True)
class Evictor:
    """Makes room: what is worth least leaves first, until the store is below its low watermark; or nothing, where that is not enough.

    ``totals``, ``usages`` and ``free_bytes`` return chunks and bytes stored, the number of accesses so far and all chunks, and the free
    bytes of the file system. ``evict`` erases chunks, or raises ``OSError``.
    """

    budget: Budget
    totals: Callable[[], tuple[int, int]]
    usages: Callable[[], tuple[int, list[Sized]]]
    free_bytes: Callable[[], int]
    evict: Callable[[list[ChunkKey]], object]
    in_vain_until: float = 0.0

    def make_room(self, need: int, *, priority: int) -> None:
        """Evict until ``need`` bytes fit, nothing of a higher priority; nothing at all where that is not enough: raise ``StoreError``."""
        why = "what left it was not enough"
        for turn in range(PASSES):
            free = self._free()
            must, should, disk = self.budget.excess(self.totals()[1], free, need)
            if not (must if turn else should):
                return
            if disk and time.monotonic() < self.in_vain_until:
                why = "evicting chunks has freed no space on its disk (snapshots, or open files?)"
                break
            now, chunks = self.usages()
            must, should, disk = self.budget.excess(
                sum(chunk.num_bytes for chunk in chunks), free, need
            )
            if not (must if turn else should):
                return
            going = leaving(chunks, now, priority=priority, must=must, should=should)
            if going is None:
                why = "nothing more may leave it that would be enough"
                break
            for part in (going[:PROBE], going[PROBE:]):
                with suppress(OSError):
                    self.evict([chunk.key for chunk in part])
                if (
                    disk
                    and self._free() <= free + sum(chunk.num_bytes for chunk in going[:PROBE]) // 4
                ):
                    self.in_vain_until = time.monotonic() + RETRY_S
                    break
        raise StoreError(
            f"{need} bytes don't fit into the KV store: {why}; raise StoreConfig.disk_bytes (ram_bytes without kv_dir), lower "
            "StoreConfig.min_free_bytes, or free space on the disk"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _free(self) -> int:
        """Return the bytes that are free, as far as that matters."""
        with suppress(OSError):  # the write will tell
            return self.free_bytes() if self.budget.min_free_bytes else 2**62
        return 2**62
