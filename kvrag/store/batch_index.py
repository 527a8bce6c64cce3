"""The index of a store that is open: one that can be asked about many chunks at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice

from kvrag.store.index import DiskIndex
from kvrag.store.row_seal import load_value
from kvrag.store.rows import row_of, sizes_of
from kvrag.types import ChunkKey

BATCH = 500
"""Most rows of one statement: SQLite may be built to take no more than 999 parameters, and others wait for each."""


class BatchIndex(DiskIndex):
    """A :class:`~kvrag.store.index.DiskIndex` that looks for many chunks with few statements."""

    def known(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Return those of many keys that have a row; of a batch that can't be read, none."""
        names, found = {self._sealed(row_of("key", key)): key for key in keys}, set[ChunkKey]()
        left = iter(names)
        while batch := list(islice(left, BATCH)):
            rows: list[tuple[str, object]] = self._tolerant(partial(self._fetch_many, batch), [])
            found.update(names[name] for name, row in rows if sizes_of(names[name], row) is not None)
        return found

    def _fetch_many(self, names: list[str]) -> list[tuple[str, object]]:
        with self._lock:
            rows = self._database().fetch_many(names)
        return [(n, load_value(value if self._seal is None else self._seal.open_value(n, value))) for n, value in rows]
