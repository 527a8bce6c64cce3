"""An index in a directory shared by processes, in a database of diskcache or of sqlite3 alone.

It may be lost at any time: the files of the store say the same.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kvrag.errors import StoreError
from kvrag.store import connect, index_kinds
from kvrag.store.erasures import ErasureIndex
from kvrag.store.fork import ForkAware
from kvrag.store.index_kinds import COMPLETE, FILES, Rows
from kvrag.store.row_seal import RowSeal, load_rows, load_value
from kvrag.store.rows import end_of
from kvrag.store.sqlite import SqliteRows

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_RETRIES = 3

RETRY_SHARE, RETRY_S = 20, 60.0
"""An index that could not be made anew is tried again after so many times the time that it took, but no later than after so long."""


class DiskIndex(ErasureIndex, ForkAware):
    """An index in a directory, shared by threads and processes.

    A damaged database is moved aside and begun anew; :attr:`stale` then says that it has to be rebuilt. One that was deleted or
    replaced meanwhile is opened again at the next call, by :attr:`recover`. Reads of rows that can't be read give nothing; changes
    that can't be made raise.

    Parameters
    ----------
    directory
        Where the database lives; made if absent.
    kind
        ``"diskcache"``, or ``"sqlite"`` (the standard library alone), which also takes the place of the other where it isn't installed.
        Another kind that is there is taken over, with its rows. ``None``: the kind that is there, else diskcache.
    seal
        Encrypts the rows; ``None``: they are plain.

    Raises
    ------
    StoreError
        If the directory can't be used.
    """

    has_files = True

    def __init__(self, directory: str | os.PathLike[str], kind: str | None = None, seal: RowSeal | None = None) -> None:
        super().__init__()
        self._seal = seal
        self._directory = Path(directory)
        self._wanted, self._kind = kind, "diskcache"
        self._errors = SqliteRows.errors
        self._path = self._directory
        self._rows: Rows | None = None
        self._file: tuple[int, int] | None = None
        self._closed = self._warned = self._is_reopening = False
        self._depth, self._retry_at = 0, 0.0
        self._fault: OSError | None = None
        self.recover: Callable[[Callable[[], None]], None] = lambda reopen: reopen()
        """Called with what opens the database that is there now, when ours was deleted or replaced; it has to rebuild a stale one."""
        self.stale = True
        """Whether the index may not know every blob; :meth:`complete` ends it."""
        with self._lock, self._as_store_error():
            os.makedirs(self._directory.parent, mode=0o700, exist_ok=True)
            self._settle(takes_over=True)

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

    def scrub(self) -> None:
        """Let nothing of erased rows remain in the database's journal, as far as other readers allow it."""
        with suppress(StoreError), self._lock, self._as_store_error():
            self._database().sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def _is_reopened(self, generation: int) -> bool:
        if self.generation == generation and not self._is_ours():
            self._peek("total")
        return self.generation != generation

    def _before_fork(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def _in_child(self) -> None:
        self._depth, self._is_reopening = 0, False

    def _settle(self, *, takes_over: bool = False) -> None:
        """Open the database of the kind that is wanted or there; a damaged one is moved aside before anything is believed."""
        if self._directory.is_symlink():
            raise OSError("its directory is a link")
        kind, make = index_kinds.choose(self._directory, self._wanted, self._kind)
        others = index_kinds.others(self._directory, kind)
        is_whole = not others or index_kinds.is_complete(self._directory, kind)
        if not is_whole:
            if not takes_over:
                raise StoreError(
                    f"the index {self._directory} was replaced by one of the kind {others[0]!r}, and this store was opened for {kind!r}; "
                    "open it again, with the same StoreConfig.index as the other processes (None: the kind that is there)"
                )
            index_kinds.remove(self._directory, kind)
        self._kind, self._errors, self._path = kind, make.errors, self._directory / FILES[kind]
        if os.path.lexists(self._path) and (fault := make.examine(self._path)):
            log.warning("the index %s is damaged (%s); it is moved aside and rebuilt", self._path, fault)
            index_kinds.move_aside(self._directory)
        rows = self._open(make)
        for other in others if takes_over else ():
            index_kinds.replace(self._directory, other, kind, None if is_whole else rows)
        self.stale = self._peek(COMPLETE) is None

    def _open(self, make: type[Rows]) -> Rows:
        with suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)
        connect.create(self._path)
        self._before_fork()
        self._rows = rows = make(self._directory)
        self._file = index_kinds.inode(self._path)
        return rows

    def _database(self) -> Rows:
        """Return the database on the file that is there now: ours may have been moved aside, replaced or deleted."""
        if self._closed:
            raise OSError("the store is closed")
        if self._depth or self._is_reopening:  # half of a change must not be made in another database
            self._check_ours()
        elif not self._is_ours():
            self._reopen()
        assert self._rows is not None
        return self._rows

    def _is_ours(self) -> bool:
        """Whether the file that is there is the one that is open."""
        return self._file is not None and index_kinds.inode(self._path) == self._file

    def _reopen(self) -> None:
        """Open what is there now, or make it anew. What failed is left alone for a while: trying must take little of a core."""
        if self._fault is not None and time.monotonic() < self._retry_at:
            raise self._fault
        begun, is_waiting = time.monotonic(), True

        def settle() -> None:
            nonlocal begun, is_waiting
            begun, is_waiting = time.monotonic(), False
            self._settle()

        self._is_reopening, self._file = True, None
        try:
            self.recover(settle)
        except self._errors as error:
            is_lost = index_kinds.is_absence(error) if self._file is None else not self._is_ours()
            if is_waiting or not is_lost:  # otherwise who deletes it may still be at it
                now = time.monotonic()
                self._retry_at = now + min(RETRY_SHARE * (now - begun), RETRY_S)
            self._fault = StoreError(str(error)) if isinstance(error, StoreError) else OSError(str(error))
            self._file = None  # not finished: begun again
            raise
        finally:
            self._is_reopening = False
        self._fault, self._warned = None, False
        self.generation += 1

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
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            self._check_ours()  # what is committed to a file that is gone is lost, and nobody would know

    def _begin(self, stack: ExitStack) -> None:
        """Begin a transaction, in bounded time: diskcache's own retry goes on for ever on a full or read-only disk."""
        fault: Exception | None = None
        for _ in range(BUSY_RETRIES):
            try:
                with ExitStack() as attempt:
                    attempt.enter_context(self._database().transact())
                    self._check_ours()  # it may have waited for whoever took the database over
                    stack.push(attempt.pop_all())
                return
            except StoreError:
                raise
            except self._errors as error:
                fault = error
        raise OSError(f"the database stays locked, or can't be written to ({fault})")

    def _check_ours(self) -> None:
        if not self._is_ours():
            raise OSError("it was replaced or deleted in the midst of a change")

    @contextmanager
    def _as_store_error(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except self._errors as error:
            # A failed commit leaves its transaction open; closing the connection ends it. One inside another is rolled back with that.
            if not self._depth:
                self._before_fork()
            raise StoreError(
                f"the index {self._path} can't be changed: {error or 'it is locked'}; "
                "make sure that the directory exists, is writable and has free space, then try again"
            ) from error
