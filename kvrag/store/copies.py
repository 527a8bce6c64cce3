"""Local copies, in a directory, of blobs that machines share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from kvrag.kv.format import Bytes
from kvrag.store.base import Blobs
from kvrag.store.blobs import FileBlobs
from kvrag.store.eviction import Budget, Evictor, Sized, Usage
from kvrag.types import ChunkKey

LISTINGS = 16  # listings of the directory while bytes for the whole budget are copied
FULL_S = 10.0  # seconds without copies after a copy found no room


class CachedBlobs(Blobs):
    """Shared blobs, copied to a directory when they are read or written here.

    The methods are as in :class:`kvrag.store.base.Blobs`.

    Parameters
    ----------
    shared, local
        The shared blobs, and the directory of their copies. A fault of the disk costs copies,
        nothing else.
    budget
        Limits of the copies of all processes. The copies that this process has not used for longest
        are evicted first; a blob that finds no room is not copied.
    """

    shared: Blobs

    def __init__(self, shared: Blobs, local: FileBlobs, budget: Budget) -> None:
        self.shared = shared
        self.local = local
        self._most = budget.max_bytes or 2**62
        self._sizes = local.sizes()
        self._room = Evictor(budget, self._totals, self._usages, local.free_bytes, self.forget)
        # _unlisted: bytes that were copied since the directory was listed.
        self._unlisted = 0
        self._full_until = 0.0
        self._lock = threading.RLock()

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return bytes of the copy, which is made if it is missing."""
        with suppress(OSError):
            data = self.local.read(key, start, length)
            if data is not None:
                self._use(key)
                return data
        # All of it, whatever part is wanted, because the copy must be whole.
        whole = self.shared.read(key)
        if whole is None:
            return None
        self._copy(key, whole)
        return memoryview(whole)[start:][:length]

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Write a shared blob and its copy."""
        data = b"".join(parts)
        if written := self.shared.write(key, [data]):  # an existing blob may have other bytes
            self._copy(key, data)
        return written

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Erase copies, then the shared blobs."""
        # In this order: a copy of an erased blob would still be read.
        self.forget(keys)
        return self.shared.delete(keys)

    def forget(self, keys: Collection[ChunkKey]) -> None:
        """Erase copies; raises ``OSError`` if a copy still exists."""
        self.local.delete(keys)
        with self._lock:
            for key in keys:
                self._sizes.pop(key, None)

    def follow(self, absent: Callable[[Collection[ChunkKey]], set[ChunkKey]]) -> None:
        """Erase the copies whose keys ``absent`` returns; on a fault they stay until the next."""
        with suppress(OSError):
            self.forget(absent(list(self._sizes)))

    def keys(self) -> set[ChunkKey]:
        """Return the keys of the shared blobs."""
        return self.shared.keys()

    def expire(self, key: ChunkKey, seconds: float) -> None:
        """Let a shared blob expire after a time."""
        self.shared.expire(key, seconds)

    def sweep(self) -> int:
        """Remove the remains of killed writers among the copies and the shared blobs."""
        return self.local.sweep() + self.shared.sweep()

    def close(self) -> None:
        """Release resources; idempotent."""
        self.shared.close()

    def _use(self, key: ChunkKey) -> None:
        with self._lock:
            # The size of another process's copy is known at the next listing.
            self._sizes[key] = self._sizes.pop(key, 0)

    def _copy(self, key: ChunkKey, data: Bytes) -> None:
        """Keep a copy, and evict copies for it; after a copy without room, skip copies a while."""
        if len(data) > self._most or time.monotonic() < self._full_until:
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
        if self._unlisted > self._most // LISTINGS:
            self._usages()
        with self._lock:
            return len(self._sizes), sum(self._sizes.values())

    def _usages(self) -> tuple[int, list[Sized]]:
        """Return all copies; copies of other processes count as used before this process's."""
        with self._lock:
            there = self.local.sizes()
            mine = {key: there.pop(key) for key in self._sizes if key in there}
            self._sizes = there | mine
            self._unlisted = 0
            return 0, [
                Sized(each, 0, size, Usage(last=n))
                for n, (each, size) in enumerate(self._sizes.items())
            ]
