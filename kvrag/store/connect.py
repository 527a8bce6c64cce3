"""SQLite connections to a database that anyone may have written."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kvrag.store.directory import FOLDER

BUSY_TIMEOUT_S = 5.0

MAX_VALUE_BYTES = 64 * 2**20
"""Longer strings than any row of ours has are refused by SQLite itself."""

OUTAGES = frozenset({"BUSY", "LOCKED", "FULL", "READONLY", "IOERR", "CANTOPEN", "PERM", "NOMEM", "AUTH", "PROTOCOL"})
"""SQLite errors that say nothing against the file's content."""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a database in autocommit mode, for one thread at a time, with nothing in it trusted.

    Parameters
    ----------
    path
        Its file.
    read_only
        Write nothing, not even journals: nobody may change the database meanwhile.

    Raises
    ------
    sqlite3.Error, OSError
        If it can't be opened, or is a link.
    """
    if path.is_symlink():
        raise OSError(f"{path} is a link")
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{'mode=ro&immutable=1' if read_only else 'mode=rwc'}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=64,
    )
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def create(path: Path) -> None:
    """Make an empty, private file where there is none; SQLite gives its other files the same mode.

    A file that is there is not opened: to close it would drop the locks that other connections of this process hold.
    """
    parent = os.open(path.parent, FOLDER)
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(path.name, flags, 0o600, dir_fd=parent))
    except FileExistsError:
        pass
    finally:
        os.close(parent)


def is_outage(error: sqlite3.Error) -> bool:
    """Whether an error says nothing against the file's content."""
    name = getattr(error, "sqlite_errorname", "")
    return any(name.startswith(f"SQLITE_{outage}") for outage in OUTAGES)


def examine(path: Path, fault_of: Callable[[sqlite3.Connection], str | None]) -> str | None:
    """Say what is wrong with a database, before anything in it is believed; ``None`` if nothing is.

    Parameters
    ----------
    path
        Where it is.
    fault_of
        Compares schema and settings with those expected.

    Raises
    ------
    sqlite3.Error
        If it can't be read now, which says nothing about its content.
    """
    if path.is_symlink() or not path.is_file():
        return "it is no regular file"
    try:
        with closing(connect(path)) as database:
            ((verdict,),) = database.execute("PRAGMA quick_check(1)").fetchall()
            return fault_of(database) if verdict == "ok" else str(verdict)
    except sqlite3.Error as error:
        if is_outage(error):
            raise
        return str(error)


def schema_of(database: sqlite3.Connection) -> dict[str, str]:
    """Return the SQL of every table, index, trigger and view by name, white space made one."""
    rows = database.execute("SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_autoindex%'")
    return {f"{kind} {name}": " ".join(str(sql).split()) for kind, name, sql in rows}
