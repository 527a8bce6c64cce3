"""Memory above another store: reads promote, what is pushed out is demoted, writes go through, erasures reach both.

Tiers stack: the accelerator's memory above the host's, above the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blob
from kvrag.store.base import KVStore, Record, StoreStats, TextLookup
from kvrag.store.memory import MemoryStore, copy_kv
from kvrag.store.retention import Retention, priority_of
from kvrag.store.tiered_reads import TieredReads
from kvrag.store.write_behind import WriteBehind
from kvrag.store.writer import check_kv
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry


class TieredStore(TieredReads):
    """A memory tier in front of a store that lasts. Both give the same bits: what is kept above, the lower one took or gave.

    What the upper one rounds is rounded in every read. What any process erases is not answered from memory afterwards, where the lower
    tier is :class:`~kvrag.store.base.Shared`.

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
        super().__init__(memory, disk, prefetch)
        self._keeps_puts = keeps_puts
        self._min_priority = min_priority
        self._lower_min_priority = lower_min_priority
        self._only_here: set[ChunkKey] = set()
        memory.pushed_out = disk.demote if demotes and isinstance(disk, TieredStore) else self._lose

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
        if self._shared is not None:
            self._follow()  # what had to leave below for this chunk is of no use here
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
            self.hold(replace(record, text=text), doc_id)
            return True
        return self._disk.link(identity, text=text, doc_id=doc_id)

    def hold(self, record: Record, doc_id: str | None) -> None:
        """Give a chunk in this process's memory its row in the lower tier's index; raises ``StoreError``."""
        if self._shared is None:
            self.index.add(record, doc_id=doc_id)
        else:
            self._shared.hold(record, doc_id)

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

    def clear(self, namespace: str | None = None) -> int:
        """Erase everything in both tiers, or the namespace of a digest, and return how many chunks there were."""
        owners = {key: self._memory.identity(key) for key in list(self._only_here)}
        going = [key for key, owner in owners.items() if namespace is None or (owner and owner.namespace == namespace)]
        here = sum(map(self._is_only_here, going))
        try:
            return self._disk.clear(namespace) + here
        finally:  # memory last, as in delete
            self._only_here.difference_update(going)
            self._memory.clear(namespace)

    def _drop_orphans(self) -> None:
        """Take out of memory what nothing below knows any more: it can't be told whose it is, so no erasure would find it."""
        if self._shared is None:
            self._memory.delete([key for key in self._memory.keys() if not self.contains(key)])  # noqa: SIM118
        else:
            self._follow()

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, with what is left of its duration; ``None`` if nothing was."""
        return self._memory.retention(key) if self._is_only_here(key) else super().retention(key)

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Say anew what chunks are worth, in both tiers, and return how many there are; where they lie stays as it is."""
        keys = list(keys)
        found = self._disk.retain(keys, retention)
        self._memory.retain(keys, retention)
        return found

    def demote(self, identity: ChunkIdentity, kv: ChunkKV, retention: Retention) -> None:
        """Take what the tier above had to push out, unless it is here, or is worth less than this tier's minimum.

        What is said of its worth below goes before ``retention``: that may have been said anew since the chunk was pushed out.
        """
        key, erasures = chunk_key(identity), self._memory.erasures
        if self._memory.contains(key):
            return
        # A lower tier that processes share has the row, and where that says nothing, nothing holds any more.
        retention = self.retention(key) or (retention if self._shared is None else Retention())
        if retention.priority < self._min_priority:
            return
        self._memory.keep(identity, copy_kv(kv), erasures=erasures, retention=retention, reason="demoted")
        if not self.is_known(key):  # erased meanwhile: an erasure takes the row first
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
        check_kv(identity, kv)
        # Nothing of the disk's budget is taken.
        record = replace(blob.plan(identity, kv, text=text).header.record(), num_bytes=0)
        self.hold(record, doc_id)
        self._only_here.add(record.key)
        own = copy_kv(self._memory.converted(kv), self._memory.device)
        if not self._memory.keep(identity, own, retention=retention, reason="put"):
            self._lose(identity, kv, retention)
            raise StoreError(
                f"{kv.num_bytes} bytes find no room in memory, and have too low a priority for the disk; raise StoreConfig.ram_bytes "
                "or lower StoreConfig.disk_min_priority"
            )
        return kv.num_bytes

    def _is_only_here(self, key: ChunkKey) -> bool:
        # Without its row it could be found, and never be erased: another process may have taken that, for want of a file.
        return key in self._only_here and self._memory.contains(key) and self.index.get(key) is not None

    def _lose(self, identity: ChunkIdentity, kv: ChunkKV, retention: Retention | None) -> None:
        """Take the row of a chunk that was pushed out and is nowhere else."""
        self._drop_row(chunk_key(identity))

    def _drop_row(self, key: ChunkKey) -> None:
        if key in self._only_here:
            self._only_here.discard(key)
            if not self._disk.contains(key):
                with suppress(StoreError):
                    self.index.remove(key)
