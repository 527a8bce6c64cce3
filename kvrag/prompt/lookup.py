"""What a plan asks the store: whether KV is there, behind which prefix, and of which token ids. No KV is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrag.config import KV_DTYPES
from kvrag.identity.fingerprint import chunk_key, content_key
from kvrag.store import Record, TieredStore
from kvrag.threads import Deadline
from kvrag.types import ChunkIdentity, KVDtype, TextEntry


@dataclass(slots=True)
class Lookup:
    """Asks the store for chunks of one model and namespace; a fault of it, or its being late, is an absence.

    Parameters
    ----------
    store
        The store; never asked for KV itself.
    model, namespace
        Fields of the identities.
    deadline
        Time for all questions together.
    kv_dtype
        How the KV is kept.
    prefix
        Digest of the token ids that the prompt begins with.
    """

    store: TieredStore
    model: str
    namespace: str
    deadline: Deadline
    kv_dtype: KVDtype = "auto"
    prefix: str = ""

    def identity(self, ids: tuple[int, ...], prefix: str) -> ChunkIdentity:
        """Identity of a chunk behind a prefix."""
        return ChunkIdentity(self.model, self.namespace, prefix, ids, self.kv_dtype)

    def has(self, identity: ChunkIdentity) -> bool:
        """Whether a chunk's KV is stored."""
        key = chunk_key(identity)
        return self.deadline.ask(lambda: bool(self.store.known([key])), False, what="the KV store")

    def why_not(self, otherwise: str) -> str:
        """Return why nothing was found: because the store gave no answer, or for the reason given."""
        return self.deadline.fault or otherwise

    def is_stored(self, ids: tuple[int, ...]) -> bool:
        """Whether there is KV of this chunk behind any prefix."""
        return self.other_prefix(ids) is not None

    def stored_ids(self, entries: Sequence[TextEntry]) -> list[tuple[int, ...]]:
        """Return the token ids of those texts that have KV of this model."""
        store = self.store
        nothing: list[ChunkIdentity] = []
        found = self.deadline.ask(
            lambda: [i for entry in entries for i in store.identities(self.namespace, entry.digest)],
            nothing,
            what="the KV store",
        )
        return list(
            dict.fromkeys(
                i.token_ids
                for i in found
                if (i.model, i.namespace, i.kv_dtype) == (self.model, self.namespace, self.kv_dtype)
            )
        )

    def other_prefix(self, ids: tuple[int, ...]) -> ChunkIdentity | None:
        """Return the newest stored variant of this chunk behind any prefix."""
        content, nothing = content_key(self.identity(ids, "")), list[Record]()
        variants = self.deadline.ask(lambda: self.store.catalog.variants(content), nothing, what="the KV store's index")
        return self.identity(ids, variants[-1].prefix) if variants else None

    def other_dtypes(self, ids: tuple[int, ...]) -> list[KVDtype]:
        """Return the other ways in which this chunk is kept, behind any prefix."""
        others = [d for d in KV_DTYPES if d != self.kv_dtype]
        return [d for d in others if replace(self, kv_dtype=d).is_stored(ids)]
