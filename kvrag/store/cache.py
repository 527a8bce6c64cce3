"""diskcache cut down to what is safe in a directory that others may write to.

No pickles, no files beside the database, no eviction, one connection per process, nothing believed before it was
examined.
"""

from __future__ import annotations

import functools
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME, DEFAULT_SETTINGS, METADATA, MODE_RAW

from kvrag.store import connect as sqlite
from kvrag.store.connect import schema_of

FILE = DBNAME

SETTINGS = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "size_limit": 2**62,
    "cull_limit": 0,
    "sqlite_mmap_size": 0,
}

OURS = "raw = 1 AND mode = 1 AND filename IS NULL AND typeof(key) = 'text' AND typeof(value) = 'text'"
GET = f"SELECT value FROM Cache WHERE key = ? AND {OURS}"
GET_MANY = f"SELECT key, value FROM Cache WHERE key IN ({{}}) AND {OURS}"
SCAN = f"SELECT key, value FROM Cache WHERE key > ? AND key < ? AND {OURS} ORDER BY key LIMIT ?"

INSERT = (
    "INSERT INTO Cache (key, raw, store_time, access_time, access_count, size, mode, value) VALUES (?, 1, 0, 0, 0, 0, 1, ?)"
    " ON CONFLICT (key, raw) DO UPDATE SET mode = 1, filename = NULL, expire_time = NULL, size = 0, value = excluded.value"
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


class CacheRows(diskcache.Cache):  # type: ignore[misc]
    """A cache with one connection for all threads, which can be closed before a fork; calls must be serialised.

    Parameters
    ----------
    directory
        Of the database, whose file is there, possibly empty.

    Raises
    ------
    sqlite3.Error, OSError, diskcache.Timeout
        If it can't be opened.
    """

    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError, diskcache.Timeout)
    lookup = GET
    _shared: sqlite3.Connection | None = None

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), timeout=sqlite.BUSY_TIMEOUT_S, disk=JsonDisk, **SETTINGS)

    @property
    def _con(self) -> sqlite3.Connection:
        if self._shared is None:
            self._shared = sqlite.connect(Path(self._directory) / DBNAME)
            for name, value in {**DEFAULT_SETTINGS, **SETTINGS}.items():
                if name.startswith("sqlite_"):
                    self.reset(name, value, update=False)
        return self._shared

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def fetch(self, name: str) -> str | None:
        """Return a row's value."""
        row = self._sql(GET, (name,)).fetchone()
        return None if row is None else str(row[0])

    def fetch_many(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the names and values of those rows that are there."""
        return list(self._sql(GET_MANY.format(",".join("?" * len(names))), names).fetchall())

    def insert(self, name: str, value: str) -> None:
        """Insert or replace a row, as ``self[name] = value`` would, in a fifth of its time."""
        self._sql(INSERT, (name, value))

    def erase(self, name: str) -> None:
        """Remove a row; absent ones are fine."""
        self._sql("DELETE FROM Cache WHERE key = ? AND raw = 1", (name,))

    def scan(self, low: str, high: str, limit: int) -> list[tuple[str, str]]:
        """Return the rows between two names, without anything that is not a string."""
        return list(self._sql(SCAN, (low, high, limit)).fetchall())

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement without parameters."""
        return list(self._sql(statement).fetchall())

    @contextmanager
    def transact(self, retry: bool = False) -> Iterator[None]:
        """Make what happens inside atomic, waiting for other processes in bounded time only."""
        with super().transact(retry=False):
            yield

    @staticmethod
    def examine(path: Path) -> str | None:
        """Say what is wrong with a database; ``None`` if nothing is. Raises as :func:`kvrag.store.connect.examine`."""
        return sqlite.examine(path, fault_of)


@functools.cache
def own_schema() -> dict[str, str]:
    """Return what diskcache itself makes of an empty directory: the installed version's tables, indices and triggers."""
    with tempfile.TemporaryDirectory(prefix="kvrag-") as folder:
        CacheRows(Path(folder)).close()
        with closing(sqlite.connect(Path(folder) / DBNAME)) as database:
            return schema_of(database)


def fault_of(database: sqlite3.Connection) -> str | None:
    """Compare schema and settings with diskcache's own; an empty database is fine."""
    schema = schema_of(database)
    if not schema:
        return None
    if schema != own_schema():
        return "it has a foreign schema"
    for name, value in database.execute("SELECT key, value FROM Settings"):
        # Names become attributes and PRAGMAs of diskcache; words other than ours have no business there.
        is_known = name in DEFAULT_SETTINGS or name in METADATA
        if not is_known or (type(value) is not int and value != {**DEFAULT_SETTINGS, **SETTINGS}.get(name)):
            return "it has foreign settings"
    return None
