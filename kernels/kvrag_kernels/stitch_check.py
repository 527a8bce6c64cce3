"""Checks of the stitch op: parts that don't fit their places are refused, one layer for all that look alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kvrag_kernels.stitch import CODECS, TOKEN_GROUP, Stitching, Stored
from kvrag_kernels.stitch_layers import Remembered


def check(call: Stitching) -> None:
    """Refuse parts that don't fit their places.

    Raises
    ------
    ValueError
        Naming what does not fit.
    """
    keys, values, starts, tables, cos, sin = call.keys, call.values, call.starts, call.tables, call.cos, call.sin
    layers = len(call.out_keys)
    if not (len(keys) == len(values) == layers * len(starts) and len(call.out_values) == len(tables) == layers):
        raise ValueError(
            f"{len(keys)} keys and {len(values)} values, {len(tables)} tables and {len(call.out_values)} value buffers were given for "
            f"{layers} key buffers and {len(starts)} starts; each layer needs one part per start, one table and one buffer"
        )
    if cos.shape != sin.shape or cos.dim() != 3 or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(
            f"cos is {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} {tuple(sin.shape)}; both need float32 (tables, rows, R / 2)"
        )
    rows = [0] * layers
    for kind, same in call.alike.items():
        needed = _ROWS.get(kind, partial(_check_layer, call, same[0]))
        for layer in same:
            rows[layer] = needed
    _check_rows(call, rows)


def _check_rows(call: Stitching, rows: Sequence[int]) -> None:
    """Refuse tables and a mask that are shorter than what layers need."""
    cos, skip, most = call.cos, call.skip, max(rows, default=0)
    for layer, (table, needed) in enumerate(zip(call.tables, rows, strict=True)):
        has_rows = cos.shape[1] >= needed and 2 * cos.shape[2] <= call.out_keys[layer].shape[2]
        if table >= cos.shape[0] or (table >= 0 and not has_rows):
            raise ValueError(
                f"layer {layer} asks for {needed} rows of table {table}, and cos has the shape {tuple(cos.shape)}; pass more rows or tables"
            )
    if skip is not None and (skip.dtype != torch.bool or skip.dim() != 1 or len(skip) < most):
        raise ValueError(
            f"skip is {skip.dtype} of shape {tuple(skip.shape)}; it needs one bool per row of the buffer, {most} at least"
        )


_ROWS = Remembered[int]()
"""First row beyond all parts of a layer that has been checked."""


def _check_layer(call: Stitching, layer: int) -> int:
    """Refuse parts of a layer that don't fit; returns the first row beyond all of them."""
    keys, values = call.in_layer(layer)
    for name, parts, out in (("keys", keys, call.out_keys[layer]), ("values", values, call.out_values[layer])):
        for segment, (part, start) in enumerate(zip(parts, call.starts, strict=True)):
            _check_part(f"{name} of layer {layer}, segment {segment}", part, out, start)
    for segment, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = k.data.shape[1], v.data.shape[1]
        if rows[0] != rows[1]:
            raise ValueError(
                f"keys of layer {layer}, segment {segment} have {rows[0]} rows and its values {rows[1]}; they go to the same rows"
            )
    return max((start + k.data.shape[1] for start, k in zip(call.starts, keys, strict=True)), default=0)


def _check_part(name: str, part: Stored, out: torch.Tensor, start: int) -> None:
    data, scales = part.data, part.scales
    if data.dtype not in CODECS and data.dtype != out.dtype:
        raise ValueError(
            f"{name} are {data.dtype}; stored KV is one of {', '.join(map(str, CODECS))}, or of the buffer's dtype"
        )
    if data.dim() != 3 or out.dim() != 3 or data.shape[0] != out.shape[0] or part.dim != out.shape[2]:
        raise ValueError(
            f"{name} have the shape {tuple(data.shape)} and their buffer {tuple(out.shape)}: heads or head dims differ"
        )
    if start < 0 or start + data.shape[1] > out.shape[1]:
        raise ValueError(
            f"{name} need rows {start} to {start + data.shape[1]} of a buffer of {out.shape[1]} rows; make it larger"
        )
    is_quantised = CODECS.get(data.dtype, "same") != "same"
    if is_quantised != (scales is not None):
        raise ValueError(
            f"{name} are {data.dtype} {'without' if is_quantised else 'with'} scales; quantised data alone needs them"
        )
    if scales is not None:
        num_rows = data.shape[1]
        counts = (1, num_rows, -(-num_rows // TOKEN_GROUP))
        fits = scales.dim() == 3 and scales.shape[0] == data.shape[0] and scales.shape[1] in counts
        if scales.dtype != torch.float16 or not fits or part.dim % max(1, scales.shape[2]):
            raise ValueError(
                f"{name} have scales {scales.dtype} {tuple(scales.shape)}; they need float16 (H_kv, G, a divisor of D), where G is 1, T, "
                f"or the number of groups of {TOKEN_GROUP} tokens"
            )
    zeros = part.zeros
    if zeros is not None and (
        scales is None or zeros.dtype != torch.float16 or zeros.shape != (*scales.shape[:2], part.dim)
    ):
        raise ValueError(
            f"{name} have zeros {zeros.dtype} {tuple(zeros.shape)}; they need scales (H_kv, G, C) beside them, and float16 (H_kv, G, D)"
        )
    if part.residual is not None and (
        part.residual.dtype != torch.float32 or part.residual.shape != (data.shape[0], part.dim)
    ):
        raise ValueError(
            f"{name} have a residual {part.residual.dtype} {tuple(part.residual.shape)}; it needs float32 (H_kv, D)"
        )
