"""Database file of the catalog.

The file is created private, and examined before diskcache opens it. diskcache trusts the schema and
the settings that it finds, so both are compared with a database that diskcache has just created.
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
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME

from kvrag.store.blobs import sync_names

log = logging.getLogger(__name__)

BUSY_S = 10.0

SETTINGS = {
    # kvrag evicts; diskcache must not.
    "eviction_policy": "none",
    "cull_limit": 0,
    # A page that can't be read must be an error, not the end of the process by a signal.
    "sqlite_mmap_size": 0,
    # The file may be anyone's: its schema must call no functions, and its cells are checked.
    "sqlite_trusted_schema": 0,
    "sqlite_cell_size_check": 1,
    # Erased rows are overwritten.
    "sqlite_secure_delete": 1,
    "disk_pickle_protocol": 0,
    # No value goes into a file of its own.
    "disk_min_file_size": 2**62,
}
SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
CHOICES = (
    "SELECT key, CASE typeof(value) WHEN 'integer' THEN 0 ELSE value END FROM Settings ORDER BY key"
)

FAULTS = (sqlite3.Error, OSError, diskcache.Timeout)
# SQLite errors that do not indicate damage of the file.
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


def make(folder: Path) -> None:
    """Create a directory and an empty database in it, unless they exist.

    Both are private, and survive a power cut.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        # SQLite gives its other files this mode.
        (folder / DBNAME).touch(mode=0o600, exist_ok=False)
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
            # Before anything is read, and as in SETTINGS.
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
            if not schema or (
                schema == own(SCHEMA) and database.execute(CHOICES).fetchall() == own(CHOICES)
            ):
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
