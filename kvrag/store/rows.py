"""Named JSON rows in a database of diskcache that processes share: the only file that knows diskcache and SQLite.

diskcache is used by its public API, with a ``Disk`` that can't pickle and touches no file. Besides that, this file reads the schema and
the settings of a database before diskcache opens it, because diskcache believes what it finds there; ``tests/store/test_rows.py`` fails
when another version of diskcache has others.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME, DEFAULT_SETTINGS, METADATA, MODE_RAW

from kvrag.errors import StoreError
from kvrag.store.crypto import Seal

log = logging.getLogger(__name__)

BUSY_S = 5.0
BUSY_RETRIES = 3

SETTINGS = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "size_limit": 2**62,
    "cull_limit": 0,
    "sqlite_mmap_size": 0,
    "sqlite_trusted_schema": 0,
    "sqlite_cell_size_check": 1,
    "sqlite_secure_delete": 1,
}

FAULTS = (sqlite3.Error, OSError, diskcache.Timeout)

OUTAGES = ("BUSY", "LOCKED", "FULL", "READONLY", "IOERR", "CANTOPEN", "PERM", "NOMEM", "AUTH", "PROTOCOL")
"""SQLite errors that say nothing against the file's content."""


class JsonDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's serialisation cut down to strings: it never pickles, and never touches a file that a row names."""

    def put(self, key: Any) -> tuple[str, bool]:
        """Pass a string key."""
        if type(key) is not str:
            raise TypeError(f"a row is named by a string, not by {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        """Pass a string key from the database; another one becomes one that no row has."""
        return key if type(key) is str and raw else ""

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, str]:
        """Pass a string value."""
        if type(value) is not str or read:
            raise TypeError("a row holds a string")
        return 0, MODE_RAW, None, value

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> str:
        """Pass a string value from the database; diskcache takes ``OSError`` for absent."""
        if mode != MODE_RAW or filename is not None or type(value) is not str or read:
            raise OSError("the row is not one of kvrag's")
        return value

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        """Refuse: values never go to files."""
        raise TypeError("a row has no file")

    def remove(self, file_path: Any) -> None:
        """Leave the file alone: a planted row could name any file of the user's."""


class Rows:
    """Rows of one database. A damaged one is moved aside and begun anew; one that was deleted or replaced is opened again.

    Parameters
    ----------
    folder
        Where the database is; made, with mode 0700, if absent. ``None``: in a private temporary folder.
    seal
        Encrypts values; ``None``: they are plain.
    read_only
        Change nothing in the folder: rows are read from a private copy, made again when the database changes.
    durable
        Whether a change survives a power cut.
    begin
        Called inside a transaction on a database that has no rows yet, and on one that has taken the place of another; told which.

    Raises
    ------
    StoreError
        If the folder can't be used.
    """

    def __init__(
        self,
        folder: Path | None,
        seal: Seal | None,
        *,
        read_only: bool = False,
        durable: bool = True,
        begin: Callable[[Rows, bool], None],
    ) -> None:
        self._seal, self._begin, self.read_only = seal, begin, read_only
        self._settings = {**SETTINGS, "sqlite_synchronous": 2 if durable and folder is not None else 1}
        self._private = tempfile.mkdtemp(prefix="kvrag-") if folder is None or read_only else None
        self._source = folder if read_only else None
        self._folder = Path(self._private) / "catalog" if self._private is not None else Path(folder or "")
        self._path = str(self._folder / DBNAME)
        self._lock, self._looking = threading.RLock(), threading.RLock()
        self._cache: diskcache.Cache | None = None
        self._file: object = None
        self._closed = self._warned = False
        self._changing: int | None = None
        try:
            self._heal()
        except FAULTS as error:
            self.close()
            raise self._unusable(error) from error
        _all.add(self)

    def get(self, name: str) -> str | None:
        """Return a row's value as JSON; ``None`` if it is absent or can't be read. Inside :meth:`change`, faults are raised."""
        try:
            if self._cache is not None and self._changing == threading.get_ident():
                text = self._cache.get(name)
            else:
                text = self._look(lambda cache: cache.get(name))
            return text if text is None or self._seal is None else self._seal.open(text, name)
        except FAULTS as error:
            if self._changing == threading.get_ident():
                raise
            if not self._closed and not self._warned:
                self._warned = True
                log.warning("the catalog %s can't be read (%s); it counts as empty", self._folder, error)
            return None

    def has(self, name: str) -> bool:
        """Whether a row is there, whatever its value."""
        try:
            return bool(self._look(lambda cache: name in cache))
        except FAULTS:
            return False

    def names(self, prefix: str) -> list[str]:
        """Return the rest of all names that begin with ``prefix``; quick for the first or last names. Raises :data:`FAULTS`."""
        found: list[str] = self._look(lambda cache: self._listed(cache, prefix))
        return found

    def _listed(self, cache: diskcache.Cache, prefix: str) -> list[str]:
        is_last = prefix >= "t"
        found = []
        for name in cache.iterkeys(reverse=is_last):
            if name.startswith(prefix):
                found.append(name[len(prefix) :])
            elif name < prefix if is_last else name > prefix:
                break
        return found[::-1] if is_last else found

    def set(self, name: str, value: Any) -> None:
        """Insert or replace a row, inside :meth:`change`."""
        text = json.dumps(value, separators=(",", ":"))
        self._ours().set(name, text if self._seal is None else self._seal.seal(text, name))

    def delete(self, name: str) -> None:
        """Remove a row, inside :meth:`change`; absent ones are fine."""
        self._ours().delete(name)

    def clear(self) -> None:
        """Remove all rows, inside :meth:`change`."""
        self._ours().clear()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make several changes one step for all threads and processes.

        Raises
        ------
        StoreError
            If it can't be made; then nothing has changed.
        """
        with self._lock:
            outer = self._changing
            try:
                with self._transaction():
                    self._changing = threading.get_ident()
                    yield
            except FAULTS as error:
                if isinstance(error, StoreError):
                    raise
                with suppress(*FAULTS):  # a failed commit leaves its transaction open; closing the connection ends it
                    self._ours().close()
                raise StoreError(
                    f"the catalog {self._folder} can't be changed: {error or 'it is locked'}; "
                    "make sure that the directory exists, is writable and has free space, then try again"
                ) from error
            finally:
                self._changing = outer

    def scrub(self) -> None:
        """Leave nothing of erased rows in the database's journal, as far as other readers allow."""
        with suppress(*FAULTS):
            self._look(lambda cache: cache.reset("sqlite_wal_checkpoint", "TRUNCATE", update=False))

    def close(self) -> None:
        """Close the database; idempotent. A closed one is empty and can't be changed."""
        with self._lock:
            self._closed = True
            if self._cache is not None:
                self._cache.close()
            self._cache = None
            if self._private is not None:
                shutil.rmtree(self._private, ignore_errors=True)

    def before_fork(self) -> None:
        """Wait for the change under way and close all connections: a child that inherited their locks could never write."""
        is_quiet = self._lock.acquire(timeout=BUSY_S) and self._looking.acquire(timeout=BUSY_S)
        if is_quiet and self._cache is not None and self._changing is None:
            self._cache.close()
            self._cache = None  # what other threads have open goes with it

    def after_fork(self, *, is_child: bool) -> None:
        """Go on; the child has a lock of its own."""
        if is_child:
            self._lock, self._looking, self._changing = threading.RLock(), threading.RLock(), None
        else:
            for lock in (self._looking, self._lock):
                with suppress(RuntimeError):  # it was not acquired in time
                    lock.release()

    def _look(self, action: Callable[[diskcache.Cache], Any]) -> Any:
        """Read from the database, never while the process forks."""
        while True:
            self._heal()
            with self._looking:  # nothing else may hold on to the cache: a fork must find no connection
                if self._cache is not None:
                    return action(self._cache)

    def _ours(self) -> diskcache.Cache:
        """Return the open database, inside a transaction."""
        if self._cache is None:
            raise OSError("the store is closed")
        return self._cache

    def _heal(self) -> None:
        """Open the database that is there now, unless it is open; not inside a transaction of this thread."""
        if self._changing == threading.get_ident() or (self._cache is not None and self._file == self._there()):
            return
        with self._lock:
            if self._closed:
                raise OSError("the store is closed")
            if self._cache is None or self._file != self._there():
                self._open()

    def _there(self) -> object:
        """Return what tells the database that is there from another one; of a source that is read, what changes with it."""
        try:
            if self._source is None:
                status = os.stat(self._path)
                return status.st_dev, status.st_ino
            paths = (self._source / DBNAME, self._source / f"{DBNAME}-wal")
            found = (os.stat(path) if path.exists() else None for path in paths)
            return [s and (s.st_dev, s.st_ino, s.st_mtime_ns, s.st_size) for s in found]
        except OSError:
            return None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._heal()
        cache, file = self._ours(), self._file
        for attempt in range(BUSY_RETRIES):
            transaction = cache.transact(retry=False)  # diskcache's own retry never ends on a full or read-only disk
            try:
                transaction.__enter__()
                break
            except diskcache.Timeout:
                if attempt == BUSY_RETRIES - 1:
                    raise OSError("it stays locked, or can't be written to") from None
        try:
            if self._source is None and self._there() != file:
                raise OSError("it was replaced or deleted during a change")
            yield
        except BaseException as error:
            transaction.__exit__(type(error), error, error.__traceback__)
            raise
        transaction.__exit__(None, None, None)
        if self._source is None and self._there() != file:
            raise OSError("it was replaced or deleted during a change")

    def _open(self) -> None:
        """Open the database, made anew where there is none or a damaged one."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        if self._source is not None:
            self._copy(self._source)
        if (
            self._file is None or self._private is not None
        ):  # a directory that is taken away is not made again: it may be a mount
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._folder.parent / "lock"):
            if self._folder.is_symlink():
                raise OSError("its folder is a link")
            path, known = self._folder / DBNAME, self._file
            is_new = self._source is not None or known is None or known != self._there()
            if is_new and os.path.lexists(path) and (fault := examine(path)):
                log.warning("the catalog %s is damaged (%s); it is moved aside and begun anew", path, fault)
                move_aside(self._folder)
            with suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            with suppress(FileExistsError):  # SQLite gives its other files the mode of this one
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
                sync(self._folder, self._folder.parent)
            self._cache = diskcache.Cache(str(self._folder), timeout=BUSY_S, disk=JsonDisk, **self._settings)
            if self._source is None:
                self._file = self._there()
        is_other = known is not None and known != self._file
        if is_other or not len(self._cache):
            with self.change():
                if is_other or not len(self._cache):
                    self._begin(self, is_other)
        self._warned = False

    def _copy(self, source: Path) -> None:
        """Copy a database and its journal without changing anything beside them."""
        for _ in range(BUSY_RETRIES):
            self._file = self._there()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, parents=True)
            for name in (DBNAME, f"{DBNAME}-wal"):
                if (source / name).is_file() and not (source / name).is_symlink():
                    shutil.copyfile(source / name, self._folder / name)
            if self._file == self._there():
                break

    def _unusable(self, error: Exception) -> StoreError:
        return StoreError(
            f"the catalog {self._folder} can't be opened: {error or 'it is locked'}; "
            "make sure that the directory can be written to and has free space, or choose another one"
        )


_all: weakref.WeakSet[Rows] = weakref.WeakSet()
_quiet: list[Rows] = []


def _before_fork() -> None:
    _quiet[:] = _all
    for rows in _quiet:
        rows.before_fork()


def _after_fork(is_child: bool) -> None:
    for rows in _quiet:
        rows.after_fork(is_child=is_child)
    _quiet.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, False),
    after_in_child=functools.partial(_after_fork, True),
)


def sync(*folders: Path) -> None:
    """Bring the names in folders to the disk."""
    for folder in folders:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, where the file system has locks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def move_aside(folder: Path) -> None:
    """Move a database and its journals out of the way; only the latest damaged one is kept."""
    aside = folder.with_name(folder.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)


def examine(path: Path) -> str | None:
    """Say what is wrong with a database, before diskcache believes anything in it; ``None`` if nothing is.

    Raises
    ------
    sqlite3.Error
        If it can't be read now, which says nothing about its content.
    """
    if path.is_symlink() or not path.is_file():
        return "it is not a regular file"
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as database:
            for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
                database.execute(f"PRAGMA {pragma}")
            ((verdict,),) = database.execute("PRAGMA quick_check(1)").fetchall()
            if outage := re.search(r"error code=(\d+)", str(verdict)):  # a page could not be read, which is no damage
                raise sqlite3.OperationalError(f"error {outage[1]}")
            return fault_of(database) if verdict == "ok" else str(verdict)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "IOERR").removeprefix("SQLITE_").startswith(OUTAGES):
            raise
        return str(error)


def fault_of(database: sqlite3.Connection) -> str | None:
    """Compare schema and settings with diskcache's own; an empty database is fine."""
    schema = schema_of(database)
    if not schema:
        return None
    if schema != own_schema():
        return "it has a foreign schema"
    for name, value in database.execute("SELECT key, value FROM Settings"):
        # diskcache turns names into attributes and PRAGMAs.
        is_known = name in DEFAULT_SETTINGS or name in METADATA or name in SETTINGS
        if not is_known or (type(value) is not int and value != {**DEFAULT_SETTINGS, **SETTINGS}.get(name)):
            return "it has foreign settings"
    return None


def schema_of(database: sqlite3.Connection) -> dict[str, str]:
    """Return the SQL of every table, index, trigger and view by name, white space made one."""
    rows = database.execute("SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_autoindex%'")
    return {f"{kind} {name}": " ".join(str(sql).split()) for kind, name, sql in rows}


@functools.cache
def own_schema() -> dict[str, str]:
    """Return what diskcache makes of an empty directory: the installed version's tables, indices and triggers."""
    with tempfile.TemporaryDirectory(prefix="kvrag-") as folder:
        diskcache.Cache(folder, disk=JsonDisk, **SETTINGS).close()
        with closing(sqlite3.connect(Path(folder) / DBNAME)) as database:
            return schema_of(database)
