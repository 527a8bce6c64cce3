"""``kvrag::stitch`` as ``torch.library`` sees it: schema, checks, and who computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvrag_kernels import runtime
from kvrag_kernels.stitch import Parts, Stitching, stitch_in_torch
from kvrag_kernels.stitch_check import check

_LIBRARY: Any = torch.library.Library("kvrag", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "stitch(Tensor[] keys, Tensor[] values, Tensor(a!)[] out_keys, Tensor(b!)[] out_values, int[] starts, Tensor cos, Tensor sin, "
    "int[] tables, *, bool interleaved=False, Tensor[]? key_scales=None, Tensor[]? value_scales=None, "
    "Tensor[]? key_zeros=None, Tensor[]? key_residuals=None, Tensor[]? value_residuals=None, Tensor? skip=None) -> ()"
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
    key_residuals: Tensors | None = None,
    value_residuals: Tensors | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """Write the stored KV of all layers and segments to its rows: dequantise, add residuals, rotate keys in float32, round once.

    With ``L`` layers and ``S`` segments, every list of parts has ``L · S`` entries, layer by layer. On CUDA it is one launch.

    Parameters
    ----------
    keys, values
        Position-free keys, and values, ``(H_kv, T, D)``: bfloat16, float16, int8, float8_e4m3fn, or uint8 ``(H_kv, T, D / 2)`` with two
        4-bit integers each, offset by 8, the lower first.
    out_keys, out_values
        ``L`` buffers ``(H_kv, capacity, D)`` each, written in place; any strides.
    starts
        ``S`` first rows.
    cos, sin
        Float32 ``(tables, rows, R / 2)``: the angles of each row; the first ``R`` channels are rotated. Scaled rotations (YaRN) pass scaled
        values. An angle of zero copies bits.
    tables
        ``L`` indices into ``cos`` and ``sin``; -1: the layer does not rotate.
    interleaved
        Whether channels ``2 i`` and ``2 i + 1`` are a pair (GPT-J, GLM), rather than ``i`` and ``i + R / 2``.
    key_scales, value_scales
        For quantised parts: float16 ``(H_kv, 1, D)`` per channel, ``(H_kv, T, 1)`` per token, ``(H_kv, T, C)`` in groups of ``D / C``
        channels, ``(H_kv, ceil(T / 32), C)`` for every 32 tokens.
    key_zeros
        For quantised keys: float16 ``(H_kv, G, D)`` with the ``G`` of the scales, added to the scaled codes.
    key_residuals, value_residuals
        Float32 ``(H_kv, D)`` per part, added to all its rows before the rotation.
    skip
        Bool, per row of the buffer: rows that will be recomputed and are left as they are.

    Raises
    ------
    ValueError
        If parts, buffers, tables and starts don't fit.
    """
    torch.ops.kvrag.stitch(
        list(keys), list(values), list(out_keys), list(out_values), list(starts), cos, sin, list(tables), interleaved=interleaved,
        key_scales=key_scales, value_scales=value_scales, key_zeros=key_zeros, key_residuals=key_residuals,
        value_residuals=value_residuals, skip=skip,
    )  # fmt: skip


def _compute(
    keys: Tensors,
    values: Tensors,
    out_keys: Tensors,
    *places: Any,
    key_scales: Tensors | None = None,
    value_scales: Tensors | None = None,
    key_zeros: Tensors | None = None,
    key_residuals: Tensors | None = None,
    value_residuals: Tensors | None = None,
    **options: Any,
) -> None:
    call = Stitching(
        Parts(keys, key_scales, key_residuals, key_zeros),
        Parts(values, value_scales, value_residuals),
        out_keys,
        *places,
        **options,
    )
    check(call)
    if not (out_keys and out_keys[0].is_cuda and runtime.stitch(call)):
        stitch_in_torch(call)


_LIBRARY.impl("stitch", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("kvrag::stitch", lambda *_, **__: None, lib=_LIBRARY)
