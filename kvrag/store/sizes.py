"""Budgets: bytes, and fractions of what the machine has; the lesser wins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def lesser(limit: int | None, fraction: float, total: Callable[[], int]) -> int | None:
    """Return the lesser of a limit in bytes and a fraction of ``total()``; a fraction of 1 is no limit.

    Parameters
    ----------
    limit
        Bytes; ``None``: no limit.
    fraction
        In [0, 1].
    total
        Bytes that there are; asked only where the fraction needs it. Where it fails with ``OSError``, the fraction is no limit.
    """
    if fraction >= 1:
        return limit
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
    """Bytes of an accelerator's memory; 0 for one that doesn't say."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
