"""Eviction: rank chunks by compute time saved per byte, and choose the chunks to evict.

Age is counted in accesses, so an idle store keeps its ranking.
"""

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
from kvrag.errors import StoreError
from kvrag.types import ChunkKey

SHARE = 16  # a write evicts at least 1/16 of the bytes, so that not every write ranks all chunks
# Assumed cost of a token if no cost was measured in the whole store; only ratios matter.
TOKEN_MS = 1.0
# Chunks evicted for free space before it is checked: snapshots and open files may keep their space.
PROBE = 4
PASSES = 8  # times that room is made for a chunk: other writers may take it
RETRY_S = 600.0  # seconds without evictions for free space after evictions freed no space

Known = Annotated[float, Field(ge=-1, le=MOST)]


class Usage(NamedTuple):
    """Eviction data of a chunk.

    ``priority`` holds until ``until``, in seconds since 1970 (UTC; -1: forever). ``last`` is the
    access of the last hit. ``cost_ms`` is the time that computing the chunk took, or -1 if it is
    unknown.
    """

    # The limits keep a row from elsewhere from making a chunk that is never evicted.
    priority: Annotated[int, Field(ge=0, le=100)] = DEFAULT_PRIORITY
    until: Known = -1.0
    hits: Annotated[float, Field(ge=0, lt=2**63)] = 0.0
    last: Annotated[int, Field(ge=0, lt=2**63)] = 0
    cost_ms: Known = -1.0

    def retained(self, retention: Retention) -> Usage:
        """Return the usage with a new retention, from now on."""
        until = -1.0
        cost = self.cost_ms
        if retention.duration_s is not None:
            until = min(time.time() + retention.duration_s, MOST)
        if retention.cost_ms is not None:
            cost = float(retention.cost_ms)
        return self._replace(priority=retention.priority, until=until, cost_ms=cost)

    def retention(self) -> Retention | None:
        """Return the retention to pass to :meth:`retained` now, with the remaining duration.

        ``None`` stands for the default.
        """
        left = None if self.until < 0 else self.until - time.time()
        cost = None if self.cost_ms < 0 else self.cost_ms
        if left is not None and left <= 0:
            found = Retention(cost_ms=cost)
        else:
            found = Retention(self.priority, left, cost)
        if found == Retention():
            return None
        return found

    def touched(self, hits: int, now: int) -> Usage:
        """Return the usage with more hits, at access ``now``."""
        return self._replace(hits=self.hits + hits, last=now)

    def priority_now(self) -> int:
        """Return the current priority; the default again when its time is over."""
        if self.until < 0 or time.time() < self.until:
            return self.priority
        return DEFAULT_PRIORITY


class Sized(NamedTuple):
    """Chunk that may be evicted."""

    key: ChunkKey
    num_tokens: int
    num_bytes: int
    usage: Usage

    def worth(self, now: int, token_ms: float = TOKEN_MS) -> float:
        """Return the milliseconds of computing that a byte saves: cost × (1 + hits) ÷ bytes ÷ age.

        The age is the number of accesses since the last hit, and at least 1. ``token_ms`` per token
        stands in for an unknown cost.
        """
        cost = self.usage.cost_ms if self.usage.cost_ms >= 0 else self.num_tokens * token_ms
        return (
            cost
            * (1.0 + self.usage.hits)
            / max(1, self.num_bytes)
            / (max(0, now - self.usage.last) + 1)
        )


def token_ms(chunks: Iterable[Sized]) -> float:
    """Return the mean cost per token of the chunks with a known cost.

    It makes chunks with an unknown cost rank neither high nor low.
    """
    known = [chunk for chunk in chunks if chunk.usage.cost_ms >= 0]
    tokens = sum(chunk.num_tokens for chunk in known)
    if tokens:
        return sum(chunk.usage.cost_ms for chunk in known) / tokens
    return TOKEN_MS


def leaving(
    chunks: list[Sized], now: int, *, priority: int, must: int, share: int = 0
) -> list[Sized] | None:
    """Choose the chunks to evict, up to ``priority``: lowest priority first, then least worth.

    They hold ``must`` bytes, and up to ``share`` bytes if this is more, but then at most half of
    the bytes of the chunks up to ``priority``. Returns ``None`` if these hold less than ``must``
    bytes.
    """
    mean = token_ms(chunks)
    ranks = (
        (each.usage.priority_now(), each.worth(now, mean), each.usage.last, each) for each in chunks
    )
    going = [rank[-1] for rank in sorted(ranks) if rank[0] <= priority]
    there = sum(chunk.num_bytes for chunk in going)
    if there < must:
        return None
    most = min(share, there // 2)
    sizes = accumulate(chunk.num_bytes for chunk in going)
    return [
        chunk
        for chunk, size in zip(going, sizes, strict=True)
        if size <= most or size - chunk.num_bytes < must
    ]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the lowest tier, from :class:`kvrag.StoreConfig`.

    A ``max_bytes`` of ``None`` and a ``min_free_bytes`` of 0 are no limits.
    """

    max_bytes: int | None = None
    min_free_bytes: int = 0

    def excess(self, stored: int, free: int, need: int) -> tuple[int, int]:
        """Return the bytes to evict before ``need`` bytes are written, in all and for the disk.

        The latter count ``min_free_bytes`` alone.
        """
        disk = max(0, self.min_free_bytes + need - free)
        if self.max_bytes is None:
            return disk, disk
        return max(disk, stored + need - self.max_bytes), disk


@dataclass(slots=True)
class Evictor:
    """Evict the least valuable chunks of a store that is over its budget."""

    budget: Budget
    # Returns the numbers of chunks and bytes stored.
    totals: Callable[[], tuple[int, int]]
    # Returns the number of accesses so far, and all chunks.
    usages: Callable[[], tuple[int, list[Sized]]]
    # Returns the free bytes of the file system.
    free_bytes: Callable[[], int]
    # Erases chunks, or raises ``OSError``.
    evict: Callable[[list[ChunkKey]], object]
    in_vain_until: float = 0.0

    def make_room(self, need: int, *, priority: int) -> None:
        """Evict chunks up to ``priority`` until ``need`` bytes fit.

        A write that evicts anything evicts about ``1 / SHARE`` of the stored bytes. Raises
        ``StoreError`` if the bytes don't fit. Evicts nothing if the chunks that may be evicted hold
        too few bytes.
        """
        reason = "the evicted chunks freed too little"
        for _ in range(PASSES):
            free = self._free()
            # The totals are cheap; all chunks are read only if something must go.
            must, disk = self.budget.excess(self.totals()[1], free, need)
            if not must:
                return
            if disk and time.monotonic() < self.in_vain_until:
                reason = (
                    "evicting chunks has freed no space on its disk (snapshots, or open files?)"
                )
                break
            now, chunks = self.usages()
            stored = sum(chunk.num_bytes for chunk in chunks)
            must, disk = self.budget.excess(stored, free, need)
            if not must:
                return
            # A write evicts more than it must, for the writes behind it; anyone else does not.
            going = leaving(
                chunks, now, priority=priority, must=must, share=stored // SHARE if need else 0
            )
            if going is None:
                reason = "nothing more may leave it that would be enough"
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
            f"{need} bytes don't fit into the KV store: {reason}; "
            "raise StoreConfig.disk_bytes (ram_bytes without kv_dir), lower "
            "StoreConfig.min_free_bytes, or free space on the disk"
            # The cause tells a precompute that the fault concerns all its chunks.
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _free(self) -> int:
        """Return the free bytes of the file system; 2**62 if unlimited or unknown."""
        with suppress(OSError):  # a write on a full disk fails by itself
            if self.budget.min_free_bytes:
                return self.free_bytes()
        return 2**62
