"""Use of chunks: retention, and hits, which are collected in memory and written now and then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import cast

from kvrag.config import Retention
from kvrag.runtime import POOL, Forking, at_fork
from kvrag.store.base import CatalogRows
from kvrag.store.catalog.ledger import Ledger, one_step
from kvrag.store.catalog.rows import Inherited
from kvrag.store.eviction import Sized, Usage
from kvrag.types import ChunkKey

AT_ONCE = 4096  # chunks that are read in a transaction
MAX_TOUCHED = 128  # chunks with collected hits before these are written, in the background


class Hits(Ledger, Forking):
    """Use of a catalog's chunks."""

    read_only: bool

    def __init__(self) -> None:
        self._touched = Counter[ChunkKey]()
        self._next_flush_s = 0.0
        at_fork(self)

    def after_fork(self, *, in_child: bool) -> None:
        """Leave the rows to the parent: a child has none of its threads and connections."""
        if in_child:
            self._rows = cast(CatalogRows, Inherited())

    def touch(self, key: ChunkKey) -> None:
        """Count a hit of a chunk, in any tier; it is written later."""
        self._touched[key] += 1
        if len(self._touched) >= MAX_TOUCHED and time.monotonic() >= self._next_flush_s:
            self._next_flush_s = time.monotonic() + self._rows.pause_s
            with suppress(RuntimeError):  # no thread can be started
                POOL.submit(self.flush)

    def flush(self) -> None:
        """Write the hits of the most frequent chunks; on a fault the counts are lost, no more."""
        touched = self._touched
        self._touched = Counter()
        if touched and not self.read_only:
            with suppress(OSError):
                self._count_hits(dict(touched.most_common(MAX_TOUCHED)))

    @one_step
    def _count_hits(self, touched: Mapping[ChunkKey, int]) -> None:
        state = self.state()
        state = state._replace(accesses=state.accesses + sum(touched.values()))
        for key, chunk in self._chunks(touched):
            self._rows.set(
                f"c {key}",
                chunk._replace(usage=chunk.usage.touched(touched[key], state.accesses)),
            )
        self._rows.set("s", state)

    def usages(self) -> tuple[int, list[Sized]]:
        """Return the number of accesses so far, and all stored chunks with their usage.

        Raises ``StoreError``.
        """
        self.flush()
        keys = sorted(self.present())
        found = [
            each
            for first in range(0, len(keys), AT_ONCE)
            for each in self._sized(keys[first : first + AT_ONCE])
        ]
        return self.state().accesses, found

    @one_step  # a single transaction for all keys
    def _sized(self, keys: Sequence[ChunkKey]) -> list[Sized]:
        return [
            Sized(key, chunk.num_tokens, chunk.num_bytes, chunk.usage)
            for key, chunk in self.stored(keys).items()
        ]

    @one_step
    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Set the retention of stored chunks, and return their number."""
        found = self.stored(keys)
        for key, chunk in found.items():
            self._rows.set(f"c {key}", chunk._replace(usage=chunk.usage.retained(retention)))
        return len(found)

    def usage(self, key: ChunkKey) -> Usage:
        """Return the usage of a chunk, for eviction."""
        chunk = self.stored_row(key)
        if chunk is None:
            return Usage()
        return chunk.usage
