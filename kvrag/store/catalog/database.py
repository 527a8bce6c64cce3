"""Database of the catalog, which may be damaged, deleted or replaced at any moment.

Its file is created private, and examined before diskcache opens it. diskcache trusts the schema and
the settings that it finds, so both are compared with a database that diskcache has just created. It
is used by its public API, with a ``Disk`` that only passes strings.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import diskcache
from diskcache.core import DBNAME, MODE_RAW

from kvrag.errors import StoreError
from kvrag.store.blobs import sync_names

log = logging.getLogger(__name__)

BUSY_S = 10.0
# Free bytes without which SQLite can't open a database: its journal and shared memory need some.
ROOM = 2**20
FILES = (DBNAME, f"{DBNAME}-wal")

SETTINGS = {
    "eviction_policy": "none",
    "cull_limit": 0,
    "sqlite_mmap_size": 0,
    "sqlite_trusted_schema": 0,
    "sqlite_cell_size_check": 1,
    "sqlite_secure_delete": 1,
    "disk_pickle_protocol": 0,
    "disk_min_file_size": 2**62,
}
SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
CHOICES = (
    "SELECT key, CASE typeof(value) WHEN 'integer' THEN 0 ELSE value END FROM Settings ORDER BY key"
)

FAULTS = (sqlite3.Error, OSError, diskcache.Timeout)
OUTAGES = (
    "BUSY",
    "LOCKED",
    "FULL",
    "READONLY",
    "IOERR",
    "CANTOPEN",
    "PERM",
    "NOMEM",
    "AUTH",
    "PROTOCOL",
)
"""SQLite errors that do not indicate damage of the file."""


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
        self._private = ""
        if folder is None:
            self._private = tempfile.mkdtemp(prefix="kvrag-")
            folder = Path(self._private, "catalog")
            durable = False
        self.folder = folder
        self._source = source
        self._settings = {**SETTINGS, "sqlite_synchronous": 2 if durable else 1}
        self._opened: Opened | None = None
        # The files when they were opened last, whether or not they are open now.
        self._known: object = None
        self.has_warned = False
        """Whether a fault was logged since the database was opened."""

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
            return not self._private and (
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
        if self._opened is not None:
            self._opened.cache.close()
            Database.has_garbage = True
        self._opened = None

    def close(self) -> None:
        """Close the database, and remove a private directory."""
        self.let_go()
        if self._private:
            shutil.rmtree(self._private, ignore_errors=True)

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
        with locked(self.folder.parent / "lock"):
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
        for name in FILES:
            if (source / name).is_file() and not (source / name).is_symlink():
                shutil.copyfile(source / name, self.folder / name)


def make(folder: Path) -> None:
    """Create a directory and an empty database in it, unless they exist.

    Both are private, and survive a power cut.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    with suppress(FileExistsError):
        (folder / DBNAME).touch(
            mode=0o600, exist_ok=False
        )  # SQLite gives its other files this mode
        sync(folder, folder.parent)


def sync(*folders: Path) -> None:
    """Sync directories, so that the names in them survive a power cut."""
    for folder in folders:
        # a directory that may be entered and not listed can't be opened
        with suppress(PermissionError), _opened(folder, os.O_DIRECTORY) as fd:
            sync_names(fd)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, if the file system supports locks."""
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def put_aside_if_damaged(folder: Path) -> None:
    """Move a damaged database and its journals aside; only the latest is kept.

    Raises ``sqlite3.Error`` if the database can't be read now, which is no sign of damage.
    """
    path = folder / DBNAME
    # A page that can't be read may look like damage to SQLite, once: check twice.
    if os.path.lexists(path) and _fault_at(path) and (fault := _fault_at(path)):
        log.warning(
            "the catalog %s is damaged (%s); it is moved aside and begun anew", folder, fault
        )
        aside = folder.with_name(folder.name + ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)


def _fault_at(path: Path) -> str | None:
    """Describe the fault of a database; ``None`` if it is sound or empty."""
    if path.is_symlink() or not path.is_file():
        return "it is not a regular file"
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as database:
            for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
                database.execute(f"PRAGMA {pragma}")
            ((verdict,),) = database.execute("PRAGMA quick_check(1)").fetchall()
            # A page that could not be read is no damage.
            outage = re.search(r"error code=(\d+)", str(verdict))
            if outage:
                raise sqlite3.OperationalError(f"error {outage[1]}")
            if verdict != "ok":
                return str(verdict)
            schema = database.execute(SCHEMA).fetchall()
            is_own = not schema or (
                schema == own(SCHEMA) and database.execute(CHOICES).fetchall() == own(CHOICES)
            )
            if is_own:
                return None
            return "it has a foreign schema, or foreign settings"
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "IOERR").removeprefix("SQLITE_").startswith(OUTAGES):
            raise
        return str(error)


@functools.cache
def own(query: str) -> list[Any]:
    """Return the answer of a database that diskcache has just created to a query."""
    with tempfile.TemporaryDirectory(prefix="kvrag-") as folder:
        diskcache.Cache(folder, **SETTINGS).close()
        with closing(sqlite3.connect(Path(folder) / DBNAME)) as database:
            return database.execute(query).fetchall()
