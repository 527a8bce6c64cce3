"""Store of KV between requests: content-addressed, and verified at every read.

::

    engine → opening → tiers ─┬→ reading ─┬→ memory (tiers: host, gpu)
                              └→ writing ─┼→ catalog (diskcache; shared: kvrag_shared)
                                          ├→ kv.format → kv.crypto
                                          └→ blobs (files, or copies → kvrag_shared)

Imports ``types errors config runtime``, ``identity`` and ``kv``; nothing else of kvrag.
"""

from kvrag.config import Retention
from kvrag.kv.crypto import Keys, RowCipher
from kvrag.kv.format import Bytes
from kvrag.runtime import POOL
from kvrag.store.base import (
    WRITABLE,
    Blobs,
    CatalogRows,
    ChunkRecord,
    MemoryBlobs,
    StoreEvent,
    StoreStats,
)
from kvrag.store.blobs import FileBlobs
from kvrag.store.catalog import Catalog
from kvrag.store.memory import MemoryTier, Prefetch
from kvrag.store.opening import on_accelerator, open_store
from kvrag.store.tiers import TieredStore
from kvrag.types import ChunkKey

__all__ = [
    "POOL",
    "WRITABLE",
    "Blobs",
    "Bytes",
    "Catalog",
    "CatalogRows",
    "ChunkKey",
    "ChunkRecord",
    "FileBlobs",
    "Keys",
    "MemoryBlobs",
    "MemoryTier",
    "Prefetch",
    "Retention",
    "RowCipher",
    "StoreEvent",
    "StoreStats",
    "TieredStore",
    "on_accelerator",
    "open_store",
]
