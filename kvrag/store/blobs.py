"""Blobs in a directory, and blobs in memory.

A file is ``objects/<key[:2]>/<key>.safetensors`` below the store's root, private, and reached without following a link. It is written to
``tmp/``, synced and then linked to its name, so a name always stands for a whole file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrag.store.base import Bytes, LateHead
from kvrag.types import ChunkKey

KEY = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".safetensors"
OBJECTS, TMP = "objects", "tmp"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
ABSENT = (FileNotFoundError, NotADirectoryError)
YOUNG_S = 60.0  # files in tmp/ that are younger are left to their writers


class FileBlobs:
    """Blobs as files of a directory, which processes may share; the methods are those of :class:`kvrag.store.base.Blobs`.

    Parameters
    ----------
    root
        The store's directory; made, with mode 0700, at the first write.
    durable
        Whether a blob that was written survives a power cut.
    """

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.root, self._durable, self._buffers = Path(root), durable, Buffers()

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return bytes of a file, none of what is no regular file."""
        try:
            with self._folder(OBJECTS, key[:2]) as folder:
                fd = os.open(key + SUFFIX, FILE, dir_fd=folder)
        except ABSENT:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a FIFO
                return b""
            raise
        try:
            status = os.fstat(fd)
            size = max(0, status.st_size - start) if stat.S_ISREG(status.st_mode) else 0
            view, done = self._buffers.take(size if length is None else min(size, length)), 0
            while done < len(view) and (count := os.preadv(fd, [view[done:]], start + done)):
                done += count
            return view[:done]
        finally:
            os.close(fd)

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Write a file and give it its name, unless that is taken."""
        with self._folder(OBJECTS, key[:2], make=True) as folder:
            with suppress(FileNotFoundError):
                os.stat(key + SUFFIX, dir_fd=folder, follow_symlinks=False)
                return 0
            with self._draft() as (tmp, name, fd):
                written = _write(fd, parts)
                if self._durable:
                    os.fdatasync(fd)
                if not _name(tmp, name, folder, key + SUFFIX):
                    return 0
            try:
                self._sync(folder)
            except OSError:  # after a failed sync nobody knows what is on the disk
                os.unlink(key + SUFFIX, dir_fd=folder)
                raise
        return written

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Remove files."""
        gone = set()
        for key in keys:
            with suppress(*ABSENT), self._folder(OBJECTS, key[:2]) as folder:
                os.unlink(key + SUFFIX, dir_fd=folder)
                gone.add(key)
                self._sync(folder)
        return gone

    def keys(self) -> set[ChunkKey]:
        """Return the keys of all files that have the name of a blob, whatever they are."""
        found = set[ChunkKey]()
        for shard in self._names(OBJECTS):
            names = (name.removesuffix(SUFFIX) for name in self._names(OBJECTS, shard) if name.endswith(SUFFIX))
            found.update(ChunkKey(key) for key in names if KEY.fullmatch(key) and key[:2] == shard)
        return found

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def free_bytes(self) -> int:
        """Bytes that this user may still write on the file system; raises ``OSError``."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def sweep(self) -> int:
        """Remove what dead writers left in ``tmp/``, and return how many files that was. A writer holds the lock of its file."""
        swept = 0
        with suppress(OSError), self._folder(TMP) as tmp:
            for name in os.listdir(tmp):
                with suppress(OSError):
                    swept += _sweep(tmp, name)
        return swept

    @contextmanager
    def _folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """Open a folder below the root, one component after the other; with ``make``, make what is absent, private."""
        if make:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.root, FOLDER)
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=fd)
                        self._sync(fd)
                inner = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _names(self, *names: str) -> list[str]:
        """Names in a folder; none if it can't be read."""
        with suppress(OSError), self._folder(*names) as folder:
            return os.listdir(folder)
        return []

    def _sync(self, folder: int) -> None:
        if self._durable:
            os.fsync(folder)

    @contextmanager
    def _draft(self) -> Iterator[tuple[int, str, int]]:
        """Make a locked file in ``tmp/``, and remove that name afterwards."""
        with self._folder(TMP, make=True) as tmp:
            name = secrets.token_hex(16)
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=tmp)
            try:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield tmp, name, fd
            finally:
                with suppress(OSError):
                    os.unlink(name, dir_fd=tmp)
                os.close(fd)


class MemoryBlobs:
    """Blobs in the memory of this process; the methods are those of :class:`kvrag.store.base.Blobs`."""

    def __init__(self) -> None:
        self._blobs: dict[ChunkKey, memoryview] = {}
        self._buffers = Buffers()

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return a view of a blob."""
        blob = self._blobs.get(key)
        return None if blob is None else blob[start : None if length is None else start + length]

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Keep a copy of the parts."""
        if key in self._blobs:
            return 0
        parts, end = list(parts), 0
        blob = self._buffers.take(sum(map(len, parts)))
        for part in parts:
            blob[end : (end := end + len(part))] = part
        return len(blob) if self._blobs.setdefault(key, blob) is blob else 0

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Forget blobs."""
        return {key for key in keys if self._blobs.pop(key, None) is not None}

    def keys(self) -> set[ChunkKey]:
        """Return all keys."""
        return set(self._blobs)

    def close(self) -> None:
        """Forget everything."""
        self._blobs.clear()


def _name(tmp: int, name: str, folder: int, final: str) -> bool:
    """Give a file its name, without replacing another one; whether it has it."""
    try:
        os.link(name, final, src_dir_fd=tmp, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:  # a file system without hard links
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        os.rename(name, final, src_dir_fd=tmp, dst_dir_fd=folder)
    return True


def _write(fd: int, parts: Iterable[Bytes]) -> int:
    """Write all parts, a late first one last, and return where they end."""
    if not isinstance(parts, LateHead):
        return _write_at(fd, 0, parts)
    end = _write_at(fd, parts.head_bytes, parts.body())
    _write_at(fd, 0, [parts.head()])
    return end


def _write_at(fd: int, start: int, parts: Iterable[Bytes]) -> int:
    """Write parts one after the other from an offset on, and return where they end; a call may write less than asked for."""
    for part in parts:
        view = memoryview(part)
        while view:
            count = os.pwrite(fd, view, start)
            start, view = start + count, view[count:]
    return start


def _sweep(tmp: int, name: str) -> bool:
    """Remove a file of ``tmp/``, unless it may have a writer."""
    status = os.stat(name, dir_fd=tmp, follow_symlinks=False)
    if abs(time.time() - status.st_ctime) < YOUNG_S:
        return False
    if stat.S_ISREG(status.st_mode):
        fd = os.open(name, FILE, dir_fd=tmp)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
    os.unlink(name, dir_fd=tmp)
    return True


class Buffers:
    """Memory for blobs, used again when nobody uses it any more: a fresh page costs as much as reading it.

    On machines with CUDA the memory is pinned, so that copies to the device need no staging.
    """

    IDLE_BYTES = 256 * 2**20
    """Most memory kept for reuse."""
    MIN_BYTES = 64 * 1024

    def __init__(self) -> None:
        # By size. No lock: a buffer may come back at any moment, in a thread that holds any lock, or in a forked child.
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._lent: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}
        self._pinned = torch.cuda.is_available()

    def take(self, num_bytes: int) -> memoryview:
        """Return so many writable bytes, not initialised; raises ``OSError``."""
        try:
            if num_bytes < self.MIN_BYTES:
                return np.empty(num_bytes, np.uint8).data
            step = max(4096, 2 ** (num_bytes.bit_length() - 1) // 16)  # chunks of similar length share buffers
            size = -(-num_bytes // step) * step
            idle = self._idle.get(size)
            owner = idle.pop() if idle else torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        except (MemoryError, RuntimeError):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
        array = owner.numpy()
        end = weakref.ref(array, self._come_back)  # views of the array keep it alive
        self._lent[id(end)] = end, owner
        return array.data[:num_bytes]

    def _come_back(self, end: weakref.ref[Any]) -> None:
        owner = self._lent.pop(id(end))[1]
        idle = sum(size * len(buffers) for size, buffers in list(self._idle.items()))
        if idle + owner.numel() <= self.IDLE_BYTES:
            self._idle.setdefault(owner.numel(), []).append(owner)
