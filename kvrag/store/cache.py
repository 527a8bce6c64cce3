"""diskcache cut down to what is safe in a directory that others may write to.

No pickles, no files beside the database, no eviction, one connection per process, nothing believed before it was
examined.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME, DEFAULT_SETTINGS, METADATA, MODE_RAW

BUSY_TIMEOUT_S = 5.0

SETTINGS = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "size_limit": 2**62,
    "cull_limit": 0,
    "sqlite_mmap_size": 0,
}

OUTAGES = frozenset({"BUSY", "LOCKED", "FULL", "READONLY", "IOERR", "CANTOPEN", "PERM", "NOMEM", "AUTH", "PROTOCOL"})
"""SQLite errors that say nothing against the file's content."""

SCHEMA = frozenset(
    {"Cache", "Cache_expire_time", "Cache_key_raw", "Settings", "Settings_count_delete", "Settings_count_insert"}
    | {"Settings_size_delete", "Settings_size_insert", "Settings_size_update"}
)
COLUMNS = (
    *("rowid", "key", "raw", "store_time", "expire_time", "access_time"),
    *("access_count", "tag", "size", "mode", "filename", "value"),
)

SCAN = (
    "SELECT key, value FROM Cache WHERE key > ? AND key < ? AND raw = 1 AND mode = 1 AND filename IS NULL"
    " AND typeof(key) = 'text' AND typeof(value) = 'text' ORDER BY key LIMIT ?"
)


class JsonDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's serialisation cut down to strings: it never pickles, and never touches a file that a row names."""

    def put(self, key: Any) -> tuple[str, bool]:
        """Pass a string key."""
        if type(key) is not str:
            raise TypeError(f"an index row is named by a string, not by {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        """Pass a string key from the database."""
        if type(key) is not str or not raw:
            raise OSError("the row is not one of kvrag's")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, str]:
        """Pass a string value."""
        if type(value) is not str or read:
            raise TypeError("an index row holds a string")
        return 0, MODE_RAW, None, value

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> str:
        """Pass a string value from the database; diskcache takes ``OSError`` for absent."""
        if mode != MODE_RAW or filename is not None or type(value) is not str or read:
            raise OSError("the row is not one of kvrag's")
        return value

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        """Refuse: values never go to files."""
        raise TypeError("an index row has no file")

    def remove(self, file_path: Any) -> None:
        """Leave the file alone: a planted row could name any file of the user's."""


class Rows(diskcache.Cache):  # type: ignore[misc]
    """A cache with one connection for all threads, which can be closed before a fork; calls must be serialised."""

    _shared: sqlite3.Connection | None = None

    @property
    def _con(self) -> sqlite3.Connection:
        if self._shared is None:
            path = os.path.join(self._directory, DBNAME)
            self._shared = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
            )
            self._shared.execute("PRAGMA trusted_schema = OFF")
            for name, value in {**DEFAULT_SETTINGS, **SETTINGS}.items():
                if name.startswith("sqlite_"):
                    self.reset(name, value, update=False)
        return self._shared

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def scan(self, low: str, high: str, limit: int) -> list[tuple[str, str]]:
        """Return the rows between two names, without anything that is not a string."""
        return list(self._sql(SCAN, (low, high, limit)).fetchall())


def examine(path: Path) -> str | None:
    """Say what is wrong with a database, before anything in it is believed; ``None`` if nothing is.

    Raises
    ------
    sqlite3.Error
        If it can't be read now, which says nothing about its content.
    """
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            ((verdict,),) = database.execute("PRAGMA quick_check(1)").fetchall()
            return _fault(database) if verdict == "ok" else str(verdict)
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if any(name.startswith(f"SQLITE_{outage}") for outage in OUTAGES):
            raise
        return str(error)


def _fault(database: sqlite3.Connection) -> str | None:
    """Compare schema and settings with diskcache's own; an empty database is fine."""
    names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    if not names:
        return None
    if {name for name in names if not str(name).startswith("sqlite_autoindex")} != SCHEMA:
        return "it has a foreign schema"
    if tuple(name for (_, name, *_) in database.execute("PRAGMA table_info(Cache)")) != COLUMNS:
        return "it has a foreign schema"
    for name, value in database.execute("SELECT key, value FROM Settings"):
        # Names become attributes and PRAGMAs of diskcache; words other than ours have no business there.
        is_known = name in DEFAULT_SETTINGS or name in METADATA
        if not is_known or (type(value) is not int and value != {**DEFAULT_SETTINGS, **SETTINGS}.get(name)):
            return "it has foreign settings"
    return None
