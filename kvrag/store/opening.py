"""Open the store of an engine: one catalog and one memory tier per directory, key and process, however many engines use it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvrag.config import StoreConfig
from kvrag.errors import StoreError, StoreFormatError
from kvrag.identity.fingerprint import FORMAT_VERSION
from kvrag.store.base import Blobs
from kvrag.store.blobs import OBJECTS, TMP, FileBlobs, MemoryBlobs
from kvrag.store.catalog import Catalog
from kvrag.store.crypto import Keys
from kvrag.store.memory import MemoryTier, Reads
from kvrag.store.rows import sync
from kvrag.store.tiers import TieredStore
from kvrag.store.worth import Budget
from kvrag.types import ChunkKV, KVDtype

log = logging.getLogger(__name__)

FORMAT_FILE = "format.json"
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

Convert = Callable[[ChunkKV, KVDtype], ChunkKV]
"""Returns a chunk kept as a type: :func:`kvrag.blend.quantise.convert`."""


@dataclass(slots=True, eq=False)
class _Shared:
    """What the stores of one directory share, as long as one of them is open."""

    blobs: Blobs
    catalog: Catalog
    tiers: dict[object, MemoryTier]
    reads: Reads
    users: int = 0


_shared: dict[object, _Shared] = {}
_lock = threading.Lock()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def open_store(
    kv_dir: str | os.PathLike[str] | None, config: StoreConfig, *, convert: Convert | None = None
) -> TieredStore:
    """Open the store of an engine.

    Stores of this process with the same directory, key and memory budget share one catalog and one memory tier. They are released when the
    last one is closed.

    Parameters
    ----------
    kv_dir
        Directory to keep KV in; ``None`` keeps it in memory, for as long as the store is open.
    config
        Budgets, limits and the key.
    convert
        Changes how a chunk is kept, for ``ram_dtype`` and ``gpu_dtype``.

    Raises
    ------
    ConfigError, MissingDependencyError
        If the key, or what it is needed for, can't be had.
    StoreError
        If the directory can't be used. One that holds a store and can't be written to is opened for reading.
    StoreFormatError
        If it was written by a newer kvrag.
    """
    keys = Keys.of(config)
    if kv_dir is None:
        return _in_memory(config, keys)
    root = Path(os.path.abspath(kv_dir))
    read_only = prepare(root, config)
    ram = budget_of(config)
    key = (os.path.realpath(root), keys.cipher, read_only, config.durability, ram, config.ram_dtype)
    with _lock:
        shared = _shared.get(key)
        if shared is None:
            shared = _shared[key] = _open(root, config, keys, read_only, ram, convert)
        shared.users += 1
    limit = lesser(config.disk_bytes, config.disk_fraction, partial(file_system, root))
    return TieredStore(
        list(shared.tiers.values())[-1:],
        shared.blobs,
        shared.catalog,
        config,
        keys=keys,
        budget=Budget(limit, config.min_free_bytes, config.high_watermark, config.low_watermark),
        free_bytes=getattr(shared.blobs, "free_bytes", None),
        reads=shared.reads,
        on_close=partial(_release, key, shared),
    )


def _open(root: Path, config: StoreConfig, keys: Keys, read_only: bool, ram: int, convert: Convert | None) -> _Shared:
    blobs = FileBlobs(root, durable=config.durability == "durable")
    if not read_only:
        blobs.sweep()
    catalog = Catalog(
        root / (f"catalog-{keys.id}" if keys.id else "catalog"),
        keys,
        read_only=read_only,
        durable=config.durability == "durable",
        may_have_blobs=(root / OBJECTS).is_dir,
    )
    host = MemoryTier(ram, convert=converter(convert, config.ram_dtype))
    return _Shared(blobs, catalog, {"host": host}, Reads(ram))


def _release(key: object, shared: _Shared) -> None:
    with _lock:
        shared.users -= 1
        if shared.users:
            return
        if _shared.get(key) is shared:
            del _shared[key]
    shared.reads.cancel()
    shared.catalog.close()
    shared.blobs.close()
    for tier in shared.tiers.values():
        tier.release()


def _in_memory(config: StoreConfig, keys: Keys) -> TieredStore:
    if config.ram_dtype not in (None, config.kv_dtype):
        log.warning("ram_dtype changes nothing without kv_dir: chunks are kept as kv_dtype=%r", config.kv_dtype)
    blobs, catalog = MemoryBlobs(), Catalog(None, keys, may_have_blobs=lambda: False)
    budget = Budget(budget_of(config), 0, 1.0, 1.0)
    return TieredStore([], blobs, catalog, config, keys=keys, name="host", budget=budget)


def on_accelerator(
    store: TieredStore, device: torch.device, config: StoreConfig, *, convert: Convert | None = None
) -> TieredStore:
    """Put a tier in the memory of an accelerator above a store; the store itself where there is none, or no budget for one.

    Parameters
    ----------
    store
        From :func:`open_store`; it is closed with the one that is returned.
    device
        Where the model is.
    config, convert
        As for :func:`open_store`.
    """
    if device.type == "cpu":
        return store
    budget = device_budget(config.gpu_bytes, config.gpu_fraction, device)
    return accelerator_tier(store, device, config, budget, convert=convert) if budget else store


def accelerator_tier(
    store: TieredStore, device: torch.device, config: StoreConfig, budget: int, *, convert: Convert | None = None
) -> TieredStore:
    """Put a tier of ``budget`` bytes in a device's memory above a store; stores of one directory share it."""
    kv_dtype = None if config.gpu_dtype in (None, config.ram_dtype or config.kv_dtype) else config.gpu_dtype
    shared = next((each for each in _shared.values() if each.catalog is store.catalog), None)
    tiers: dict[object, MemoryTier] = {} if shared is None else shared.tiers
    key = (str(device), budget, kv_dtype)
    with _lock:
        if key not in tiers:
            made = MemoryTier(budget, name="gpu", device=device, convert=converter(convert, kv_dtype), keeps_puts=False)
            tiers.update({key: made, **{k: tiers.pop(k) for k in list(tiers)}})  # the host's stays the last one
    return store.below(tiers[key])


def converter(convert: Convert | None, kv_dtype: KVDtype | None) -> Callable[[ChunkKV], ChunkKV] | None:
    """Return what changes chunks to a type; ``None`` where they stay as they come."""
    if kv_dtype is None:
        return None
    if convert is None:
        raise StoreError(f"chunks can't be kept as {kv_dtype} in memory here; open the store with convert=")
    return lambda kv: convert(kv, kv_dtype)


def prepare(root: Path, config: StoreConfig) -> bool:
    """Make a directory a store, and return whether it is to be opened for reading only. Raises as :func:`open_store`."""
    path = root / FORMAT_FILE
    version = _version(path)
    if version is not None and version > FORMAT_VERSION:
        raise StoreFormatError(
            f"the KV store {root} was written by a newer kvrag (format {version}; this one has {FORMAT_VERSION}); update kvrag, or choose "
            "another directory"
        )
    if config.read_only:
        return True
    try:
        _make(root)
        _close_to_others(root)
        if version != FORMAT_VERSION:
            draft = root / f".{FORMAT_FILE}.{os.getpid()}"
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump({"format": "kvrag", "version": FORMAT_VERSION}, file)
            draft.replace(path)
        elif not os.access(root, os.W_OK):
            raise PermissionError("the directory is not writable")
    except OSError as error:
        if version is None:
            raise StoreError(
                f"the KV store {root} can't be used: {error}; choose a directory that can be written to"
            ) from error
        log.warning("the KV store %s can't be written to (%s); it is opened for reading only", root, error)
        return True
    return False


def _make(root: Path) -> None:
    """Make a directory, private, whose name survives a power cut."""
    absent = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    sync(*(path.parent for path in absent))


def _version(path: Path) -> int | None:
    """Return the version of the format that a store was written in; 0 for what can't be told."""
    try:
        version = json.loads(path.read_text())["version"]
        return version if type(version) is int else 0
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0 if path.is_file() else None


def _close_to_others(root: Path) -> None:
    """Take the rights of others from the store's folders, and from the root if it holds nothing else."""
    own = (FORMAT_FILE, OBJECTS, TMP, "lock", "catalog", "index", "references", "quarantine", "llama_index")
    names = os.listdir(root)
    closed = [root / name for name in names if name.startswith(own)]
    closed += [] if len(closed) < len(names) else [root]
    for path in closed:
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o077:
            path.chmod(status.st_mode & 0o700)
            log.warning("others had access to the KV store's directory %s; its rights were taken from them", path)


def budget_of(config: StoreConfig) -> int:
    """Return the budget of the host's memory tier, in bytes."""
    limit = lesser(config.ram_bytes, config.ram_fraction, host_memory)
    return config.ram_bytes if limit is None else limit


def lesser(limit: int | None, fraction: float, total: Callable[[], int]) -> int | None:
    """Return the lesser of a limit in bytes (``None``: none) and a fraction in [0, 1] of ``total()``; a fraction of 1 is no limit."""
    if fraction >= 1:
        return limit
    if not fraction:
        return 0
    try:
        part = int(fraction * total())
    except OSError:
        return limit
    return part if limit is None else min(limit, part)


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit; raises ``OSError``."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, AttributeError) as error:
        raise OSError("the system doesn't say how much memory it has") from error
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            total = min(total, int(Path(path).read_text()))
    return total


def file_system(path: str | os.PathLike[str]) -> int:
    """Bytes of the file system that a directory is on, or will be; raises ``OSError``."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).total


def device_budget(limit: int | None, fraction: float, device: torch.device) -> int:
    """Return the budget of a tier in an accelerator's memory, in bytes; 0: no tier.

    Parameters
    ----------
    limit, fraction
        As for :func:`lesser`. How much memory there is, is known for CUDA; elsewhere only ``limit`` counts.
    device
        The accelerator.
    """
    budget = lesser(limit, fraction, partial(_device_memory, device))
    if budget is not None:
        return budget
    try:
        return _device_memory(device)
    except OSError as error:
        log.warning("there is no memory tier on the accelerator: %s; set StoreConfig.gpu_bytes", error)
        return 0


def _device_memory(device: torch.device) -> int:
    if device.type != "cuda":
        raise OSError(f"it is not known how much memory {device} has")
    return int(torch.cuda.get_device_properties(device).total_memory)
