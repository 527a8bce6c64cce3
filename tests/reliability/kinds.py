"""Kinds of stores that the scenarios run on besides the plain one: written behind, protected by keys, with rounded KV."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrag.store.guard import Guard
from kvrag.store.keys import Keys
from world import CONFIG, LONG_TOKENS

from kvrag.blend.quantise import convert
from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, WriteBehind
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, KVDtype

RAM_BYTES = 2**20


@dataclass(frozen=True)
class Kind:
    """How a store is written: its keys, the type that KV is rounded to, whether in the background, whether memory is above."""

    config: StoreConfig = CONFIG
    kv_dtype: KVDtype = "auto"
    is_behind: bool = False
    is_tiered: bool = False

    @property
    def needs(self) -> str:
        """What is missing here for this kind; nothing if all is here."""
        is_missing = self.config.encryption_key and importlib.util.find_spec("cryptography") is None
        return "cryptography is not installed" if is_missing else ""

    @property
    def guard(self) -> Guard | None:
        """What protects its blobs."""
        return Guard.of(Keys.of(self.config))

    def open(self, root: Path) -> DiskStore | WriteBehind | TieredStore:
        """Open a store of this kind."""
        disk = DiskStore(root, self.config)
        lower = WriteBehind(disk) if self.is_behind else disk
        return TieredStore(MemoryStore(RAM_BYTES), lower) if self.is_tiered else lower

    def identity(self, number: int, *, tokens: int | None = None) -> ChunkIdentity:
        """Chunk of this number; every fifth is long."""
        length = (LONG_TOKENS if number % 5 == 0 else 3) if tokens is None else tokens
        return replace(make_identity(number, tokens=length), kv_dtype=self.kv_dtype)

    def key(self, number: int) -> ChunkKey:
        """Key of this chunk."""
        return chunk_key(self.identity(number))

    def kv(self, identity: ChunkIdentity) -> ChunkKV:
        """Its KV."""
        return convert(make_kv(identity), self.kv_dtype)

    def put(self, store: Any, number: int, *, is_flushed: bool = True, **options: Any) -> int:
        """Store a chunk under a text and a document of its own, and wait until it is on the disk."""
        me = self.identity(number)
        written = store.put(me, self.kv(me), text=make_text(str(number)), doc_id=f"doc {number}", **options)
        errors = store.flush() if is_flushed else {}
        if errors:
            raise StoreError("; ".join(errors.values()))
        return int(written)

    def state(self, store: Any, number: int) -> str:
        """Say whether a chunk is ``readable`` with the right bits, ``missing``, or ``wrong``."""
        me = self.identity(number)
        kv = store.get(me)
        if kv is None:
            return "missing"
        return "readable" if same_bits(kv, self.kv(me)) else "wrong"


def _key(number: int) -> bytes:
    return bytes([number]) * 32


KEYS = replace(
    CONFIG, namespace_secret=lambda: _key(1), mac_key=lambda: _key(2), encryption_key=lambda: _key(3), index="sqlite"
)
PLAIN = Kind()
BEHIND = Kind(is_behind=True)
PROTECTED = Kind(KEYS, "int8")
ROUNDED = Kind(kv_dtype="int4")
ALL_AT_ONCE = Kind(KEYS, "int8", is_behind=True, is_tiered=True)
TIERED = Kind(is_tiered=True)
TIERED_BEHIND = Kind(is_behind=True, is_tiered=True)
