"""Interfaces of the store: blobs, records, statistics and events.

``Blobs`` holds bytes under a key, the catalog (:mod:`kvrag.store.catalog`) lists the stored chunks
with their texts and documents, and :class:`~kvrag.store.tiers.TieredStore` puts memory above both.
A fault of stored data is a miss, never an error and never an answer.
"""

from __future__ import annotations

# ruff: noqa: B027  (some defaults of Blobs do nothing)
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from kvrag.config import Retention
from kvrag.kv.format import Bytes
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, DocIds, TextEntry

log = logging.getLogger(__name__)
T = TypeVar("T")


class Blobs(ABC):
    """Bytes under a key, on a disk, in memory or on another machine. Thread-safe.

    Writing a key twice has the effect of writing it once. Keys are 64 lower-case hex digits. A tier
    of your own implements the five abstract methods, and overrides the defaults that it can better;
    check it with :class:`kvrag.testing.store.BlobsContract`.
    """

    medium: str = "shared"
    """Name of the tier, in statistics and events."""
    is_remote: bool = False
    """Whether a second request costs more than bytes that are not needed."""
    shared: Blobs | None = None
    """Blobs of which these are local copies."""

    @abstractmethod
    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return ``length`` bytes from ``start`` on, fewer at the end.

        Without a length, all bytes from ``start`` on; ``None`` if the key is absent. Raises
        ``OSError`` if the bytes can't be read now: the store counts a miss and keeps the chunk's
        row.
        """

    @abstractmethod
    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Store the parts in order and return the bytes written; 0 if the key exists already.

        Raises ``OSError`` if the parts can't be written; nothing of them is left then.
        """

    @abstractmethod
    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Erase keys and return the keys that existed; raises ``OSError`` if a key still exists."""

    @abstractmethod
    def keys(self) -> set[ChunkKey]:
        """Return all keys; may be slow. Raises ``OSError`` rather than omit a key."""

    @abstractmethod
    def close(self) -> None:
        """Release resources; idempotent."""

    def free_bytes(self) -> int:
        """Return the bytes that may still be written, by default no limit; raises ``OSError``."""
        return 2**62

    def expire(self, key: ChunkKey, seconds: float) -> None:
        """Let a blob expire after a time; by default it stays. Raises ``OSError``."""

    def sweep(self) -> int:
        """Remove the remains of killed writers, and return their number; 0 by default."""
        return 0

    def forget(self, keys: Collection[ChunkKey]) -> None:
        """Erase local copies; by default there are none. Raises ``OSError`` if one still exists."""

    def catalog(self, store: str) -> Callable[..., CatalogRows] | None:
        """Return the function that makes a store's catalog beside the blobs, if there can be one.

        It takes ``seal``, ``read_only`` and ``begin``, as
        :func:`~kvrag.store.catalog.rows.open_table` does.
        """
        return None

    def follow(self, absent: Callable[[Collection[ChunkKey]], set[ChunkKey]]) -> None:
        """Erase the local copies whose keys ``absent`` returns; never raises."""


WRITABLE = "open it without read_only, make its directory writable, or free space on its disk"


class CatalogRows(Protocol):
    """Named rows of JSON, of which the catalog consists. Thread-safe; other processes share them.

    Rows are on this machine (:class:`~kvrag.store.catalog.rows.RowTable`) or shared by machines
    (:meth:`Blobs.catalog`). Rows that can't be read count as absent;
    inside :meth:`change`, faults are raised.
    """

    read_only: bool
    remedy: str
    """How to change rows that are ``read_only``."""
    pause_s: float
    """Minimum pause between background changes."""

    def get(self, name: str) -> str | None:
        """Return a row's value as JSON; ``None`` if it is absent."""

    def many(self, names: Sequence[str]) -> list[str | None]:
        """Return the values of several rows, in one round trip."""

    def ahead(self, names: Sequence[str]) -> None:
        """Read rows that the current change will ask for; may do nothing."""

    def names(self, prefix: str) -> list[str]:
        """Return the rest of all names that begin with ``prefix``, sorted; may be slow."""

    def set(self, name: str, value: Any) -> None:
        """Insert or replace a row, inside :meth:`change`."""

    def delete(self, name: str) -> None:
        """Remove a row if it exists, inside :meth:`change`."""

    def clear(self) -> None:
        """Remove all rows, inside :meth:`change`."""

    def change(self, action: Callable[[], T]) -> T:
        """Run ``action`` as a single transaction of all writers, and return its result.

        ``action`` may run several times. Raises ``StoreError``, and changes nothing, if that fails.
        """

    def scrub(self) -> None:
        """Purge erased rows from the files of the database, as far as that is possible."""

    def close(self) -> None:
        """Release resources; idempotent."""


class MemoryBlobs(Blobs):
    """Blobs in the memory of this process; see :class:`Blobs`."""

    medium = "host"

    def __init__(self) -> None:
        self._blobs: dict[ChunkKey, memoryview] = {}

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return a view of a blob."""
        blob = self._blobs.get(key)
        return blob and blob[start:][:length]

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Store a copy of the parts."""
        blob = memoryview(bytearray().join(parts))
        if self._blobs.setdefault(key, blob) is blob:
            return len(blob)
        return 0

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Delete blobs and return the keys that existed."""
        return {key for key in keys if self._blobs.pop(key, None) is not None}

    def keys(self) -> set[ChunkKey]:
        """Return all keys."""
        return set(self._blobs)

    def close(self) -> None:
        """Delete all blobs."""
        self._blobs.clear()


class ChunkRecord(NamedTuple):
    """Catalog record of a stored chunk: its identity without token ids, and the size of its KV.

    ``content`` is :func:`kvrag.identity.fingerprint.content_key`, which the variants of a chunk
    behind other prefixes and contexts share.
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
    """Chunk to store: identity, KV, text that finds it, documents of the text, and retention.

    Without ``doc_ids``, the text must have been registered, and the chunk is refused if it was
    deleted since.
    """

    identity: ChunkIdentity
    kv: ChunkKV
    text: TextEntry | None
    doc_ids: DocIds = (None,)
    retention: Retention | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Size of a tier, and its counters since the store was opened.

    ``rejected`` counts blobs that failed verification.
    """

    chunks: int
    num_bytes: int
    hits: int
    misses: int
    rejected: int


EventType = Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """Change of the chunks stored in a tier; named like vLLM's KV cache events.

    ``medium`` is the tier: ``"gpu"``, ``"host"``, ``"disk"`` or ``"shared"``. ``reason`` is
    ``"put"``, ``"adopted"``, ``"import"`` or ``"promoted"``; ``"evicted"``, ``"deleted"`` or
    ``"rejected"``; ``"cleared"``. ``block_hashes`` are the chunks' keys, ``block_size`` and
    ``num_bytes`` the tokens and bytes of a stored chunk, and ``ts`` seconds since 1970 (UTC).
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
    """Callback for events, and a file with mode 0600 to which they are appended as JSON lines.

    ``on_event`` is called in the thread that made the change; it must be quick and must not use the
    store. Only the first fault is logged.
    """

    on_event: Callable[[StoreEvent], None] | None
    path: str | None
    has_warned: bool = field(default=False, compare=False)

    def receive(self, event: StoreEvent) -> None:
        """Pass on an event; never raises."""
        try:
            if self.on_event is not None:
                self.on_event(event)
            if self.path is not None:
                known = {name: value for name, value in asdict(event).items() if value is not None}
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
                # A single write in append mode: lines of several processes do not mix.
                with open(
                    self.path, "ab", 0, opener=lambda path, _: os.open(path, flags, 0o600)
                ) as file:
                    file.write(json.dumps(known).encode() + b"\n")
        except Exception as error:
            if not self.has_warned:
                self.has_warned = True
                log.warning("an event of the KV store could not be reported: %s", error)
