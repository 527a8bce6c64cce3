"""Blobs in a directory.

A blob is the file ``objects/<key[:2]>/<key>.safetensors`` below the store's root. It is private,
and opened without following links. It is written to ``tmp/``, synced and then linked to its name,
so a name always stands for a complete file.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path

from kvrag.kv.buffers import BUFFERS
from kvrag.kv.format import Bytes, Encoded
from kvrag.store.base import Blobs
from kvrag.types import ChunkKey, StrPath

log = logging.getLogger(__name__)

KEY = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".safetensors"
OBJECTS = "objects"
TMP = "tmp"
ABSENT = (FileNotFoundError, NotADirectoryError)
ABANDONED_S = 3600.0  # files in tmp/ that did not change for so long have no writer
NO_SYNC = errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS  # errors of file systems without syncs
MAX_VIEWS = 512  # written with a single call; the kernel takes twice as many


class FileBlobs(Blobs):
    """Blobs as files of a directory that processes may share; see :class:`kvrag.store.base.Blobs`.

    Parameters
    ----------
    root
        Directory of the store; created, with mode 0700, at the first write.
    durable
        Whether a written blob survives a power cut.
    """

    medium = "disk"

    def __init__(self, root: StrPath, *, durable: bool = True) -> None:
        self.root = Path(root)
        self._durable = durable

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return bytes of a file; empty if it is not a regular file."""
        try:
            with self._shard(key) as folder:
                # Opening a pipe would wait for its writer, were it not for O_NONBLOCK.
                fd = os.open(key + SUFFIX, os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except ABSENT:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
                # Empty bytes are rejected as damaged, and erased; an absent blob would stay.
                return b""
            raise
        try:
            status = os.fstat(fd)
            size = 0
            if stat.S_ISREG(status.st_mode):
                size = max(0, status.st_size - start)
            if length is not None:
                size = min(size, length)
            view = BUFFERS.take(size)
            done = 0
            # A read returns at most 2 GiB, and fewer bytes if the file was cut meanwhile.
            while done < len(view) and (count := os.preadv(fd, [view[done:]], start + done)):
                done += count
            return view[:done]
        except MemoryError as error:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
        finally:
            os.close(fd)

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Write a file and link it to its name, unless the name exists."""
        draft = secrets.token_hex(16)
        final = key + SUFFIX
        with self._shard(key, make=True) as folder, self._folder(TMP, make=True) as tmp:
            if os.access(final, os.F_OK, dir_fd=folder, follow_symlinks=False):
                return 0
            try:
                with open(
                    draft,
                    "xb",
                    0,
                    opener=lambda name, flags: os.open(name, flags, 0o600, dir_fd=tmp),
                ) as file:
                    written = _write(file.fileno(), parts, is_synced=self._durable)
                    if self._durable:
                        # Before the file gets its name: after a power cut, a name must stand for
                        # whole data.
                        _sync_data(file.fileno())
                try:
                    # A link fails where a rename would replace the file of another writer.
                    os.link(draft, final, src_dir_fd=tmp, dst_dir_fd=folder, follow_symlinks=False)
                except FileExistsError:
                    return 0
                except OSError:  # file systems without hard links have many errors for it
                    os.rename(draft, final, src_dir_fd=tmp, dst_dir_fd=folder)
            finally:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=tmp)
            # The name survives a power cut once its directory is synced.
            self._sync(folder)
        return written

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Remove files, and empty directories with a blob's name."""
        gone = set()
        for key in keys:
            with suppress(*ABSENT, IsADirectoryError), self._shard(key) as folder:
                with suppress(OSError):
                    # A directory that anyone may have put there; unlink() would refuse it.
                    os.rmdir(key + SUFFIX, dir_fd=folder)
                os.unlink(key + SUFFIX, dir_fd=folder)
                gone.add(key)
                self._sync(folder)
        return gone

    def keys(self) -> set[ChunkKey]:
        """Return the keys of all files named like a blob, of any file type; raises ``OSError``."""
        found = set[ChunkKey]()
        for shard in self._names(OBJECTS):
            names = (
                name.removesuffix(SUFFIX)
                for name in self._names(OBJECTS, shard)
                if name.endswith(SUFFIX)
            )
            # A file in another directory than its key's is never found by its key.
            found.update(ChunkKey(key) for key in names if KEY.fullmatch(key) and key[:2] == shard)
        return found

    def sizes(self) -> dict[ChunkKey, int]:
        """Return the sizes of all files in bytes, oldest write first."""
        found = list[tuple[float, ChunkKey, int]]()
        for key in self.keys():
            with suppress(OSError), self._shard(key) as folder:
                status = os.stat(key + SUFFIX, dir_fd=folder, follow_symlinks=False)
                found.append((status.st_mtime, key, status.st_size))
        return {key: size for _, key, size in sorted(found)}

    def close(self) -> None:
        """Do nothing: files are not kept open."""

    def free_bytes(self) -> int:
        """Return the bytes that this user may still write on the disk; raises ``OSError``."""
        return shutil.disk_usage(self.root).free

    def sweep(self) -> int:
        """Remove files that dead writers left in ``tmp/``, and return their number."""
        swept = 0
        with suppress(OSError), self._folder(TMP) as tmp:
            for name in os.listdir(tmp):
                with suppress(OSError):
                    if (
                        # By ctime, which no copy sets; abs() because the clock may have been set
                        # back.
                        abs(time.time() - os.stat(name, dir_fd=tmp, follow_symlinks=False).st_ctime)
                        > ABANDONED_S
                    ):
                        os.unlink(name, dir_fd=tmp)
                        swept += 1
        return swept

    def _shard(self, key: ChunkKey, *, make: bool = False) -> AbstractContextManager[int]:
        """Open the shard directory of a key.

        Raises ``FileNotFoundError`` for a malformed key, which could be the path of any file.
        """
        if not KEY.fullmatch(key):
            raise FileNotFoundError(errno.ENOENT, "it is no key of a blob", key)
        return self._folder(OBJECTS, key[:2], make=make)

    @contextmanager
    def _folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """Open a directory below the root, component by component.

        With ``make``, missing directories are created, private.
        """
        if make:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The root alone may be a link: the user has named it.
        fd = os.open(self.root, os.O_DIRECTORY)
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=fd)
                        self._sync(fd)
                inner = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _names(self, *names: str) -> list[str]:
        """Return the names in a directory; empty if the directory is missing."""
        with suppress(*ABSENT), self._folder(*names) as folder:
            return os.listdir(folder)
        return []

    def _sync(self, folder: int) -> None:
        if self._durable:
            sync_names(folder)


def sync_names(folder: int) -> None:
    """Sync an open directory, if its file system can: a name that is lost costs computing time."""
    try:
        os.fsync(folder)
    except OSError as error:
        _warn_of_sync("directories", str(error))


def _sync_data(fd: int) -> None:
    """Sync a file, if its file system can; raises ``OSError`` if the data may be lost."""
    try:
        getattr(os, "fdatasync", os.fsync)(fd)  # macOS has no fdatasync
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
        _warn_of_sync("files", str(error))


@cache
def _warn_of_sync(kind: str, fault: str) -> None:
    log.warning(
        "the file system of the KV store can't sync %s (%s): a power cut may lose the latest "
        "chunks, which are then computed again; use a local disk, or durability='cache'",
        kind,
        fault,
    )


def _write(fd: int, parts: Iterable[Bytes], *, is_synced: bool) -> int:
    """Write parts in order and return their number of bytes.

    The head of :class:`Encoded` is known last and written last. With ``is_synced``, the disk begins
    to write while later parts are made.
    """
    if not isinstance(parts, Encoded):
        return _put(fd, map(memoryview, parts), 0)
    end = parts.head_bytes
    for views in parts.body():
        start = end
        end = _put(fd, views, end)
        if is_synced and hasattr(os, "posix_fadvise"):  # starts writing; dirty pages stay in memory
            os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
    _put(fd, [memoryview(parts.head())], 0)
    return end


def _put(fd: int, views: Iterable[memoryview], start: int) -> int:
    """Write views from an offset on, with few calls, and return the end."""
    left = deque(views)
    while left:
        # The kernel may write less than it is given.
        count = os.pwritev(fd, [*islice(left, MAX_VIEWS)], start)
        start += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]
    return start
