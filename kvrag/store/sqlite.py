"""An index's rows in a database of the standard library's sqlite3 alone, for those who may not install diskcache."""

from __future__ import annotations

import functools
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvrag.store.connect import connect, examine, schema_of

log = logging.getLogger(__name__)

FILE = "rows.db"
SCHEMA = "CREATE TABLE rows (name TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL) WITHOUT ROWID"
TEXTS = "typeof(name) = 'text' AND typeof(value) = 'text'"
GET = f"SELECT value FROM rows WHERE name = ? AND {TEXTS}"
GET_MANY = f"SELECT name, value FROM rows WHERE name IN ({{}}) AND {TEXTS}"
SCAN = f"SELECT name, value FROM rows WHERE name > ? AND name < ? AND {TEXTS} ORDER BY name LIMIT ?"


class SqliteRows:
    """Names and values, both strings; calls must be serialised.

    Parameters
    ----------
    directory
        Of the database, whose file is there, possibly empty.

    Raises
    ------
    sqlite3.Error, OSError
        If it can't be opened.
    """

    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError)
    lookup = GET

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._shared: sqlite3.Connection | None = None
        self._depth = 0
        self._connection()

    def _connection(self) -> sqlite3.Connection:
        if self._shared is None:
            self._depth = 0
            self._shared = connect(self._path)
            self._shared.execute("PRAGMA journal_mode = WAL")
            self._shared.execute("PRAGMA synchronous = NORMAL")
            if not schema_of(self._shared):
                self._shared.execute(SCHEMA.replace("TABLE", "TABLE IF NOT EXISTS"))
        return self._shared

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def fetch(self, name: str) -> str | None:
        """Return a row's value."""
        row = self._connection().execute(GET, (name,)).fetchone()
        return None if row is None else str(row[0])

    def fetch_many(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the names and values of those rows that are there."""
        return list(self._connection().execute(GET_MANY.format(",".join("?" * len(names))), names).fetchall())

    def insert(self, name: str, value: str) -> None:
        """Insert or replace a row."""
        self._connection().execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (name, value))

    def erase(self, name: str) -> None:
        """Remove a row; absent ones are fine."""
        self._connection().execute("DELETE FROM rows WHERE name = ?", (name,))

    def scan(self, low: str, high: str, limit: int) -> list[tuple[str, str]]:
        """Return the rows between two names."""
        return list(self._connection().execute(SCAN, (low, high, limit)).fetchall())

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement without parameters."""
        return list(self._connection().execute(statement).fetchall())

    @contextmanager
    def transact(self) -> Iterator[None]:
        """Make what happens inside atomic; transactions may be nested."""
        connection = self._connection()
        if not self._depth:
            connection.execute("BEGIN IMMEDIATE")
        self._depth += 1
        try:
            yield
        except BaseException:
            self._depth -= 1
            if not self._depth and connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._depth -= 1
        if not self._depth:
            connection.execute("COMMIT")

    @staticmethod
    def examine(path: Path) -> str | None:
        """Say what is wrong with a database; ``None`` if nothing is. Raises as :func:`kvrag.store.connect.examine`."""
        return examine(path, fault_of)


@functools.cache
def warn_without_diskcache() -> None:
    """Say, once, that this takes the place of diskcache."""
    log.warning(
        "diskcache is not installed, so indices are kept with sqlite3 alone, as by StoreConfig(index='sqlite'), and none of "
        "diskcache's can be read"
    )


def fault_of(database: sqlite3.Connection) -> str | None:
    """Compare the schema with the one expected; an empty database is fine."""
    return None if schema_of(database) in ({}, {"table rows": SCHEMA}) else "it has a foreign schema"
