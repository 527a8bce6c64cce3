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
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import diskcache
from diskcache.core import DBNAME, MODE_RAW

from kvrag.errors import StoreError
from kvrag.kv.crypto import RowCipher
from kvrag.runtime import Forking, at_fork, at_thread_end, snapshot
from kvrag.store.base import WRITABLE, CatalogRows
from kvrag.store.catalog.database import (
    BUSY_S,
    FAULTS,
    SETTINGS,
    locked,
    make,
    put_aside_if_damaged,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

# Free bytes without which SQLite can't open a database: its journal and shared memory need some.
ROOM = 2**20
FILES = (DBNAME, f"{DBNAME}-wal")


class Strings(diskcache.Disk):  # type: ignore[misc]
    """diskcache's serialisation, for strings only.

    It unpickles nothing, and touches no file that a row names.
    """

    def get(self, key: Any, raw: Any) -> str:
        """Return the key; anything but a raw string becomes the empty string, which no row uses."""
        if type(key) is str and raw:
            return key
        return ""

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> str:
        """Return a value; diskcache treats ``OSError`` as absent."""
        if mode != MODE_RAW or filename is not None or type(value) is not str:
            raise OSError("the row is not one of kvrag's")
        return value

    def remove(self, file_path: Any) -> None:
        """Leave the file alone: it may be any of the user's files."""


class Opened(NamedTuple):
    """Database that diskcache has opened, and the identity of its files then."""

    cache: Any
    files: object


class Database:
    """Database in a folder, opened again if it is deleted or replaced.

    A damaged database is moved aside and begun anew. The caller takes care that one thread at a
    time calls a method.

    Parameters
    ----------
    folder
        Created if it is missing. Without one, a private temporary directory is used.
    source
        With it, the database is a private copy of the database there, made again when that
        changes; nothing there is changed.
    durable
        Whether changes survive a power cut.
    """

    has_garbage = False  # whether closed connections to any database may await collection

    def __init__(
        self,
        folder: Path | None,
        *,
        source: Path | None = None,
        durable: bool = True,
    ) -> None:
        # Removes a private directory: at a close, and else with this, or at exit.
        self._remove: Any = None
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="kvrag-"), "catalog")
            self._remove = weakref.finalize(self, _remove, folder.parent, os.getpid())
            durable = False
        self.folder = folder
        self._source = source
        self._settings = {**SETTINGS, "sqlite_synchronous": 2 if durable else 1}
        self._opened: Opened | None = None
        # The files when they were opened last, whether or not they are open now.
        self._known: object = None
        # Whether a fault was logged since the database was opened.
        self.has_warned = False

    def current(self, begin: Callable[[Opened, bool], None]) -> Opened:
        """Return the database, opened if needed; raises one of :data:`FAULTS`.

        ``begin`` is called with a database that has no rows or has replaced another, before its
        first use; the second argument tells which.
        """
        if self._opened is None or self._opened.files != self._files():
            self._opened = self._open(begin)
            self._known = self._opened.files
            self.has_warned = False
        return self._opened

    def check(self, opened: Opened) -> None:
        """Raise ``OSError`` if the database was replaced or deleted since it was opened."""
        if self._source is None and self._files() != opened.files:
            raise OSError("it was replaced or deleted during a change")

    def is_stuck(self) -> bool:
        """Whether SQLite can't open the database because the disk takes no writes.

        A copy of the database can be read then.
        """
        with suppress(OSError):
            disk = os.statvfs(self.folder)
            return not self._remove and (
                disk.f_bavail * disk.f_frsize < ROOM or bool(disk.f_flag & os.ST_RDONLY)
            )
        return False

    def fault(self, what: str, error: Exception) -> StoreError:
        """Return the error that says what can't be done with the database."""
        return StoreError(
            f"the catalog {self.folder} can't be {what}: {str(error) or 'it stays locked'}; "
            "make sure that the directory exists, is writable and has free space, then try again"
        )

    def leave(self) -> None:
        """Close this thread's connection.

        It is part of a reference cycle, and would stay open, with its memory, until Python collects
        garbage.
        """
        if self._opened is not None:
            self._opened.cache.close()

    def let_go(self) -> None:
        """Close the database; connections of other threads close when Python collects them."""
        self.leave()
        Database.has_garbage = True
        self._opened = None

    def close(self) -> None:
        """Close the database, and remove a private directory."""
        self.let_go()
        if self._remove:
            self._remove()

    def _files(self) -> object:
        """Return the identity of the files: device and inode; of a source, also its last change."""
        found = list[int]()
        for name in FILES[:1] if self._source is None else FILES:
            with suppress(OSError):
                status = os.stat((self._source or self.folder) / name)
                found += [status.st_dev, status.st_ino]
                if self._source is not None:
                    found += [status.st_mtime_ns, status.st_size]
        return found

    def _open(self, begin: Callable[[Opened, bool], None]) -> Opened:
        """Open the database; create it if it is missing or damaged."""
        self.let_go()
        known = self._known
        there = self._files()
        if (self._source or self.folder).is_symlink():
            raise OSError("its folder is a link")
        if self._source is not None:
            self._copy(self._source)
        elif known is None:  # a removed directory is not created again: it may be a mount
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One process at a time examines a database, and begins it.
        with locked(self.folder.parent / "lock"):
            # Known files were examined when they were opened first.
            if there != known:
                put_aside_if_damaged(self.folder)
            make(self.folder)
            cache = diskcache.Cache(
                str(self.folder), timeout=BUSY_S, disk=Strings, **self._settings
            )
            opened = Opened(cache, self._files() if self._source is None else there)
            is_other = self._source is None and known not in (None, opened.files)
            if is_other or not len(cache):
                begin(opened, is_other)
        return opened

    def _copy(self, source: Path) -> None:
        """Copy a database and its journal without changing anything beside them.

        Changes made meanwhile are copied at the next call.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True)
        files = map(source.joinpath, FILES)
        found = [file for file in files if file.is_file() and not file.is_symlink()]
        try:
            # In a process of its own: SQLite's locks on a file end where a process closes it.
            subprocess.run(["cp", *found, self.folder], check=True, capture_output=True)
        except (
            OSError,
            subprocess.SubprocessError,
        ):  # no such program, or its error is raised here
            for file in found:
                shutil.copyfile(file, self.folder / file.name)


def _remove(private: Path, process: int) -> None:
    """Remove a directory; a fork leaves it to the process that made it."""
    if process == os.getpid():
        shutil.rmtree(private, ignore_errors=True)


def open_table(
    folder: Path | None,
    seal: RowCipher | None,
    *,
    read_only: bool = False,
    durable: bool = True,
    begin: Callable[[CatalogRows, bool], None],
) -> RowTable:
    """Open the rows of a database, which is created if it is missing.

    Parameters
    ----------
    folder
        Without a folder, a private temporary directory is used.
    seal
        Encrypts values.
    read_only
        Nothing in ``folder`` is changed: rows are read from a private copy. So are they on a full
        disk.
    durable
        Changes survive a power cut.
    begin
        Called inside a transaction on a database without rows, and on a database that has replaced
        another; its second argument tells which.

    Raises
    ------
    StoreError
        If the folder can't be used.
    """
    if read_only:
        database = Database(None, source=folder)
    else:
        database = Database(folder, durable=durable)
    table = RowTable(database, seal, begin, read_only=read_only)
    try:
        table.open()
    except FAULTS as error:
        table.close()
        if read_only or not database.is_stuck():
            raise database.fault("opened", error) from error
        log.warning(
            "the catalog %s is opened for reading only: its disk takes no writes (%s)",
            folder,
            error,
        )
        return open_table(folder, seal, read_only=True, begin=begin)
    _TABLES.all.add(table)
    at_thread_end(table)
    return table


class Inherited:
    """Rows in a process that was forked since they were opened."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreError(
            "this KV store was opened before the process was forked; open it after the fork "
            "(gunicorn: without --preload; celery: in worker_process_init), or start processes "
            "by 'spawn'"
        )

    def close(self) -> None:
        """Do nothing: all that is open is the parent's."""


class RowTable:
    """Rows of a database; :func:`open_table` opens them.

    While the database's disk takes no writes, rows are read from a private copy.
    """

    remedy = WRITABLE
    pause_s = 0.0  # minimum pause between background changes

    def __init__(
        self,
        database: Database,
        seal: RowCipher | None,
        begin: Callable[[CatalogRows, bool], None],
        *,
        read_only: bool,
    ) -> None:
        self.read_only = read_only
        self._seal = seal
        self._begin = begin
        self._mine = threading.local()
        self._database = database
        # The database, and its copy once that was needed.
        self._databases = [database]
        # Changes take both locks in this order, looks only the second. A fork waits for both locks,
        # and finds no connection.
        self._lock = threading.RLock()
        self._looking = threading.RLock()
        self._is_closed = self._is_refused = False

    def open(self) -> None:
        """Open the database; raises one of :data:`~kvrag.store.catalog.database.FAULTS`."""
        with self._looking:
            self._current()

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
            lambda cache: sorted(
                name.removeprefix(prefix) for name in cache if name.startswith(prefix)
            ),
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
                if self._is_refused and not self._database.is_stuck():
                    self._is_refused = False
                    _TABLES.let_go()
                with self._looking:
                    opened = self._current()
                with self._transaction(opened):
                    return action()
            except StoreError:
                raise
            except FAULTS as error:
                self._is_refused = self._database.is_stuck()
                raise self._database.fault("changed", error) from error

    def scrub(self) -> None:
        """Purge erased rows from the database's journal, as far as other readers allow."""
        self._look(
            lambda cache: cache.reset("sqlite_wal_checkpoint", "TRUNCATE", update=False), None
        )

    def close(self) -> None:
        """Close the database; idempotent. A closed database is empty and can't be changed."""
        with self._lock, self._looking:
            self._is_closed = True
            for database in self._databases:
                database.close()

    def at_thread_end(self) -> None:
        """Close this thread's connections."""
        with self._looking, suppress(*FAULTS):
            for database in self._databases:
                database.leave()

    def hold(self) -> None:
        """Wait for changes and looks under way, and close all connections before a fork."""
        # Not for ever: the fork goes on even if a change hangs.
        if self._lock.acquire(timeout=BUSY_S) and self._looking.acquire(timeout=BUSY_S):
            self.let_go()

    def go_on(self) -> None:
        """Let changes and looks begin again after a fork."""
        for lock in (self._looking, self._lock):
            with suppress(RuntimeError):  # it was not acquired in time
                lock.release()

    def let_go(self) -> None:
        """Close all connections; the database is opened again when it is needed."""
        with self._looking:
            for database in self._databases:
                database.let_go()

    def _current(self) -> Opened:
        if self._is_closed:
            raise StoreError("the KV store is closed; open it again")
        return self._database.current(self._begun)

    def _begun(self, opened: Opened, is_other: bool) -> None:
        with self._transaction(opened):
            self._begin(self, is_other)

    @contextmanager
    def _transaction(self, opened: Opened) -> Iterator[None]:
        try:
            # diskcache's own retry never ends on a full or read-only disk.
            with opened.cache.transact(retry=False):
                self._database.check(opened)
                self._mine.cache = opened.cache
                yield
            # After the commit, too: the file may have been deleted or replaced before it.
            self._database.check(opened)
        except FAULTS:
            # A failed commit leaves its transaction open; closing the connection ends it.
            opened.cache.close()
            raise
        finally:
            self._mine.cache = None

    def _look(self, action: Callable[[Any], T], default: T) -> T:
        """Read from the database and return ``default`` on a fault.

        Inside a change, read its uncommitted state and raise faults.
        """
        if getattr(self._mine, "cache", None) is not None:
            return action(self._mine.cache)
        with self._looking:
            try:
                return action(self._current().cache)
            except FAULTS as error:
                return self._look_elsewhere(action, default, error)

    def _look_elsewhere(self, action: Callable[[Any], T], default: T, error: Exception) -> T:
        """Read from a copy of a database that can't be opened now, or return ``default``."""
        if self._is_closed:
            return default
        if self._database.is_stuck():
            with suppress(*FAULTS):
                if len(self._databases) == 1:
                    self._databases.append(Database(None, source=self._database.folder))
                return action(self._databases[1].current(lambda *_: None).cache)
        if not self._database.has_warned:
            self._database.has_warned = True
            log.warning(
                "the catalog %s can't be read (%s); it counts as empty",
                self._database.folder,
                error,
            )
        return default


class _Tables(Forking):
    """Tables that are open in this process.

    A child never uses its parent's tables, but SQLite would take the parent's locks for its own.
    """

    def __init__(self) -> None:
        self.all: weakref.WeakSet[RowTable] = weakref.WeakSet()
        at_fork(self)

    def let_go(self) -> None:
        """Close all connections; they are parts of reference cycles, so collect garbage, too."""
        for table in snapshot(self.all):
            table.let_go()
        gc.collect()

    def before_fork(self) -> None:
        """Wait for changes and looks under way, and close all connections."""
        for table in snapshot(self.all):
            table.hold()
        if Database.has_garbage:
            # A connection is part of a reference cycle. A child that inherited it would close it,
            # and damage the database.
            gc.collect()
            Database.has_garbage = False

    def after_fork(self, *, in_child: bool) -> None:
        """Let changes and looks begin again, in the parent and in the child."""
        for table in snapshot(self.all):
            table.go_on()


_TABLES = _Tables()
