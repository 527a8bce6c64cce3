"""Open a store's directory: folders, format, leftovers of the dead, and an index that knows what is there."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import FORMAT_VERSION
from kvrag.store import files, recovery
from kvrag.store.batch_index import BatchIndex
from kvrag.store.claims import is_alive
from kvrag.store.directory import Directory
from kvrag.store.draft import sweep, write_file
from kvrag.store.guard import Guard
from kvrag.store.index import DiskIndex
from kvrag.store.index_kinds import COMPLETE, FILES
from kvrag.store.keys import Keys
from kvrag.store.memory_index import MemoryIndex
from kvrag.store.objects import OBJECTS, QUARANTINE, Objects, Rejected
from kvrag.store.privacy import make_private
from kvrag.store.references import FOLDER as REFERENCES
from kvrag.store.references import References
from kvrag.store.row_seal import RowSeal, folder_of, load_rows
from kvrag.store.sqlite import warn_without_diskcache

log = logging.getLogger(__name__)

FOLDERS = (OBJECTS, REFERENCES, "tmp", QUARANTINE)
LOCK_FILE, BALLAST = "lock", "ballast"

BALLAST_BYTES = 2**20
"""Enough for the rows that an erasure changes."""

BALLAST_SHARE = 64
"""No ballast where it would take more than this part of what is free."""

UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Opened:
    """Parts of an open store."""

    objects: Objects
    references: References
    index: DiskIndex | MemoryIndex
    read_only: bool


@dataclass(frozen=True, slots=True)
class Seals:
    """What protects blobs, and what encrypts rows and references."""

    guard: Guard | None
    rows: RowSeal | None


def open_directory(directory: Directory, config: StoreConfig, rejected: Rejected, keys: Keys) -> Opened:
    """Open or make a store; raises as :class:`~kvrag.store.disk.DiskStore`."""
    seals = Seals(Guard.of(keys), RowSeal.of(keys))
    opened = _open(directory, config, rejected, seals)
    if opened.objects.foreign:
        log.warning(
            "%s chunk(s) in %s are protected by other keys than those that it was opened with, or by none; they are left alone",
            len(opened.objects.foreign),
            directory.root,
        )
    return opened


def _open(directory: Directory, config: StoreConfig, rejected: Rejected, seals: Seals) -> Opened:
    if not config.read_only:
        try:
            files.prepare(directory, FOLDERS)
        except StoreError as error:
            cause = error.__cause__
            is_unwritable = isinstance(cause, OSError) and cause.errno in UNWRITABLE
            if not (is_unwritable and directory.is_file(files.FORMAT_FILE)):
                raise
            log.warning("%s can't be written to (%s); it is open for reading only", directory.root, cause)
        else:
            return _open_for_writing(directory, config, rejected, seals)
    if not directory.is_file(files.FORMAT_FILE):
        raise StoreError(f"{directory.root} is no store, or can't be read; choose the directory of one to read from it")
    files.check_format(directory, FORMAT_VERSION, write=False)
    objects = Objects(directory, rejected, read_only=True, guard=seals.guard)
    references = References(directory, seals.rows)
    return Opened(objects, references, _read_index(directory, objects, references, seals.rows), read_only=True)


def _open_for_writing(directory: Directory, config: StoreConfig, rejected: Rejected, seals: Seals) -> Opened:
    objects = Objects(directory, rejected, guard=seals.guard)
    references = References(directory, seals.rows)
    with files.locked(directory.root / LOCK_FILE):
        files.check_format(directory, FORMAT_VERSION)
        sweep(directory)
        make_private(directory)
        index = BatchIndex(directory.root / folder_of(seals.rows), None, seals.rows)
        index.make_room = lambda: give_up_ballast(directory)
        index.recover = _refuse  # the lock is held here
        recovery.finish_erasures(index, objects, references)
        recovery.reconcile(index, objects, references, partial(is_alive, directory))
        lay_ballast(directory)
    index.recover = partial(_recover, directory, index, objects, references)
    return Opened(objects, references, index, read_only=False)


def _refuse(_: Callable[[], None]) -> None:
    raise OSError("it was replaced or deleted while the store was opened")


def _recover(
    directory: Directory, index: DiskIndex, objects: Objects, references: References, reopen: Callable[[], None]
) -> None:
    """Open the index that is there now, after another process's work or an accident, and rebuild it if nobody has; as at the opening.

    Raises
    ------
    OSError
        If the store itself is gone, perhaps only for now: it is not made again. Or if it can't be done.
    """
    with directory.folder(OBJECTS):
        pass
    files.check_format(directory, FORMAT_VERSION, write=False)
    with files.locked(directory.root / LOCK_FILE):
        reopen()
        if index.stale:
            log.warning("the index of %s was deleted or replaced under this process; it is rebuilt", directory.root)
            recovery.finish_erasures(index, objects, references)
            recovery.reconcile(index, objects, references, partial(is_alive, directory))


def lay_ballast(directory: Directory) -> None:
    """Occupy a little space that can be given up, if there is plenty."""
    with suppress(OSError):
        if not directory.is_file(BALLAST) and directory.free_bytes() > BALLAST_SHARE * BALLAST_BYTES:
            write_file(directory, b"\1" * BALLAST_BYTES, BALLAST)


def give_up_ballast(directory: Directory) -> bool:
    """Free the ballast; whether there was one."""
    try:
        return directory.unlink(BALLAST)
    except OSError:
        return False


def _read_index(directory: Directory, objects: Objects, references: References, seal: RowSeal | None) -> MemoryIndex:
    """Make an index in memory: from the database if it is sound and complete, otherwise from the files themselves."""
    index = MemoryIndex()
    for kind, file in FILES.items():
        rows = _read_rows(directory, kind, file, seal)
        if any(name == COMPLETE for name, _ in rows):
            index.load(rows)
            return index
    for header in recovery.headers(objects, sorted(objects.keys(), key=objects.age)):
        index.add(header.record(), doc_id=None)
    for name in references.names():
        reference = references.read(name)
        if reference is not None:
            recovery.add_reference(index, reference)
    return index


def _read_rows(directory: Directory, kind: str, file: str, seal: RowSeal | None) -> list[tuple[str, Any]]:
    """Read a whole database that nobody changes; nothing if it is damaged, absent or was not closed."""
    folder = folder_of(seal)
    journal = directory.status(folder, f"{file}-wal")
    if not directory.is_file(folder, file) or (journal is not None and journal.st_size):
        return []
    try:
        return list(load_rows(_all_rows(directory.root / folder / file, kind), seal))
    except ImportError:
        warn_without_diskcache()
        return []
    except (sqlite3.Error, OSError):
        return []


def _all_rows(path: Path, kind: str) -> list[tuple[str, str]]:
    if kind == "sqlite":
        from kvrag.store import sqlite as rows
    else:
        from kvrag.store import cache as rows  # type: ignore[no-redef]
    from kvrag.store.connect import connect

    with closing(connect(path, read_only=True)) as database:
        ((verdict,),) = database.execute("PRAGMA quick_check(1)").fetchall()
        if verdict != "ok" or rows.fault_of(database) is not None:
            return []
        return list(database.execute(rows.SCAN, ("", "\U0010ffff", -1)).fetchall())
