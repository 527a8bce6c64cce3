"""Attention of other libraries on one shape of the kernels' benchmark: FlexAttention, FlashInfer, and varlen FlashAttention.

Masks, plans and layouts are made before, in their favour. Each is checked against float64 before it is timed, and what is not installed or
refuses a shape says so in its place.

    flex attention             any rows, by a block mask; compiled
    flashinfer ragged, mask    any rows, by a packed mask
    flashinfer paged decode    one row a request, of a pool with pages of 16 slots
    flash varlen               one row a request, or a whole prompt
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_shapes import PAGE, Shape

Inputs = list[list[torch.Tensor]]
"""Several times queries ``(1, H, R, D)``, keys and values ``(1, H_kv, N, D)``."""
Run = Callable[[int], torch.Tensor]
"""Attends with the inputs of an index; the result is ``(1, H, R, D)``."""

WORKSPACE = 128 * 2**20  # bytes, as FlashInfer recommends
TIMES_SDPA_ERROR = 4.0
"""Times SDPA's own root mean square error of the same dtype, beyond which an answer is another one."""


def flex(shape: Shape, inputs: Inputs, rows: torch.Tensor) -> Run:
    """FlexAttention, compiled on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    first = shape.first().to(rows.device)
    mask = create_block_mask(
        lambda b, h, i, j: (j <= rows[i]) & (j >= first[i]),
        None,
        None,
        len(rows),
        shape.keys,
        device=rows.device.type,
    )
    attend = torch.compile(flex_attention, dynamic=True) if rows.is_cuda else flex_attention
    return lambda i: attend(*inputs[i], block_mask=mask, enable_gqa=True)


def flashinfer_ragged(shape: Shape, inputs: Inputs, rows: torch.Tensor) -> Run:
    """FlashInfer's ragged prefill of one request, its mask packed by its plan."""
    import flashinfer

    q, k, v = _tokens_first(inputs)
    j = torch.arange(shape.keys, device=rows.device)
    mask = (j <= rows[:, None]) & (j >= shape.first().to(rows.device)[:, None])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(rows), "NHD")
    ends = [torch.tensor([0, n], dtype=torch.int32) for n in (len(rows), shape.keys)]
    wrapper.plan(
        *(each.to(rows.device) for each in ends),
        shape.heads,
        shape.kv_heads,
        shape.dim,
        custom_mask=mask.flatten(),
        sm_scale=shape.dim**-0.5,
        q_data_type=q[0].dtype,
        kv_data_type=k[0].dtype,
    )
    return lambda i: _heads_first(wrapper.run(q[i], k[i], v[i]))


def flashinfer_decode(shape: Shape, inputs: Inputs, rows: torch.Tensor) -> Run:
    """FlashInfer's decode of one row a request, from pages in the order of the pool."""
    import flashinfer

    q, k, v = _tokens_first(inputs)
    pages = [
        [x.view(-1, PAGE, shape.kv_heads, shape.dim) for x in pair]
        for pair in zip(k, v, strict=True)
    ]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(rows), "NHD", use_tensor_cores=True
    )
    ends, filled = _spans(shape) // PAGE, torch.full((shape.requests,), PAGE, dtype=torch.int32)
    wrapper.plan(
        ends.to(rows.device),
        torch.arange(shape.keys // PAGE, dtype=torch.int32, device=rows.device),
        filled.to(rows.device),
        shape.heads,
        shape.kv_heads,
        shape.dim,
        PAGE,
        sm_scale=shape.dim**-0.5,
        q_data_type=q[0].dtype,
        kv_data_type=k[0].dtype,
    )
    return lambda i: _heads_first(wrapper.run(q[i], tuple(pages[i])))


def varlen(shape: Shape, inputs: Inputs, rows: torch.Tensor) -> Run:
    """FlashAttention by torch for sequences of any length: the requests of a pool, or one whole prompt."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = _tokens_first(inputs)
    is_prompt = shape.requests == 1
    most = len(rows) if is_prompt else 1
    ends = torch.arange(0, len(rows) + 1, most, dtype=torch.int32, device=rows.device)
    spans = _spans(shape).to(rows.device)
    return lambda i: _heads_first(
        varlen_attn(
            q[i],
            k[i],
            v[i],
            ends,
            spans,
            most,
            shape.keys // shape.requests,
            window_size=(-1, 0 if is_prompt else -1),
            enable_gqa=shape.heads != shape.kv_heads,
        )
    )


def neighbours_of(shape: Shape) -> dict[str, Callable[[Shape, Inputs, torch.Tensor], Run]]:
    """Return what can give the exact answer for a shape, by name."""
    found = {"flex attention": flex, "flashinfer ragged, mask": flashinfer_ragged}
    if shape.requests > 1:
        found["flashinfer paged decode"] = flashinfer_decode
    if shape.requests > 1 or shape.ratio == 1.0:
        found["flash varlen"] = varlen
    return found


def add_neighbours(
    row: dict[str, Any],
    shape: Shape,
    inputs: Inputs,
    rows: torch.Tensor,
    error_of: Callable[[torch.Tensor], float],
    time: Callable[[Run], float | str],
) -> None:
    """Add to a shape's row, for each neighbour, its error and its time, or why there is none.

    ``error_of`` returns an answer's root mean square error against float64. The row has SDPA's own.
    """
    for name, make in neighbours_of(shape).items():
        try:
            run = make(shape, inputs, rows)
            error = error_of(run(0))
        except ModuleNotFoundError as missing:
            row["ms"][name] = f"not installed: {missing.name}"
            continue
        except Exception as refusal:  # whatever a library refuses with is a result of this table
            row["ms"][name] = f"{type(refusal).__name__}: {str(refusal).splitlines()[0][:120]}"
            continue
        row["rms_error"][name] = error
        if not error <= TIMES_SDPA_ERROR * row["rms_error"]["sdpa"]:
            row["ms"][name] = f"not timed: its error is {error:.1e}"
            continue
        row["ms"][name] = time(run)
        if isinstance(row["ms"][name], float):
            row["useful_tflops"][name] = shape.flops() / row["ms"][name] / 1e9


def _tokens_first(inputs: Inputs) -> list[list[torch.Tensor]]:
    """Return queries, keys and values as ``(tokens, heads, D)``, contiguous."""
    return [[x[0].transpose(0, 1).contiguous() for x in each] for each in zip(*inputs, strict=True)]


def _heads_first(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(0, 1)[None]


def _workspace(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=rows.device)


def _spans(shape: Shape) -> torch.Tensor:
    """Return where the requests' slots begin, and the end of the last, int32."""
    step = shape.keys // shape.requests
    return torch.arange(0, shape.keys + 1, step, dtype=torch.int32)
