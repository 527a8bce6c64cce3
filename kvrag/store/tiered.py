"""Memory above disk: reads promote, writes go through, erasures reach both."""

from __future__ import annotations

from collections.abc import Sequence

from kvrag.fingerprint import chunk_key
from kvrag.store.base import Index, KVStore, Retention, StoreStats, TextLookup
from kvrag.store.disk import DiskStore
from kvrag.store.loader import Loader
from kvrag.store.memory import MemoryStore, copy_kv
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry


class TieredStore:
    """A memory tier in front of a store that lasts.

    Both give the same bits, because only what the lower one took or gave is kept above. A chunk that another process
    erases stays in this one's memory until it is pushed out or erased here too.

    Parameters
    ----------
    memory
        Upper tier; its index is not used.
    disk
        Lower tier, the truth; its index is the index of both.
    """

    def __init__(self, memory: MemoryStore, disk: KVStore) -> None:
        self._memory = memory
        self._disk = disk
        self._loader = Loader(self._promote)
        self.index: Index = disk.index

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV from the nearest tier that has it, or ``None``."""
        kv = self._memory.get(identity)
        if kv is None:
            return self._promote(identity)
        self._touch(identity)
        return kv

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Load several chunks at once; one that is late is ``None``, and is promoted when it comes."""
        found = {identity: self._memory.get(identity) for identity in dict.fromkeys(identities)}
        absent = [identity for identity, kv in found.items() if kv is None]
        for identity in found.keys() - set(absent):
            self._touch(identity)
        found.update(zip(absent, self._loader.load_many(absent, timeout_s=timeout_s), strict=True))
        return [found[identity] for identity in identities]

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Write a chunk through to the lower tier and return the bytes written; 0 if it was there already.

        Raises
        ------
        StoreError
            If it can't be written; then it isn't kept in memory either.
        """
        erasures = self._memory.erasures
        written = self._disk.put(identity, kv, text=text, doc_id=doc_id, retention=retention)
        if written:
            self._memory.keep(identity, copy_kv(kv), erasures=erasures)
        return written

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""
        return self._disk.link(identity, text=text, doc_id=doc_id)

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV the lower tier has for a text."""
        return self._disk.identities(namespace, digest) if isinstance(self._disk, TextLookup) else []

    def knows(self, namespace: str, digest: str) -> bool:
        """Whether the lower tier has a text registered now, with or without KV."""
        return isinstance(self._disk, TextLookup) and self._disk.knows(namespace, digest)

    def contains(self, key: ChunkKey) -> bool:
        """Whether the lower tier has a chunk, without proving its integrity."""
        return self._disk.contains(key)

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Erase chunks from both tiers and return how many were there."""
        found = sum(self._memory.contains(key) or self._disk.contains(key) for key in dict.fromkeys(keys))
        try:
            self._disk.delete(keys)
        finally:
            # Memory last: a read that began before may still promote what it found until this call.
            self._memory.delete(keys)
        return found

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to, in every tier; return how many chunks were erased."""
        keys = self.index.document_keys(namespace, doc_id)
        try:
            return self._disk.forget(namespace, doc_id)
        finally:
            self._memory.delete([key for key in keys if not self._disk.contains(key)])

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name."""
        return {**self._memory.stats(), **self._disk.stats()}

    def close(self) -> None:
        """Release both tiers; idempotent."""
        self._memory.close()
        self._disk.close()

    def _touch(self, identity: ChunkIdentity) -> None:
        """Let the lower tier know that a chunk is in use, so that it does not evict it for want of hits."""
        if isinstance(self._disk, DiskStore):
            self._disk.touch(chunk_key(identity))

    def _promote(self, identity: ChunkIdentity) -> ChunkKV | None:
        erasures = self._memory.erasures
        kv = self._disk.get(identity)
        if kv is not None:
            self._memory.keep(identity, kv, erasures=erasures)
        return kv
