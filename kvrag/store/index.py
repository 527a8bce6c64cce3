"""An index in a directory shared by processes, in a database of diskcache or of sqlite3 alone.

It may be lost at any time: the files of the store say the same.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvrag.errors import StoreError
from kvrag.store import connect
from kvrag.store.fork import ForkAware
from kvrag.store.row_seal import RowSeal, load_rows, load_value
from kvrag.store.rows import end_of
from kvrag.store.sqlite import SqliteRows, warn_without_diskcache
from kvrag.store.store_index import StoreIndex
from kvrag.types import ChunkKey

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_RETRIES = 3

COMPLETE = "complete"
"""Row that is written when the index knows every blob; without it, it must be rebuilt."""

FILES = {"diskcache": "cache.db", "sqlite": "rows.db"}
"""Database of each kind of index."""


class Rows(Protocol):
    """A database of names and values, both strings."""

    errors: tuple[type[Exception], ...]

    def __init__(self, directory: Path) -> None: ...

    @staticmethod
    def examine(path: Path) -> str | None:
        """Say what is wrong with a database; ``None`` if nothing is."""

    def fetch(self, name: str) -> str | None:
        """Return a row's value."""

    def insert(self, name: str, value: str) -> None:
        """Insert or replace a row."""

    def erase(self, name: str) -> None:
        """Remove a row; absent ones are fine."""

    def scan(self, low: str, high: str, limit: int) -> list[tuple[str, str]]:
        """Return the rows between two names."""

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement without parameters."""

    def transact(self) -> AbstractContextManager[None]:
        """Make what happens inside atomic."""

    def close(self) -> None:
        """Close the connection; the next call opens another one."""


class DiskIndex(StoreIndex, ForkAware):
    """An index in a directory, shared by threads and processes.

    A damaged database is moved aside and begun anew; :attr:`stale` then says that it has to be rebuilt. Reads of rows
    that can't be read give nothing; changes that can't be made raise.

    Parameters
    ----------
    directory
        Where the database lives; made if absent.
    kind
        ``"diskcache"``, or ``"sqlite"`` (the standard library alone), which also takes the place of the other where it isn't installed.
    seal
        Encrypts the rows; ``None``: they are plain.

    Raises
    ------
    StoreError
        If the directory can't be used.
    """

    has_files = True

    def __init__(self, directory: str | os.PathLike[str], kind: str = "diskcache", seal: RowSeal | None = None) -> None:
        super().__init__()
        self._seal = seal
        self._directory = Path(directory)
        self._make: type[Rows]
        kind, self._make = _backend(kind)
        self._errors = self._make.errors
        self._path = self._directory / FILES[kind]
        self._rows: Rows | None = None
        self._file: tuple[int, int] = (0, 0)
        self._closed = False
        self._warned = False
        self.make_room: Callable[[], bool] = lambda: False
        """Called when the disk is full in the middle of an erasure; returns whether it may be tried again."""
        with self._lock, self._as_store_error():
            self._drop_other_kinds(kind)
            if os.path.lexists(self._path) and (fault := self._make.examine(self._path)):
                log.warning("the index %s is damaged (%s); it is moved aside and rebuilt", self._path, fault)
                _move_aside(self._directory)
            self._open()
        self.stale = self._peek(COMPLETE) is None
        """Whether the index may not know every blob; :meth:`complete` ends it."""

    def complete(self) -> None:
        """Note that the index knows every blob."""
        with self._transaction():
            self._write(COMPLETE, 1)
        self.stale = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Make several changes one transaction, which is quicker."""
        with self._transaction():
            yield

    def close(self) -> None:
        """Close the database; idempotent. A closed index is empty and can't be changed."""
        with self._lock:
            self._closed = True
            self._before_fork()

    def unlink(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Drop document ``doc_id``; return and remove the keys of the texts that no document references any more."""
        return self._with_room(lambda: super(DiskIndex, self).unlink(namespace, doc_id))

    def unlink_text(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Drop every reference to the text with this digest; return and remove all its keys."""
        return self._with_room(lambda: super(DiskIndex, self).unlink_text(namespace, digest))

    def remove(self, key: ChunkKey) -> None:
        """Remove one row; unknown keys are fine."""
        self._with_room(lambda: super(DiskIndex, self).remove(key))

    def settle(self, names: tuple[str, ...], erase: Callable[[], bool]) -> bool:
        """Erase the file of a chunk or of a reference if it still is to go; see :class:`StoreIndex`."""
        return self._with_room(lambda: super(DiskIndex, self).settle(names, erase))

    def drop(self, key: ChunkKey, erase: Callable[[], bool]) -> bool:
        """Erase a chunk's file and remove its row in one step, and return what ``erase`` did."""
        return self._with_room(lambda: super(DiskIndex, self).drop(key, erase))

    def scrub(self) -> None:
        """Let nothing of erased rows remain in the database's journal, as far as other readers allow it."""
        with suppress(StoreError), self._lock, self._as_store_error():
            self._database().sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def _with_room(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except StoreError:
            if not self.make_room():
                raise
            return work()

    def _before_fork(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def _drop_other_kinds(self, kind: str) -> None:
        """Forget a database of another kind: it does not know what happens in this one."""
        for file in (file for other, file in FILES.items() if other != kind):
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(self._directory / (file + suffix))

    def _open(self) -> None:
        if self._directory.is_symlink():
            raise OSError("its directory is a link")
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        connect.create(self._path)
        self._before_fork()
        self._rows = self._make(self._directory)
        self._file = _inode(self._path)

    def _database(self) -> Rows:
        """Return the database on the file that is there now: another process may have moved ours aside."""
        if self._closed:
            raise OSError("the store is closed")
        if self._rows is None or _inode(self._path) != self._file:
            self._open()
        assert self._rows is not None
        return self._rows

    def _read(self, row: str) -> Any:
        name = self._sealed(row)
        with self._lock:
            value = self._database().fetch(name)
        return load_value(value if self._seal is None else self._seal.open_value(name, value))

    def _write(self, row: str, value: Any) -> None:
        name, text = self._sealed(row), json.dumps(value, separators=(",", ":"))
        self._database().insert(name, text if self._seal is None else self._seal.value(name, text))

    def _erase(self, row: str) -> None:
        self._database().erase(self._sealed(row))

    def _scan(self, prefix: str, after: str = "", limit: int = -1) -> list[tuple[str, Any]]:
        name = self._sealed(prefix)
        with self._lock:
            rows = self._database().scan(name + after, end_of(name), limit)
        return [(row[len(prefix) :], value) for row, value in load_rows(rows, self._seal)]

    def _sealed(self, row: str) -> str:
        return row if self._seal is None else self._seal.name(row)

    def _peek(self, row: str) -> Any:
        return self._tolerant(lambda: self._read(row), None)

    def _list(self, prefix: str, after: str = "") -> list[tuple[str, Any]]:
        return self._tolerant(lambda: self._scan(prefix, after), [])

    def _tolerant(self, read: Callable[[], T], nothing: T) -> T:
        try:
            return read()
        except self._errors as error:
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
        fault: Exception | None = None
        for _ in range(BUSY_RETRIES):
            try:
                stack.enter_context(self._database().transact())
                return
            except self._errors as error:
                fault = error
        raise OSError(f"the database stays locked, or can't be written to ({fault})")

    @contextmanager
    def _as_store_error(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except self._errors as error:
            # A failed commit leaves its transaction open; closing the connection ends it.
            self._before_fork()
            raise StoreError(
                f"the index {self._path} can't be changed: {error or 'it is locked'}; "
                "make sure that the directory exists, is writable and has free space, then try again"
            ) from error


def _backend(kind: str) -> tuple[str, type[Rows]]:
    """Import the database of a kind, or of ``"sqlite"`` where diskcache isn't installed; returns which, too."""
    if kind == "diskcache":
        try:
            from kvrag.store.cache import CacheRows

            return kind, CacheRows
        except ImportError:
            warn_without_diskcache()
    return "sqlite", SqliteRows


def _inode(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _move_aside(directory: Path) -> None:
    """Move the database and its journals out of the way; only the latest damaged one is kept."""
    aside = directory.with_name(directory.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(directory, aside)
