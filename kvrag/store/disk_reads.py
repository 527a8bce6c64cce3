"""What reading from a directory needs: the half of the disk tier that works where nothing can be written."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import Index, StoreStats
from kvrag.store.claims import Claim, is_alive
from kvrag.store.directory import Directory
from kvrag.store.events import Events, StoreEvent
from kvrag.store.evict import Budget, Evictor
from kvrag.store.fork import ForkAware
from kvrag.store.header import Header
from kvrag.store.holes import Reading, Readings
from kvrag.store.keys import Keys
from kvrag.store.loader import Loader
from kvrag.store.objects import Objects
from kvrag.store.opening import open_directory
from kvrag.store.reader import LayerStream, read_layers
from kvrag.store.retention import Retention, Worth
from kvrag.store.sizes import file_system, lesser
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole

log = logging.getLogger(__name__)

T = TypeVar("T")


class DiskReads(ForkAware):
    """Reads of a :class:`~kvrag.store.disk.DiskStore`, and what is counted and reported about them."""

    def __init__(
        self, root: str | os.PathLike[str], config: StoreConfig | None = None, keys: Keys | None = None
    ) -> None:
        super().__init__()
        config = config or StoreConfig()
        self.keys = Keys.of(config) if keys is None else keys
        self._root = Path(root).absolute()
        self._hits = self._misses = self._rejected = 0
        self._touched: Counter[ChunkKey] = Counter()
        self._warned: set[str] = set()
        self._closed = False
        self.directory = Directory(self._root, durable=config.durability == "durable")
        self._events = Events(config.on_event, config.event_log)
        self.read_only = True
        """Whether nothing can be changed, by :class:`~kvrag.StoreConfig` or because the directory is so."""
        opened = open_directory(self.directory, config, self._on_rejected, self.keys)
        self.read_only = opened.read_only
        self.objects: Objects = opened.objects
        self.objects.on_left = self._on_left
        self.references = opened.references
        self.rows = opened.index
        self.index: Index = self.rows
        limit = lesser(config.disk_bytes, config.disk_fraction, lambda: file_system(self._root))
        budget = Budget(limit, config.min_free_bytes, config.high_watermark, config.low_watermark)
        self._claim = Claim(self.directory)
        self._evictor = Evictor(self.directory, self.rows, budget, self.objects.erase, self._on_evicted, self.is_held)
        self._readings = Readings()
        self._loader = Loader(lambda identity: self._get(identity, is_helped=False))

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV, proven to be that of ``identity``, or ``None``; no fault of stored data is raised."""
        return self._get(identity, is_helped=True)

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Load several chunks at once; one that is not there in time is ``None``."""
        with self._evictor.pinned(map(chunk_key, identities)):
            return self._loader.load_many(identities, timeout_s=timeout_s)

    def stream(self, identity: ChunkIdentity) -> LayerStream | None:
        """Return the chunk's layers one by one, layer 0 first, each proven when it is given; ``None`` for a miss.

        The stream ends early at the first layer that is damaged or can't be read: those before it may be used, and
        the rest is to be computed. It holds a file open and must be exhausted or closed.
        """
        key = chunk_key(identity)
        file = None
        if not (self._closed or self.rows.is_gone(key)):
            file = self._reading(key, lambda: self.objects.open(identity, key))
        if file is not None and self.rows.get(key) is None and not self._restore(file.header):
            file.close()
            file = None
        self._count(key, hit=file is not None)
        if file is None:
            return None
        try:
            buffer = self.objects.buffer(file.header.num_bytes)
        except OSError as error:
            file.close()
            self._warn_unreadable(error)
            return None
        return LayerStream(
            file,
            read_layers(file, buffer),
            rejected=lambda reason: self.objects.put_away(key, file.inode, reason),
            failed=self._warn_unreadable,
        )

    def files(self) -> set[ChunkKey]:
        """Keys of all files that are named like chunks, sound or not."""
        return self.objects.keys()

    def header(self, key: ChunkKey) -> Header | None:
        """Return the header of a chunk's file; ``None`` if it is absent or no chunk of this format."""
        return self._reading(key, lambda: self.objects.header(key))

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV is stored for a text, as its files' headers say."""
        keys = [] if self._closed else self.rows.text_keys(namespace, digest)
        # A row without a file may be that of a chunk in a tier above, which must not lose it for being looked for.
        headers = [self.header(key) for key in keys if self.contains(key) and not self.rows.is_gone(key)]
        return [header.identity for header in headers if header is not None]

    def knows(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered now, with or without KV."""
        return self.rows.text(namespace, digest) is not None

    def contains(self, key: ChunkKey) -> bool:
        """Whether a chunk's file is there, without proving its integrity."""
        return self.objects.contains(key)

    def is_held(self, key: ChunkKey) -> bool:
        """Whether a chunk has no file, but is in the memory of a process that lives."""
        holder = self.rows.holder(key)
        return holder is not None and not self.contains(key) and is_alive(self.directory, holder)

    def abandon(self, key: ChunkKey) -> bool:
        """Remove the row of a chunk that has no file and nobody's memory; whether that was so."""

        def is_abandoned(holder: str | None) -> bool:
            return not self.contains(key) and not is_alive(self.directory, holder)

        return not self.is_held(key) and self.rows.abandon(key, is_abandoned)

    def erasure_mark(self) -> str | None:
        """Return what is another value after each erasure or eviction by any process; ``None``: ask :meth:`is_known` about each chunk."""
        # Where nothing can be written the index is what it was when it was opened.
        return None if self.read_only else self.rows.erasure_mark()

    def is_known(self, key: ChunkKey) -> bool:
        """Whether a copy of a chunk may be answered with: what has no row was erased, or no erasure would find it."""
        if self._closed or self.read_only:
            return self.contains(key)
        return self.rows.get(key) is not None

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those of many keys that :meth:`is_known` is true of."""
        if self._closed or self.read_only:
            return set(filter(self.contains, keys))
        return self.rows.known(keys)

    def pinned(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[None]:
        """Keep chunks from being evicted by this process until the context ends."""
        return self._evictor.pinned(keys)

    def priority(self, key: ChunkKey) -> int:
        """Return a chunk's priority at present."""
        return self.rows.priority(key)

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, with what is left of its duration; ``None`` if nothing was."""
        return self.rows.retention(key)

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is stored under a key; reads the head of its file."""
        header = None if self._closed else self.header(key)
        return None if header is None else header.identity

    def hole(self, identity: ChunkIdentity) -> Hole | None:
        """Return what is known of the chunk's latest read, if that gave nothing or is not over; else ``None``."""
        return self._readings.hole(chunk_key(identity))

    def flush(self) -> dict[ChunkKey, str]:
        """Return at once: what was put is on the disk."""
        return {}

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of this tier, ``"disk"``."""
        chunks, num_bytes = self.rows.totals()
        with self._lock:
            return {"disk": StoreStats(chunks, num_bytes, self._hits, self._misses, self._rejected)}

    def close(self) -> None:
        """Release resources; idempotent. A closed store has nothing and takes nothing."""
        if not self._closed:
            with suppress(StoreError):
                self._flush_hits()
        self._closed = True
        self._claim.close()
        self.rows.close()

    def _get(self, identity: ChunkIdentity, *, is_helped: bool) -> ChunkKV | None:
        key = chunk_key(identity)
        reading = self._readings.begin(key)
        found = None
        if not self._closed:
            found = self._reading(key, lambda: self._read(identity, key, is_helped, reading))
        if found is not None and self.rows.get(key) is None and not self._restore(found[1]):
            found = None
        reading.reason = reading.reason or "absent"
        self._readings.end(key, is_found=found is not None)
        self._count(key, hit=found is not None)
        return None if found is None else found[0]

    def _read(
        self, identity: ChunkIdentity, key: ChunkKey, is_helped: bool, reading: Reading
    ) -> tuple[ChunkKV, Header] | None:
        """Read a chunk and note what became of it."""
        try:
            found = self.objects.read(identity, key, is_helped=is_helped, opened=reading.opened)
        except OSError as error:
            is_absent = isinstance(error, (FileNotFoundError, NotADirectoryError))
            reading.reason = "absent" if is_absent else "unreadable"
            raise
        reading.reason = "damaged" if found is None else None
        return found

    def _reading(self, key: ChunkKey, read: Callable[[], T]) -> T | None:
        """Run a read; what is absent is forgotten, and any other fault is a miss."""
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError):
            self._forget(key)
        except OSError as error:
            self._warn_unreadable(error)
        return None

    def _count(self, key: ChunkKey, *, hit: bool) -> None:
        with self._lock:
            self._hits += hit
            self._misses += not hit
            if hit and not self.read_only:
                self._touched[key] += 1

    def touch(self, key: ChunkKey) -> None:
        """Count a hit that a tier above has answered; nothing is written now."""
        with self._lock:
            if not self.read_only:
                self._touched[key] += 1

    def worth(self, key: ChunkKey) -> Worth:
        """Return a chunk's recent hits, those that have yet to be handed to the index included, and its cost."""
        known = self.rows.worth(key)
        return replace(known, hits=known.hits + self._touched[key])

    def _flush_hits(self) -> None:
        """Hand the counted hits to the index. Only changes do that: a read must not wait for another one's change."""
        with self._lock:
            touched, self._touched = self._touched, Counter()
        if touched and not self.read_only:
            self.rows.touch(touched)

    def _forget(self, key: ChunkKey) -> None:
        """Drop the row of a file that is gone; not if all are, because then the directory is, perhaps only for now."""
        if self.read_only or self.rows.get(key) is None or not (self._root / "objects").is_dir():
            return
        with suppress(OSError):
            self.abandon(key)

    def _restore(self, header: Header) -> bool:
        """Give a chunk without a row its row back; ``False`` if it has none because it is being erased."""
        key = chunk_key(header.identity)
        if self.rows.is_gone(key):
            return False
        if not self.read_only:
            try:
                return self.rows.restore(header.record(), lambda: self.contains(key))
            except StoreError as error:
                self._warn_once(str(error))
        return True

    def _on_rejected(self, key: ChunkKey, reason: str, is_put_away: bool) -> None:
        """Note that a file is not what its name says, and drop its row, unless file and row stay because nothing may change."""
        with self._lock:
            self._rejected += 1
        if not is_put_away:
            self._warn_once(
                f"a file in {self._root} is not used, because {reason}; it stays there, as the store is open for reading only, and its "
                "chunk is computed again"
            )
            return
        self._warn_once(
            f"a file was moved to {self._root / 'quarantine'}, because {reason}; its chunk is computed again"
        )
        if not self.read_only:
            with suppress(StoreError):
                self.rows.remove(key)
        self._events.emit(StoreEvent("BlockRemoved", "disk", (key,), "rejected"))

    def _on_left(self, key: ChunkKey, reason: str) -> None:
        """Note that a file was left alone that its name says is ours, and drop its row: it may be written anew."""
        self._warn_once(f"a chunk in {self._root} is not used, because {reason}; it is computed again")
        if not self.read_only:
            with suppress(StoreError):
                self.rows.remove(key)

    def _on_evicted(self, key: ChunkKey) -> None:
        self._events.emit(StoreEvent("BlockRemoved", "disk", (key,), "evicted"))

    def _warn_unreadable(self, error: OSError) -> None:
        self._warn_once(f"a chunk could not be read: {error.strerror or error}; it counts as absent")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)
