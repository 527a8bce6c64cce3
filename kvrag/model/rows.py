"""What a forward computes: the KV that it writes to (a buffer of slots), its rows, and which keys each row sees.

``Rows`` holds the slot, the position and the first visible slot of each row. ``Limits`` is made from it once per forward: blocks of rows
for torch, int32 limits for the kernels, shared by all layers with the same reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

BLOCK_ROWS = (
    64  # enough to fill a core, few enough that cutting keys at the block's last limit saves work
)
ALIGNMENT = 64  # bytes: a line of the processor's cache
MAX_BLOCKED = (
    2**22
)  # rows x keys beyond which rows behind a short head are quicker as a whole prompt than by blocks
MAX_CACHED_MASK = 2**24  # elements of one forward's mask that are kept for all its layers


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back the rows of a layer see; ``None``: no limit.

    ``window`` shows the last keys, the row's own included; ``chunk`` those from its last multiple on (Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    def lo(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the first slot that rows in these slots, at these positions, see, shaped as ``slots``."""
        first = (
            torch.zeros_like(slots)
            if self.window is None
            else (slots - self.window + 1).clamp_(min=0)
        )
        return first if self.chunk is None else torch.maximum(first, slots - positions % self.chunk)

    def is_whole(self, num_keys: int) -> bool:
        """Whether no row of a prompt of this length misses a key before it."""
        return (self.window or num_keys) >= num_keys and (self.chunk or num_keys) >= num_keys


EVERYTHING = Reach()  # no limit but causality


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's KV: heads and the head dims of keys and of values."""

    num_heads: int
    key_dim: int
    value_dim: int


class KVBuffer:
    """The KV of one request (or of a batch of chunks), row index = position.

    ``layers`` are rotated keys ``(B, H_kv, capacity, D)`` and values ``(B, H_kv, capacity, D_v)``. ``token_ids``, int64 ``(capacity,)`` on
    the host, are kept by the forwards of a model that may have to compute rows again; else ``None``. While a stream of the device still
    writes stored KV, ``arrivals`` has an event per layer, and ``sources`` what that stream reads; who reads a layer waits for its event.
    """

    def __init__(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        token_ids: torch.Tensor | None = None,
    ) -> None:
        self.layers, self.token_ids = layers, token_ids
        self.arrivals: Sequence[torch.cuda.Event] = ()
        self.sources: object = None

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
        """Allocate ``capacity`` rows, uninitialised until written; attention sees none before. ``shapes`` has one per layer."""
        sizes = [
            (batch, s.num_heads, capacity, dim) for s in shapes for dim in (s.key_dim, s.value_dim)
        ]
        tensors = _allocate(sizes, dtype, device)
        ids = torch.zeros(capacity, dtype=torch.int64) if keeps_ids else None
        return cls(list(zip(tensors[::2], tensors[1::2], strict=True)), ids)

    def wait_for(self, layer: int) -> None:
        """Let the device's current stream wait until the stored KV of a layer is there; the host goes on."""
        if self.arrivals:
            torch.cuda.current_stream(self.layers[layer][0].device).wait_event(self.arrivals[layer])

    @property
    def capacity(self) -> int:
        """Number of rows: prompt plus room for the answer."""
        return int(self.layers[0][0].shape[2])

    def keys(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer."""
        self.wait_for(layer)
        return self.layers[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """Return the values of a layer."""
        self.wait_for(layer)
        return self.layers[layer][1]


def _allocate(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Allocate tensors; on the host together, by numpy, which asks for huge pages: touching them first costs a fraction."""
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
    """The rows that one forward computes.

    A row sees the slots from ``first``, int64 ``(R,)`` (``None``: 0), to its own, and the first ``prefix`` slots. A chunk is in
    neighbouring slots, in order. The KV of the rows is written to ``slots``: a slice, or int64 ``(R,)``, ascending within each chunk;
    ``stop`` is one past the last of them. ``positions``, int64 ``(R,)``, are those of each row in its prompt; ``None``: its slot.
    ``is_fixed``: the slots may be others when the forward is replayed, none from ``stop`` on; the host must not look at them.
    """

    slots: slice | torch.Tensor
    stop: int
    positions: torch.Tensor | None = None
    first: torch.Tensor | None = None
    prefix: int = 0
    is_fixed: bool = False

    @classmethod
    def span(cls, start: int, stop: int) -> Rows:
        """Return neighbouring rows of one request: positions ``start`` to ``stop - 1``."""
        return cls(slice(start, stop), stop)

    @classmethod
    def at(cls, positions: torch.Tensor) -> Rows:
        """Return rows of one request at these positions, int64 ``(R,)``, ascending."""
        return cls(positions, int(positions[-1]) + 1)

    @classmethod
    def packed(cls, prefix: int, lengths: Sequence[int], device: torch.device) -> Rows:
        """Return chunks of these lengths in a row, each behind the same prefix and blind to the others."""
        sizes = torch.tensor(lengths, device=device)
        starts = (prefix + sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        stop = prefix + sum(lengths)
        positions = torch.arange(prefix, stop, device=device) - starts + prefix
        return cls(slice(prefix, stop), stop, positions, starts, prefix)

    def indices(self, device: torch.device) -> torch.Tensor:
        """Return the slots as an int64 tensor ``(R,)`` on a device."""
        if isinstance(self.slots, slice):
            return torch.arange(self.slots.start, self.slots.stop, device=device)
        return self.slots.to(device, non_blocking=True)


class Block(NamedTuple):
    """Rows ``rows`` of a forward see keys ``keys``, plus ``mask`` (``(G · len(rows), len(keys))``: 0 or -inf, ``None``: all).

    The heads of a group are packed as rows, group first. Every row sees the first ``sure`` of the keys.
    """

    rows: slice
    keys: slice
    mask: torch.Tensor | None
    sure: int


class KernelLimits(NamedTuple):
    """What a kernel takes for a layer: int32 limits, and its plan of tiles."""

    hi: torch.Tensor
    lo: torch.Tensor | None
    tiles: torch.Tensor


@dataclass(slots=True)
class Limits:
    """Which keys the rows of one forward see, shared by all its layers.

    ``hi``, int64 ``(R,)``, is the slot of each row, the last one that it sees; ``num_keys`` is ``max(hi) + 1``; the others are as in
    :class:`Rows`. ``padding`` is how many rows in front would make these a whole prompt; ``None`` where that is no short cut.
    """

    hi: torch.Tensor
    num_keys: int
    positions: torch.Tensor | None = None
    first: torch.Tensor | None = None
    prefix: int = 0
    is_fixed: bool = False
    padding: int | None = field(init=False, default=None)
    kept: dict[tuple[Reach, int, torch.dtype], list[Block]] = field(default_factory=dict)
    for_kernels: dict[tuple[object, ...], KernelLimits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        before, size = self.num_keys - len(self.hi), len(self.hi) * self.num_keys
        is_long = (
            size > MAX_BLOCKED and before <= self.num_keys // 8 and self.hi.device.type == "cpu"
        )
        if self.first is None and (before == 0 or (is_long and self.hi[0] == before)):
            self.padding = before

    def lo(self, reach: Reach) -> torch.Tensor | None:
        """Return the first slot that each row sees in a layer, int64 ``(R,)``; ``None``: slot 0."""
        # Behind a shared prefix, a layer's reach cuts no chunk: see CausalLM.can_pack.
        if self.prefix or reach == EVERYTHING or reach.is_whole(self.num_keys):
            return self.first
        lo = reach.lo(self.hi, self.hi if self.positions is None else self.positions)
        return lo if self.first is None else torch.maximum(lo, self.first)

    def blocks(self, reach: Reach, groups: int, dtype: torch.dtype) -> Iterable[Block]:
        """Return the blocks for a layer with this reach and so many heads per key head; made once unless they are large."""
        kind = (EVERYTHING if reach.is_whole(self.num_keys) else reach, groups, dtype)
        if kind not in self.kept:
            lo = self.lo(reach)
            if self.is_fixed:
                cuts = [(slice(0, len(self.hi)), slice(0, self.num_keys), 0)]
            else:
                hi, first = self._on_host(reach, lo)
                cuts = _cut(hi.tolist(), None if first is None else first.tolist())
            blocks = (self._block(*cut, lo, groups, dtype) for cut in cuts)
            if len(self.hi) * self.num_keys * groups > MAX_CACHED_MASK:
                return blocks
            self.kept[kind] = list(blocks)
        self.kept[(reach, groups, dtype)] = self.kept[kind]
        return self.kept[kind]

    def _on_host(
        self, reach: Reach, lo: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the limits for the host to read: those of a single row, as of every decode step, follow from their number of keys."""
        if len(self.hi) > 1 or self.positions is not None or self.first is not None:
            return self.hi, lo
        last = Limits(torch.tensor([self.num_keys - 1]), self.num_keys)
        return last.hi, last.lo(reach)

    def _block(
        self,
        rows: slice,
        keys: slice,
        sure: int,
        lo: torch.Tensor | None,
        groups: int,
        dtype: torch.dtype,
    ) -> Block:
        if (
            rows.stop - rows.start == 1 and not self.is_fixed
        ):  # one row that sees all its keys needs no mask
            return Block(rows, keys, None, sure)
        j = torch.arange(keys.start, keys.stop, device=self.hi.device)
        hidden = j > self.hi[rows, None]
        if lo is not None and not sure:
            hidden |= j < lo[rows, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=j.device).masked_fill_(
            hidden, float("-inf")
        )
        return Block(rows, keys, mask.repeat(groups, 1), sure)

    def last(self, count: int) -> Limits:
        """Return the limits of the last ``count`` rows alone."""
        positions, first = (None if x is None else x[-count:] for x in (self.positions, self.first))
        return Limits(self.hi[-count:], self.num_keys, positions, first, self.prefix, self.is_fixed)

    def for_kernel(self, query: torch.Tensor, keys: torch.Tensor, reach: Reach) -> KernelLimits:
        """Return the limits for a layer; made once for all layers like it."""
        import kvrag_kernels

        limits = None if reach.is_whole(self.num_keys) else reach
        kind = (limits, query.shape, keys.shape[1:], query.dtype, query.device)
        if kind not in self.for_kernels:
            lo = self.lo(reach)
            hi, lo = (
                self.hi.to(query.device).int(),
                None if lo is None else lo.to(query.device).int(),
            )
            tiles = kvrag_kernels.ragged_plan(query, keys, hi, lo, self.prefix)
            self.for_kernels[kind] = KernelLimits(hi, lo, tiles)
        return self.for_kernels[kind]


def _cut(last: list[int], first: list[int] | None) -> list[tuple[slice, slice, int]]:
    """Cut rows into blocks: rows, keys, and how many of these every row sees. A row of another request begins a block."""
    cuts, start, first = [], 0, first or [0] * len(last)
    for i in range(1, len(last) + 1):
        if i < len(last) and i - start < BLOCK_ROWS and first[i] <= last[i - 1] < last[i]:
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
