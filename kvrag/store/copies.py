"""Copies, in a directory of this machine, of blobs that machines share."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import suppress

from kvrag.store.base import Blobs, Bytes
from kvrag.store.blobs import FileBlobs
from kvrag.store.worth import Budget, Evictor, Sized, Usage
from kvrag.threads import fork_lock
from kvrag.types import ChunkKey

LISTINGS = 16  # times that the directory is looked through while the whole budget is copied
FULL_S = 10.0  # without copies after one that found no room


class CopiedBlobs:
    """Shared blobs; each that is read or written here is copied to a directory. The methods are those of :class:`kvrag.store.base.Blobs`.

    Parameters
    ----------
    shared, local
        Where blobs are, and where copies of them are kept. A fault of the disk costs copies, nothing else.
    budget
        Of the copies of all processes. Those that this one has not used for longest go first; for what finds no room there is no copy.
    """

    def __init__(self, shared: Blobs, local: FileBlobs, budget: Budget) -> None:
        self.shared, self.local, self._sizes = shared, local, local.sizes()
        self._room = Evictor(budget, self._totals, self._usages, local.free_bytes, self.forget)
        self._unlisted, self._full_until, self._lock = 0, 0.0, fork_lock()
        # The first: bytes that were copied since the directory was looked through.

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
        if written := self.shared.write(key, [data]):  # what is there already may be something else
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

    def expire(self, key: ChunkKey, seconds: float) -> None:
        """Let a shared blob go after a time, where there is such a thing."""
        getattr(self.shared, "expire", lambda *_: None)(key, seconds)

    def close(self) -> None:
        """Release resources; idempotent."""
        self.shared.close()

    def _use(self, key: ChunkKey) -> None:
        with self._lock:
            self._sizes[key] = self._sizes.pop(
                key, 0
            )  # of another process's, its size is known at the next look

    def _copy(self, key: ChunkKey, data: Bytes) -> None:
        """Keep a copy, for which others go; none for a while where there was no room."""
        if (
            len(data) > (self._room.budget.max_bytes or 2**62)
            or time.monotonic() < self._full_until
        ):
            return
        try:
            self._room.make_room(len(data), priority=100)
            self.local.write(key, [data])
        except OSError:
            self._full_until = time.monotonic() + FULL_S
            return
        with self._lock:
            self._sizes[key] = len(data)
            self._unlisted += len(data)

    def _totals(self) -> tuple[int, int]:
        if self._unlisted > (self._room.budget.max_bytes or 2**62) // LISTINGS:
            self._usages()
        with self._lock:
            return len(self._sizes), sum(self._sizes.values())

    def _usages(self) -> tuple[int, list[Sized]]:
        """Return all copies, also those of other processes, which count as used before this one's."""
        with self._lock:
            there = self.local.sizes()
            mine = {key: there.pop(key) for key in self._sizes if key in there}
            self._sizes, self._unlisted = there | mine, 0
            return 0, [
                Sized(each, 0, size, Usage(last=n))
                for n, (each, size) in enumerate(self._sizes.items())
            ]
