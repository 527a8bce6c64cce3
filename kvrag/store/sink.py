"""What stores chunks for a precompute, be it a store or what stands before one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvrag.store.base import StoreStats
from kvrag.store.retention import Retention
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry


class ChunkSink(Protocol):
    """What a precompute needs of a :class:`~kvrag.store.base.KVStore`."""

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Store a chunk."""
        ...

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""
        ...

    def contains(self, key: ChunkKey) -> bool:
        """Whether a chunk is stored."""
        ...

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth."""
        ...

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Say anew what chunks are worth."""
        ...

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name."""
        ...
