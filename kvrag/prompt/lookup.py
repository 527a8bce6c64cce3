"""What a plan asks the store: which KV is there, behind which prefix, and of which token ids. No KV is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kvrag.config import KV_DTYPES
from kvrag.identity.fingerprint import chunk_key, content_key
from kvrag.store import TieredStore
from kvrag.threads import Deadline
from kvrag.types import ChunkIdentity, ChunkKey, KVDtype, TextEntry

TokenIds = tuple[int, ...]


@dataclass(slots=True)
class Lookup:
    """Asks the store about chunks of one model and namespace; if it fails or is late, they count as absent.

    Parameters
    ----------
    store
        The store; never asked for KV itself. Each method asks once, in one hand-off to another thread.
    model, namespace
        Fields of the identities.
    deadline
        Time for all questions together.
    kv_dtype
        How the KV is kept.
    """

    store: TieredStore
    model: str
    namespace: str
    deadline: Deadline
    kv_dtype: KVDtype = "auto"

    def identity(self, ids: TokenIds, prefix: str) -> ChunkIdentity:
        """Return the identity of a chunk behind a prefix."""
        return ChunkIdentity(self.model, self.namespace, prefix, ids, self.kv_dtype)

    def known(self, identities: Iterable[ChunkIdentity]) -> set[ChunkIdentity]:
        """Return those whose KV is stored."""
        keys = {chunk_key(identity): identity for identity in identities}
        nothing = set[ChunkKey]()
        found = self.deadline.ask(lambda: self.store.known(keys), nothing, what="the KV store")
        return {keys[key] for key in found}

    def elsewhere(self, runs: Collection[TokenIds]) -> dict[TokenIds, ChunkIdentity]:
        """Return, where there is one, each chunk's newest variant behind any prefix; else one kept with another dtype."""

        def find() -> dict[TokenIds, ChunkIdentity]:
            found: dict[TokenIds, ChunkIdentity] = {}
            dtypes = sorted(KV_DTYPES, key=lambda dtype: dtype != self.kv_dtype)
            for ids in runs:
                for dtype in dtypes:
                    identity = replace(self.identity(ids, ""), kv_dtype=dtype)
                    if variants := self.store.catalog.variants(content_key(identity)):
                        found[ids] = replace(identity, prefix=variants[-1].prefix, context=variants[-1].context)
                        break
            return found

        nothing: dict[TokenIds, ChunkIdentity] = {}
        return self.deadline.ask(find, nothing, what="the KV store's catalog") if runs else nothing

    def stored_ids(self, entries: Sequence[TextEntry]) -> dict[str, list[TokenIds]]:
        """Return, by digest, the token ids of those texts that have KV of this model."""
        store, nothing = self.store, dict[str, list[ChunkIdentity]]()
        found = self.deadline.ask(
            lambda: {entry.digest: store.identities(self.namespace, entry.digest) for entry in entries},
            nothing,
            what="the KV store",
        )
        own = self.identity((), "")
        return {
            digest: list(
                dict.fromkeys([i.token_ids for i in ids if replace(i, prefix="", context="", token_ids=()) == own])
            )
            for digest, ids in found.items()
        }
