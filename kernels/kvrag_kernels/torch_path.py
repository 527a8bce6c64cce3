"""Attention op in torch: on CPU, MPS, ROCm, and wherever no kernel is available.

Works on blocks of query rows, with the keys cut to the range that the rows of a block see. The
heads of a group are packed as rows, so K and V are never repeated. No tensor of size ``R × N`` is
made: a block's scores stay under :data:`MAX_SCORES` elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvrag_kernels.launch import Call

MAX_SCORES = 2**22
"""Scores of a block over all its heads: 16 MiB in float32, which a core's caches can stream."""

MAX_ROWS = 512
"""Packed rows of a block.

More rows gain nothing on a CPU and cut the keys less tightly (measured best from 512 to 1024).
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows ``rows`` and the pieces of the keys that some of them see.

    ``is_full``: every row sees all of the pieces.
    """

    rows: slice
    pieces: tuple[slice, ...]
    is_full: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the rows: int64 tensors ``(R,)``, ``lo`` never ``None``, prefix within the keys."""

    hi: torch.Tensor
    lo: torch.Tensor
    prefix: int
    num_keys: int

    @classmethod
    def of(cls, hi: torch.Tensor, lo: torch.Tensor | None, prefix: int, num_keys: int) -> Limits:
        """Clamp the limits to the keys."""
        first = torch.zeros_like(hi, dtype=torch.int64) if lo is None else lo.long().clamp(min=0)
        return cls(
            hi.long().clamp(max=num_keys - 1), first, max(0, min(prefix, num_keys)), num_keys
        )

    def mask(self, block: Block) -> torch.Tensor:
        """Return the mask of the block's rows over its pieces, bool ``(rows, keys)``."""
        j = torch.cat([torch.arange(p.start, p.stop, device=self.hi.device) for p in block.pieces])
        hi = self.hi[block.rows, None]
        lo = self.lo[block.rows, None]
        return (j < self.prefix) | ((j >= lo) & (j <= hi))

    def blocks(self, heads: int, groups: int) -> Iterator[Block]:
        """Cut the rows into blocks.

        ``heads`` counts heads of all batch entries; ``groups`` is heads per key head.
        """
        size = max(1, min(MAX_ROWS // groups, MAX_SCORES // max(1, heads * self.num_keys)))
        for start, bounds in enumerate(_bounds(self.hi, self.lo, size)):
            hi_min, hi_max, lo_min, lo_max = bounds
            first = max(lo_min, self.prefix)
            pieces = tuple(
                p for p in (slice(0, self.prefix), slice(first, hi_max + 1)) if p.start < p.stop
            )
            # Full if there is nothing but the prefix, or if all rows end at the same key and begin
            # before the piece.
            is_full = hi_max < first or (hi_min == hi_max and lo_max <= first)
            yield Block(slice(start * size, min((start + 1) * size, len(self.hi))), pieces, is_full)


def _bounds(hi: torch.Tensor, lo: torch.Tensor, size: int) -> list[list[int]]:
    """Return ``min hi, max hi, min lo, max lo`` of every block of ``size`` rows.

    Takes a single transfer from the device, not a transfer per block.
    """
    padding = -len(hi) % size
    if padding:
        hi, lo = (torch.cat([x, x[-1:].expand(padding)]) for x in (hi, lo))
    hi = hi.reshape(-1, size)
    lo = lo.reshape(-1, size)
    return torch.stack([hi.amin(1), hi.amax(1), lo.amin(1), lo.amax(1)], dim=1).tolist()


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out (B, H, R, D_v)``, stored as ``(B, R, H, D_v)``, and ``lse (B, H, R)``.

    See :mod:`kvrag_kernels.ops`.
    """
    hi = call.hi
    lo = call.lo
    sinks = call.sinks
    # torch's CPU flash kernel ignores the last stride.
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    batch, heads, rows, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[3])).transpose(1, 2)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    is_shared = hi.dim() == 1 and (lo is None or lo.dim() == 1)
    for b in [slice(0, batch)] if is_shared else [slice(i, i + 1) for i in range(batch)]:
        limits = Limits.of(
            _row_of(hi, b), None if lo is None else _row_of(lo, b), call.prefix, k.shape[2]
        )
        _attend(q[b], k[b], v[b], limits, call.scale, call.softcap, out[b], lse[b])
    if sinks is not None:
        share = torch.sigmoid(lse - sinks.float()[None, :, None])
        # A row without keys and a sink of -inf would give NaN.
        share = share.masked_fill(lse == -torch.inf, 0.0)
        out.copy_(out * share[..., None])
    return out, lse


def _row_of(limit: torch.Tensor, b: slice) -> torch.Tensor:
    if limit.dim() == 1:
        return limit
    return limit[b.start]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    limits: Limits,
    scale: float,
    softcap: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Fill ``out`` and ``lse`` block by block."""
    batch, heads = q.shape[:2]
    groups = heads // k.shape[1]
    for block in limits.blocks(batch * heads, groups):
        shape = (batch, heads, block.rows.stop - block.rows.start)
        if not block.pieces:
            out[:, :, block.rows], lse[:, :, block.rows] = 0.0, float("-inf")
            continue
        packed = q[:, :, block.rows].reshape(batch, k.shape[1], groups * shape[2], q.shape[3])
        keys, values = (
            x[:, :, block.pieces[0]] if len(block.pieces) == 1 else _join(x, block) for x in (k, v)
        )
        mask = None if block.is_full else limits.mask(block).repeat(groups, 1)
        attend_block = _fused if _can_fuse(packed, values, softcap) else _explicit
        o, s = attend_block(packed, keys, values, mask, scale, softcap)
        out[:, :, block.rows], lse[:, :, block.rows] = o.reshape(*shape, -1), s.reshape(shape)


def _join(x: torch.Tensor, block: Block) -> torch.Tensor:
    return torch.cat([x[:, :, piece] for piece in block.pieces], dim=2)


def _can_fuse(q: torch.Tensor, v: torch.Tensor, softcap: float) -> bool:
    """Whether torch's CPU flash kernel applies.

    It is the only SDPA kernel of torch that returns the log-sum-exp with a mask.
    """
    has_op = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return (
        has_op
        and q.device.type == "cpu"
        and not softcap
        and q.shape[3] == v.shape[3]
        and q.dtype != torch.float64
    )


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a flash call on the CPU: ``(B, H_kv, rows, D_v)`` and its log-sum-exp."""
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(
            ~mask, float("-inf")
        )
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    if mask is None:
        return out, lse
    # A row without keys gives 0 and -inf, whatever the flash call made of it.
    is_empty = ~mask.any(dim=1)
    return out.masked_fill(is_empty[:, None], 0.0), lse.masked_fill(is_empty, float("-inf"))


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute scores, float32 softmax and product.

    For soft caps, and for devices without a fused call that returns the log-sum-exp.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Scores rounded to 16 bits would be off by whole percents.
    s = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        s = s.masked_fill_(~mask, float("-inf"))
    lse = torch.logsumexp(s, dim=-1)
    # A row without keys: exp(-inf - 0) is 0, and exp(-inf + inf) would be NaN.
    p = torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None])
    return torch.matmul(p.to(v.dtype), v), lse
