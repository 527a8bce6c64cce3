"""Where KV is kept between requests: content-addressed, proven at every read."""

from __future__ import annotations

import os

from kvrag.config import StoreConfig
from kvrag.store.base import Index, KVStore, Record, Retention, StoreStats, TextLookup
from kvrag.store.disk import DiskStore
from kvrag.store.events import StoreEvent
from kvrag.store.index import DiskIndex
from kvrag.store.memory import MemoryStore
from kvrag.store.memory_index import MemoryIndex
from kvrag.store.tiered import TieredStore

__all__ = [
    "DiskIndex",
    "DiskStore",
    "Index",
    "KVStore",
    "MemoryIndex",
    "MemoryStore",
    "Record",
    "Retention",
    "StoreEvent",
    "StoreStats",
    "TextLookup",
    "TieredStore",
    "open_store",
]


def open_store(kv_dir: str | os.PathLike[str] | None, config: StoreConfig) -> KVStore:
    """Open the store of an engine.

    Parameters
    ----------
    kv_dir
        Directory to keep KV in; ``None`` keeps it in memory only, for as long as the process lives.
    config
        Budgets.

    Raises
    ------
    StoreError
        If the directory can't be used.
    """
    memory = MemoryStore(config.ram_bytes)
    return memory if kv_dir is None else TieredStore(memory, DiskStore(kv_dir, config))
