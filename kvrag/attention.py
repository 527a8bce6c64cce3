"""The attention op in torch: few query rows at scattered positions, all keys, an exact limit per row.

Row ``i`` sees key ``j`` iff ``hi[i] - window < j <= hi[i]``. That is not what ``is_causal`` means when there are fewer rows than keys:
a causal mask aligned bottom-right lets a repaired row see the future. Three paths, one result: one fused causal call where the rows
are a whole prompt, blocks of rows with the keys cut at the block's limit, and explicit probabilities where the model needs them
(soft cap, sinks) or the caller wants them (the probe).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

BLOCK_ROWS = 128
"""Query rows per block: enough to fill a core, few enough that cutting keys at the block's last limit saves work."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``rows`` of a forward see keys ``keys``, subject to ``mask`` (``(len(rows), len(keys))``, ``None``: all)."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None


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
    """

    hi: torch.Tensor
    num_keys: int
    mass: torch.Tensor | None = None
    mass_rows: int = 0
    _blocks: dict[int | None, list[Block]] = field(default_factory=dict)
    _is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_whole = len(self.hi) == self.num_keys

    def is_plain_causal(self, window: int | None) -> bool:
        """Whether the rows are the whole prompt and no window cuts it."""
        return self._is_whole and (window is None or window >= self.num_keys)

    def blocks(self, window: int | None) -> list[Block]:
        """Return the blocks for a layer with this window; computed once per window."""
        if window not in self._blocks:
            self._blocks[window] = list(_cut(self.hi, window))
        return self._blocks[window]


def _cut(hi: torch.Tensor, window: int | None) -> Iterator[Block]:
    limits = hi.tolist()
    for start in range(0, len(limits), BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, len(limits)))
        first = 0 if window is None else max(0, limits[start] - window + 1)
        keys = slice(first, limits[rows.stop - 1] + 1)
        j = torch.arange(keys.start, keys.stop, device=hi.device)
        mask = j <= hi[rows, None]
        if window is not None:
            mask &= j > hi[rows, None] - window
        # One row that sees all its keys needs no mask: every decode step.
        yield Block(rows, keys, None if rows.stop - rows.start == 1 else mask)


def ragged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: RowPlan,
    *,
    scale: float,
    window: int | None = None,
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
    window
        Sliding window: a row sees its last ``window`` keys, itself included.
    softcap
        Scores become ``softcap · tanh(scores / softcap)`` (Gemma 2).
    sinks
        One learned extra score per head, ``(H,)`` (GPT-OSS).

    Returns
    -------
    torch.Tensor
        ``(B, H, R, D_v)`` in the dtype of ``query``.
    """
    needs_scores = softcap is not None or sinks is not None
    if plan.mass is None and not needs_scores and plan.is_plain_causal(window):
        is_grouped = query.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=is_grouped)
    out = query.new_empty((*query.shape[:3], values.shape[-1]))
    collected_from = query.shape[2] - plan.mass_rows
    for block in plan.blocks(window):
        q, k, v = query[:, :, block.rows], keys[:, :, block.keys], values[:, :, block.keys]
        if needs_scores or (plan.mass is not None and block.rows.stop > collected_from):
            probabilities = _probabilities(q, k, block.mask, scale, softcap, sinks)
            out[:, :, block.rows] = _mix(probabilities.to(v.dtype), v)
            if plan.mass is not None:
                skip = max(0, collected_from - block.rows.start)
                plan.mass[block.keys] += probabilities[..., skip:, :].sum(dim=(0, 1, 2, 3)).to(plan.mass.device)
        else:
            out[:, :, block.rows] = _fused(q, k, v, block.mask, scale)
    return out


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """One masked SDPA call with the heads of a group packed as rows, so that K and V are never repeated."""
    batch, heads, rows, dim = q.shape
    groups = heads // k.shape[1]
    packed = q.reshape(batch, k.shape[1], groups * rows, dim)
    full = mask if mask is None or groups == 1 else mask.repeat(groups, 1)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=full, scale=scale)
    return out.reshape(batch, heads, rows, v.shape[-1])


def _probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax in float32 over the visible keys, ``(B, H_kv, H / H_kv, R, keys)``."""
    batch, heads, rows, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], rows, dim)
    scores = torch.matmul(grouped, k[:, :, None].transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.float().reshape(1, k.shape[1], -1, 1, 1).expand(batch, -1, -1, rows, 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]


def _mix(probabilities: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    batch, _, _, rows, _ = probabilities.shape
    return torch.matmul(probabilities, v[:, :, None]).reshape(batch, -1, rows, v.shape[-1])
