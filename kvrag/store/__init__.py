"""Where KV is kept between requests: content-addressed, proven at every read.

::

    engine → opening → tiers → reading ──→ memory (host, gpu)
                                   ├─────→ catalog → ledger → rows (diskcache) → database
                                   ├─────→ format → layers, crypto
                                   └─────→ blobs (files, memory; later Redis, object stores)
    cli → check → tiers

Imports ``types errors config threads`` and ``identity``; nothing else of kvrag.
"""

from kvrag.store.base import Blobs, Record, StoreEvent, StoreStats, below_collection, members
from kvrag.store.blobs import FileBlobs, MemoryBlobs
from kvrag.store.catalog import Catalog
from kvrag.store.crypto import Keys, Naming
from kvrag.store.memory import MemoryTier, Prefetch
from kvrag.store.opening import on_accelerator, open_store
from kvrag.store.tiers import TieredStore
from kvrag.store.worth import Retention, check_retention

__all__ = [
    "Blobs",
    "Catalog",
    "FileBlobs",
    "Keys",
    "MemoryBlobs",
    "MemoryTier",
    "Naming",
    "Prefetch",
    "Record",
    "Retention",
    "StoreEvent",
    "StoreStats",
    "TieredStore",
    "below_collection",
    "check_retention",
    "members",
    "on_accelerator",
    "open_store",
]
