"""Opening a store's directory: folders made private, one process at a time, no format but ours."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvrag.errors import StoreError, StoreFormatError
from kvrag.store.directory import Directory
from kvrag.store.draft import Draft, write_file

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 60.0
FORMAT_FILE = "format.json"


def prepare(directory: Directory, folders: Sequence[str]) -> None:
    """Make a store's folders, private to the user, and prove that they can be written to.

    Raises
    ------
    StoreError
        If they can't; its cause is the ``OSError``.
    """
    try:
        directory.make()
        for folder in folders:
            with directory.folder(folder, make=True):
                pass
        Draft(directory, 0).close()
    except OSError as error:
        raise StoreError(
            f"the store's directory {directory.root} can't be used: {error.strerror or error}; "
            "choose a directory that can be written to, whose folders are no links"
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes, where the file system has locks.

    Raises
    ------
    StoreError
        If another process holds it for too long.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(f"{path} can't be opened: {error.strerror}; remove it or choose another directory") from error
    try:
        _lock(fd, path)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has held {path} for {LOCK_TIMEOUT_S:g} s; "
                    "it may be rebuilding the index, try again later"
                ) from None
            time.sleep(0.01)
        except OSError as error:
            log.warning("%s can't be locked (%s); don't open the store from several processes at once", path, error)
            return None


def check_format(directory: Directory, version: int, *, write: bool = True) -> None:
    """Read ``format.json``, or write it into a new store; an older store gets the number of this version.

    Raises
    ------
    StoreFormatError
        If the store was written by a newer version.
    StoreError
        If the directory belongs to something else.
    """
    path = directory.root / FORMAT_FILE
    try:
        found = json.loads(directory.read(FORMAT_FILE, limit=4096))
    except FileNotFoundError:
        found = None
    except (ValueError, RecursionError):
        log.warning("%s is damaged; it is written again", path)
        found = None
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror or error}; choose another directory") from error
    if found is not None:
        known = found.get("version") if isinstance(found, dict) and found.get("format") == "kvrag" else None
        if not isinstance(known, int):
            raise StoreError(f"{path} is not that of a kvrag store; choose another directory")
        if known > version:
            raise StoreFormatError(
                f"the store {directory.root} has format {known} and this kvrag reads up to {version}; "
                "upgrade kvrag or choose another directory"
            )
        if known < version:
            log.warning("%s has format %s; its chunks are computed again, kvrag gc removes the old ones", path, known)
    if write and (found is None or found["version"] < version):
        _write_format(directory, version)


def _write_format(directory: Directory, version: int) -> None:
    try:
        directory.unlink(FORMAT_FILE)
        write_file(directory, json.dumps({"format": "kvrag", "version": version}).encode(), FORMAT_FILE)
    except OSError as error:
        raise StoreError(
            f"{directory.root / FORMAT_FILE} can't be written: {error.strerror}; choose another directory or free space"
        ) from error
