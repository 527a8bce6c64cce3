"""One shape of the kernels' benchmark: ours and whatever else of torch's gives the same answer, their times and their errors."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from kernel_neighbours import add_neighbours
from kernel_shapes import Shape

from kvrag_kernels import ragged_attention, ragged_plan, reference, runtime

Run = Callable[[int], object]
COPIES = 3
LAUNCHES = 12
MAX_MASK = 2**28
"""Elements of a mask: more would not fit beside the rest."""
MAX_CHECKED = 49152
"""Keys of a shape that is checked against float64."""
MAX_SCORES = 2**30
"""Scores of all heads, which SDPA's plain path keeps several times: more would not fit."""


@contextmanager
def kernel_mode(name: str) -> Iterator[None]:
    """Let ``KVRAG_KERNEL`` be ``name`` meanwhile."""
    before = os.environ.get("KVRAG_KERNEL")
    os.environ["KVRAG_KERNEL"] = name
    try:
        yield
    finally:
        del os.environ["KVRAG_KERNEL"]
        if before is not None:
            os.environ["KVRAG_KERNEL"] = before


def milliseconds(run: Run, device: torch.device) -> float:
    """Median time of one call; ``run`` gets the index of the inputs to take."""
    for i in range(COPIES):
        run(i)
    if device.type != "cuda":
        times = []
        for i in range(3):
            start = time.perf_counter()
            run(i % COPIES)
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            run(i % COPIES)
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / LAUNCHES)
    return statistics.median(times)


def tried(run: Run, device: torch.device) -> float | str:
    """Milliseconds, or why there are none."""
    try:
        return milliseconds(run, device)
    except Exception as error:  # whatever a backend refuses with is a result of this table
        if device.type == "cuda":
            torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str, **options: Any
) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, **options)


def kernels_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """Return what computes here by name, and the mode that brings it: on Hopper two kernels, elsewhere one."""
    found: dict[str, str] = {}
    # What is asked for from outside holds.
    for mode in ("sm90", "mma", "auto") if runtime.mode() == "auto" else (runtime.mode(),):
        with kernel_mode(mode):
            found.setdefault(f"kvrag {runtime.tier(shape.dim, dtype, device)}", mode)
    return found


def ours(mode: str, shape: Shape, inputs: list[list[torch.Tensor]], rows: torch.Tensor) -> Run:
    """Our attention with its plan made before, as in all layers but the first."""
    hi, lo = limits_of(shape, rows)
    with kernel_mode(mode):
        plan = ragged_plan(inputs[0][0], inputs[0][1], hi, lo)

    def run(i: int) -> object:
        with kernel_mode(mode):
            return ragged_attention(*inputs[i], hi, lo, scale=shape.dim**-0.5, plan=plan)

    return run


def limits_of(shape: Shape, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the last and the first key of each row as our op takes them; ``None`` is the very first."""
    lo = shape.first().int().to(rows.device) if shape.requests > 1 else None
    return rows.int(), lo


def sees(shape: Shape, rows: torch.Tensor) -> torch.Tensor:
    """Whether a row sees a key, ``(R, N)``."""
    j = torch.arange(shape.keys, device=rows.device)
    return (j <= rows[:, None]) & (j >= shape.first().to(rows.device)[:, None])


def exact(
    shape: Shape, inputs: list[torch.Tensor], rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 64 of the rows, by their number, and their attention in float64."""
    q, k, v = inputs
    picked = torch.linspace(0, len(rows) - 1, min(64, len(rows)), device=rows.device).long()
    first = shape.first().to(rows.device)[picked]
    scale = shape.dim**-0.5
    return picked, reference.attention(q[:, :, picked], k, v, rows[picked], first, scale=scale)[0]


def contenders(
    shape: Shape, inputs: list[list[torch.Tensor]], rows: torch.Tensor
) -> dict[str, Run]:
    """Ours and everything else of torch's that gives the same answer. A mask is made before, as a bias: in SDPA's favour."""
    dtype = inputs[0][0].dtype
    runs = {
        name: ours(mode, shape, inputs, rows)
        for name, mode in kernels_of(shape, dtype, rows.device).items()
    }
    if len(rows) * shape.keys <= MAX_MASK:
        bias = torch.zeros(len(rows), shape.keys, dtype=dtype, device=rows.device)
        bias.masked_fill_(~sees(shape, rows), float("-inf"))
        groups = shape.heads // shape.kv_heads
        backends = ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION"] if rows.is_cuda else []
        if len(rows) * shape.keys * shape.heads <= MAX_SCORES:
            backends.append("MATH")
        for backend in backends:
            name = backend.split("_")[0].lower()
            runs[f"sdpa {name}, mask"] = lambda i, b=backend: sdpa(
                *inputs[i], b, attn_mask=bias, enable_gqa=True
            )  # type: ignore[misc]
            runs[f"sdpa {name}, mask, K and V repeated"] = (
                lambda i, b=backend: sdpa(  # type: ignore[misc]
                    inputs[i][0],
                    *(x.repeat_interleave(groups, 1) for x in inputs[i][1:]),
                    b,
                    attn_mask=bias,
                )
            )
    if shape.ratio == 1.0:
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION") if rows.is_cuda else ("MATH",):
            runs[f"sdpa {backend.split('_')[0].lower()}, causal"] = lambda i, b=backend: sdpa(  # type: ignore[misc]
                *inputs[i], b, is_causal=True, enable_gqa=True
            )
    return runs


def errors(
    shape: Shape, inputs: list[torch.Tensor], rows: torch.Tensor
) -> dict[str, dict[str, float]]:
    """Errors against float64 over 64 of the rows, largest and root mean square: ours, SDPA's in the same dtype, two inexact masks'."""
    q, k, v = inputs
    picked, want = exact(shape, inputs, rows)
    scale = shape.dim**-0.5
    j = torch.arange(shape.keys, device=rows.device)
    aligned = j <= (shape.keys - len(rows) + torch.arange(len(rows), device=rows.device))[:, None]
    last = rows[
        (torch.arange(len(rows), device=rows.device) // 32 * 32 + 31).clamp(max=len(rows) - 1)
    ]
    blocks = (j // 32) < (last // 32)[:, None]
    groups = shape.heads // shape.kv_heads
    found: dict[str, torch.Tensor] = {}
    for name, mode in kernels_of(shape, q.dtype, rows.device).items():
        with kernel_mode(mode):
            found[name] = ragged_attention(*inputs, *limits_of(shape, rows), scale=scale)[0][
                :, :, picked
            ]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    found["sdpa"] = F.scaled_dot_product_attention(
        q[:, :, picked], k, v, attn_mask=sees(shape, rows)[picked]
    )
    k, v = k.float(), v.float()
    for name, mask in (
        ("causal mask aligned bottom-right", aligned),
        ("32 × 32 block mask", blocks),
    ):
        found[name] = F.scaled_dot_product_attention(
            q[:, :, picked].float(), k, v, attn_mask=mask[picked]
        ).nan_to_num()
    off = {name: (x.double() - want).abs() for name, x in found.items()}
    return {
        "max_error": {name: float(x.max()) for name, x in off.items()},
        "rms_error": {name: float(x.square().mean().sqrt()) for name, x in off.items()},
    }


def inputs_of(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return the rows to compute and, several times, queries, keys and values."""
    rows = shape.rows().to(device)
    sizes = [
        (1, shape.heads, len(rows), shape.dim),
        *[(1, shape.kv_heads, shape.keys, shape.dim)] * 2,
    ]
    return rows, [
        [torch.randn(s, device=device, dtype=dtype) for s in sizes] for _ in range(COPIES)
    ]


def attention_row(
    shape: Shape, device: torch.device, dtype: torch.dtype, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Everything about one shape, but other libraries. What ``known``, a row of the same shape, has times for is not measured again."""
    known = known or {"ms": {}, "useful_tflops": {}}
    rows, inputs = inputs_of(shape, device, dtype)
    runs = contenders(shape, inputs, rows)
    times = {name: tried(run, device) for name, run in runs.items() if name not in known["ms"]}
    still = kernels_of(shape, dtype, device)
    times |= {
        n: "given up: see failures" for n in times if n.startswith("kvrag") and n not in still
    }
    row = known | {
        "shape": shape.name,
        "dim": shape.dim,
        "keys": shape.keys,
        "ratio": shape.ratio,
        "useful_gflop": shape.flops() / 1e9,
        "ms": known["ms"] | times,
        "useful_tflops": known["useful_tflops"]
        | {n: shape.flops() / t / 1e9 for n, t in times.items() if isinstance(t, float)},
    }
    found = errors(shape, inputs[0], rows) if shape.keys <= MAX_CHECKED else {}
    return row | {kind: known.get(kind, {}) | own for kind, own in found.items()}


def add_others(row: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Add other libraries' attention to a shape's row, where it has errors: see :mod:`kernel_neighbours`."""
    if "rms_error" not in row:
        return
    rows, inputs = inputs_of(shape, device, dtype)
    picked, want = exact(shape, inputs[0], rows)
    add_neighbours(
        row,
        shape,
        inputs,
        rows,
        lambda out: float((out[:, :, picked].double() - want).square().mean().sqrt()),
        lambda run: tried(run, device),
    )
