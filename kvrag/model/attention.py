"""Attention in torch: few query rows at scattered positions, all keys, an exact limit per row.

Row ``i`` sees key ``j`` iff ``lo[i] <= j <= hi[i]``. ``is_causal`` means something
else when there are fewer rows than keys: a causal mask aligned bottom-right lets a repaired row see
the future. Three paths give the same result: a fused causal call where the rows are a whole prompt,
or all but the short head of a long prompt; blocks of rows with the keys cut at the block's limits;
and explicit probabilities where the model needs them (soft cap, sinks), where the caller wants them
(the probe), or where oneDNN makes them faster than torch's fused kernel. A CUDA kernel of
:mod:`kvrag_kernels` takes everything but whole prompts and single rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrag.errors import UnsupportedModelError
from kvrag.model.linear import has_onednn, linear
from kvrag.model.rows import BLOCK_ROWS, EVERYTHING, Block, Limits, Reach

# Index of a tensor's first two dims: batch and heads.
Index = tuple[slice, slice] | EllipsisType

# Packed rows of a block for oneDNN: its scores stay in the processor's cache.
PRODUCT_ROWS = 256
# Scores of a key head from which products are faster: each head costs calls of its own.
MIN_SCORES = 2**16
# The fused kernel shares heads and rows among its threads, oneDNN a single product. Two threads
# were measured.
MAX_THREADS = 8

# Options that change nothing here: limits come from the model's own mask, rows from Rows, and
# dropout is off outside training.
UNDERSTOOD = {"sliding_window", "position_ids", "cache_position", "dropout", "use_cache"}
UNDERSTOOD |= {"output_attentions", "output_router_logits", "logits_to_keep"}


class Mass(NamedTuple):
    """Collector of attention mass per key in ``total``, float32 ``(num_keys,)``.

    The mass of a key is the largest probability that any of the last ``rows`` rows gives it in any
    query head of a key head, summed over key heads. A fact is read by a few heads at a few rows: a
    sum over all would hide it behind keys that get a little from every head and row.
    """

    total: Tensor
    rows: int


class _Scores(NamedTuple):
    """Options of a layer's scores, as in :func:`ragged_attention`."""

    scale: float
    reach: Reach
    softcap: float | None
    sinks: Tensor | None

    def of(self, heads: Index) -> _Scores:
        """Return the options of some query heads, by their index in a query."""
        if self.sinks is None or heads is ...:
            return self
        return self._replace(sinks=self.sinks[heads[1]])


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    limits: Limits,
    *,
    scale: float,
    reach: Reach = EVERYTHING,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mass: Mass | None = None,
) -> Tensor:
    """Attend with an exact limit per row.

    ``query`` is ``(B, H, R, D)``, ``keys`` and ``values`` are ``(B, H_kv, N, ·)``, ``H`` a multiple
    of ``H_kv``; the result is ``(B, H, R, D_v)`` in the dtype of ``query``. ``limits`` and
    ``reach`` say which keys the rows see. With a ``softcap``, scores become
    ``softcap · tanh(scores / softcap)`` (Gemma 2); ``sinks`` are a learned extra score per head,
    ``(H,)`` (GPT-OSS). The attention of the last rows is added to ``mass``.
    """
    is_plain = mass is None and softcap is None and sinks is None
    is_fused = limits.padding is not None and is_plain
    if is_fused and reach.is_whole(limits.num_keys) and not _by_products(query, keys):
        whole = F.pad(query, (0, 0, limits.padding, 0)) if limits.padding else query
        width = values.shape[-1]
        spare = keys.shape[-1] - width
        if spare > 0 and not keys.is_cuda:  # torch's fused kernel needs values as wide as keys
            values = F.pad(values, (0, spare))
        out = F.scaled_dot_product_attention(
            whole,
            keys,
            values,
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return out[:, :, limits.padding :, :width]
    by_way = _by_kernel if _has_kernel(query, values, limits) else _by_blocks
    return by_way(query, keys, values, limits, _Scores(scale, reach, softcap, sinks), mass)


def _by_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    limits: Limits,
    scores: _Scores,
    mass: Mass | None,
) -> Tensor:
    """Attend block by block, fused where the probabilities are not needed."""
    is_plain = scores.softcap is None and scores.sinks is None
    batch, heads, rows, _ = query.shape
    groups = heads // keys.shape[1]
    out = query.new_empty(batch, heads, rows, values.shape[-1])
    weighed_from = rows - (mass.rows if mass else 0)
    most = keys.new_zeros((*keys.shape[:2], limits.num_keys if mass else 0), dtype=torch.float32)
    kind = (scores.reach, BLOCK_ROWS, groups)
    if _by_products(query, keys):
        kind = (scores.reach, max(1, PRODUCT_ROWS // groups), 0)
    for block in limits.kept.get(kind) or limits.blocks(*kind):
        q = query[:, :, block.rows]
        k = keys[:, :, block.keys]
        v = values[:, :, block.keys]
        to = out[:, :, block.rows]
        weighed = block.rows.stop - weighed_from
        if is_plain and weighed <= 0 and not _by_products(q, k):
            mask = None if block.mask is None else block.packed_mask(groups, q.dtype)
            to.copy_(fused_attention(q, k, v, scores.scale, mask))
        else:
            found = most[:, :, block.keys] if weighed > 0 else None
            _by_probabilities(q, k, v, block, scores, to, found, weighed)
    if mass:
        mass.total.add_(most.sum(dim=(0, 1)))
    return out


def _by_probabilities(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    scores: _Scores,
    out: Tensor,
    most: Tensor | None,
    weighed: int,
) -> None:
    """Write a block's attention to ``out``, and what its last ``weighed`` rows pay to ``most``.

    Products by oneDNN take a key head at a time.
    """
    rows = q.shape[2]
    is_each = _by_products(q, k)
    for own, of_keys in _each_head(k, q.shape[1] // k.shape[1]) if is_each else [(..., ...)]:
        probabilities = _probabilities(q[own], k[of_keys], block, scores.of(own))
        found = _product(probabilities.to(v.dtype), v[of_keys].mT)
        out[own] = found.view(out[own].shape)
        if most is not None:
            place = most[of_keys]
            found = largest(probabilities, place.shape[1], rows, max(0, rows - weighed))
            torch.maximum(place, found, out=place)


def _by_products(query: Tensor, keys: Tensor) -> bool:
    """Whether products by oneDNN, head by head, are faster than torch's fused attention."""
    scores_per_head = query.shape[1] // keys.shape[1] * query.shape[2] * keys.shape[2]
    return (
        scores_per_head >= MIN_SCORES
        and query.dtype is torch.float32
        and query.device.type == "cpu"
        and torch.get_num_threads() <= MAX_THREADS
        and has_onednn()
    )


def _each_head(keys: Tensor, groups: int) -> list[tuple[Index, Index]]:
    """Return the indices of each key head: of its heads in the query, and of itself."""
    return [
        ((one, slice(h * groups, (h + 1) * groups)), (one, slice(h, h + 1)))
        for one in (slice(b, b + 1) for b in range(keys.shape[0]))
        for h in range(keys.shape[1])
    ]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ bᵀ`` over the last two dims."""
    if a.shape[:2] != (1, 1):
        return torch.matmul(a, b.mT)
    weight = b[0, 0]
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()  # oneDNN is slow with values that are cut from wider rows
    return linear(a[0, 0], weight)[None, None]


def _has_kernel(query: Tensor, values: Tensor, limits: Limits) -> bool:
    """Whether a CUDA kernel computes this.

    Single rows are left to torch's own kernels, which take them without a mask. In a recording,
    they would need one.
    """
    if not query.is_cuda or (query.shape[2] == 1 and not limits.is_fixed):
        return False
    import kvrag_kernels  # only where there is a CUDA device

    return kvrag_kernels.has_kernel(query, values)


def _by_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    limits: Limits,
    scores: _Scores,
    mass: Mass | None,
) -> Tensor:
    """Attend in a single launch for all rows, and collect mass in a second launch.

    On other devices the same ops compute with torch.
    """
    import kvrag_kernels

    hi, lo, tiles = limits.for_kernel(query, keys, scores.reach)
    options: dict[str, Any] = {
        "scale": scores.scale,
        "softcap": scores.softcap or 0.0,
        "sinks": scores.sinks,
    }
    out, lse = kvrag_kernels.ragged_attention(query, keys, values, hi, lo, plan=tiles, **options)
    if mass is not None:
        last = slice(-min(mass.rows, query.shape[2]), None)
        first = None if lo is None else lo[last]
        found = kvrag_kernels.probe_mass(
            query[:, :, last], keys, lse[:, :, last], hi[last], first, **options
        )
        mass.total.add_(found.sum(dim=0)[: limits.num_keys])
    return out


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Call SDPA once, with the heads of a group packed as rows, so that K and V are not repeated.

    Without a mask, rows see all keys.
    """
    batch, heads, rows, dim = q.shape
    packed = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, rows, v.shape[-1])


def _probabilities(q: Tensor, k: Tensor, block: Block, how: _Scores) -> Tensor:
    """Return the float32 softmax over the visible keys, ``(B, H_kv, G · R, keys)``."""
    batch, heads, rows, dim = q.shape
    packed = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    scores = _product(packed * how.scale, k).float()
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    # Only where a limit cuts: every row sees most of a probe's keys.
    if block.mask is not None:
        by_row = scores.view(*k.shape[:2], -1, rows, k.shape[2])
        by_row[..., block.sure :] += block.mask
    if how.sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = how.sinks.float().reshape(1, k.shape[1], -1, 1, 1).expand(batch, -1, -1, rows, 1)
    extra = sink.reshape(batch, k.shape[1], packed.shape[2], 1)
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]


def largest(probabilities: Tensor, kv_heads: int, rows: int, skip: int) -> Tensor:
    """Return the largest probabilities of the keys per key head, ``(B, H_kv, keys)``.

    The maximum is over the rows from ``skip`` on and the query heads of the key head.
    ``probabilities`` are ``(B, H, R, keys)``, or packed as ``(B, H_kv, H / H_kv · R, keys)``.
    """
    by_row = probabilities.reshape(len(probabilities), kv_heads, -1, rows, probabilities.shape[-1])
    # One dim after the other: over both at once, torch is 30 times slower where rows are skipped.
    return by_row[:, :, :, skip:].amax(dim=3).amax(dim=2)


def refuse_unknown(
    module: torch.nn.Module,
    others: Mapping[str, object],
    then: str = "the model is answered by full computation",
) -> None:
    """Raise ``UnsupportedModelError`` for options that may change the attention.

    ``then`` ends the message: the consequence, or the remedy.
    """
    known = UNDERSTOOD | {"is_causal"}
    unknown = [
        name
        for name, given in others.items()
        if name not in known and given is not None and given is not False
    ]
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention "
            f"function, which kvrag doesn't apply; {then}"
        )
