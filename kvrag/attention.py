"""The attention op in torch: few query rows at scattered positions, all keys, an exact limit per row.

Row ``i`` sees key ``j`` iff ``lo[i] <= j <= hi[i]``, ``lo`` by the layer's :class:`Reach`. That is not what ``is_causal`` means when
there are fewer rows than keys: a causal mask aligned bottom-right lets a repaired row see the future. Three paths, one result: one fused
causal call where the rows are a whole prompt, blocks of rows with the keys cut at the block's limit, and explicit probabilities where the
model needs them (soft cap, sinks) or the caller wants them (the probe). Where :mod:`kvrag_kernels` has a CUDA kernel, that computes
all but whole prompts and single rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvrag.packing import Packing

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


def ragged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: RowPlan,
    *,
    scale: float,
    reach: Reach = EVERYTHING,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with an exact limit per row.

    Parameters
    ----------
    query
        ``(B, H, R, D)``.
    keys, values
        ``(B, H_kv, N, D)`` and ``(B, H_kv, N, D_v)``; ``H`` is a multiple of ``H_kv``.
    plan
        The rows' limits.
    scale
        Factor of the scores.
    reach
        How far back the layer's rows see.
    softcap
        Scores become ``softcap · tanh(scores / softcap)`` (Gemma 2).
    sinks
        One learned extra score per head, ``(H,)`` (GPT-OSS).

    Returns
    -------
    torch.Tensor
        ``(B, H, R, D_v)`` in the dtype of ``query``.
    """
    if plan.packing is not None:
        return _by_kernel(query, keys, values, plan, scale, reach, softcap, sinks)
    needs_scores = softcap is not None or sinks is not None
    if plan.mass is None and not needs_scores and plan.is_plain_causal(reach):
        is_grouped = query.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=is_grouped)
    if _has_kernel(query, values):
        return _by_kernel(query, keys, values, plan, scale, reach, softcap, sinks)
    out = query.new_empty((*query.shape[:3], values.shape[-1]))
    collected_from = query.shape[2] - plan.mass_rows
    for block in plan.blocks(reach, query.shape[1] // keys.shape[1], query.dtype):
        q, k, v = query[:, :, block.rows], keys[:, :, block.keys], values[:, :, block.keys]
        if needs_scores or (plan.mass is not None and block.rows.stop > collected_from):
            probabilities = _probabilities(q, k, block, scale, softcap, sinks)
            out[:, :, block.rows] = torch.matmul(probabilities.to(v.dtype), v).reshape(*q.shape[:3], v.shape[-1])
            if plan.mass is not None:
                plan.mass[block.keys] += _collect(probabilities, q.shape, max(0, collected_from - block.rows.start))
        else:
            out[:, :, block.rows] = _fused(q, k, v, block.mask, scale)
    return out


def _has_kernel(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a CUDA kernel computes this: several rows, for one row sees all its keys and torch's own kernels take it without a mask.

    The package that holds the kernels is only looked at where there is a CUDA device.
    """
    if not query.is_cuda or query.shape[2] == 1:
        return False
    import kvrag_kernels

    return kvrag_kernels.has_kernel(query, values)


def _by_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: RowPlan,
    scale: float,
    reach: Reach,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in one launch for all rows, and collect mass in a second one, without probabilities in memory.

    On other devices the same op computes with torch.
    """
    import kvrag_kernels

    hi, lo, tiles = plan.for_kernel(query, keys, reach)
    cap = softcap or 0.0
    out, lse = kvrag_kernels.ragged_attention(
        query, keys, values, hi, lo, plan.prefix, scale=scale, softcap=cap, sinks=sinks, plan=tiles
    )
    if plan.mass is not None:
        last = slice(query.shape[2] - min(plan.mass_rows, query.shape[2]), None)
        first = None if lo is None else lo[last]
        q, s = query[:, :, last], lse[:, :, last]
        mass = kvrag_kernels.probe_mass(q, keys, s, hi[last], first, scale=scale, softcap=cap, sinks=sinks)
        plan.mass += mass.sum(dim=0)[: plan.num_keys]
    return out


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """One masked SDPA call with the heads of a group packed as rows, so that K and V are never repeated."""
    batch, heads, rows, dim = q.shape
    packed = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, rows, v.shape[-1])


def _probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    block: Block,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax in float32 over the visible keys, ``(B, H_kv, G · R, keys)``."""
    batch, heads, rows, dim = q.shape
    packed = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    scores = torch.matmul(packed * scale, k.transpose(-1, -2)).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if block.mask is not None:  # only where a limit cuts: most of a probe's keys are seen by every row
        scores[..., block.sure :] += block.mask[:, block.sure :]
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.float().reshape(1, k.shape[1], -1, 1, 1).expand(batch, -1, -1, rows, 1)
    extra = sink.reshape(batch, k.shape[1], packed.shape[2], 1)
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]


def _collect(probabilities: torch.Tensor, shape: torch.Size, skip: int) -> torch.Tensor:
    """Sum probabilities over batch, heads and the rows from ``skip`` on: one pass, as a product with zeros and ones."""
    _, heads, rows, _ = shape
    counted = (torch.arange(rows, device=probabilities.device) >= skip).float()
    packed = counted.repeat(heads // probabilities.shape[1])
    return torch.matmul(packed, probabilities).sum(dim=(0, 1))
