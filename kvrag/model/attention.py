"""The attention op in torch: few query rows at scattered positions, all keys, an exact limit per row.

Row ``i`` sees key ``j`` iff ``j < prefix or lo[i] <= j <= hi[i]``. That is not what ``is_causal`` means when there are fewer rows than
keys: a causal mask aligned bottom-right lets a repaired row see the future. Three paths, one result: one fused causal call where the
rows are a whole prompt, blocks of rows with the keys cut at the block's limits, and explicit probabilities where the model needs them
(soft cap, sinks) or the caller wants them (the probe). Where :mod:`kvrag_kernels` has a CUDA kernel, that computes all but whole
prompts and single rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvrag.errors import UnsupportedModelError
from kvrag.model.rows import EVERYTHING, Block, Limits, Reach

UNDERSTOOD = frozenset(
    [
        "sliding_window",
        "position_ids",
        "cache_position",
        "dropout",
        "use_cache",
        "output_attentions",
        "output_router_logits",
    ]
)
"""Options that change nothing here: limits come from the model's own mask, rows from Rows, and dropout is off outside training."""


class Mass(NamedTuple):
    """Collects attention mass: probability per key, summed over heads and the last ``rows`` rows, in ``total``, float32 ``(num_keys,)``."""

    total: torch.Tensor
    rows: int


def ragged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    limits: Limits,
    *,
    scale: float,
    reach: Reach = EVERYTHING,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mass: Mass | None = None,
) -> torch.Tensor:
    """Attend with an exact limit per row.

    Parameters
    ----------
    query, keys, values
        ``(B, H, R, D)``, ``(B, H_kv, N, D)`` and ``(B, H_kv, N, D_v)``; ``H`` is a multiple of ``H_kv``.
    limits, reach
        Which keys the rows see, and how far back the layer's rows see.
    scale
        Factor of the scores.
    softcap
        Scores become ``softcap · tanh(scores / softcap)`` (Gemma 2).
    sinks
        One learned extra score per head, ``(H,)`` (GPT-OSS).
    mass
        Where to add the attention of the last rows, if anywhere.

    Returns
    -------
    torch.Tensor
        ``(B, H, R, D_v)`` in the dtype of ``query``.
    """
    needs_scores = softcap is not None or sinks is not None
    if limits.is_whole and mass is None and not needs_scores and reach.is_whole(limits.num_keys):
        is_grouped = query.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=is_grouped)
    by_way = _by_kernel if limits.prefix or _has_kernel(query, values) else _by_blocks
    return by_way(query, keys, values, limits, scale, reach, softcap, sinks, mass)


def _by_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    limits: Limits,
    scale: float,
    reach: Reach,
    softcap: float | None,
    sinks: torch.Tensor | None,
    mass: Mass | None,
) -> torch.Tensor:
    """Attend block by block: fused where nobody needs the probabilities."""
    needs_scores = softcap is not None or sinks is not None
    out = query.new_empty((*query.shape[:3], values.shape[-1]))
    weighed_from = query.shape[2] if mass is None else query.shape[2] - mass.rows
    kind = (reach, query.shape[1] // keys.shape[1], query.dtype)
    for block in limits.kept.get(kind) or limits.blocks(*kind):
        q, k, v = query[:, :, block.rows], keys[:, :, block.keys], values[:, :, block.keys]
        if needs_scores or block.rows.stop > weighed_from:
            probabilities = _probabilities(q, k, block, scale, softcap, sinks)
            out[:, :, block.rows] = torch.matmul(probabilities.to(v.dtype), v).reshape(*q.shape[:3], v.shape[-1])
            if mass is not None and block.rows.stop > weighed_from:
                mass.total[block.keys] += _collect(probabilities, q.shape, max(0, weighed_from - block.rows.start))
        else:
            out[:, :, block.rows] = _fused(q, k, v, block.mask, scale)
    return out


def _has_kernel(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a CUDA kernel computes this: several rows, for one row sees all its keys and torch's own kernels take it without a mask.

    The package that holds the kernels is imported only where there is a CUDA device.
    """
    if not query.is_cuda or query.shape[2] == 1:
        return False
    import kvrag_kernels

    return kvrag_kernels.has_kernel(query, values)


def _by_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    limits: Limits,
    scale: float,
    reach: Reach,
    softcap: float | None,
    sinks: torch.Tensor | None,
    mass: Mass | None,
) -> torch.Tensor:
    """Attend in one launch for all rows, and collect mass in a second one, without probabilities in memory.

    On other devices the same op computes with torch.
    """
    import kvrag_kernels

    hi, lo, tiles = limits.for_kernel(query, keys, reach)
    cap = softcap or 0.0
    out, lse = kvrag_kernels.ragged_attention(
        query, keys, values, hi, lo, limits.prefix, scale=scale, softcap=cap, sinks=sinks, plan=tiles
    )
    if mass is not None:
        last = slice(query.shape[2] - min(mass.rows, query.shape[2]), None)
        first = None if lo is None else lo[last]
        q, s = query[:, :, last], lse[:, :, last]
        found = kvrag_kernels.probe_mass(q, keys, s, hi[last], first, scale=scale, softcap=cap, sinks=sinks)
        mass.total.add_(found.sum(dim=0)[: limits.num_keys])
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


def refuse_unknown(
    module: torch.nn.Module, others: Mapping[str, object], then: str = "the model is answered by full computation"
) -> None:
    """Refuse options that may change the attention: dropping one silently would give a wrong answer; ``then`` says what is left."""
    known = UNDERSTOOD | {"is_causal"}
    unknown = [name for name, given in others.items() if name not in known and given is not None and given is not False]
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention function, which kvrag doesn't apply; {then}"
        )
