"""Where KV is kept between requests: content-addressed, proven at every read."""

from __future__ import annotations

import os

import torch

from kvrag.config import StoreConfig
from kvrag.store.base import Index, KVStore, Record, StoreStats, TextLookup, Tier
from kvrag.store.disk import DiskStore
from kvrag.store.events import Events, StoreEvent
from kvrag.store.index import DiskIndex
from kvrag.store.keys import Keys
from kvrag.store.layers import Layers
from kvrag.store.memory import MemoryStore
from kvrag.store.memory_index import MemoryIndex
from kvrag.store.prefetch import Prefetch
from kvrag.store.retention import Retention
from kvrag.store.sizes import device_budget, host_memory, lesser
from kvrag.store.tiered import TieredStore
from kvrag.store.write_behind import WriteBehind

# INTERIM, until the new store is merged: the names of its API on today's classes.
_AnyStore = (TieredStore, MemoryStore, DiskStore, WriteBehind)
for _cls in _AnyStore:
    _cls.catalog = property(lambda self: self.index)  # type: ignore
    _cls.known = lambda self, keys: {key for key in keys if self.contains(key)}  # type: ignore
    if not hasattr(_cls, "prefetch"):
        _cls.prefetch = lambda self, chunks: Prefetch(len(list(chunks)))  # type: ignore
    if not hasattr(_cls, "release"):
        _cls.release = lambda self: 0  # type: ignore

Catalog = Index  # INTERIM

__all__ = [
    "Catalog",
    "DiskIndex",
    "DiskStore",
    "Index",
    "KVStore",
    "Layers",
    "MemoryIndex",
    "MemoryStore",
    "Prefetch",
    "Record",
    "Retention",
    "StoreEvent",
    "StoreStats",
    "TextLookup",
    "Tier",
    "TieredStore",
    "WriteBehind",
    "accelerator_tier",
    "on_accelerator",
    "open_store",
]


_open: dict = {}  # type: ignore  # INTERIM


def open_store(kv_dir: str | os.PathLike[str] | None, config: StoreConfig, keys: Keys | None = None) -> KVStore:
    """Open the store of an engine.

    Parameters
    ----------
    kv_dir
        Directory to keep KV in; ``None`` keeps it in memory only, for as long as the process lives.
    config
        Budgets.
    keys
        The config's keys, where they were read already.

    Raises
    ------
    ConfigError, MissingDependencyError
        If a key, or what it is needed for, can't be had.
    StoreError
        If the directory can't be used.
    """
    limit = lesser(config.ram_bytes, config.ram_fraction, host_memory)
    budget = config.ram_bytes if limit is None else limit
    memory = MemoryStore(budget, events=Events(config.on_event, config.event_log), kv_dtype=config.ram_dtype)
    keys = keys or Keys.of(config)
    if kv_dir is None:
        memory.names = keys.names  # type: ignore
        return memory
    place = (os.path.realpath(kv_dir), config)
    if place in _open:  # INTERIM: one store per directory and process
        _open[place][1][0] += 1
        return _open[place][0]
    users = [0]
    disk = DiskStore(kv_dir, config, keys)
    lower = disk
    store = TieredStore(
        memory,
        lower,
        prefetch=config.prefetch,
    )
    store.names = keys.names  # type: ignore
    close, users[0] = store.close, 1

    def release() -> None:  # INTERIM
        users[0] -= 1
        if users[0] == 0:
            _open.pop(place, None)
            close()

    store.close = release  # type: ignore
    _open[place] = store, users
    return store


def on_accelerator(store: KVStore, device: torch.device, config: StoreConfig) -> KVStore:
    """Put a tier in the memory of an accelerator above a store; the store itself where there is none, or no budget for one.

    Parameters
    ----------
    store
        From :func:`open_store`.
    device
        Where the model is.
    config
        Budgets.
    """
    if device.type == "cpu":
        return store
    budget = device_budget(config.gpu_bytes, config.gpu_fraction, device)
    return accelerator_tier(store, device, config, budget) if budget else store


def accelerator_tier(store: KVStore, device: torch.device, config: StoreConfig, budget: int) -> TieredStore:
    """Put a tier of ``budget`` bytes in a device's memory above a store."""
    below = config.ram_dtype or config.kv_dtype
    is_alike = config.gpu_dtype in (None, below)
    kv_dtype = None if is_alike else config.gpu_dtype
    events = Events(config.on_event, config.event_log)
    memory = MemoryStore(budget, name="gpu", device=device, events=events, kv_dtype=kv_dtype)
    # What is kept in another way here must not take the place of what is below.
    above = TieredStore(memory, store, keeps_puts=False, demotes=is_alike, prefetch=config.prefetch)
    above.names = store.names  # type: ignore
    return above
