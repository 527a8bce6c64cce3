"""KV of running requests on a device: a pool of slots that is allocated once."""

from __future__ import annotations

import os
import threading
from bisect import insort
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvrag.errors import ConfigError

ALIGNED = 128  # slots: no tile of the kernels' keys holds rows of two requests


def pool_share() -> float:
    """Return the share of a device's free memory that a pool takes: ``KVRAG_POOL_SHARE``.

    Raises ``ConfigError`` if it is no number from 0 to 1.
    """
    given = os.environ.get("KVRAG_POOL_SHARE", "0.5")
    with suppress(ValueError):
        if 0 <= (share := float(given)) <= 1:
            return share
    raise ConfigError(
        f"KVRAG_POOL_SHARE is {given!r}; set it to a number from 0 (no pool) to 1, the share of "
        "the device's free memory that holds the KV of running requests"
    )


class KVPool:
    """KV of all running requests on a device: slots of all layers, allocated once.

    A request holds a run of neighbouring slots. The slot behind the last is spare.

    Parameters
    ----------
    shapes
        Number of heads, and head dims of keys and of values, per layer.
    num_slots
        Slots for requests.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        sides = [(1, heads, num_slots + 1, dim) for heads, *dims in shapes for dim in dims]
        # Layers of the same shape are views of one tensor, so that few launches clear a run.
        self._stacks = {
            side: torch.zeros((sides.count(side), *side), dtype=dtype, device=device)
            for side in set(sides)
        }
        each = {side: iter(stack) for side, stack in self._stacks.items()}
        tensors = [next(each[side]) for side in sides]
        self.layers = list(zip(tensors[::2], tensors[1::2], strict=True))
        self._guard = threading.Lock()
        self._runs = list[tuple[int, int]]()

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's memory."""
        return sum([stack.nbytes for stack in self._stacks.values()])

    @property
    def num_taken(self) -> int:
        """Number of slots that requests hold."""
        with self._guard:
            return sum([stop - start for start, stop in self._runs])

    def take(self, count: int) -> range | None:
        """Take a run of at least ``count`` free slots; ``None`` if no free run is as long."""
        size = -(-count // ALIGNED) * ALIGNED
        start = 0
        with self._guard:
            # A run of no slots at the end bounds the last gap.
            for begin, stop in [*self._runs, (self.num_slots, self.num_slots)]:
                if begin - start >= size:
                    insort(self._runs, (start, start + size))
                    return range(start, start + size)
                start = stop
        return None

    def give_back(self, run: range) -> None:
        """Free the slots of a run."""
        with self._guard:
            self._runs.remove((run.start, run.stop))

    def cleared(self, run: range, capacity: int) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of the first ``capacity`` slots of a run, per layer.

        A hidden key weighs nothing only if it is finite, so rows of earlier requests are cleared.
        """
        for stack in self._stacks.values():
            stack[..., run.start : run.stop, :] = 0
        own = slice(run.start, run.start + capacity)
        return [(keys[:, :, own], values[:, :, own]) for keys, values in self.layers]
