"""Which keys each row of a forward sees: the limits of its rows, the reach of its layers, and blocks of rows that share keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from kvrag.model.packing import Packing

BLOCK_ROWS = 64
"""Query rows per block: enough to fill a core, few enough that cutting keys at the block's last limit saves work."""

MAX_CACHED_MASK = 2**24
"""Mask elements of one forward that are kept for all its layers; larger ones are made anew in each layer."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a layer's rows see: ``lo[i]``, the first key of row ``i``.

    Parameters
    ----------
    window
        Sliding window: the last ``window`` keys, the row's own included. ``None``: no limit.
    chunk
        Chunked attention (Llama 4): the keys from the last multiple of ``chunk`` on. ``None``: no limit.
    """

    window: int | None = None
    chunk: int | None = None

    def lo(self, hi: torch.Tensor) -> torch.Tensor:
        """Return the first key that rows at these positions see, int64, shaped as ``hi``."""
        first = torch.zeros_like(hi) if self.window is None else (hi - self.window + 1).clamp_(min=0)
        return first if self.chunk is None else torch.maximum(first, hi // self.chunk * self.chunk)

    def first(self, row: int) -> int:
        """Return :meth:`lo` of one row."""
        by_window = 0 if self.window is None else max(0, row - self.window + 1)
        return by_window if self.chunk is None else max(by_window, row // self.chunk * self.chunk)

    def is_whole(self, num_keys: int) -> bool:
        """Whether no row of a prompt of this length misses a key before it."""
        return all(limit is None or limit >= num_keys for limit in (self.window, self.chunk))


EVERYTHING = Reach()
"""No limit but causality."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``rows`` of a forward see keys ``keys``, plus ``mask`` (``(G · len(rows), len(keys))``: 0 or -inf, ``None``: all).

    The heads of a group are packed as rows, group first, so that K and V are never repeated. Every row sees the keys before
    ``sure``, as an index into ``keys``.
    """

    rows: slice
    keys: slice
    mask: torch.Tensor | None
    sure: int


class KernelLimits(NamedTuple):
    """What a kernel takes for a layer: int32 limits, and its own plan of tiles; see :mod:`kvrag_kernels`."""

    hi: torch.Tensor
    lo: torch.Tensor | None
    tiles: torch.Tensor


@dataclass(slots=True)
class RowPlan:
    """The limits of one forward, shared by all its layers.

    Parameters
    ----------
    hi
        Int64 tensor ``(R,)``, ascending: index of the last key that each row sees.
    num_keys
        Keys in the buffer that the rows attend to, ``max(hi) + 1``.
    mass
        Float32 tensor ``(num_keys,)`` that collects attention mass, or ``None``; see :meth:`collect`.
    mass_rows
        Number of last rows whose attention is collected.
    packing
        Of several runs in one forward, or ``None``. No layer's reach may cut a run or the prefix.
    """

    hi: torch.Tensor
    num_keys: int
    mass: torch.Tensor | None = None
    mass_rows: int = 0
    packing: Packing | None = None
    _blocks: dict[tuple[Reach, int, torch.dtype], list[Block]] = field(default_factory=dict)
    _limits: dict[tuple[object, ...], KernelLimits] = field(default_factory=dict)
    _is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_whole = len(self.hi) == self.num_keys

    @property
    def prefix(self) -> int:
        """First keys that every row sees whatever its limits say."""
        return 0 if self.packing is None else self.packing.prefix

    def is_plain_causal(self, reach: Reach) -> bool:
        """Whether the rows are the whole prompt and no window cuts it."""
        return self._is_whole and reach.is_whole(self.num_keys)

    def blocks(self, reach: Reach, groups: int, dtype: torch.dtype) -> Iterable[Block]:
        """Return the blocks for a layer with this reach and so many heads per key head; made once unless they are large."""
        kind = (EVERYTHING if reach.is_whole(self.num_keys) else reach, groups, dtype)
        if kind not in self._blocks:
            if len(self.hi) * self.num_keys * groups > MAX_CACHED_MASK:
                return _cut(self.hi, *kind)
            self._blocks[kind] = list(_cut(self.hi, *kind))
        return self._blocks[kind]

    def last(self, count: int) -> RowPlan:
        """Return the limits of the last ``count`` rows alone; mass is collected in the same tensor."""
        return RowPlan(self.hi[-count:], self.num_keys, self.mass, self.mass_rows)

    def without_mass(self) -> RowPlan:
        """Return the same limits, for layers whose attention is not collected."""
        return replace(self, mass=None, mass_rows=0)

    def for_kernel(self, query: torch.Tensor, keys: torch.Tensor, reach: Reach) -> KernelLimits:
        """Return the limits for a layer with this reach and these shapes; made once for all layers like it, on their device."""
        import kvrag_kernels

        limits = None if reach.is_whole(self.num_keys) else reach
        kind = (limits, query.shape, keys.shape[1:], query.dtype, query.device)
        if kind not in self._limits:
            rows = self.hi.to(query.device)
            hi, lo = rows.int(), None if limits is None else limits.lo(rows).int()
            lo = lo if self.packing is None else self.packing.lo.int()
            self._limits[kind] = KernelLimits(hi, lo, kvrag_kernels.ragged_plan(query, keys, hi, lo, self.prefix))
        return self._limits[kind]


def _cut(hi: torch.Tensor, reach: Reach, groups: int, dtype: torch.dtype) -> Iterator[Block]:
    limits, is_limited = hi.tolist(), reach != EVERYTHING
    for start in range(0, len(limits), BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, len(limits)))
        first = reach.first(limits[start])  # lo ascends with hi
        keys = slice(first, limits[rows.stop - 1] + 1)
        # One row that sees all its keys needs no mask: every decode step.
        if rows.stop - rows.start == 1:
            yield Block(rows, keys, None, keys.stop - first)
            continue
        j = torch.arange(keys.start, keys.stop, device=hi.device)
        hidden = j > hi[rows, None]
        if is_limited:
            hidden |= j < reach.lo(hi[rows, None])
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hi.device).masked_fill_(hidden, float("-inf"))
        yield Block(rows, keys, mask.repeat(groups, 1), 0 if is_limited else limits[start] + 1)
