"""Kinds of databases that an index may live in: which one is there, and what becomes of it when another one is asked for."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Protocol

from kvrag.store.connect import connect
from kvrag.store.sqlite import SqliteRows, warn_without_diskcache

log = logging.getLogger(__name__)

FILES = {"diskcache": "cache.db", "sqlite": "rows.db"}
"""Database of each kind of index."""

COMPLETE = "complete"
"""Row that is written when the index knows every blob; without it, it must be rebuilt."""

LAST, PAGE = "\U0010ffff", 10_000


class Rows(Protocol):
    """A database of names and values, both strings."""

    errors: tuple[type[Exception], ...]
    lookup: str
    """Statement that selects the value of a row by its name."""

    def __init__(self, directory: Path) -> None: ...

    @staticmethod
    def examine(path: Path) -> str | None:
        """Say what is wrong with a database; ``None`` if nothing is."""

    def fetch(self, name: str) -> str | None:
        """Return a row's value."""

    def fetch_many(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the names and values of those rows that are there; of few hundred at most, which is what SQLite takes at once."""

    def insert(self, name: str, value: str) -> None:
        """Insert or replace a row."""

    def erase(self, name: str) -> None:
        """Remove a row; absent ones are fine."""

    def scan(self, low: str, high: str, limit: int) -> list[tuple[str, str]]:
        """Return the rows between two names."""

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement without parameters."""

    def transact(self) -> AbstractContextManager[None]:
        """Make what happens inside atomic."""

    def close(self) -> None:
        """Close the connection; the next call opens another one."""


def backend(kind: str) -> tuple[str, type[Rows]]:
    """Import the database of a kind, or of ``"sqlite"`` where diskcache isn't installed; returns which, too."""
    if kind == "diskcache":
        try:
            from kvrag.store.cache import CacheRows

            return kind, CacheRows
        except ImportError:
            warn_without_diskcache()
    return "sqlite", SqliteRows


def choose(directory: Path, wanted: str | None, default: str) -> tuple[str, type[Rows]]:
    """Return the kind that is wanted; for ``None`` the one that is there, else the default.

    Of two that are there, of which one was never finished, it is the other one.

    Raises
    ------
    sqlite3.Error, OSError
        If there are two, and it can't be told now which is whole.
    """
    there = [kind for kind in FILES if is_there(directory, kind)]
    if wanted is None and len(there) > 1:
        there = [kind for kind in there if is_complete(directory, kind)] or there
    return backend(wanted or next(iter(there), default))


def others(directory: Path, kind: str) -> list[str]:
    """Return the kinds beside this one that have a database in a directory."""
    return [other for other in FILES if other != kind and is_there(directory, other)]


def is_there(directory: Path, kind: str) -> bool:
    """Whether a directory has a database of a kind; a link to one is none."""
    try:
        return stat.S_ISREG(os.lstat(directory / FILES[kind]).st_mode)
    except OSError:
        return False


def is_complete(directory: Path, kind: str) -> bool:
    """Whether a database is there, sound, and was finished once. Raises ``sqlite3.Error`` if that can't be told now."""
    name, make = backend(kind)
    path = directory / FILES[kind]
    if name != kind or not is_there(directory, kind) or make.examine(path) is not None:
        return False
    with closing(connect(path)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall():
            return False  # made, and not yet written to
        return bool(database.execute(make.lookup, (COMPLETE,)).fetchall())


def replace(directory: Path, other: str, kind: str, rows: Rows | None) -> None:
    """Copy the rows of another kind into a new database of this kind, and remove the other.

    The copy does not count as complete: what there are files for is read from the files again, and priorities, durations, costs and
    hits, which are in no file, stay. The other database is locked until it is gone, so whoever has it open has either changed it
    before, or finds that it is gone.

    Parameters
    ----------
    directory
        Of both.
    other, kind
        The kind that goes, and the one that stays.
    rows
        Where to copy to; ``None``: what is of this kind is whole.

    Raises
    ------
    OSError
        If the other can't be read or removed now.
    """
    name, make = backend(other)
    is_copied = rows is not None and name == other and make.examine(directory / FILES[other]) is None
    if rows is not None and is_copied:
        _copy(directory, other, make, rows)
    else:
        remove(directory, other)
    lost = "" if is_copied or rows is None else ", but priorities, costs and hits are lost"
    log.warning(
        "the index %s is kept by %s now, and no longer by %s; it is rebuilt from the files%s. Processes that opened it with index=%r "
        "must open it again (without StoreConfig.index they use the kind that is there)",
        directory,
        kind,
        other,
        lost,
        other,
    )


def _copy(directory: Path, other: str, make: type[Rows], rows: Rows) -> None:
    try:
        with closing(make(directory)) as source, source.transact():
            with rows.transact():
                for name, value in _all(source):
                    if name != COMPLETE:
                        rows.insert(name, value)
            remove(directory, other)
    except make.errors as error:
        if isinstance(error, OSError):
            raise
        raise OSError(f"its {other} database can't be read ({error or 'it is locked'})") from error


def _all(source: Rows) -> Iterator[tuple[str, str]]:
    after = ""
    while page := source.scan(after, LAST, PAGE):
        yield from page
        after = page[-1][0]


def remove(directory: Path, kind: str) -> None:
    """Remove the database of a kind, with its journals; raises ``OSError``."""
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / (FILES[kind] + suffix))


def is_absence(error: Exception) -> bool:
    """Whether an error says that a file or a folder is gone."""
    name = getattr(error, "sqlite_errorname", "")
    return isinstance(error, FileNotFoundError) or name.startswith("SQLITE_CANTOPEN")


def inode(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; ``None`` if there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def move_aside(directory: Path) -> None:
    """Move the database and its journals out of the way; only the latest damaged one is kept."""
    aside = directory.with_name(directory.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(directory, aside)
