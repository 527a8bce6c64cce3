"""Store of KV between requests: content-addressed, and verified at every read.

::

    engine → opening → tiers → writing → reading ──→ memory (host, gpu)
                                             ├─────→ catalog (diskcache; shared: follows a journal)
                                             ├─────→ format → crypto
                                             └─────→ blobs (files, or copies → redis, object_store)
    cli → check → tiers

Imports ``types errors config threads layers buffers address`` and ``identity``; nothing else of
kvrag.
"""

from kvrag.config import Retention
from kvrag.store.base import Blobs, MemoryBlobs, Record, StoreEvent, StoreStats
from kvrag.store.blobs import FileBlobs
from kvrag.store.catalog import Catalog
from kvrag.store.crypto import Keys
from kvrag.store.memory import MemoryTier, Prefetch
from kvrag.store.opening import host_memory, on_accelerator, open_store
from kvrag.store.tiers import TieredStore
from kvrag.store.worth import check_retention

__all__ = [
    "Blobs",
    "Catalog",
    "FileBlobs",
    "Keys",
    "MemoryBlobs",
    "MemoryTier",
    "Prefetch",
    "Record",
    "Retention",
    "StoreEvent",
    "StoreStats",
    "TieredStore",
    "check_retention",
    "host_memory",
    "on_accelerator",
    "open_store",
]
