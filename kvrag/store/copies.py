"""Blobs that machines share, with copies on this one's disk."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from contextlib import suppress

from kvrag.store.base import Blobs, Bytes
from kvrag.store.blobs import FileBlobs
from kvrag.threads import renew_after_fork
from kvrag.types import ChunkKey


class CopiedBlobs:
    """Shared blobs; each that is read or written here is copied to a directory. The methods are those of :class:`kvrag.store.base.Blobs`.

    Parameters
    ----------
    shared, local
        Where blobs are, and where copies of them are kept. A fault of the disk costs copies, nothing else.
    max_bytes
        Budget of the copies, of which those not used for longest go first; ``None``: no limit.
    """

    def __init__(self, shared: Blobs, local: FileBlobs, max_bytes: int | None = None) -> None:
        self.shared, self.local, self._max_bytes = shared, local, max_bytes
        self._sizes = local.sizes()
        self._at_fork_reinit()
        renew_after_fork(self)

    def _at_fork_reinit(self) -> None:
        self._lock = threading.Lock()

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return bytes of the copy, which is made if there is none."""
        with suppress(OSError):
            if (data := self.local.read(key, start, length)) is not None:
                self._use(key)
                return data
        if (whole := self.shared.read(key)) is None:
            return None
        self._copy(key, whole)
        return memoryview(whole)[start : None if length is None else start + length]

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Write a shared blob, and its copy."""
        data = b"".join(parts)
        written = self.shared.write(key, [data])
        self._copy(key, data)
        return written

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Erase copies, and then the shared blobs."""
        self.forget(keys)
        return self.shared.delete(keys)

    def forget(self, keys: Collection[ChunkKey]) -> None:
        """Erase copies; raises ``OSError`` if one is still there."""
        self.local.delete(keys)
        with self._lock:
            for key in keys:
                self._sizes.pop(key, None)

    def keys(self) -> set[ChunkKey]:
        """Return the keys of the shared blobs."""
        return self.shared.keys()

    def close(self) -> None:
        """Release resources; idempotent."""
        self.shared.close()
        self.local.close()

    def _use(self, key: ChunkKey) -> None:
        with self._lock:
            if (size := self._sizes.pop(key, None)) is not None:
                self._sizes[key] = size

    def _copy(self, key: ChunkKey, data: Bytes) -> None:
        """Keep a copy, and let others go for it."""
        size = len(data)
        if self._max_bytes is not None and size > self._max_bytes:
            return
        with suppress(OSError):
            self.local.write(key, [data])
            with self._lock:
                self._sizes[key] = size
                left, going = sum(self._sizes.values()), list[ChunkKey]()
                for other in self._sizes if self._max_bytes is not None else ():
                    if left <= (self._max_bytes or 0):
                        break
                    going.append(other)
                    left -= self._sizes[other]
            self.forget(going)
