"""Rows of a forward, the buffer that their KV is written to, and the keys that they see.

``Rows`` holds the rows' slots, positions and first visible slots. ``Limits`` is made from it once
per forward: blocks of rows for torch, int32 limits for the kernels, shared by all layers with the
same reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Enough to fill a core, few enough that cutting keys at the block's last limit saves work.
BLOCK_ROWS = 64
ALIGNMENT = 64  # bytes: a line of the processor's cache
# Rows x keys beyond which rows behind a short head are faster as a whole prompt than in blocks.
MAX_BLOCKED = 2**22
MAX_CACHED_MASK = 2**24  # elements of a forward's mask up to which all its layers share it


# Both tensors that a layer caches.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Reach:
    """Reach of a layer's rows to earlier keys; by default unlimited.

    With ``window``, a row sees the last ``window`` keys, its own included. With ``chunk``, it sees
    the keys from the last multiple of ``chunk`` on (Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    def lo(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the first visible slots of rows at these slots and positions."""
        if self.window is None:
            first = torch.zeros_like(slots)
        else:
            first = (slots - self.window + 1).clamp_(min=0)
        if self.chunk is None:
            return first
        return torch.maximum(first, slots - positions % self.chunk)

    def is_whole(self, num_keys: int) -> bool:
        """Whether every row of a prompt of this length sees all keys before it."""
        return (self.window or num_keys) >= num_keys and (self.chunk or num_keys) >= num_keys


EVERYTHING = Reach()  # causality is the only limit


class LayerShape(NamedTuple):
    """Shape of a layer's KV: its key heads, and the head dims of keys and of values."""

    num_heads: int
    key_dim: int
    value_dim: int


class KVBuffer:
    """KV of a request (the row index is the position), or of a batch of chunks.

    ``layers`` are rotated keys ``(B, H_kv, capacity, D)`` and values ``(B, H_kv, capacity, D_v)``.
    ``token_ids``, int64 ``(capacity,)`` on the host, are kept only for a model that may have to
    recompute rows. A run of a pool's slots begins at its slot ``start``. While a stream of the
    device still writes stored KV, ``arrivals`` holds an event per layer: one of ``events``, if the
    buffer has events. A reader of a layer must wait for its event.
    """

    def __init__(
        self,
        layers: Sequence[Pair],
        token_ids: Tensor | None = None,
        start: int | None = None,
    ) -> None:
        self.layers = layers
        self.token_ids = token_ids
        self.start = start
        self.events: Sequence[torch.cuda.Event] = ()
        self.arrivals: Sequence[torch.cuda.Event] = ()

    @classmethod
    def empty(
        cls,
        shapes: Sequence[LayerShape],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch: int = 1,
        keeps_ids: bool = False,
    ) -> KVBuffer:
        """Allocate ``capacity`` uninitialised rows; attention sees a row only once it is written.

        ``shapes`` has an entry per layer.
        """
        sizes = [
            (batch, s.num_heads, capacity, dim) for s in shapes for dim in (s.key_dim, s.value_dim)
        ]
        tensors = _allocate(sizes, dtype, device)
        ids = torch.zeros(capacity, dtype=torch.int64) if keeps_ids else None
        return cls(list(zip(tensors[::2], tensors[1::2], strict=True)), ids)

    def wait_for(self, layer: int) -> None:
        """Make the device's current stream wait for the stored KV of a layer.

        The host goes on.
        """
        if self.arrivals:
            torch.cuda.current_stream(self.layers[layer][0].device).wait_event(self.arrivals[layer])

    @property
    def capacity(self) -> int:
        """Number of rows: prompt plus room for the answer."""
        return int(self.layers[0][0].shape[2])

    def keys(self, layer: int) -> Tensor:
        """Return the keys of a layer."""
        self.wait_for(layer)
        return self.layers[layer][0]

    def values(self, layer: int) -> Tensor:
        """Return the values of a layer."""
        self.wait_for(layer)
        return self.layers[layer][1]


def _allocate(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Allocate tensors; on the host, all in a single numpy array.

    numpy asks for huge pages, which makes the first touch of the memory much cheaper.
    """
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    ends = [*accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)]
    whole = torch.from_numpy(np.empty(ends[-1] + ALIGNMENT, np.uint8))
    whole = whole[-whole.data_ptr() % ALIGNMENT :]
    return [
        whole[at : at + size].view(dtype).view(shape)
        for at, size, shape in zip(ends, sizes, shapes, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a forward computes.

    A row sees the slots from ``first``, int64 ``(R,)`` (by default 0), to its own slot. The rows'
    KV is written to ``slots``: a slice, or int64 ``(R,)``; ``stop`` is the index after the last
    slot. ``positions``, int64 ``(R,)``, are the rows' positions in their prompt, by default
    their slots. With ``is_fixed``, a replay of the forward may use other slots below ``stop``, so
    the host must not read them.
    """

    slots: slice | Tensor
    stop: int
    positions: Tensor | None = None
    first: Tensor | None = None
    is_fixed: bool = False

    @classmethod
    def span(cls, start: int, stop: int) -> Rows:
        """Return neighbouring rows of a request: positions ``start`` to ``stop - 1``."""
        return cls(slice(start, stop), stop)

    @classmethod
    def at(cls, positions: Tensor) -> Rows:
        """Return rows of a request at these positions, int64 ``(R,)``, ascending."""
        return cls(positions, int(positions[-1]) + 1)

    def indices(self, device: torch.device) -> Tensor:
        """Return the slots as an int64 tensor ``(R,)`` on a device."""
        if isinstance(self.slots, slice):
            return torch.arange(self.slots.start, self.slots.stop, device=device)
        return self.slots.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Block:
    """Block of rows, with the keys that they see.

    Every row sees the first ``sure`` of the keys. ``mask``, float32
    ``(len(rows), len(keys) - sure)``, is 0 or -inf for the others; without a mask, the rows see all
    keys.
    """

    rows: slice
    keys: slice
    mask: Tensor | None
    sure: int
    _packed: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def packed_mask(self, groups: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask of all keys, ``(groups · len(rows), len(keys))``, made once.

        The heads of a group are packed as rows, heads outermost.
        """
        if self.mask is None:
            return None
        kind = (groups, dtype)
        if kind not in self._packed:
            self._packed[kind] = torch.nn.functional.pad(
                self.mask.to(dtype), (self.sure, 0)
            ).repeat(groups, 1)
        return self._packed[kind]


class KernelLimits(NamedTuple):
    """Arguments of a kernel for a layer: int32 limits, and its plan of tiles."""

    hi: Tensor
    lo: Tensor | None
    tiles: Tensor


@dataclass(slots=True)
class Limits:
    """Limits of the keys that the rows of a forward see, shared by all its layers.

    ``hi``, int64 ``(R,)``, is the rows' own slots, the last that they see. ``num_keys`` is
    ``max(hi) + 1``, or more if ``is_fixed``. ``positions``, ``first`` and ``is_fixed`` are
    as in :class:`Rows`. ``padding`` is the number of rows that, put in front, make these a
    whole prompt; ``None`` where that is no shortcut.
    """

    hi: Tensor
    num_keys: int
    positions: Tensor | None = None
    first: Tensor | None = None
    is_fixed: bool = False
    padding: int | None = field(init=False, default=None)
    kept: dict[tuple[Reach, int, int], list[Block]] = field(default_factory=dict)
    for_kernels: dict[tuple[object, ...], KernelLimits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        before = self.num_keys - len(self.hi)
        size = len(self.hi) * self.num_keys
        is_long = (
            size > MAX_BLOCKED and before <= self.num_keys // 8 and self.hi.device.type == "cpu"
        )
        if self.first is None and (before == 0 or (is_long and self.hi[0] == before)):
            self.padding = before

    def lo(self, reach: Reach) -> Tensor | None:
        """Return the rows' first visible slots in a layer, int64 ``(R,)``; ``None`` is slot 0."""
        if reach.is_whole(self.num_keys):
            return self.first
        lo = reach.lo(self.hi, self.hi if self.positions is None else self.positions)
        if self.first is None:
            return lo
        return torch.maximum(lo, self.first)

    def blocks(self, reach: Reach, size: int = BLOCK_ROWS, groups: int = 0) -> Iterable[Block]:
        """Return the blocks of a layer with this reach, of at most ``size`` rows.

        They are kept for the next layers unless their masks are large. ``groups`` is the number of
        query heads that masks are packed for (:meth:`Block.packed_mask`).
        """
        kind = (EVERYTHING if reach.is_whole(self.num_keys) else reach, size, groups)
        if kind not in self.kept:
            lo = self.lo(reach)
            if self.is_fixed:
                cuts = [(slice(0, len(self.hi)), slice(0, self.num_keys), 0)]
            else:
                hi, first = self._on_host(reach, lo)
                cuts = _cut(hi.tolist(), None if first is None else first.tolist(), size)
            blocks = (self._block(*cut, lo) for cut in cuts)
            elements = len(self.hi) * self.num_keys * groups
            for rows, keys, sure in cuts:
                elements += (rows.stop - rows.start) * (keys.stop - keys.start - sure)
            if elements > MAX_CACHED_MASK:
                return blocks
            self.kept[kind] = list(blocks)
        self.kept[(reach, size, groups)] = self.kept[kind]
        return self.kept[kind]

    def _on_host(self, reach: Reach, lo: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``hi`` and ``lo`` for the host to read.

        For a single row, as in a decode step, they follow from the number of keys, so nothing is
        copied.
        """
        if len(self.hi) > 1 or self.positions is not None or self.first is not None:
            return self.hi, lo
        last = Limits(torch.tensor([self.num_keys - 1]), self.num_keys)
        return last.hi, last.lo(reach)

    def _block(self, rows: slice, keys: slice, sure: int, lo: Tensor | None) -> Block:
        # A single row sees all keys of its block.
        if rows.stop - rows.start == 1 and not self.is_fixed:
            return Block(rows, keys, None, sure)
        j = torch.arange(keys.start + sure, keys.stop, device=self.hi.device)
        hidden = j > self.hi[rows, None]
        if lo is not None and not sure:
            hidden |= j < lo[rows, None]
        return Block(rows, keys, hidden.float().masked_fill_(hidden, float("-inf")), sure)

    def last(self, count: int) -> Limits:
        """Return the limits of the last ``count`` rows alone."""
        positions, first = (None if x is None else x[-count:] for x in (self.positions, self.first))
        return Limits(self.hi[-count:], self.num_keys, positions, first, self.is_fixed)

    def for_kernel(self, query: Tensor, keys: Tensor, reach: Reach) -> KernelLimits:
        """Return the kernel's limits for a layer, made once for all layers of the same kind."""
        import kvrag_kernels

        kind = (
            None if reach.is_whole(self.num_keys) else reach,
            query.shape,
            keys.shape[1:],
            query.dtype,
            query.device,
        )
        if kind not in self.for_kernels:
            lo = self.lo(reach)
            if self.is_fixed and lo is not None and self.first is not None:
                # Spare rows see nothing: their tiles would be read up to the end of the pool.
                lo = lo.where(self.hi < self.num_keys - 1, self.num_keys)
            hi = self.hi.to(query.device).int()
            lo = None if lo is None else lo.to(query.device).int()
            self.for_kernels[kind] = KernelLimits(
                hi, lo, kvrag_kernels.ragged_plan(query, keys, hi, lo)
            )
        return self.for_kernels[kind]


def _cut(last: list[int], first: list[int] | None, size: int) -> list[tuple[slice, slice, int]]:
    """Cut rows into blocks: rows, keys, and the number of first keys that all these rows see.

    A row of another request begins a block.
    """
    cuts = []
    start = 0
    first = first or [0] * len(last)
    for i in range(1, len(last) + 1):
        if i < len(last) and i - start < size and first[i] <= last[i - 1] < last[i]:
            continue
        keys = slice(first[start], last[i - 1] + 1)
        cuts.append(
            (
                slice(start, i),
                keys,
                last[start] + 1 - keys.start if first[i - 1] == keys.start else 0,
            )
        )
        start = i
    return cuts
