"""A memory tier, on the host or on an accelerator: the lowest priority leaves first, then what saves least computing per byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvrag.blend.quantise import convert
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import Index, StoreStats
from kvrag.store.events import Events, StoreEvent
from kvrag.store.fork import ForkAware
from kvrag.store.layers import HeldLayers, Layers
from kvrag.store.memory_index import MemoryIndex
from kvrag.store.retention import Retention, Worth, check_retention
from kvrag.store.shelf import Entry, Shelf, record_for
from kvrag.store.usage import Usage
from kvrag.store.writer import check_kv
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, KVDtype, TextEntry

PushedOut = Callable[[ChunkIdentity, ChunkKV, Retention], None]
"""Told chunk, KV and worth of what had to leave for want of room."""


class MemoryStore(ForkAware):
    """KV in memory up to a byte budget.

    It is a store by itself, or the upper tier of a :class:`~kvrag.store.tiered.TieredStore`.

    Parameters
    ----------
    max_bytes
        Budget; when it is exceeded, the lowest priority leaves, and of that what saves least computing per byte
        (:meth:`~kvrag.store.usage.Usage.worth`), or has not been used for longest. Neither a pinned chunk does, nor one of a higher
        priority than the one that comes.
    name
        The tier's name in statistics and events.
    device
        Where the tensors are kept; default: on the host.
    events
        Told what comes and goes.
    kv_dtype
        How chunks are kept here, see :class:`~kvrag.StoreConfig`; ``None``: as they come.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        name: str = "host",
        device: torch.device | str = "cpu",
        events: Events | None = None,
        kv_dtype: KVDtype | None = None,
    ) -> None:
        super().__init__()
        self._rows = MemoryIndex()
        self.index: Index = self._rows
        self.name = name
        self.max_bytes = max_bytes
        self.pushed_out: PushedOut = lambda identity, kv, retention: None
        """Set by the tier that demotes what leaves."""
        self.known_worth: Callable[[ChunkKey], Worth] = lambda key: Worth()
        """Set by the tier that knows of a chunk what happened while it was not here."""
        self.device = torch.device(device)
        self._events = events or Events()
        self._kv_dtype = kv_dtype
        self._shelf = Shelf(max_bytes)
        self._hits = 0
        self._misses = 0
        self._erasures = 0

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV, or ``None``; the tensors are shared and must not be written to."""
        key = chunk_key(identity)
        with self._lock:
            kv = self._shelf.find(key, identity)
            if kv is None:
                self._misses += 1
                return None
            self._shelf.use(key)
            self._hits += 1
            return kv

    def missed(self, count: int) -> None:
        """Count chunks that were asked for and, as :meth:`contains` has said, were not here."""
        with self._lock:
            self._misses += count

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Return several chunks; memory is never late."""
        return [self.get(identity) for identity in identities]

    def stream(self, identity: ChunkIdentity) -> Layers | None:
        """Return the chunk's layers in order; all are there at once. ``None`` for a miss."""
        kv = self.get(identity)
        return None if kv is None else HeldLayers(kv)

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Keep a copy of a chunk and return its bytes; 0 if it was there already.

        Raises
        ------
        StoreError
            If the KV must not be stored, is larger than the whole budget, or finds it taken by what may not leave.
        """
        check_retention(retention)
        if self.link(identity, text=text, doc_id=doc_id):
            return 0
        check_kv(identity, kv)
        kept = copy_kv(self.converted(kv), self.device)
        record = record_for(identity, kept.num_bytes, text)
        # The row first: the chunk may be pushed out by another thread at once, and takes its row with it then.
        self.index.add(record, doc_id=doc_id)
        if not self.keep(identity, kept, retention=retention, reason="put"):
            self.index.remove(record.key)
            if kept.num_bytes <= self.max_bytes:
                raise StoreError(
                    f"{kept.num_bytes} bytes don't fit into the memory store, and nothing more may leave it; "
                    "raise StoreConfig.ram_bytes or give the store a directory"
                )
            raise StoreError(
                f"a chunk of {kept.num_bytes} bytes is larger than the memory store's budget of {self.max_bytes} bytes; "
                "raise StoreConfig.ram_bytes or give the store a directory"
            )
        return kept.num_bytes

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""
        kv = self.peek(identity)
        if kv is None:
            return False
        self.index.add(record_for(identity, kv.num_bytes, text), doc_id=doc_id)
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether a chunk is in memory."""
        with self._lock:
            return key in self._shelf.chunks

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV is stored for a text."""
        keys = self._rows.text_keys(namespace, digest)
        with self._lock:
            return [self._shelf.chunks[key].identity for key in keys if key in self._shelf.chunks]

    def knows(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered now, with or without KV."""
        return self._rows.text(namespace, digest) is not None

    def keys(self) -> list[ChunkKey]:
        """Return the keys of all chunks in memory."""
        with self._lock:
            return list(self._shelf.chunks)

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, with what is left of its duration; ``None`` if nothing was."""
        with self._lock:
            return self._shelf.retention(key)

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Say anew what chunks are worth, and return how many there are; unknown ones are left out."""
        check_retention(retention, is_needed=True)
        with self._lock:
            self._erasures += 1  # a read that has begun would bring what the chunk was worth before
            return sum(self._shelf.retain(key, retention) for key in dict.fromkeys(keys))

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Erase chunks and return how many were there."""
        with self._lock:
            self._erasures += 1
        return self.drop(keys, "deleted")

    def drop(self, keys: Sequence[ChunkKey], reason: str = "evicted") -> int:
        """Let go of chunks that the tier below has evicted, and return how many were there; they may be kept again at any time."""
        with self._lock:
            gone = [key for key in keys if self._shelf.drop(key)]
        for key in keys:
            self.index.remove(key)
        for key in gone:
            self._events.emit(StoreEvent("BlockRemoved", self.name, (key,), reason))
        return len(gone)

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to; return how many chunks were erased."""
        return self.delete(self.index.unlink(namespace, doc_id))

    def clear(self, namespace: str | None = None) -> int:
        """Erase all chunks, texts and documents, of one namespace if its digest is given, and return how many chunks there were."""
        with self._lock:
            self._erasures += 1
            gone = self._shelf.clear(namespace)
        for key in gone:
            self._rows.remove(key)
        for space, digest, _ in self._rows.references():
            if namespace in (None, space):
                self._rows.unlink_text(space, digest)
        if namespace is None:
            self._events.emit(StoreEvent("AllBlocksCleared", self.name, reason="cleared"))
        for key in gone if namespace is not None else ():
            self._events.emit(StoreEvent("BlockRemoved", self.name, (key,), "deleted"))
        return len(gone)

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of this tier by its name."""
        with self._lock:
            chunks, num_bytes = len(self._shelf.chunks), self._shelf.num_bytes
            return {self.name: StoreStats(chunks, num_bytes, self._hits, self._misses, rejected=0)}

    def release(self) -> int:
        """Push everything out and return its bytes, as an upper tier; nothing is demoted, because memory is wanted now."""
        with self._lock:
            freed, gone = self._shelf.num_bytes, self._shelf.clear()
        for key in gone:
            self._events.emit(StoreEvent("BlockRemoved", self.name, (key,), "evicted"))
        return freed

    def close(self) -> None:
        """Forget everything; idempotent."""
        with self._lock:
            self._shelf.clear()

    @contextmanager
    def pinned(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Keep chunks, there or yet to come, from being pushed out, as long as a request needs them."""
        keys = list(keys)
        with self._lock:
            self._shelf.pins.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._shelf.pins -= Counter(keys)

    def converted(self, kv: ChunkKV) -> ChunkKV:
        """Return a chunk as it is kept here; raises as :func:`kvrag.blend.quantise.convert`. It may be the chunk itself."""
        return kv if self._kv_dtype is None else convert(kv, self._kv_dtype)

    def kept_as(self, kv_dtype: KVDtype) -> KVDtype:
        """Return what :meth:`converted` makes of chunks that were rounded so."""
        return self._kv_dtype or kv_dtype if kv_dtype == "auto" else kv_dtype

    @property
    def erasures(self) -> int:
        """Calls of :meth:`delete`, :meth:`clear` and :meth:`retain` so far, for :meth:`keep`."""
        return self._erasures

    def peek(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV, or ``None``, and count nothing."""
        with self._lock:
            return self._shelf.find(chunk_key(identity), identity)

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is kept under a key."""
        with self._lock:
            entry = self._shelf.chunks.get(key)
        return None if entry is None else entry.identity

    def keep(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        erasures: int | None = None,
        retention: Retention | None = None,
        reason: str = "promoted",
    ) -> bool:
        """Take ownership of ``kv`` if there is, or can be made, room for it; return whether it does. The index gets no row.

        Parameters
        ----------
        identity, kv
            The chunk; its tensors must be on the tier's device and hold on to no more memory than they show.
        erasures
            Value of :attr:`erasures` before the chunk was read elsewhere: if something was erased since, or given another worth, the
            chunk isn't kept, because it may be that.
        retention
            What was said of its worth.
        reason
            For the event.
        """
        key, size = chunk_key(identity), kv.num_bytes
        usage = Usage.brought(self.known_worth(key))
        entry = Entry(identity, kv, usage if retention is None else usage.retained(retention))
        with self._lock:
            if erasures is not None and erasures != self._erasures:
                return False
            victims = self._shelf.take(key, entry)
            if victims is None:
                return False
        self._events.emit(StoreEvent("BlockStored", self.name, (key,), reason, kv.num_tokens, size))
        for old, entry in victims.items():
            self._events.emit(StoreEvent("BlockRemoved", self.name, (old,), "evicted"))
            self.pushed_out(entry.identity, entry.kv, entry.usage.retention())
            if not self.contains(old):
                self.index.remove(old)
        return True


def copy_kv(kv: ChunkKV, device: torch.device | str = "cpu") -> ChunkKV:
    """Copy a chunk to tensors of its own on a device: a slice would keep the whole batch that it was cut from alive."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)

    return kv.map(own)
