"""Memory that blobs are read into, used again when the tensors in it are gone.

A fresh buffer costs a page fault per 4 KiB, which takes as long as the read itself. On machines with CUDA the buffers
are pinned, so that copies to the device need no staging.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

IDLE_BYTES = 256 * 2**20
"""Most memory kept for reuse; what comes back beyond it is freed."""

STEPS = 16
"""Sizes are rounded up to a sixteenth of their power of two, so that chunks of similar length share buffers."""

MIN_BYTES = 64 * 1024


class Buffers:
    """A pool of buffers. A buffer comes back by itself when no tensor uses it any more.

    Parameters
    ----------
    idle_bytes
        Most memory kept while nobody uses it.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        # By size. No lock: a buffer may come back at any moment, in a thread that holds any lock, or in a forked child.
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._lent: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}
        self._idle_bytes = idle_bytes
        self._pinned = torch.cuda.is_available()

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor ``(num_bytes,)`` on the host.

        Raises
        ------
        MemoryError, RuntimeError
            If there is not enough memory.
        """
        if num_bytes < MIN_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        size = rounded(num_bytes)
        try:
            owner = self._idle[size].pop()
        except LookupError:
            owner = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        array = owner.numpy()
        # Tensors made of the array keep the array alive, and the array's end is the end of all of them.
        end = weakref.ref(array, self._come_back)
        self._lent[id(end)] = end, owner
        return torch.from_numpy(array)[:num_bytes]

    def _come_back(self, end: weakref.ref[Any]) -> None:
        self._give(self._lent.pop(id(end))[1])

    def _give(self, owner: torch.Tensor) -> None:
        if self.idle_bytes + owner.numel() <= self._idle_bytes:
            self._idle.setdefault(owner.numel(), []).append(owner)

    @property
    def idle_bytes(self) -> int:
        """Memory that is kept and not used now."""
        return sum(size * len(buffers) for size, buffers in list(self._idle.items()))


def rounded(num_bytes: int) -> int:
    """Round up to a multiple of a sixteenth of the power of two below."""
    step: int = max(4096, 2 ** (num_bytes.bit_length() - 1) // STEPS)
    return -(-num_bytes // step) * step
