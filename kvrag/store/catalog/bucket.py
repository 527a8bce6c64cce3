"""Rows of a bucket without a catalog, read off its blobs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.crypto import Keys
from kvrag.kv.format import Blob, BlobRejected
from kvrag.runtime import POOL
from kvrag.store.base import Blobs
from kvrag.store.blobs import KEY
from kvrag.store.catalog.ledger import ChunkRow, State, record_of
from kvrag.store.eviction import Usage
from kvrag.types import ChunkKey

REMEDY = (
    "name the Redis with its catalog as StoreConfig.catalog (--catalog, KVRAG_CATALOG), "
    "as redis://host:6379/0"
)
FOLLOW_S = 60  # seconds after which chunks in memory are looked up again


class BlobRows:
    """Rows of a bucket without a catalog: the chunks whose blobs exist.

    Texts and documents are unknown, and erasures by other machines are noticed after
    :data:`FOLLOW_S`. Changes raise ``StoreError``, as do questions about documents.
    """

    read_only = True
    pause_s = 0.0
    remedy = REMEDY

    def __init__(self, *, blobs: Blobs, keys: Keys, **_: object) -> None:
        self._blobs = blobs
        self._cipher = keys.cipher

    def get(self, name: str) -> str | None:
        """Return the row of a chunk, or of the store."""
        kind, _, rest = name.partition(" ")
        if kind == "c":
            return self._chunk(ChunkKey(rest))
        if kind == "s":
            # A new generation makes memory compare its chunks with the rows.
            return json.dumps(State(int(time.time()) // FOLLOW_S, dormant=False))
        if kind == "e":
            return str(time.time_ns())  # an erasure may have happened just now
        return None

    def many(self, names: Sequence[str]) -> list[str | None]:
        """Return several rows."""
        return list(POOL.ahead(self.get, names))

    def ahead(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def names(self, prefix: str) -> list[str]:
        """Return the keys of all chunks; raises ``StoreError`` for other names."""
        if prefix != "c ":
            self.change()
        with suppress(OSError):
            return sorted(self._blobs.keys())
        return []

    def change(self, *_: object) -> NoReturn:
        """Raise ``StoreError``."""
        raise StoreError(f"this bucket of KV has no catalog, so it can only be read; {REMEDY}")

    set = delete = clear = change

    def scrub(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def _chunk(self, key: ChunkKey) -> str | None:
        if not KEY.fullmatch(key):
            return None
        with suppress(BlobRejected):
            header = Blob(partial(self._blobs.read, key), None, self._cipher).header
            if chunk_key(header.identity) == key:
                _, *known = record_of(header.identity, header.num_bytes)
                return json.dumps(ChunkRow._make([*known, [], Usage(), False, 1]))
        return None
