"""Reference of the ops, in float64 and the plainest torch: the yardstick of all other paths."""

from __future__ import annotations

import torch

NEGATIVE = float("-inf")


def visible(hi: torch.Tensor, lo: torch.Tensor | None, prefix: int, num_keys: int) -> torch.Tensor:
    """Return the mask of keys that rows see, bool ``(..., R, N)``.

    Row ``i`` sees key ``j`` iff ``j < prefix or lo[i] <= j <= hi[i]``.
    """
    j = torch.arange(num_keys, device=hi.device)
    first = torch.zeros_like(hi) if lo is None else lo
    return (j < prefix) | ((j >= first[..., None]) & (j <= hi[..., None]))


def scores(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """Return the scores before the mask, float64 ``(B, H, R, N)``."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = q.double() @ k.transpose(-1, -2) * scale
    if softcap:
        return softcap * torch.tanh(s / softcap)
    return s


def mass(p: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the mass per key ``(B, N)`` of probabilities ``(B, H, R, N)``.

    Takes the largest over rows and the query heads of a key head, and sums over key heads.
    """
    return p.reshape(p.shape[0], kv_heads, -1, p.shape[3]).amax(dim=2).sum(dim=1)


def probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None = None,
    prefix: int = 0,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 probabilities ``(B, H, R, N)`` and the log-sum-exp ``(B, H, R)``.

    The log-sum-exp is over the keys alone.
    """
    seen = visible(hi, lo, prefix, k.shape[2])
    if seen.dim() == 3:
        seen = seen[:, None]
    s = scores(q, k, scale, softcap).masked_fill(~seen, NEGATIVE)
    lse = torch.logsumexp(s, dim=-1)
    if sinks is None:
        total = lse
    else:
        total = torch.logaddexp(lse, sinks.double()[None, :, None].expand_as(lse))
    p = torch.exp(s - total[..., None]).masked_fill(~seen, 0.0)
    return p, lse


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None = None,
    prefix: int = 0,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of :func:`kvrag_kernels.ragged_attention` in float64."""
    p, lse = probabilities(q, k, hi, lo, prefix, scale=scale, softcap=softcap, sinks=sinks)
    return p @ v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1), lse


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the first ``R`` channels of ``x (H_kv, T, D)`` by ``cos, sin (T, R / 2)``.

    Computes in float64, pair by pair.
    """
    x = x.double().clone()
    half = cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        one = x[..., a].clone()
        two = x[..., b].clone()
        c = cos[:, i].double()
        s = sin[:, i].double()
        x[..., a], x[..., b] = one * c - two * s, two * c + one * s
    return x
