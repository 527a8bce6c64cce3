"""``kvrag::stitch`` writes stored KV to its rows of the buffer, dequantised and rotated.

This module has the op, its checks, and its torch path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvrag_kernels import runtime
from kvrag_kernels.stitch_launch import CODECS, TOKEN_GROUP, Stitching, Stored

_LIBRARY: Any = torch.library.Library("kvrag", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "stitch(Tensor[] keys, Tensor[] values, Tensor(a!)[] out_keys, Tensor(b!)[] out_values, int[] "
    "starts, Tensor cos, Tensor sin, "
    "int[] tables, *, bool interleaved=False, Tensor[]? key_scales=None, Tensor[]? "
    "value_scales=None, Tensor[]? key_zeros=None, "
    "Tensor? skip=None) -> ()"
)

Tensors = Sequence[torch.Tensor]


def stitch(
    keys: Tensors,
    values: Tensors,
    out_keys: Tensors,
    out_values: Tensors,
    starts: Sequence[int],
    cos: torch.Tensor,
    sin: torch.Tensor,
    tables: Sequence[int],
    *,
    interleaved: bool = False,
    key_scales: Tensors | None = None,
    value_scales: Tensors | None = None,
    key_zeros: Tensors | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """Write the stored KV of ``S`` segments in ``L`` layers to its rows.

    Dequantises, rotates keys in float32 and rounds a single time. On CUDA this is a single launch.

    Parameters
    ----------
    keys, values
        Position-free keys, and values, per segment ``(L, H_kv, T, D)``: bfloat16, float16, int8,
        float8_e4m3fn, or uint8 ``(L, H_kv, T, D / 2)`` with two 4-bit integers per byte, offset by
        8, the lower first.
    out_keys, out_values
        ``L`` buffers ``(H_kv, capacity, D)``, written in place; any strides.
    starts
        First rows of the ``S`` segments.
    cos, sin
        Float32 ``(tables, rows, R / 2)``: the angles of the rows; the first ``R`` channels are
        rotated. Scaled rotations (YaRN) pass scaled values. An angle of zero copies bits.
    tables
        ``L`` indices into ``cos`` and ``sin``; -1: the layer does not rotate.
    interleaved
        Whether channels ``2 i`` and ``2 i + 1`` are a pair (GPT-J, GLM), rather than ``i`` and
        ``i + R / 2``.
    key_scales, value_scales
        For quantised parts, per segment: float16 ``(L, H_kv, 1, D)`` per channel,
        ``(L, H_kv, T, 1)`` per token, ``(L, H_kv, T, C)`` in groups of ``D / C`` channels,
        ``(L, H_kv, ceil(T / 32), C)`` for every 32 tokens.
    key_zeros
        For quantised keys: float16 ``(L, H_kv, G, D)`` with the ``G`` of the scales, added to the
        scaled codes.
    skip
        Bool, per row of the buffer: rows that will be recomputed and stay as they are.

    Raises
    ------
    ValueError
        If parts, buffers, tables and starts don't fit together.
    """
    torch.ops.kvrag.stitch(
        list(keys), list(values), list(out_keys), list(out_values), list(starts), cos, sin,
        list(tables), interleaved=interleaved, key_scales=key_scales, value_scales=value_scales,
        key_zeros=key_zeros, skip=skip,
    )  # fmt: skip


def _compute(
    keys: Tensors,
    values: Tensors,
    out_keys: Tensors,
    *places: Any,
    key_scales: Tensors | None = None,
    value_scales: Tensors | None = None,
    key_zeros: Tensors | None = None,
    **options: Any,
) -> None:
    parts = _parts("keys", keys, key_scales, key_zeros), _parts("values", values, value_scales)
    call = Stitching(*parts, out_keys, *places, **options)
    check(call)
    if not (out_keys and out_keys[0].is_cuda and runtime.stitch(call)):
        stitch_in_torch(call)


_LIBRARY.impl("stitch", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("kvrag::stitch", lambda *_, **__: None, lib=_LIBRARY)


def _parts(name: str, data: Tensors, *beside: Tensors | None) -> list[Stored]:
    given = [[None] * len(data) if column is None else column for column in beside]
    for what, column in zip(("scales", "zeros"), given, strict=False):
        if len(column) != len(data):
            raise ValueError(
                f"{len(column)} {what} were given for the {name} of {len(data)} segments; each "
                "needs its own"
            )
    return [Stored(*part) for part in zip(data, *given, strict=True)]


def check(call: Stitching) -> None:
    """Refuse parts that don't fit their rows and buffers.

    Raises
    ------
    ValueError
        With a message that names the misfit.
    """
    layers = len(call.out_keys)
    segments = len(call.starts)
    cos = call.cos
    sin = call.sin
    if not (
        len(call.keys) == len(call.values) == segments
        and len(call.out_values) == len(call.tables) == layers
    ):
        raise ValueError(
            f"{len(call.keys)} keys and {len(call.values)} values were given for {segments} "
            f"starts, {len(call.tables)} tables and "
            f"{len(call.out_values)} value buffers for {layers} key buffers; each segment needs "
            "its keys, values and a start, each layer "
            "a table and two buffers"
        )
    if (
        cos.shape != sin.shape
        or cos.dim() != 3
        or cos.dtype != torch.float32
        or sin.dtype != torch.float32
    ):
        raise ValueError(
            f"cos is {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} {tuple(sin.shape)}; both "
            "need float32 (tables, rows, R / 2)"
        )
    if not layers:
        return
    for name, parts, outs in (
        ("keys", call.keys, call.out_keys),
        ("values", call.values, call.out_values),
    ):
        if len({(x.dtype, x.dim(), *x.shape[::2]) for x in outs}) > 1 or outs[0].dim() != 3:
            raise ValueError(
                f"buffers of {name} have the shapes {[tuple(x.shape) for x in outs]}; one call "
                "takes layers alike, (H_kv, capacity, D)"
            )
        capacity = min(x.shape[1] for x in outs)
        for i, (part, start) in enumerate(zip(parts, call.starts, strict=True)):
            _check_part(f"{name} of segment {i}", part, layers, outs[0])
            if start < 0 or start + part.num_rows > capacity:
                raise ValueError(
                    f"{name} of segment {i} need rows {start} to {start + part.num_rows} of a "
                    f"buffer of {capacity} rows; make it larger"
                )
    for i, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        if k.num_rows != v.num_rows:
            raise ValueError(
                f"keys of segment {i} have {k.num_rows} rows and its values {v.num_rows}; they go "
                "to the same rows"
            )
    needed = max(
        (start + k.num_rows for start, k in zip(call.starts, call.keys, strict=True)), default=0
    )
    for layer, table in enumerate(call.tables):
        has_rows = cos.shape[1] >= needed and 2 * cos.shape[2] <= call.out_keys[layer].shape[2]
        if table >= cos.shape[0] or (table >= 0 and not has_rows):
            raise ValueError(
                f"layer {layer} asks for {needed} rows of table {table}, and cos has the shape "
                f"{tuple(cos.shape)}; pass more rows or tables"
            )
    skip = call.skip
    if skip is not None and (skip.dtype != torch.bool or skip.dim() != 1 or len(skip) < needed):
        raise ValueError(
            f"skip is {skip.dtype} of shape {tuple(skip.shape)}; it needs one bool per row of the "
            f"buffer, {needed} at least"
        )


def _check_part(name: str, part: Stored, layers: int, out: torch.Tensor) -> None:
    data = part.data
    scales = part.scales
    zeros = part.zeros
    if data.dtype not in CODECS and data.dtype != out.dtype:
        raise ValueError(
            f"{name} are {data.dtype}; stored KV is one of {', '.join(map(str, CODECS))}, or of "
            "the buffer's dtype"
        )
    if data.dim() != 4 or (data.shape[0], data.shape[1], part.dim) != (
        layers,
        out.shape[0],
        out.shape[2],
    ):
        raise ValueError(
            f"{name} have the shape {tuple(data.shape)}, and their {layers} buffers "
            f"{tuple(out.shape)}: layers, heads or head dims differ"
        )
    is_quantised = CODECS.get(data.dtype, "same") != "same"
    if is_quantised != (scales is not None):
        raise ValueError(
            f"{name} are {data.dtype} {'without' if is_quantised else 'with'} scales; quantised "
            "data alone needs them"
        )
    if scales is not None:
        counts = (1, part.num_rows, -(-part.num_rows // TOKEN_GROUP))
        fits = (
            scales.dim() == 4 and scales.shape[:2] == data.shape[:2] and scales.shape[2] in counts
        )
        if scales.dtype != torch.float16 or not fits or part.dim % max(1, scales.shape[3]):
            raise ValueError(
                f"{name} have scales {scales.dtype} {tuple(scales.shape)}; they need float16 (L, "
                "H_kv, G, a divisor of D), G being 1, T, "
                f"or the number of groups of {TOKEN_GROUP} tokens"
            )
    if zeros is not None and (
        scales is None
        or zeros.dtype != torch.float16
        or zeros.shape != (*scales.shape[:3], part.dim)
    ):
        raise ValueError(
            f"{name} have zeros {zeros.dtype} {tuple(zeros.shape)}; they need scales (L, H_kv, G, "
            "C), and float16 (L, H_kv, G, D)"
        )


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the first ``R`` channels of float ``x (H_kv, T, D)`` by ``cos, sin (T, R / 2)``.

    An angle of zero leaves its pair unchanged, to the bit: ``x · 1 - y · 0`` would flip the sign of
    some negative zeros.
    """
    half = cos.shape[1]
    if interleaved:
        a = x[..., 0 : 2 * half : 2]
        b = x[..., 1 : 2 * half : 2]
    else:
        a = x[..., :half]
        b = x[..., half : 2 * half]
    is_still = (cos == 1) & (sin == 0)
    turned = (
        torch.where(is_still, a, a * cos - b * sin),
        torch.where(is_still, b, b * cos + a * sin),
    )
    rotated = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([rotated, x[..., 2 * half :]], dim=-1)


def stitch_in_torch(call: Stitching) -> None:
    """Stitch part by part and layer by layer."""
    device = call.cos.device if not call.out_keys else call.out_keys[0].device
    for k, v, start in zip(call.keys, call.values, call.starts, strict=True):
        rows = slice(start, start + k.num_rows)
        k, v = (part.map(lambda x: x.to(device, non_blocking=True)) for part in (k, v))
        for i, (table, out_k, out_v) in enumerate(
            zip(call.tables, call.out_keys, call.out_values, strict=True)
        ):
            new_k, new_v = (
                part.map(lambda x, i=i: x[i]).read()  # type: ignore[misc]
                for part in (k, v)
            )
            if table >= 0:
                new_k = rotate(
                    new_k.float(),
                    call.cos[table, rows],
                    call.sin[table, rows],
                    interleaved=call.interleaved,
                )
            for out, new in ((out_k, new_k.to(out_k.dtype)), (out_v, new_v.to(out_v.dtype))):
                # A mask, not indices: the host would have to know the number of indices, which it
                # can't ask for during the capture of a CUDA graph.
                out[:, rows] = (
                    new
                    if call.skip is None
                    else torch.where(call.skip[rows, None], out[:, rows], new)
                )
