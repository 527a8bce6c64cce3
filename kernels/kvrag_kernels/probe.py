"""``kvrag::probe_mass``: largest attention per key, without probabilities of size ``R × N``."""

from __future__ import annotations

from typing import Any, cast

import torch

from kvrag_kernels import launch, runtime
from kvrag_kernels.ops import check_attention, check_devices
from kvrag_kernels.torch_path import Limits

_LIBRARY: Any = torch.library.Library("kvrag", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "probe_mass(Tensor q, Tensor k, Tensor lse, Tensor hi, Tensor? lo=None, SymInt prefix=0, *, "
    "float scale, "
    "float softcap=0.0, Tensor? sinks=None) -> Tensor"
)


def probe_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None = None,
    prefix: int = 0,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the largest attention probability per key, summed over key heads, in float32.

    The maximum is over all rows and the query heads of a key head.

    Parameters
    ----------
    q, k, hi, lo, prefix, scale, softcap, sinks
        As for :func:`kvrag_kernels.ragged_attention`.
    lse
        Log-sum-exp that it returned for them, ``(B, H, R)``.

    Returns
    -------
    torch.Tensor
        Mass ``(B, N)``.

    Raises
    ------
    ValueError
        If shapes, dtypes or options don't fit together.
    """
    check_attention(q, k, k, hi, lo, scale, softcap, sinks)
    check_devices(q, lse=lse)
    if lse.shape != q.shape[:3]:
        raise ValueError(
            f"lse has the shape {tuple(lse.shape)}; rows and heads of q need {tuple(q.shape[:3])}"
        )
    result = torch.ops.kvrag.probe_mass(
        q, k, lse, hi, lo, prefix, scale=scale, softcap=softcap, sinks=sinks
    )
    return cast(torch.Tensor, result)


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None = None,
    prefix: int = 0,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if q.is_cuda:
        done = runtime.probe(launch.Call(q, k, k, hi, lo, prefix, scale, softcap, sinks), lse)
        if done is not None:
            return done
    if sinks is None:
        total = lse.float()
    else:
        # The log-sum-exp is over the keys alone, and sinks take probability, too.
        total = torch.logaddexp(lse.float(), sinks.float()[None, :, None].expand_as(lse))
    most = torch.zeros(k.shape[:3], dtype=torch.float32, device=q.device)
    for b in range(q.shape[0]):
        first = lo if lo is None or lo.dim() == 1 else lo[b]
        limits = Limits.of(hi if hi.dim() == 1 else hi[b], first, prefix, k.shape[2])
        _raise_to(most[b], q[b], k[b], total[b], limits, scale, softcap)
    return most.sum(dim=1)


def _raise_to(
    most: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    total: torch.Tensor,
    limits: Limits,
    scale: float,
    softcap: float,
) -> None:
    """Raise ``most (H_kv, N)`` to the probabilities of a batch entry, block by block.

    A row without keys (total -inf) adds nothing.
    """
    heads = q.shape[0]
    kv_heads = k.shape[0]
    for block in limits.blocks(heads, heads // kv_heads):
        if not block.pieces:
            continue
        packed = q[:, block.rows].reshape(kv_heads, -1, q.shape[2]).float()
        denominator = total[:, block.rows].reshape(kv_heads, -1, 1)
        mask = limits.mask(block).repeat(heads // kv_heads, 1)
        offset = 0
        for piece in block.pieces:
            s = torch.matmul(packed, k[:, piece].float().transpose(-1, -2)) * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            seen = mask[:, offset : offset + s.shape[2]] & (denominator != float("-inf"))
            found = torch.exp(s - denominator).masked_fill_(~seen, 0.0).amax(dim=1)
            torch.maximum(most[:, piece], found, out=most[:, piece])
            offset += s.shape[2]


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None = None,
    prefix: int = 0,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], k.shape[2]), dtype=torch.float32)


_LIBRARY.impl("probe_mass", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("kvrag::probe_mass", _fake, lib=_LIBRARY)
