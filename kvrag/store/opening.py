"""Open the store of an engine.

Engines of a process share a catalog and a memory tier per directory, key and memory budget.
"""

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
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar, cast
from weakref import WeakValueDictionary, ref

import torch

from kvrag.config import StoreConfig
from kvrag.config.address import HIDDEN, absolute, address, revealed
from kvrag.errors import ConfigError, StoreError, StoreFormatError
from kvrag.identity.fingerprint import FORMAT_VERSION, text_digest
from kvrag.kv.crypto import Keys
from kvrag.runtime import host_memory
from kvrag.store.base import Blobs, CatalogRows, MemoryBlobs
from kvrag.store.blobs import OBJECTS, TMP, FileBlobs
from kvrag.store.catalog import Catalog
from kvrag.store.catalog.bucket import BlobRows
from kvrag.store.catalog.database import sync
from kvrag.store.copies import CachedBlobs
from kvrag.store.eviction import Budget
from kvrag.store.memory import MemoryTier
from kvrag.store.tiers import TieredStore
from kvrag.store.writing import in_words
from kvrag.types import StrPath

log = logging.getLogger(__name__)

FORMAT_FILE = "format.json"
# Beginnings of all names that a store creates in its directory.
OWN = (
    FORMAT_FILE,
    OBJECTS,
    TMP,
    "lock",
    "catalog",
    "copies",
    "index",
    "references",
    "quarantine",
    "llama_index",
)

# Beginnings, in lower case, of the names that operating systems put in roots of drives.
SYSTEM = (
    ".",
    "lost+found",
    "thumbs.db",
    "ehthumbs",
    "desktop.ini",
    "@",
    "#recycle",
    "#snapshot",
    "~snapshot",
    "$recycle.bin",
    "recycler",
    "system volume information",
    "network trash folder",
    "temporary items",
    "aquota.",
    "icon\r",
)

# Entry points of shared stores, also of kvrag's own: the name is the address scheme, the value a
# function that takes the address and a folder in it and returns :class:`~kvrag.store.base.Blobs`.
PLUGINS = "kvrag.stores"

OURS = "kvrag_shared."
NOBODY = 65534  # owner of the files of root on NFS

L = TypeVar("L", int, int | None)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Parts:
    """Parts that the stores of a directory share, and the number of these stores."""

    host: MemoryTier
    blobs: Blobs
    catalog: Catalog
    users: int = 0


# Parts of the open stores of this process, by directory, key and memory budget.
_shared: dict[object, _Parts] = {}
# Accelerator tiers by catalog, device and budget.
_above: WeakValueDictionary[object, MemoryTier] = WeakValueDictionary()
_lock = threading.RLock()

os.register_at_fork(after_in_child=_shared.clear)  # a forked child opens parts of its own


def open_store(kv_dir: StrPath | None, config: StoreConfig) -> TieredStore:
    """Open the store of an engine in a directory, in memory, or at an address that machines share.

    Stores of this process with the same directory, key and memory budget share a catalog and a
    memory tier, which are released when the last of these stores is closed. A directory that can't
    be written to is opened for reading only.

    Raises ``ConfigError`` and ``MissingDependencyError`` about the key, ``shared`` or ``catalog``,
    ``StoreFormatError`` if a newer kvrag wrote the store, and ``StoreError`` if the directory can't
    be used.
    """
    keys = Keys.of(config)
    ram = lesser(config.ram_bytes, config.ram_fraction, host_memory)
    if config.shared is not None and (
        kv_dir is None or ("://" in str(kv_dir) and address(kv_dir) != config.shared)
    ):
        raise ConfigError(
            "StoreConfig.shared has no effect without a directory for copies; "
            "pass one as kv_dir, or leave shared out"
        )
    is_shared = "://" in str(kv_dir) or config.shared is not None
    if config.catalog is not None and not is_shared:
        raise ConfigError(
            "StoreConfig.catalog has no effect on a store of one machine; "
            "name a store that machines share as kv_dir or StoreConfig.shared, or leave catalog out"
        )
    if kv_dir is None:
        return TieredStore(
            [],
            MemoryBlobs(),
            Catalog(None, keys, may_have_blobs=lambda: False),
            config,
            keys=keys,
            budget=Budget(ram),
        )
    if is_shared:
        return _open_shared(kv_dir, config, keys, MemoryTier(ram))
    root = Path(absolute(kv_dir))
    read_only = prepare(root, config)
    key = (os.path.realpath(root), keys.cipher, read_only, config.durability, ram)
    durable = config.durability == "durable"
    folder = root / (f"catalog-{keys.id}" if keys.id else "catalog")

    def open_parts() -> _Parts:
        blobs = FileBlobs(root, durable=durable)
        if not read_only:
            blobs.sweep()
        return _Parts(
            MemoryTier(ram),
            blobs,
            Catalog(
                folder,
                keys,
                read_only=read_only,
                durable=durable,
                may_have_blobs=(root / OBJECTS).is_dir,
            ),
        )

    return _joined(key, open_parts, config, keys, _budget(root, config))


def _open_shared(kv_dir: StrPath, config: StoreConfig, keys: Keys, host: MemoryTier) -> TieredStore:
    """Open a store that machines share, with local copies unless ``kv_dir`` is the address."""
    root = None
    url = address(kv_dir)
    if "://" not in str(kv_dir):
        root = Path(absolute(cast(str, kv_dir)))
        url = address(config.shared)
        if prepare(root, config):
            raise StoreError(
                f"{root} can't be written to; "
                "name a directory for copies of the shared KV store, or none"
            )
    key = (
        url,
        config.catalog,
        root and os.path.realpath(root),
        keys.cipher,
        config.read_only,
        host.max_bytes,
    )

    def open_parts() -> _Parts:
        blobs = open_url(url)
        rows = _rows(blobs, url, config.catalog, keys)
        if root is not None:
            digest = text_digest(f"{url} {keys.id}")
            blobs = CachedBlobs(
                blobs,
                # Copies that a power cut loses are fetched again.
                FileBlobs(root / f"copies-{digest[:16]}", durable=False),
                _budget(root, config),
            )
        return _Parts(host, blobs, Catalog(None, keys, read_only=config.read_only, rows=rows))

    return _joined(key, open_parts, config, keys, Budget())


def _rows(blobs: Blobs, url: str, catalog: str | None, keys: Keys) -> Callable[..., CatalogRows]:
    """Return the function that makes the rows of a store that machines share.

    They are at ``catalog``, else beside the blobs; else they are read off the blobs.
    """
    if catalog is None:
        # Machines may know a Redis by different names, but it has one store in a database.
        return blobs.catalog(keys.id) or partial(BlobRows, blobs=blobs, keys=keys)
    there = _opened(catalog)
    if there and (rows := there.catalog(f"{url.rstrip('/')} {keys.id}")):
        return rows
    raise StoreError(
        f"there is no catalog at {_whole(catalog)[0]}://; "
        "name a Redis or Valkey server as StoreConfig.catalog, as redis://host:6379/0 "
        "(kvrag[redis] adds them)"
    )


def _budget(root: Path, config: StoreConfig) -> Budget:
    return Budget(
        lesser(config.disk_bytes, config.disk_fraction, lambda: shutil.disk_usage(root).total),
        config.min_free_bytes,
    )


def _whole(url: str) -> tuple[str, str]:
    """Return the scheme of an address, and the address with its password; raises ``StoreError``."""
    whole = revealed(url)
    if f":{HIDDEN}@" in whole:
        raise StoreError(
            f"the password of {url} was left out where this address was written down; "
            "pass the whole address again"
        )
    scheme, _, rest = whole.partition("://")
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(scheme.lower(), scheme.lower())
    return scheme, f"{scheme}://{rest}"


def open_url(url: str) -> Blobs:
    """Open the blobs of a store that machines share; raises ``StoreError``."""
    blobs = _opened(url)
    if blobs is not None:
        return blobs
    known = ", ".join(sorted(entry_points(group=PLUGINS).names)) or "a directory"
    raise StoreError(
        f"there is no shared KV store at {_whole(url)[0]}://; use {known}, or install the package "
        "that adds it: kvrag[redis] for Redis and Valkey, kvrag[objects] for buckets, or any with "
        f"the entry point {PLUGINS}"
    )


def _opened(url: str) -> Blobs | None:
    """Open the blobs at an address by the package that registers its scheme, if there is any."""
    scheme, whole = _whole(url)
    plugins = entry_points(group=PLUGINS).select(name=scheme)
    # kvrag's own stores first: no other package gets the password of a Redis
    for plugin in sorted(plugins, key=lambda p: not p.module.startswith(OURS)):
        try:
            open_blobs = plugin.load()
        except (ImportError, AttributeError) as error:
            raise StoreError(
                f"{plugin.value}, which opens {scheme}://, can't be loaded ({error}); "
                "reinstall the package that registers it"
            ) from error
        blobs = open_blobs(whole, OBJECTS)
        if isinstance(blobs, Blobs):
            return blobs
        raise StoreError(
            f"{plugin.value}, which opens {scheme}://, returns {type(blobs).__name__}; "
            "let it return a subclass of kvrag.store.Blobs"
        )
    return None


def _joined(
    key: object, open_parts: Callable[[], _Parts], config: StoreConfig, keys: Keys, budget: Budget
) -> TieredStore:
    """Return a store of the parts that the stores of ``key`` share; the first store opens them."""
    with _lock:
        parts = _shared[key] = _shared.get(key) or open_parts()
        parts.users += 1

    mine = ref(parts)  # a closed store holds no memory

    def is_last() -> bool:
        with _lock:
            known = _shared.get(key)
            if known is None or known is not mine():  # mine are the parent's of this process
                return False
            known.users -= 1
            if not known.users:
                del _shared[key]
            return not known.users

    return TieredStore(
        [parts.host],
        parts.blobs,
        parts.catalog,
        config,
        keys=keys,
        budget=budget,
        is_last=is_last,
    )


def on_accelerator(store: TieredStore, device: torch.device, config: StoreConfig) -> None:
    """Put a tier in accelerator memory above a store, if there is a budget for it.

    A CPU has no budget. Stores of a directory share the tier. ``config`` is as for
    :func:`open_store`.
    """
    budget = device_budget(config.gpu_bytes, config.gpu_fraction, device)
    if budget:
        with _lock:
            store.memory.put_above(
                _above.setdefault(
                    (store.catalog, device, budget),
                    MemoryTier(budget, name="gpu", device=device),
                )
            )


def prepare(root: Path, config: StoreConfig) -> bool:
    """Make a directory a store; return whether it must be opened for reading only.

    Raises like :func:`open_store`.
    """
    with in_words(f"the KV store {root} can't be used"):
        version = _version(root / FORMAT_FILE)
    if version is not None and version > FORMAT_VERSION:
        raise StoreFormatError(
            f"the KV store {root} was written by a newer kvrag "
            f"(format {version}; this one has {FORMAT_VERSION}); "
            "update kvrag, or choose another directory"
        )
    if config.read_only:
        return True
    others = [
        path.name
        for path in (root.glob("*") if version is None else ())
        if not (path.name.startswith(OWN) or path.name.lower().startswith(SYSTEM))
    ]
    if others:
        raise StoreError(
            f"the directory {root} holds {others[0]!r} and is no KV store; "
            "name one that is empty, or does not exist yet, as kv_dir"
        )
    try:
        absent = [path for path in (root, *root.parents) if not path.exists()]
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync(*(path.parent for path in absent))  # its name must survive a power cut
        _close_to_others(root, is_encrypted=config.encryption_key is not None)
        if version != FORMAT_VERSION:
            _write_version(root)
        elif not os.access(root, os.W_OK):
            raise PermissionError("the directory is not writable")
    except OSError as error:
        if version is None:
            raise StoreError(
                f"the KV store {root} can't be used: {error}; "
                "choose a directory that can be written to"
            ) from error
        log.warning(
            "the KV store %s can't be written to (%s); it is opened for reading only", root, error
        )
        return True
    return False


def _version(path: Path) -> int | None:
    """Return the format version of a store: 0 if unreadable, ``None`` without a format file."""
    if not path.is_file():
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        version = json.loads(path.read_text())["version"]
        if type(version) is int:
            return version
    return 0


def _write_version(root: Path) -> None:
    draft = root / f".{FORMAT_FILE}.{os.getpid()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump({"format": "kvrag", "version": FORMAT_VERSION}, file)
    # Replaced at once: no process ever reads half a file.
    draft.replace(root / FORMAT_FILE)


def _close_to_others(root: Path, *, is_encrypted: bool) -> None:
    """Make the store's directories private, and the root if it holds nothing else.

    A mount may not allow it. Raises ``OSError`` for an open directory of another user, unless the
    store ``is_encrypted``: that user could exchange KV.
    """
    names = os.listdir(root)
    closed = [root / name for name in names if name.startswith(OWN)]
    if len(closed) == len(names):
        closed.append(root)
    faults = list[str]()
    for path in closed:
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o077:
            try:
                path.chmod(status.st_mode & 0o700)
            except OSError as error:
                if not is_encrypted and status.st_uid not in (os.geteuid(), 0, NOBODY):
                    raise PermissionError(
                        f"{path} belongs to another user (id {status.st_uid}), who could exchange "
                        "KV in it; make it yours with chown, or set StoreConfig.encryption_key"
                    ) from error
                faults.append(f"{path} ({error.strerror})")
                continue
            log.warning(
                "other users had access to the KV store's directory %s; access is now yours alone",
                path,
            )
    if faults:
        log.warning(
            "other users may have access to the KV store, whose files hold what your documents "
            "say, because access can't be restricted: %s; restrict it in the mount's options, or "
            "set StoreConfig.encryption_key",
            ", ".join(faults),
        )


def lesser(limit: L, fraction: float, total: Callable[[], int]) -> int | L:
    """Return ``min(limit, fraction * total())``, in bytes.

    A ``limit`` of ``None``, a fraction of 1 or an unknown total is no limit.
    """
    if fraction >= 1:
        return limit
    with suppress(OSError, ValueError, AttributeError):
        part = int(fraction * total()) if fraction else 0
        if limit is None:
            return part
        return min(limit, part)
    return limit


def device_budget(limit: int | None, fraction: float, device: torch.device) -> int:
    """Return the budget of the tier in an accelerator's memory, in bytes; 0 means no tier.

    Only CUDA reports its total memory; on other devices ``limit`` alone counts.
    """
    if device.type == "cpu" or limit == 0 or fraction == 0:
        return 0
    if device.type == "cuda":
        part = int(fraction * torch.cuda.get_device_properties(device).total_memory)
        return min(limit or part, part)
    if limit is None:
        log.warning(
            "no memory tier on %s: its memory size is unknown; set StoreConfig.gpu_bytes",
            device,
        )
    return limit or 0
