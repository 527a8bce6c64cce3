"""Files that are written whole or not at all.

A file has its name only when it is complete: a process that is killed leaves nothing that could be read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import socket
import stat
import sys
from collections.abc import Callable, Iterator

from kvrag.store.directory import FOLDER, Directory

YOUNG_S = 60.0
"""A file in ``tmp/`` that is younger may belong to a writer that has not locked it yet."""

GATHER_BYTES = 2**20
"""Smaller writes are gathered to at least this: a call costs as much as writing some ten kilobytes."""

VIEWS = 512
"""Most pieces of memory written at once; the kernel takes 1024."""

EARLY_BYTES = 2**21
"""Where the disk is waited for in the end, it begins with so many bytes while others are yet to come."""

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What file systems without hard links answer."""

sync_data = getattr(os, "fdatasync", os.fsync)


class Draft:
    """A file being written in ``tmp/``; a context manager. It is locked, so that a sweeper can see that its writer lives.

    Parameters
    ----------
    directory
        The store's.
    size
        Bytes that it will have.

    Raises
    ------
    OSError
        If it can't be made, for instance because there is no room for it.
    """

    def __init__(self, directory: Directory, size: int) -> None:
        self._directory = directory
        self._name = tmp_name()
        with directory.folder("tmp") as tmp:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._name, flags, 0o600, dir_fd=tmp)
            self._tmp = os.open(".", FOLDER, dir_fd=tmp)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if size and directory.allocates:
                allocate(self._fd, size)
        except BaseException:
            self.close()
            raise

    def write(self, view: memoryview, offset: int) -> None:
        """Write every byte: a write may take fewer than it was given, and says so only by its result."""
        while view:
            count = os.pwrite(self._fd, view, offset)
            if count <= 0:
                raise OSError(errno.EIO, "the disk takes no more bytes")
            view, offset = view[count:], offset + count

    def write_all(self, views: list[memoryview], offset: int) -> None:
        """Write what follows each other in the file with few calls; as :meth:`write`, every byte."""
        for some in _runs(views, EARLY_BYTES if self._directory.waits else sys.maxsize):
            start, count = offset, os.pwritev(self._fd, some, offset)
            for view in some:
                if count < len(view):
                    self.write(view[max(0, count) :], offset + max(0, count))
                count, offset = count - len(view), offset + len(view)
            if self._directory.waits and offset - start >= EARLY_BYTES:
                begin_writing(self._fd, start, offset - start)

    def sync(self) -> None:
        """Bring every byte to the disk, where the store is durable, so that :meth:`publish` has but the name to do."""
        if self._directory.durable:
            sync_data(self._fd)

    def publish(self, *place: str, is_synced: bool = True) -> bool:
        """Give the file its name, without replacing another one; ``False`` if the name is taken.

        Without ``is_synced``, its bytes were synced before and the folder is to be afterwards, by who can't wait for that here.

        Raises
        ------
        OSError
            If it can't be done; then the name isn't there.
        """
        if is_synced:
            self.sync()
        with self._directory.folder(*place[:-1], make=True) as parent:
            if not self._name_it(self._tmp, parent, place[-1]):
                return False
            try:
                if self._directory.durable and is_synced:
                    os.fsync(parent)
            except OSError:
                # After a failed sync nobody knows what is on the disk.
                os.unlink(place[-1], dir_fd=parent)
                raise
        return True

    def _name_it(self, tmp: int, parent: int, name: str) -> bool:
        try:
            os.link(self._name, name, src_dir_fd=tmp, dst_dir_fd=parent, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return self._rename(tmp, parent, name)
        return True

    def _rename(self, tmp: int, parent: int, name: str) -> bool:
        """Do the same where there are no hard links: claim the name with an empty file, and replace that."""
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent))
        except FileExistsError:
            if os.stat(name, dir_fd=parent, follow_symlinks=False).st_size:
                return False
        # An empty file is another writer's claim or what a dead one left: its bits would be as good as these.
        os.rename(self._name, name, src_dir_fd=tmp, dst_dir_fd=parent)
        return True

    def close(self) -> None:
        """Remove the name in ``tmp/``; what was published stays."""
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._tmp)
        os.close(self._tmp)
        os.close(self._fd)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _runs(views: list[memoryview], num_bytes: int) -> Iterator[list[memoryview]]:
    """Cut a list where so many bytes, or as many pieces as a call takes, are together."""
    run: list[memoryview] = []
    size = 0
    for view in views:
        run.append(view)
        size += len(view)
        if size >= num_bytes or len(run) == VIEWS:
            yield run
            run, size = [], 0
    if run:
        yield run


class Gather:
    """Collects small pieces that follow each other and makes large writes of them.

    Parameters
    ----------
    out
        Takes pieces and their offset. The bytes must stay as they are until then.
    offset
        Where the first piece goes.
    """

    def __init__(self, out: Callable[[list[memoryview], int], None], offset: int) -> None:
        self._out = out
        self._views: list[memoryview] = []
        self._start = self._end = offset

    def write(self, view: memoryview) -> None:
        """Take a piece; when there are enough of them, they are written."""
        self._views.append(view)
        self._end += len(view)
        if self._end - self._start >= GATHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is left; raises as ``out``."""
        views, self._views = self._views, []
        if views:
            self._out(views, self._start)
        self._start = self._end


def begin_writing(fd: int, offset: int, num_bytes: int) -> None:
    """Let the disk begin with part of a file, without waiting. Pages that have yet to be written stay in memory all the same."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is not None:
        with contextlib.suppress(OSError):  # a hint
            advise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def allocate(fd: int, size: int) -> None:
    """Reserve space, so that a full disk is known before anything is written; where it can't be, the writes tell."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
            raise


def tmp_name() -> str:
    """Name for a file in ``tmp/`` that says whose it is."""
    return f"{os.getpid()}.{_host()}.{secrets.token_hex(8)}"


def sweep(directory: Directory) -> int:
    """Remove the files of dead writers from ``tmp/`` and return how many: nobody holds the lock of such a file.

    Ages are compared with a file made now, so that a clock that jumps changes nothing.
    """
    swept = 0
    with contextlib.suppress(OSError), Draft(directory, 0) as probe, directory.folder("tmp") as tmp:
        now = os.fstat(probe._fd).st_ctime
        for name in os.listdir(tmp):
            with contextlib.suppress(OSError):
                swept += name != probe._name and _sweep_one(tmp, name, now)
    return swept


def _sweep_one(tmp: int, name: str, now: float) -> bool:
    pid, host = [*name.split("."), "", ""][:2]
    is_dead = host == _host() and pid.isdecimal() and not _is_alive(int(pid))
    status = os.stat(name, dir_fd=tmp, follow_symlinks=False)
    if not is_dead and now - status.st_ctime < YOUNG_S:
        return False
    if stat.S_ISREG(status.st_mode):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=tmp)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            if not is_dead:
                return False
        finally:
            os.close(fd)
    os.unlink(name, dir_fd=tmp)
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@functools.cache
def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def write_file(directory: Directory, content: bytes, *place: str) -> bool:
    """Write a small file whole; ``False`` if the name is taken. Raises ``OSError``."""
    with Draft(directory, len(content)) as draft:
        draft.write(memoryview(content), 0)
        return draft.publish(*place)
