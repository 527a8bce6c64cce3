"""The two homes of an index: a directory shared by processes, and memory.

The directory's is a :class:`diskcache.Cache` cut down to what is safe here: no pickles, no files beside the database,
no eviction, one connection per process. It may be lost at any time; the blobs say the same.
"""

from __future__ import annotations

import bisect
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import diskcache
from diskcache.core import DBNAME

from kvrag.errors import StoreError
from kvrag.store.base import Record
from kvrag.store.cache import BUSY_TIMEOUT_S, SETTINGS, JsonDisk, Rows, examine
from kvrag.store.fork import ForkAware
from kvrag.store.rows import RowIndex

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_RETRIES = 3
REBUILD_BATCH = 500

COMPLETE = "complete"
"""Row that is written when the index knows every blob; without it, it must be rebuilt."""


class MemoryIndex(RowIndex, ForkAware):
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
            stop = bisect.bisect_left(self._order, _end(prefix))
            names = self._order[start : stop if limit < 0 else min(stop, start + limit)]
            return [(name[len(prefix) :], self._rows[name]) for name in names]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            yield


class DiskIndex(RowIndex, ForkAware):
    """An index in a directory, shared by threads and processes.

    A damaged database is moved aside and begun anew; :attr:`stale` then says that it has to be rebuilt. Reads of rows
    that can't be read give nothing; changes that can't be made raise.

    Parameters
    ----------
    directory
        Where the database lives; made if absent.

    Raises
    ------
    StoreError
        If the directory can't be used.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__()
        self._directory = Path(directory)
        self._path = self._directory / DBNAME
        self._rows: Rows | None = None
        self._file: tuple[int, int] = (0, 0)
        self._closed = False
        self._warned = False
        with self._lock, self._as_store_error():
            if self._path.exists() and (fault := examine(self._path)):
                log.warning("the index %s is damaged (%s); it is moved aside and rebuilt", self._path, fault)
                _move_aside(self._directory)
            self._open()
        self.stale = self._peek(COMPLETE) is None
        """Whether the index may not know every blob, and :meth:`rebuild` is due."""

    def rebuild(self, records: Iterable[tuple[Record, str | None]]) -> None:
        """Add the rows of all blobs, given as records and the document that wrote each first."""
        left = iter(records)
        while batch := list(islice(left, REBUILD_BATCH)):
            with self._transaction():
                for record, doc_id in batch:
                    self._add(record, doc_id)
        with self._transaction():
            self._write(COMPLETE, 1)
        self.stale = False

    def close(self) -> None:
        """Close the database; idempotent. A closed index is empty and can't be changed."""
        with self._lock:
            self._closed = True
            self._before_fork()

    def _before_fork(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def _open(self) -> None:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        # Before diskcache would make it with the umask's mode; SQLite gives its other files the same.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self._before_fork()
        self._rows = Rows(str(self._directory), timeout=BUSY_TIMEOUT_S, disk=JsonDisk, **SETTINGS)
        self._file = _inode(self._path)

    def _cache(self) -> Rows:
        """Return the cache on the file that is there now: another process may have moved ours aside."""
        if self._closed:
            raise OSError("the store is closed")
        if self._rows is None or _inode(self._path) != self._file:
            self._open()
        assert self._rows is not None
        return self._rows

    def _read(self, row: str) -> Any:
        with self._lock:
            return _load(self._cache().get(row))

    def _write(self, row: str, value: Any) -> None:
        self._cache().set(row, json.dumps(value, separators=(",", ":")))

    def _erase(self, row: str) -> None:
        self._cache().delete(row)

    def _scan(self, prefix: str, after: str = "", limit: int = -1) -> list[tuple[str, Any]]:
        with self._lock:
            rows = self._cache().scan(prefix + after, _end(prefix), limit)
        return [(name[len(prefix) :], _load(value)) for name, value in rows]

    def _peek(self, row: str) -> Any:
        return self._tolerant(lambda: self._read(row), None)

    def _list(self, prefix: str, after: str = "") -> list[tuple[str, Any]]:
        return self._tolerant(lambda: self._scan(prefix, after), [])

    def _tolerant(self, read: Callable[[], T], nothing: T) -> T:
        try:
            return read()
        except (sqlite3.Error, diskcache.Timeout, OSError) as error:
            if not self._closed and not self._warned:
                self._warned = True
                log.warning("the index %s can't be read (%s); it counts as empty", self._path, error)
            return nothing

    def _first_number(self) -> int:
        return time.time_ns() // 1000

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._as_store_error(), ExitStack() as stack:
            self._begin(stack)
            yield

    def _begin(self, stack: ExitStack) -> None:
        """Begin a transaction, in bounded time: diskcache's own retry goes on for ever on a full or read-only disk."""
        for _ in range(BUSY_RETRIES):
            try:
                stack.enter_context(self._cache().transact())
                return
            except diskcache.Timeout:
                continue
        raise OSError("the database stays locked, or can't be written to")

    @contextmanager
    def _as_store_error(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (sqlite3.Error, diskcache.Timeout, OSError) as error:
            # A failed commit leaves its transaction open; closing the connection ends it.
            self._before_fork()
            raise StoreError(
                f"the index {self._path} can't be changed: {error or 'it is locked'}; "
                "make sure that the directory exists, is writable and has free space, then try again"
            ) from error


def _inode(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _end(prefix: str) -> str:
    """Return the first string after all that begin with ``prefix``."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _load(value: Any) -> Any:
    """Parse a row's value; what is not JSON is absent."""
    try:
        return None if value is None else json.loads(value)
    except (ValueError, RecursionError, TypeError):
        return None


def _move_aside(directory: Path) -> None:
    """Move the database and its journals out of the way; only the latest damaged one is kept."""
    aside = directory.with_name(directory.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(directory, aside)
