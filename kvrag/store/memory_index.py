"""An index in memory: that of a store in memory, and of one that can only be read."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvrag.store.fork import ForkAware
from kvrag.store.rows import end_of
from kvrag.store.store_index import StoreIndex


class MemoryIndex(StoreIndex, ForkAware):
    """An index in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, Any] = {}
        self._order: list[str] = []

    def close(self) -> None:
        """Nothing to release."""

    def _read(self, row: str) -> Any:
        return self._rows.get(row)

    def _write(self, row: str, value: Any) -> None:
        if row not in self._rows:
            bisect.insort(self._order, row)
        self._rows[row] = value

    def _erase(self, row: str) -> None:
        if self._rows.pop(row, None) is not None:
            del self._order[bisect.bisect_left(self._order, row)]

    def _scan(self, prefix: str, after: str = "", limit: int = -1) -> list[tuple[str, Any]]:
        with self._lock:
            start = bisect.bisect_right(self._order, prefix + after)
            stop = bisect.bisect_left(self._order, end_of(prefix))
            names = self._order[start : stop if limit < 0 else min(stop, start + limit)]
            return [(name[len(prefix) :], self._rows[name]) for name in names]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            yield

    def load(self, rows: list[tuple[str, Any]]) -> None:
        """Take rows that another index has written."""
        with self._lock:
            self._rows = dict(rows)
            self._order = sorted(self._rows)
