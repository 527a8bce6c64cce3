"""Files and folders of a store: made private, written whole or not at all, swept when their writer died."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvrag.errors import StoreError, StoreFormatError

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 60.0
STALE_S = 86_400.0
"""A file in ``tmp/`` that is older was left behind, whoever its writer was."""

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What file systems without hard links answer."""

sync_data = getattr(os, "fdatasync", os.fsync)


def publish(pieces: Sequence[memoryview], path: Path, *, tmp: Path) -> bool:
    """Write a new file that is complete and on the disk before it has its name; ``False`` if the name is taken already.

    Raises
    ------
    OSError
        If it can't be written; then nothing of it is left.
    """
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            write_all(fd, pieces)
            sync_data(fd)
        finally:
            os.close(fd)
        if _make_folder(path.parent):
            _sync_folder(path.parent.parent)
        return _name(tmp, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(tmp)


def write_all(fd: int, pieces: Sequence[memoryview]) -> None:
    """Write every byte: a write may take fewer than it was given, and says so only by its result."""
    for piece in pieces:
        view = piece
        while view:
            count = os.write(fd, view)
            if count <= 0:
                raise OSError(errno.EIO, "the disk takes no more bytes")
            view = view[count:]


def _name(tmp: Path, path: Path) -> bool:
    """Give a written file its name without replacing another one."""
    try:
        os.link(tmp, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # Replaces a file that another process named meanwhile, with the same content.
        os.rename(tmp, path)
    try:
        _sync_folder(path.parent)
    except OSError:
        # After a failed sync nobody knows what is on the disk.
        os.unlink(path)
        raise
    return True


def tmp_name(stem: str) -> str:
    """Name for a file in ``tmp/`` that says whose it is."""
    return f"{os.getpid()}.{_host()}.{stem}.{secrets.token_hex(6)}"


def sweep(folder: Path) -> None:
    """Remove the files of dead writers; a process id means something only on the host that gave it."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                pid, host = [*entry.name.split("."), "", ""][:2]
                is_dead = host == _host() and pid.isdecimal() and not _is_alive(int(pid))
                if is_dead or time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_S:
                    os.unlink(entry.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def unlink(path: Path) -> bool:
    """Remove a file and return whether it was there; ``OSError`` if it still is."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    with contextlib.suppress(FileNotFoundError):
        _sync_folder(path.parent)
    return True


def is_regular(path: Path) -> bool:
    """Whether a regular file is there; a link to one is none."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def inode(path: Path) -> tuple[int, int] | None:
    """Device and inode of what is there, or ``None``."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _make_folder(path: Path) -> bool:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    return True


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def prepare(root: Path, folders: Sequence[str]) -> None:
    """Make a store's folders, private to the user, and prove that they can be written to.

    Raises
    ------
    StoreError
        If they can't.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in folders:
            _make_folder(root / folder)
            probe = root / folder / tmp_name("probe")
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.unlink(probe)
    except OSError as error:
        raise StoreError(
            f"the store's directory {root} can't be used: {error.strerror or error}; "
            "choose a directory that can be written to"
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


def check_format(root: Path, version: int) -> None:
    """Read ``format.json``, or write it into a new store.

    Raises
    ------
    StoreFormatError
        If the store was written by a newer version.
    StoreError
        If the directory belongs to something else.
    """
    path = root / "format.json"
    try:
        found = json.loads(path.read_bytes()[:4096])
    except FileNotFoundError:
        found = None
    except (ValueError, RecursionError):
        log.warning("%s is damaged; it is written again", path)
        found = None
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror}; choose another directory") from error
    if found is None:
        return _write_format(path, version)
    known = found.get("version") if isinstance(found, dict) and found.get("format") == "kvrag" else None
    if type(known) is not int:
        raise StoreError(f"{path} is not that of a kvrag store; choose another directory")
    if known > version:
        raise StoreFormatError(
            f"the store {root} has format {known} and this kvrag reads up to {version}; "
            "upgrade kvrag or choose another directory"
        )
    if known < version:  # an older kvrag must not write into it any more
        log.warning("the store %s has format %s; its chunks are computed again in format %s", root, known, version)
        return _write_format(path, version)
    return None


def _write_format(path: Path, version: int) -> None:
    text = json.dumps({"format": "kvrag", "version": version}).encode()
    try:
        unlink(path)
        publish([memoryview(text)], path, tmp=path.parent / "tmp" / tmp_name("format"))
    except OSError as error:
        raise StoreError(
            f"{path} can't be written: {error.strerror}; choose another directory or free space"
        ) from error
