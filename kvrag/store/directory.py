"""The directory of a store, reached without following a link.

Every path is opened component by component below the root, so nothing that is planted there leads out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class NotRegular(OSError):
    """Something stands where a regular file was expected."""


class Directory:
    """A store's directory.

    Parameters
    ----------
    root
        Its path; the root itself may be a link, nothing below it may.
    durable
        Whether files are on the disk before they have their names; otherwise a power cut may lose the latest ones,
        which are then damaged or missing and hence misses.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self.durable = durable
        self._allocates: bool | None = None

    def make(self) -> None:
        """Make the root, private, and what is absent above it; ``OSError`` if it can't be."""
        absent = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in absent if self.durable else ():
            # Otherwise a power cut may take the whole store. A folder that can't be read can't be synced.
            with contextlib.suppress(PermissionError):
                fd = os.open(folder.parent, FOLDER)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    @contextlib.contextmanager
    def folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """Open a folder below the root and give its descriptor; with ``make``, make what is absent, private.

        Raises
        ------
        OSError
            If it is absent, a link, or no folder.
        """
        fd = os.open(self.root, FOLDER)
        try:
            for name in names:
                inner = self._enter(fd, name, make=make)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _enter(self, parent: int, name: str, *, make: bool) -> int:
        try:
            return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        if self.durable:
            os.fsync(parent)
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=parent)

    def status(self, *place: str) -> os.stat_result | None:
        """Status of what is there, a link's own for a link; ``None`` if nothing is or it can't be reached."""
        try:
            with self.folder(*place[:-1]) as parent:
                return os.stat(place[-1], dir_fd=parent, follow_symlinks=False)
        except OSError:
            return None

    def is_file(self, *place: str) -> bool:
        """Whether a regular file is there; a link to one is none."""
        status = self.status(*place)
        return status is not None and stat.S_ISREG(status.st_mode)

    def inode(self, *place: str) -> tuple[int, int] | None:
        """Device and inode of what is there, or ``None``."""
        status = self.status(*place)
        return None if status is None else (status.st_dev, status.st_ino)

    def open(self, *place: str) -> tuple[int, os.stat_result]:
        """Open a regular file for reading: its descriptor and status.

        Raises
        ------
        NotRegular
            If something else is there. Links are not followed, and no FIFO's writer is waited for.
        OSError
            If nothing is there, or it can't be opened.
        """
        try:
            with self.folder(*place[:-1]) as parent:
                # Before the open, because opening a device may do something.
                if not stat.S_ISREG(os.stat(place[-1], dir_fd=parent, follow_symlinks=False).st_mode):
                    raise NotRegular(errno.EINVAL, "it is not a regular file")
                fd = os.open(place[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise NotRegular(errno.EINVAL, "it is not a regular file") from None
            raise
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise NotRegular(errno.EINVAL, "it is not a regular file")
        return fd, status

    def read(self, *place: str, limit: int) -> bytes:
        """Return the content of a small regular file; ``OSError`` as :meth:`open`, or if it is longer than ``limit``."""
        fd, status = self.open(*place)
        with os.fdopen(fd, "rb") as file:
            if status.st_size > limit:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            return file.read(limit)

    def names(self, *folder: str) -> list[str]:
        """Names in a folder; none if it is absent or can't be read."""
        try:
            with self.folder(*folder) as fd:
                return os.listdir(fd)
        except OSError:
            return []

    def unlink(self, *place: str) -> bool:
        """Remove a file and return whether it was there; ``OSError`` if it still is."""
        try:
            with self.folder(*place[:-1]) as parent:
                os.unlink(place[-1], dir_fd=parent)
                if self.durable:
                    os.fsync(parent)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def sync(self, *folder: str) -> None:
        """Bring the names in a folder to the disk, where the store is durable. Raises ``OSError``."""
        if self.durable:
            with self.folder(*folder) as fd:
                os.fsync(fd)

    def move(self, source: tuple[str, ...], target: tuple[str, ...]) -> None:
        """Give a file, or whatever is there, another name, replacing a file of that name."""
        with self.folder(*source[:-1]) as old, self.folder(*target[:-1], make=True) as new:
            if (inode := self.inode(*source)) is not None and inode == self.inode(*target):
                os.unlink(
                    source[-1], dir_fd=old
                )  # both are names of one file: renaming would do nothing, and say nothing
            else:
                os.replace(source[-1], target[-1], src_dir_fd=old, dst_dir_fd=new)

    def free_bytes(self) -> int:
        """Bytes that this user may still write on the file system."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    @property
    def waits(self) -> bool:
        """Whether a file is published when a disk has it."""
        return self.durable and self.allocates

    @property
    def allocates(self) -> bool:
        """Whether space is reserved before a file is written. In memory that would write every page twice."""
        if self._allocates is None:
            self._allocates = file_system(self.root) not in IN_MEMORY
        return self._allocates


def file_system(path: Path) -> str:
    """Type of the file system that holds ``path``, such as ``"ext4"``; empty where the kernel doesn't say."""
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return ""
