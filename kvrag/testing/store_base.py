"""What the parts of the store's contract share: the store under test, and what is put into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import KVStore
from kvrag.testing.chunks import make_kv, make_text
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV

PATIENT_S = 30.0


class StoreUnderTest:
    """A store, and chunks for it."""

    dtype: torch.dtype = torch.float32

    def make_store(self, directory: Path) -> KVStore:
        """Open an empty store with room for a few megabytes; ``directory`` is its own and may be ignored."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        """Give the store under test, and close it afterwards."""
        store = self.make_store(tmp_path / "store")
        yield store
        store.close()

    def kv(self, identity: ChunkIdentity) -> ChunkKV:
        """KV of an identity in the dtype under test."""
        return make_kv(identity, dtype=self.dtype)

    def put(
        self, store: KVStore, identity: ChunkIdentity, text: str | None = None, doc_id: str | None = None
    ) -> ChunkKey:
        """Store the KV of an identity and return its key."""
        store.put(identity, self.kv(identity), text=make_text(text) if text else None, doc_id=doc_id)
        return chunk_key(identity)
