"""Named JSON rows in a diskcache database that threads and processes share.

The database may be damaged, deleted or replaced at any moment. diskcache is used by its public API,
with a ``Disk`` that only passes strings.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import diskcache
from diskcache.core import DBNAME

from kvrag.errors import StoreError
from kvrag.kv.crypto import RowCipher
from kvrag.runtime import at_thread_end
from kvrag.store.base import WRITABLE, CatalogRows
from kvrag.store.catalog.database import (
    BUSY_S,
    FAULTS,
    SETTINGS,
    Strings,
    locked,
    make,
    put_aside_if_damaged,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

FILES = (DBNAME, f"{DBNAME}-wal")
# Free bytes without which SQLite can't open a database: its journal and shared memory need some.
ROOM = 2**20


class RowTable:
    """Rows of a database. A damaged database is moved aside and begun anew.

    A database that was deleted or replaced is opened again. ``folder`` is created if it is missing;
    without a folder, a private temporary directory is used. With ``read_only``, or on a full disk,
    nothing there is changed: rows are read from a private copy, made again when the database
    changes. ``seal`` encrypts values; ``durable`` changes survive a power cut. ``begin`` is called
    inside a transaction on a database without rows, and on a database that has replaced another;
    its second argument tells which. Raises ``StoreError`` if the folder can't be used.
    """

    remedy = WRITABLE
    pause_s = 0.0  # minimum pause between background changes
    _has_garbage = False  # whether closed connections of any instance may await collection

    def __init__(
        self,
        folder: Path | None,
        seal: RowCipher | None,
        *,
        read_only: bool = False,
        durable: bool = True,
        begin: Callable[[CatalogRows, bool], None],
    ) -> None:
        self.read_only = read_only
        self._seal = seal
        self._begin = begin
        self._mine = threading.local()
        self._settings = {
            **SETTINGS,
            "sqlite_synchronous": 2 if durable and folder is not None else 1,
        }
        self._source: Path | None = None
        self._private = ""
        if read_only or folder is None:
            self._private = tempfile.mkdtemp(prefix="kvrag-")
            self._source = folder
            folder = Path(self._private, "catalog")
        self._folder = folder
        self._watched = [str(folder / FILES[0])]
        if self._source is not None:
            self._watched = [str(self._source / name) for name in FILES]
        self._cache: Any = None
        self._file: object = None
        self._copied: RowTable | None = None
        # Changes take both locks in this order, looks only the second. A fork waits for both locks,
        # and finds no connection.
        self._lock = threading.RLock()
        self._looking = threading.RLock()
        self._is_closed = self._has_warned = self._is_refused = False
        try:
            with self._looking:
                self._healed()
        except FAULTS as error:
            self.close()
            if not self._is_stuck():
                raise self._fault("opened", error) from error
            log.warning(
                "the catalog %s is opened for reading only: its disk takes no writes (%s)",
                folder,
                error,
            )
            RowTable.__init__(self, folder, seal, read_only=True, begin=begin)
        _all.add(self)
        at_thread_end(self)

    def get(self, name: str) -> str | None:
        """Return a row's value as JSON; ``None`` if it is absent or can't be read.

        Inside :meth:`change`, faults are raised.
        """
        return self._unsealed(self._look(methodcaller("get", name), None), name)

    def many(self, names: Sequence[str]) -> list[str | None]:
        """Return the values of several rows, read in one look; see :meth:`get`.

        A row that can't be read costs no other row.
        """
        texts: list[str | None] | None = self._look(lambda cache: list(map(cache.get, names)), None)
        if texts is None:
            return list(map(self.get, names))
        return list(map(self._unsealed, texts, names))

    def _unsealed(self, text: str | None, name: str) -> str | None:
        if text is None or self._seal is None:
            return text
        return self._seal.open(text, name)

    def ahead(self, names: Sequence[str]) -> None:
        """Do nothing: rows of this machine are read one at a time."""

    def names(self, prefix: str) -> list[str]:
        """Return the rest of all names that begin with ``prefix``, sorted; scans all rows.

        Faults count as no names, and are raised inside :meth:`change`.
        """
        # Not by iterkeys(), which sorts all remaining names for every hundred names.
        return self._look(
            lambda cache: sorted(name[len(prefix) :] for name in cache if name.startswith(prefix)),
            [],
        )

    def set(self, name: str, value: Any) -> None:
        """Insert or replace a row, inside :meth:`change`."""
        text = json.dumps(value, separators=(",", ":"))
        if self._seal is not None:
            text = self._seal.seal(text, name)
        self._mine.cache.set(name, text)

    def delete(self, name: str) -> None:
        """Remove a row if it exists, inside :meth:`change`."""
        self._mine.cache.delete(name)

    def clear(self) -> None:
        """Remove all rows, inside :meth:`change`."""
        self._mine.cache.clear()

    def change(self, action: Callable[[], T]) -> T:
        """Run ``action`` as a single transaction for all threads and processes; return its result.

        Raises ``StoreError``, and changes nothing, if that fails.
        """
        if getattr(self._mine, "cache", None) is not None:  # nested in the current change
            return action()
        with self._lock:
            try:
                # SQLite goes on refusing as long as any connection of that time lives.
                if self._is_refused and not self._is_stuck():
                    self._is_refused = False
                    _let_all_go()
                with self._looking:
                    cache = self._healed()
                    file = self._file
                with self._transaction(cache, file):
                    return action()
            except StoreError:
                raise
            except FAULTS as error:
                self._is_refused = self._is_stuck()
                raise self._fault("changed", error) from error

    @contextmanager
    def _transaction(self, cache: Any, file: object) -> Iterator[None]:
        try:
            # diskcache's own retry never ends on a full or read-only disk.
            with cache.transact(retry=False):
                self._check(file)
                self._mine.cache = cache
                yield
            self._check(file)
        except FAULTS:
            # A failed commit leaves its transaction open; closing the connection ends it.
            cache.close()
            raise
        finally:
            self._mine.cache = None

    def _check(self, file: object) -> None:
        if self._source is None and self._there() != file:
            raise OSError("it was replaced or deleted during a change")

    def scrub(self) -> None:
        """Purge erased rows from the database's journal, as far as other readers allow."""
        self._look(
            lambda cache: cache.reset("sqlite_wal_checkpoint", "TRUNCATE", update=False), None
        )

    def close(self) -> None:
        """Close the database; idempotent. A closed database is empty and can't be changed."""
        with self._lock, self._looking:
            self._is_closed = True
            self._let_go()
            if self._copied is not None:
                self._copied.close()
            if self._private:
                shutil.rmtree(self._private, ignore_errors=True)

    def at_thread_end(self) -> None:
        """Close this thread's connection.

        It is part of a reference cycle, and would stay open, with its memory, until Python collects
        garbage.
        """
        with self._looking, suppress(*FAULTS):
            if self._cache is not None:
                self._cache.close()

    def _let_go(self) -> None:
        if self._cache is not None:
            self._cache.close()
            RowTable._has_garbage = True
        self._cache = None  # connections of other threads close when Python collects it

    def _look(self, action: Callable[[Any], T], default: T) -> T:
        """Read from the database and return ``default`` on a fault.

        Inside a change, read its uncommitted state and raise faults.
        """
        if getattr(self._mine, "cache", None) is not None:
            return action(self._mine.cache)
        try:
            with self._looking:
                return action(self._healed())
        except FAULTS as error:
            if self._is_closed:
                return default
            if self._is_stuck():
                with suppress(StoreError):
                    with self._looking:
                        copied = self._copied or RowTable(
                            self._folder, self._seal, read_only=True, begin=lambda *_: None
                        )
                        self._copied = copied
                    return copied._look(action, default)
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the catalog %s can't be read (%s); it counts as empty", self._folder, error
                )
            return default

    def _healed(self) -> Any:
        """Return the current database, opened if needed."""
        if self._is_closed:
            raise OSError("the store is closed")
        if self._cache is None or self._file != self._there():
            self._open()
        return self._cache

    def _is_stuck(self) -> bool:
        """Whether SQLite can't open the database because the disk takes no writes.

        A copy of the database can be read then.
        """
        with suppress(OSError):
            disk = os.statvfs(self._folder)
            return not self._private and (
                disk.f_bavail * disk.f_frsize < ROOM or bool(disk.f_flag & os.ST_RDONLY)
            )
        return False

    def _there(self) -> object:
        """Return the identity of the database's files: device and inode.

        For a read-only source, modification time and size are included.
        """
        found = []
        for path in self._watched:
            with suppress(OSError):
                status = os.stat(path)
                found += [status.st_dev, status.st_ino]
                if self._source is not None:
                    found += [status.st_mtime_ns, status.st_size]
        return found

    def _open(self) -> None:
        """Open the database; create it if it is missing or damaged."""
        self._let_go()
        known = self._file
        there = self._there()
        if (self._source or self._folder).is_symlink():
            raise OSError("its folder is a link")
        if self._source is not None:
            self._copy(self._source)
        elif known is None:  # a removed directory is not created again: it may be a mount
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self._folder.parent / "lock"):
            if there != known:
                put_aside_if_damaged(self._folder)
            make(self._folder)
            cache = diskcache.Cache(
                str(self._folder), timeout=BUSY_S, disk=Strings, **self._settings
            )
            file = self._there() if self._source is None else there
            is_other = self._source is None and known not in (None, file)
            if is_other or not len(cache):
                with self._transaction(cache, file):
                    self._begin(self, is_other)
        self._cache = cache
        self._file = file
        self._has_warned = False

    def _copy(self, source: Path) -> None:
        """Copy a database and its journal without changing anything beside them.

        Changes made meanwhile are copied at the next call.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        for name in FILES:
            if (source / name).is_file() and not (source / name).is_symlink():
                shutil.copyfile(source / name, self._folder / name)

    def _fault(self, what: str, error: Exception) -> StoreError:
        return StoreError(
            f"the catalog {self._folder} can't be {what}: {str(error) or 'it stays locked'}; "
            "make sure that the directory exists, is writable and has free space, then try again"
        )


_all: weakref.WeakSet[RowTable] = weakref.WeakSet()


def _let_all_go() -> None:
    """Close all connections; they are parts of reference cycles, so garbage is collected, too."""
    for rows in list(_all):
        with rows._looking:
            rows._let_go()
    gc.collect()


def _before_fork() -> None:
    """Wait for changes and looks under way, and close all connections.

    A child never uses its parent's store, but SQLite would take the parent's locks for its own.
    """
    for rows in list(_all):
        if rows._lock.acquire(timeout=BUSY_S) and rows._looking.acquire(timeout=BUSY_S):
            rows._let_go()
    if RowTable._has_garbage:
        # A connection is part of a reference cycle. A child that inherited it would close it, and
        # damage the database.
        gc.collect()
        RowTable._has_garbage = False


def _after_fork() -> None:
    """Release the locks, in the parent and in the child."""
    for rows in list(_all):
        for lock in (rows._looking, rows._lock):
            with suppress(RuntimeError):  # it was not acquired in time
                lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
