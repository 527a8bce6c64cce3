"""Budgets: bytes, and fractions of what the machine has; the lesser wins."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Container
from pathlib import Path

import torch

from kvrag.store.retention import Retention

log = logging.getLogger(__name__)

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def want_of_room(tiers: Container[str], retention: Retention | None, disk_min_priority: int) -> str:
    """Say which tier was too small for a chunk that was stored and pushed out again, and what to do.

    Parameters
    ----------
    tiers
        Names of the store's tiers.
    retention
        What the chunk was stored with.
    disk_min_priority
        What has less is kept in memory alone.
    """
    priority = (retention or Retention()).priority
    remedy = "memory is too small; raise StoreConfig.ram_bytes or ram_fraction"
    if "disk" not in tiers:
        return f"{remedy}, or pass kv_dir"
    if priority < disk_min_priority:
        return f"{remedy}, or lower disk_min_priority, below which {priority} is kept in memory alone"
    return "the disk's budget is too small; raise StoreConfig.disk_bytes or disk_fraction, lower min_free_bytes, or free space there"


def lesser(limit: int | None, fraction: float, total: Callable[[], int]) -> int | None:
    """Return the lesser of a limit in bytes and a fraction of ``total()``; a fraction of 1 is no limit.

    Parameters
    ----------
    limit
        Bytes; ``None``: no limit.
    fraction
        In [0, 1].
    total
        Bytes that there are; asked only where the fraction needs it. Where it fails with ``OSError``, the fraction is no limit; a
        fraction of 0 still is nothing.
    """
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
    """Bytes of memory that this process may use: the machine's, or its control group's limit if that is less.

    Raises
    ------
    OSError
        If the system doesn't say.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, AttributeError) as error:
        raise OSError("the system doesn't say how much memory it has") from error
    for path in CGROUP_LIMITS:
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def file_system(path: str | os.PathLike[str]) -> int:
    """Bytes of the file system that a directory is on, or will be. Raises ``OSError``."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).total


def device_memory(device: torch.device) -> int:
    """Bytes of an accelerator's memory.

    Raises
    ------
    OSError
        If it is of a kind that isn't asked here.
    """
    if device.type != "cuda":
        raise OSError(f"it is not known how much memory {device} has")
    return int(torch.cuda.get_device_properties(device).total_memory)


def device_budget(limit: int | None, fraction: float, device: torch.device) -> int:
    """Return the budget of a tier in an accelerator's memory, in bytes; 0: no tier.

    Parameters
    ----------
    limit, fraction
        As for :func:`lesser`. Without either, all of the memory; where nobody knows how much that is, only ``limit`` counts.
    device
        The accelerator.
    """
    budget = lesser(limit, fraction, lambda: device_memory(device))
    if budget is not None:
        return budget
    try:
        return device_memory(device)
    except OSError as error:
        log.warning("there is no tier in the memory of the accelerator: %s; set StoreConfig.gpu_bytes", error)
        return 0
