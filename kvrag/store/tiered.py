"""Memory above another store: reads promote, what is pushed out is demoted, writes go through, erasures reach both.

Tiers stack: the accelerator's memory above the host's, above the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import torch

from kvrag.errors import StoreError, is_out_of_memory
from kvrag.fingerprint import chunk_key
from kvrag.store import blob
from kvrag.store.base import DEFAULT_PRIORITY, Index, KVStore, Retention, StoreStats, TextLookup, Tier
from kvrag.store.loader import Loader
from kvrag.store.memory import MemoryStore, copy_kv, priority_of
from kvrag.store.prefetch import Load, Prefetch, Prefetcher
from kvrag.store.write_behind import WriteBehind
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, TextEntry

log = logging.getLogger(__name__)


class TieredStore:
    """A memory tier in front of a store that lasts. Both give the same bits: what is kept above, the lower one took or gave.

    What the upper one rounds is rounded in every read. A chunk that another process erases stays in this one's memory until it is pushed
    out or erased here too.

    Parameters
    ----------
    memory
        Upper tier; its index is not used.
    disk
        Lower tier, the truth; its index is that of both.
    keeps_puts
        Whether a chunk that is put is kept above at once, and not only when it is read.
    demotes
        Whether what is pushed out is handed down; not if it is kept here in another way than below.
    min_priority
        What is demoted to this upper tier from one above it must have this priority.
    lower_min_priority
        What is put with less stays in the upper tier, with its row in the index, and is gone when it is pushed out.
    prefetch
        What :meth:`get_many` does about reads that :meth:`prefetch` has begun; see :class:`kvrag.StoreConfig`.
    """

    def __init__(
        self,
        memory: MemoryStore,
        disk: KVStore,
        *,
        keeps_puts: bool = True,
        demotes: bool = True,
        min_priority: int = 0,
        lower_min_priority: int = 0,
        prefetch: str = "timeout",
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._lower = disk if isinstance(disk, Tier) else None
        self._keeps_puts = keeps_puts
        self._min_priority = min_priority
        self._lower_min_priority = lower_min_priority
        self._only_here: set[ChunkKey] = set()
        self._loader = Loader(self._load)
        self._prefetcher = Prefetcher(memory.max_bytes, prefetch)
        self.index: Index = disk.index
        memory.pushed_out = disk.demote if demotes and isinstance(disk, TieredStore) else self._lose

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV from the nearest tier that has it, or ``None``."""
        kv = self._memory.get(identity)
        if kv is None:
            return self._promote(identity)
        self.touch(chunk_key(identity))
        return kv

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Load several chunks at once; one that is late is ``None``, and is promoted when it comes.

        A chunk that :meth:`prefetch` is reading is not read twice; whether it is waited for is the policy's business.
        """
        deadline = time.monotonic() + timeout_s
        keys = {identity: chunk_key(identity) for identity in dict.fromkeys(identities)}
        with self.pinned(keys.values()):
            found = {identity: self._memory.get(identity) for identity in keys}
            absent = [identity for identity, kv in found.items() if kv is None]
            for identity in found.keys() - set(absent):
                self.touch(keys[identity])
            reads = self._prefetcher.begun([keys[identity] for identity in absent])
            ours = [identity for identity in absent if keys[identity] not in reads]
            found.update(zip(ours, self._loader.load_many(ours, timeout_s=timeout_s), strict=True))
            for identity in absent:
                if keys[identity] in reads:
                    brought = self._prefetcher.result(reads[keys[identity]], deadline)
                    found[identity] = self._memory.peek(identity) or brought
        return [found[identity] for identity in identities]

    def prefetch(self, chunks: Iterable[ChunkIdentity | ChunkKey]) -> Prefetch:
        """Begin to read chunks into this tier and those below, and return at once; keys of nothing don't count as found.

        What is there already, or is being read, is not read again; what finds no room beside the reads under way is left out.
        """
        wanted: dict[ChunkKey, ChunkIdentity | None] = {}
        for chunk in chunks:
            wanted.update({chunk: wanted.get(chunk)} if isinstance(chunk, str) else {chunk_key(chunk): chunk})
        loads: dict[ChunkKey, tuple[Load, int]] = {}
        found = 0
        for key, identity in wanted.items():
            if self._memory.contains(key):
                found += 1
            elif self._disk.contains(key):
                found += 1
                record = self.index.get(key)
                loads[key] = (self._reader(key, identity), 0 if record is None else record.num_bytes)
        return self._prefetcher.start(loads, found=found)

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Give a chunk to the lower tier, if it is worth that, and return the bytes stored; 0 if it was there already.

        Raises
        ------
        StoreError
            If it can't be written; then it isn't kept in memory either.
        """
        converted = self._memory.converted(kv)  # first: what can't be read as it is kept above must not be promised
        if priority_of(retention) < self._lower_min_priority:
            return self._put_here(identity, kv, text, doc_id, retention)
        erasures = self._memory.erasures
        written = self._disk.put(identity, kv, text=text, doc_id=doc_id, retention=retention)
        self._only_here.discard(chunk_key(identity))
        if written and self._keeps_puts:
            unwritten = self._disk.unwritten(identity) if isinstance(self._disk, WriteBehind) else None
            shared = unwritten if converted is kv else None  # never a third copy
            own = shared or copy_kv(converted, self._memory.device)
            self._memory.keep(identity, own, erasures=erasures, retention=retention, reason="put")
        return written

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""
        record = self.index.get(chunk_key(identity)) if self._is_only_here(chunk_key(identity)) else None
        if record is not None:
            self.index.add(replace(record, text=text), doc_id=doc_id)
            return True
        return self._disk.link(identity, text=text, doc_id=doc_id)

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV is stored for a text."""
        below = self._disk.identities(namespace, digest) if isinstance(self._disk, TextLookup) else []
        records = [self.index.get(key) for key in list(self._only_here)]
        here = [r.key for r in records if r and r.text and (r.namespace, r.text.digest) == (namespace, digest)]
        found = [*below, *map(self._memory.identity, here)]
        return list(dict.fromkeys(identity for identity in found if identity is not None))

    def knows(self, namespace: str, digest: str) -> bool:
        """Whether the lower tier has a text registered now, with or without KV."""
        return isinstance(self._disk, TextLookup) and self._disk.knows(namespace, digest)

    def contains(self, key: ChunkKey) -> bool:
        """Whether the lower tier has a chunk, without proving its integrity, or this one has what the lower one is not to have."""
        return self._disk.contains(key) or self._is_only_here(key)

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Erase chunks from both tiers and return how many were there."""
        found = sum(self._memory.contains(key) or self._disk.contains(key) for key in dict.fromkeys(keys))
        try:
            self._disk.delete(keys)
        finally:
            # Memory last: a read that began before may still promote what it found until this call.
            self._only_here.difference_update(keys)
            self._memory.delete(keys)
            self._drop_orphans()
        return found

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to, in every tier; return how many chunks were erased."""
        keys = self.index.document_keys(namespace, doc_id)
        here = [key for key in keys if self._is_only_here(key)]
        try:
            erased = self._disk.forget(namespace, doc_id)
        finally:
            held = {key for key in here if self.index.get(key) is not None}
            self._memory.delete([key for key in keys if key not in held and not self._disk.contains(key)])
            self._drop_orphans()
        return erased + len(here) - len(held)

    def clear(self) -> int:
        """Erase everything in both tiers, and return how many chunks there were."""
        here = sum(self._is_only_here(key) for key in list(self._only_here))
        try:
            return self._disk.clear() + here
        finally:  # memory last, as in delete
            self._only_here.clear()
            self._memory.clear()

    def _drop_orphans(self) -> None:
        """Take out of memory what is not below any more: the index no longer says whose it is, so no erasure would find it."""
        self._memory.delete([key for key in self._memory.keys() if not self.contains(key)])  # noqa: SIM118

    def demote(self, identity: ChunkIdentity, kv: ChunkKV, priority: int) -> None:
        """Take what the tier above had to push out, unless it is here, or is worth less than this tier's minimum."""
        key = chunk_key(identity)
        if priority < self._min_priority or self._memory.contains(key):
            return
        self._memory.keep(identity, copy_kv(kv), retention=Retention(priority), reason="demoted")
        if not self.contains(key):  # erased meanwhile: an erasure empties the lower tier first
            self._memory.delete([key])

    def release(self) -> int:
        """Empty the upper tier, for the sake of its memory, and return its bytes; what was in it is still below."""
        freed = self._memory.release()
        for key in list(self._only_here):
            self._drop_row(key)
        return freed

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name."""
        return {**self._memory.stats(), **self._disk.stats()}

    def flush(self) -> dict[ChunkKey, str]:
        """Wait until all that was put has reached the lowest tier; return what could not since the last call, and why."""
        errors = {} if self._lower is None else self._lower.flush()
        self._memory.delete([key for key in errors if not self._disk.contains(key)])
        return errors

    def close(self) -> None:
        """Release all tiers; idempotent."""
        self._prefetcher.clear()
        self._disk.close()
        self._memory.close()

    def touch(self, key: ChunkKey) -> None:
        """Let the lower tiers know that a chunk is in use, so that they do not evict it for want of hits."""
        if self._lower is not None:
            self._lower.touch(key)

    @contextmanager
    def pinned(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Keep chunks from being pushed out of any tier by this process until the context ends."""
        keys = list(keys)
        with self._memory.pinned(keys), nullcontext() if self._lower is None else self._lower.pinned(keys):
            yield

    def priority(self, key: ChunkKey) -> int:
        """Return a chunk's priority at present."""
        return DEFAULT_PRIORITY if self._lower is None else self._lower.priority(key)

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is stored under a key."""
        return self._memory.identity(key) or (None if self._lower is None else self._lower.identity(key))

    def hole(self, identity: ChunkIdentity) -> Hole | None:
        """Return what is known of the chunk's latest read, if that gave nothing or is not over; else ``None``."""
        return None if self._lower is None else self._lower.hole(identity)

    def _put_here(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        text: TextEntry | None,
        doc_id: str | None,
        retention: Retention | None,
    ) -> int:
        """Store a chunk in the upper tier alone, for as long as it has room; raises as :meth:`put`."""
        if self.link(identity, text=text, doc_id=doc_id):
            return 0
        blob.check_kv(identity, kv)
        record = blob.plan(identity, kv, text=text).header.record()
        self._only_here.add(record.key)
        self.index.add(record, doc_id=doc_id)
        own = copy_kv(self._memory.converted(kv), self._memory.device)
        if not self._memory.keep(identity, own, retention=retention, reason="put"):
            self._lose(identity, kv, 0)
            raise StoreError(
                f"{kv.num_bytes} bytes find no room in memory, and have too low a priority for the disk; raise StoreConfig.ram_bytes "
                "or lower StoreConfig.disk_min_priority"
            )
        return kv.num_bytes

    def _is_only_here(self, key: ChunkKey) -> bool:
        # Without its row it could be found, and never be erased: another process may have taken that, for want of a file.
        return key in self._only_here and self._memory.contains(key) and self.index.get(key) is not None

    def _lose(self, identity: ChunkIdentity, kv: ChunkKV, priority: int) -> None:
        """Take the row of a chunk that was pushed out and is nowhere else."""
        self._drop_row(chunk_key(identity))

    def _drop_row(self, key: ChunkKey) -> None:
        if key in self._only_here:
            self._only_here.discard(key)
            if not self._disk.contains(key):
                with suppress(StoreError):
                    self.index.remove(key)

    def _reader(self, key: ChunkKey, identity: ChunkIdentity | None) -> Load:
        def read() -> ChunkKV | None:
            owner = identity or self.identity(key)
            return None if owner is None else self._load(owner)

        return read

    def _load(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return a chunk that another thread has brought meanwhile, or promote it."""
        return self._memory.peek(identity) or self._promote(identity)

    def _promote(self, identity: ChunkIdentity) -> ChunkKV | None:
        erasures = self._memory.erasures
        kv = self._disk.get(identity)
        if kv is None:
            return None
        try:
            kv = self._memory.converted(kv)
        except StoreError as error:  # kept on disk by an engine that does not round
            log.warning("a chunk is computed: %s", error)
            return None
        retention = Retention(self.priority(chunk_key(identity)))
        own = self._on_device(kv)
        if own is not None:
            self._memory.keep(identity, own, erasures=erasures, retention=retention)
        return own or kv

    def _on_device(self, kv: ChunkKV) -> ChunkKV | None:
        """Return the chunk's tensors in the upper tier's memory; ``None`` where that is full, and then it is given up."""
        if _is_on(kv, self._memory.device):
            return kv
        try:
            return copy_kv(kv, self._memory.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.release()
            return None


def _is_on(kv: ChunkKV, device: torch.device) -> bool:
    """Whether a chunk's tensors are in a device's memory; a device without a number is the only one of its kind here."""
    here = kv.layers[0].keys.device
    return here.type == device.type and device.index in (None, here.index)
