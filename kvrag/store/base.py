"""What the parts of the store agree on: blobs, records, statistics and events.

``Blobs`` holds bytes under a key, the catalog (:mod:`kvrag.store.catalog`) knows who has what, and
:class:`~kvrag.store.tiers.TieredStore` puts memory above both. A fault of stored data is a miss, never an error and never an answer.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple, Protocol

from kvrag.config import Retention
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry

log = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview


class Blobs(Protocol):
    """Bytes under a key, on a disk, in memory or on another machine. Safe to use from several threads.

    To write a key twice is to write it once. Keys are 64 lower-case hex digits.
    A shared tier (Redis, an object store) implements these five methods; prove it with :class:`kvrag.testing.store.BlobsContract`.
    """

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return ``length`` bytes from ``start`` on (all that follow for ``None``), fewer at the end; ``None`` if the key is absent.

        Raises ``OSError`` if it can't be read now: the store takes that for a miss, and keeps what it knows of the chunk.
        """

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Store the parts one after the other and return the bytes written; 0 if the key is there already.

        Raises ``OSError`` if they can't be written; nothing is left of them then.
        """

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Erase keys and return those that were there; raises ``OSError`` if one is still there."""

    def keys(self) -> set[ChunkKey]:
        """Return all keys; may be slow. Raises ``OSError`` rather than leave one out."""

    def close(self) -> None:
        """Release resources; idempotent."""


class MemoryBlobs:
    """Blobs in the memory of this process; the methods are those of :class:`Blobs`."""

    def __init__(self) -> None:
        self._blobs: dict[ChunkKey, memoryview] = {}

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return a view of a blob."""
        blob = self._blobs.get(key)
        return None if blob is None else blob[start : None if length is None else start + length]

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Keep a copy of the parts."""
        blob = memoryview(bytearray().join(parts))
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


@dataclass(frozen=True, slots=True)
class Record:
    """What the catalog knows of a stored chunk: the :class:`~kvrag.types.ChunkIdentity`, and the size of its KV.

    ``content`` is :func:`kvrag.identity.fingerprint.content_key`, which the variants of one chunk behind other prefixes and contexts share.
    """

    key: ChunkKey
    content: str
    model: str
    namespace: str
    prefix: str
    context: str
    num_tokens: int
    num_bytes: int


class NewKV(NamedTuple):
    """A chunk to store: whose KV it is, the text that finds it, if any, the documents that refer to that, and its retention."""

    identity: ChunkIdentity
    kv: ChunkKV
    text: TextEntry | None
    doc_ids: Sequence[str | None] = (None,)
    retention: Retention | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Size of one tier, and its counters since the store was opened; ``rejected`` counts blobs that failed their proof."""

    chunks: int
    num_bytes: int
    hits: int
    misses: int
    rejected: int


EventType = Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """A change of what is stored in a tier, the ``medium``: ``"gpu"``, ``"host"`` or ``"disk"``. Names are those of vLLM's KV cache events.

    ``reason`` is ``"put"``, ``"adopted"``, ``"import"`` or ``"promoted"``; ``"evicted"``, ``"deleted"`` or ``"rejected"``; ``"cleared"``.
    ``block_hashes`` are the chunks' keys, ``block_size`` and ``num_bytes`` the size of a stored one, and ``ts`` seconds since 1970 (UTC).
    """

    type: EventType
    medium: str
    block_hashes: tuple[str, ...] = ()
    reason: str = ""
    block_size: int | None = None
    num_bytes: int | None = None
    ts: float = field(default_factory=time.time, compare=False)


@dataclass(slots=True)
class Listener:
    """A callback that events are passed to, and a file, with mode 0600, that they are appended to as JSON lines.

    ``on_event`` is called in the thread that made the change; it must be quick and must not use the store. A fault is logged once.
    """

    on_event: Callable[[StoreEvent], None] | None
    path: str | None
    has_warned: bool = field(default=False, compare=False)

    def hear(self, event: StoreEvent) -> None:
        """Pass an event on; never raises."""
        try:
            if self.on_event is not None:
                self.on_event(event)
            if self.path is not None:
                known = {name: value for name, value in asdict(event).items() if value is not None}
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
                # One write in append mode: lines of several processes do not mix.
                with open(
                    self.path, "ab", 0, opener=lambda path, _: os.open(path, flags, 0o600)
                ) as file:
                    file.write(json.dumps(known).encode() + b"\n")
        except Exception as error:
            if not self.has_warned:
                self.has_warned = True
                log.warning("an event of the KV store could not be reported: %s", error)
