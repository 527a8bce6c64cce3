"""The write policy ``"back"``: a put returns when the chunk is in the host's memory, and a thread brings it to the disk.

A chunk has its row in the index from the put on, so that it is found and erased like any other; its file, and those of its references,
come later. Until then the row names the process that holds the chunk, so that others leave it alone as long as that lives; what a kill
leaves are rows without files, which count as absent. Erasing a document waits for the write that is under way, so that nothing comes back
after it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blob
from kvrag.store.base import Index, Record, StoreStats
from kvrag.store.disk import DiskStore
from kvrag.store.layers import HeldLayers, Layers
from kvrag.store.memory import copy_kv
from kvrag.store.retention import Retention, Worth, check_retention
from kvrag.store.write_queue import Entry, Queue, Reference
from kvrag.store.writer import check_kv
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, TextEntry

QUEUE_BYTES = 512 * 2**20
"""With this much waiting to be written, a put writes through: memory is not for a disk that can't keep up."""


class WriteBehind:
    """A disk tier that is written to in the background.

    Parameters
    ----------
    disk
        The tier. It is closed with this one.
    max_bytes
        Most bytes that wait to be written; a put that finds more writes through.
    """

    def __init__(self, disk: DiskStore, *, max_bytes: int = QUEUE_BYTES) -> None:
        self._disk = disk
        self._max_bytes = max_bytes
        self._hits = 0
        self.index: Index = disk.index
        self._own = Queue(disk)

    @property
    def _queue(self) -> Queue:
        """Queue of this process: a forked child leaves the parent's to the parent."""
        if self._own.pid != os.getpid():
            self._own = Queue(self._disk)
        return self._own

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV, from what waits or from the disk, or ``None``."""
        kv = self.unwritten(identity)
        if kv is None:
            return self._disk.get(identity)
        self._hits += 1
        return kv

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Load several chunks at once; one that is not there in time is ``None``."""
        found = {identity: self.unwritten(identity) for identity in dict.fromkeys(identities)}
        absent = [identity for identity, kv in found.items() if kv is None]
        self._hits += len(found) - len(absent)
        if absent:
            found.update(zip(absent, self._disk.get_many(absent, timeout_s=timeout_s), strict=True))
        return [found[identity] for identity in identities]

    def stream(self, identity: ChunkIdentity) -> Layers | None:
        """Return the chunk's layers in order, from what waits or from the disk; ``None`` for a miss."""
        kv = self.unwritten(identity)
        if kv is None:
            return self._disk.stream(identity)
        self._hits += 1
        return HeldLayers(kv)

    def unwritten(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the KV of a chunk that waits to be written, and was not erased since; its tensors are the store's own."""
        queue = self._queue
        with queue.changes:
            entry = queue.entries.get(chunk_key(identity))
        is_here = entry is not None and entry.identity == identity and self._disk.is_known(entry.record.key)
        return entry.kv if entry is not None and is_here else None

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Take a copy of a chunk, to be written soon, and return its bytes; 0 if it was there already.

        Raises
        ------
        StoreError
            If it must not be stored, or there is no room for it. What fails later is told by :meth:`flush`.
        """
        check_retention(retention)
        queue = self._queue
        with queue.changes:
            if self.link(identity, text=text, doc_id=doc_id):
                return 0
            if queue.num_bytes + kv.num_bytes <= self._max_bytes:
                record, reference = self._reserve(identity, kv, text, doc_id, retention)
                pin = ExitStack()
                pin.enter_context(self._disk.pinned([record.key]))
                queue.append(Entry(identity, copy_kv(kv), record, retention, [reference], pin))
                return record.num_bytes
        return self._disk.put(identity, kv, text=text, doc_id=doc_id, retention=retention)

    def _reserve(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        text: TextEntry | None,
        doc_id: str | None,
        retention: Retention | None,
    ) -> tuple[Record, Reference]:
        """Refuse now what would be refused later, make room, and give the chunk its row."""
        record = blob.plan(identity, kv, text=text).header.record()
        check_kv(identity, kv)
        self._disk.make_room(record.num_bytes, retention=retention)
        reference = self._announce(record, doc_id)
        if retention is not None:
            self._disk.rows.retain([record.key], retention)
        return record, reference

    def _announce(self, record: Record, doc_id: str | None) -> Reference:
        """Give a chunk that waits its row, for one text and document, and return what is to be written of them."""
        generation = (
            self._disk.rows.generation
        )  # before the row: one that is lost must not be taken for one of the new index
        self.hold(record, doc_id)
        return Reference(record.text, doc_id, generation)

    def hold(self, record: Record, doc_id: str | None) -> None:
        """Give a chunk in this process's memory its row; raises as :meth:`DiskStore.hold`."""
        self._disk.hold(record, doc_id)

    def erasure_mark(self) -> str | None:
        """Return what is another value after each erasure or eviction by any process; ``None``: ask :meth:`is_known` about each chunk."""
        return self._disk.erasure_mark()

    def is_known(self, key: ChunkKey) -> bool:
        """Whether a copy of a chunk may be answered with: what has no row was erased, or no erasure would find it."""
        return self._disk.is_known(key)

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those of many keys that :meth:`is_known` is true of."""
        return self._disk.known(keys)

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already, or waits to be; return whether it is."""
        queue = self._queue
        with queue.changes:
            entry = queue.entries.get(chunk_key(identity))
            if entry is not None and entry.identity == identity:
                entry.references.append(self._announce(replace(entry.record, text=text), doc_id))
                return True
        return self._disk.link(identity, text=text, doc_id=doc_id)

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Say anew what chunks are worth, written or not, and return how many there are; raises as :meth:`DiskStore.retain`."""
        check_retention(retention, is_needed=True)
        queue, keys = self._queue, list(keys)
        with queue.writing:  # a write that is under way would end with what its put was told
            with queue.changes:
                for entry in filter(None, map(queue.entries.get, keys)):
                    entry.retention = retention
            return self._disk.retain(keys, retention)

    def contains(self, key: ChunkKey) -> bool:
        """Whether a chunk waits to be written, and has its row, or has a file, without proving its integrity."""
        return self._disk.contains(key) or (key in self._queue.entries and self._disk.is_known(key))

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Erase chunks, written or not, and return how many were there; raises as :meth:`DiskStore.delete`."""
        queue = self._queue
        with queue.writing:
            unwritten = sum(key in queue.entries and not self._disk.contains(key) for key in dict.fromkeys(keys))
            with queue.changes:
                for key in keys:
                    queue.drop(key)
            return unwritten + self._disk.delete(keys)

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to, written or not; return how many chunks were erased."""
        queue = self._queue
        with queue.writing:
            keys = self.index.document_keys(namespace, doc_id)
            unwritten = {key for key in keys if not self._disk.contains(key)}
            erased = dropped = 0
            try:
                erased = self._disk.forget(namespace, doc_id)
            finally:
                with queue.changes:
                    for key in keys:
                        if self.index.get(key) is None and queue.drop(key):
                            dropped += key in unwritten
            return erased + dropped

    def clear(self, namespace: str | None = None) -> int:
        """Erase everything, or a namespace, written or not, and return how many chunks there were; raises as :meth:`DiskStore.clear`."""
        queue = self._queue
        with queue.writing:
            with queue.changes:
                spaces = {key: entry.identity.namespace for key, entry in queue.entries.items()}
                waiting = [key for key, space in spaces.items() if namespace in (None, space)]
                unwritten = sum(queue.drop(key) and not self._disk.contains(key) for key in waiting)
            return unwritten + self._disk.clear(namespace)

    def flush(self) -> dict[ChunkKey, str]:
        """Wait until everything is on the disk; return what could not be written since the last call, and why."""
        queue = self._queue
        queue.drain()
        with queue.changes:
            errors, queue.errors = queue.errors, {}
        return errors

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of the disk tier, what waits included."""
        queue = self._queue
        disk = self._disk.stats()["disk"]
        return {
            "disk": replace(disk, hits=disk.hits + self._hits, unwritten=len(queue.entries), failed_writes=queue.failed)
        }

    def close(self) -> None:
        """Write what waits, then close the disk tier; idempotent."""
        self.flush()
        self._disk.close()

    def touch(self, key: ChunkKey) -> None:
        """Count a hit that a tier above has answered."""
        self._disk.touch(key)

    def worth(self, key: ChunkKey) -> Worth:
        """Return a chunk's recent hits and its cost."""
        return self._disk.worth(key)

    def pinned(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[None]:
        """Keep chunks from being evicted by this process until the context ends."""
        return self._disk.pinned(keys)

    def priority(self, key: ChunkKey) -> int:
        """Return a chunk's priority at present."""
        return self._disk.priority(key)

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, with what is left of its duration; ``None`` if nothing was."""
        return self._disk.retention(key)

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is stored, or waits to be, under a key."""
        entry = self._queue.entries.get(key)
        return self._disk.identity(key) if entry is None else entry.identity

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV is stored, or waits to be, for a text."""
        rows = self._disk.rows
        found = (self.identity(key) for key in rows.text_keys(namespace, digest) if not rows.is_gone(key))
        return [identity for identity in found if identity is not None]

    def knows(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered now, with or without KV."""
        return self._disk.knows(namespace, digest)

    def hole(self, identity: ChunkIdentity) -> Hole | None:
        """Return what is known of the chunk's latest read, if that gave nothing or is not over; else ``None``."""
        return self._disk.hole(identity)
