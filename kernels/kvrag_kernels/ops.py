"""Definitions of the ops for ``torch.library``: schemas, fake kernels, checks, and dispatch.

Uses ``torch.library.Library``, not ``@torch.library.custom_op``, which costs some 30 µs more per
call, and there is a call per layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from kvrag_kernels import launch, runtime, torch_path

_LIBRARY: Any = torch.library.Library("kvrag", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "ragged_attention(Tensor q, Tensor k, Tensor v, Tensor hi, Tensor? lo=None, SymInt prefix=0, "
    "*, float scale, "
    "float softcap=0.0, Tensor? sinks=None, Tensor? plan=None) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "ragged_plan(Tensor q, Tensor k, Tensor hi, Tensor? lo=None, SymInt prefix=0) -> Tensor"
)


def ragged_attention(
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
    plan: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with exact limits per row.

    Row ``i`` sees key ``j`` iff ``j < prefix or lo[i] <= j <= hi[i]``. Limits are indices into the
    keys, not position ids. Rows at holes of a stitched prompt: ``hi`` is their own index. A sliding
    window of ``W`` with ``S`` first keys always seen: ``lo = hi - W + 1``, ``prefix = S``. Many
    chunks packed behind a shared prefix of ``P`` keys: ``prefix = P``, ``lo`` is the start of the
    own chunk. Left padding: ``lo`` is its length.

    Parameters
    ----------
    q
        ``(B, H, R, D)``, floating point, any strides. With an empty batch or no rows, nothing is
        computed.
    k, v
        ``(B, H_kv, N, D)`` and ``(B, H_kv, N, D_v)`` in the dtype of ``q``, any strides; ``H`` is a
        multiple of ``H_kv``. Keys and values up to the last key that some row sees must be finite:
        a key that no row sees weighs 0, and 0 times a NaN is a NaN.
    hi
        Integer ``(R,)`` or ``(B, R)``, in any order; the last key that a row sees. Below 0 (or
        below ``lo``), the row sees only the prefix.
    lo
        Like ``hi``, the first key that a row sees; ``None``: 0.
    prefix
        Number of first keys that every row sees.
    scale
        Factor of the scores, positive.
    softcap
        If not 0, scores become ``softcap · tanh(scores / softcap)`` (Gemma 2).
    sinks
        Learned extra score per head ``(H,)``, which takes probability and gives nothing (GPT-OSS).
    plan
        Result of :func:`ragged_plan` for the same shapes, limits and prefix; ``None``: make it.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        ``out (B, H, R, D_v)`` in the dtype of ``q``, stored as ``(B, R, H, D_v)``; and
        ``lse (B, H, R)``, float32: the natural log of the sum of exponentials over the keys alone,
        without sinks, so that results over parts of the keys can be merged. A row that sees no key
        gives 0 and -inf.

    Raises
    ------
    ValueError
        If shapes, dtypes or options don't fit together.
    """
    check_attention(q, k, v, hi, lo, scale, softcap, sinks)
    check_devices(q, plan=plan)
    result = torch.ops.kvrag.ragged_attention(
        q, k, v, hi, lo, prefix, scale=scale, softcap=softcap, sinks=sinks, plan=plan
    )
    return cast(tuple[torch.Tensor, torch.Tensor], result)


def ragged_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None = None,
    prefix: int = 0,
) -> torch.Tensor:
    """Plan :func:`ragged_attention` for all layers of a forward, on the device.

    The plan says which tiles every row needs, and splits them evenly.

    Parameters
    ----------
    q, k
        Of any layer with these limits: shapes and dtype matter, values don't.
    hi, lo, prefix
        As for :func:`ragged_attention`.

    Returns
    -------
    torch.Tensor
        Int32, to be passed as ``plan``; of length 0 where torch computes. Opaque, and valid for a
        single device model only.
    """
    check_attention(q, k, k, hi, lo, 1.0, 0.0, None)
    return cast(torch.Tensor, torch.ops.kvrag.ragged_plan(q, k, hi, lo, prefix))


def check_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Refuse invalid arguments by shape and dtype; reading limits would wait for the device."""
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(
            f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions; each needs 4: (B, H, "
            "rows, D)"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: they need "
            "one batch size, q and k one head dim, "
            "k and v the same heads and keys"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads; repeat or "
            "drop heads"
        )
    if not (q.dtype == k.dtype == v.dtype) or not q.dtype.is_floating_point:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; convert them to one floating "
            "point dtype"
        )
    for name, limit in (("hi", hi), ("lo", lo)):
        if limit is not None and (
            limit.dtype.is_floating_point or tuple(limit.shape) not in _limit_shapes(q)
        ):
            raise ValueError(
                f"{name} is {limit.dtype} of shape {tuple(limit.shape)}; it needs integers of one "
                f"of the shapes {_limit_shapes(q)}"
            )
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}; it needs one score per query head: "
            f"({q.shape[1]},)"
        )
    if not scale > 0 or softcap < 0:
        raise ValueError(
            f"scale is {scale} and softcap {softcap}; scale must be positive and softcap at least "
            "0 (0: none)"
        )

    check_devices(q, k=k, v=v, hi=hi, lo=lo, sinks=sinks)


def check_devices(q: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse tensors on another device than ``q``.

    A kernel that reads their addresses ends the process's CUDA context.
    """
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move it to q's device")


def _limit_shapes(q: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return (q.shape[2],), (q.shape[0], q.shape[2])


def _fake(
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
    plan: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((batch, heads, rows), dtype=torch.float32)


def _compute(
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
    plan: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    runtime.mode()  # refuses an unknown mode on every device
    call = launch.Call(q, k, v, hi, lo, prefix, scale, softcap, sinks)
    done = runtime.attend(call, plan) if q.is_cuda else None
    if done is None:
        return torch_path.attend(call)
    return done


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None = None,
    prefix: int = 0,
) -> torch.Tensor:
    made = runtime.make_plan(launch.Call(q, k, k, hi, lo, prefix, 1.0)) if q.is_cuda else None
    if made is None:
        return q.new_empty(0, dtype=torch.int32)
    return made


def _fake_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor | None = None,
    prefix: int = 0,
) -> torch.Tensor:
    # The length depends on the device's multiprocessors, and is 0 where torch computes.
    return q.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)


_LIBRARY.impl("ragged_plan", _plan, "CompositeExplicitAutograd")
torch.library.register_fake("kvrag::ragged_plan", _fake_plan, lib=_LIBRARY)
_LIBRARY.impl("ragged_attention", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("kvrag::ragged_attention", _fake, lib=_LIBRARY)
