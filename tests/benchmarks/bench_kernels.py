"""Speed and exactness of the kernels, beside a matmul, a device copy, SDPA with a mask on each backend, and FlexAttention.

Useful TFLOP/s count only the keys that rows see. Times are medians over CUDA graphs of several launches with inputs that rotate through
more memory than the L2 cache. Without a GPU, or with ``--dry-run``, small shapes go through the torch path: a check of the script, no
measurement, and nothing is written but to ``--out``.

    python tests/benchmarks/bench_kernels.py [--shapes short|full] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernel_shapes import DRY, FULL, SHORT, Shape

import kvrag_kernels
from kvrag_kernels import ragged_attention, ragged_plan, reference, stitch

Run = Callable[[int], object]
COPIES = 3
LAUNCHES = 12


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


def yardsticks(device: torch.device, dtype: torch.dtype, is_dry: bool) -> dict[str, float]:
    """What the device can do: a square matmul in TFLOP/s, and a copy in GB/s, read and written bytes counted."""
    n = 256 if is_dry else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    x = torch.randn((1 if is_dry else 256) * 2**20, device=device)
    y = torch.empty_like(x)
    return {
        "matmul_tflops": 2 * n**3 / milliseconds(lambda _: torch.mm(a, b), device) / 1e9,
        "copy_gb_s": 2 * x.nbytes / milliseconds(lambda _: y.copy_(x), device) / 1e6,
    }


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str, **options: Any) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, **options)


def flex(inputs: list[list[torch.Tensor]], rows: torch.Tensor) -> tuple[Run, float]:
    """Compiled FlexAttention, and the milliseconds that building its mask took."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    keys = inputs[0][1].shape[2]
    start = time.perf_counter()
    mask = create_block_mask(lambda b, h, i, j: j <= rows[i], None, None, len(rows), keys, device=rows.device.type)
    if rows.is_cuda:
        torch.cuda.synchronize()
    built = (time.perf_counter() - start) * 1e3
    compiled = torch.compile(flex_attention, dynamic=True)
    return lambda i: compiled(*inputs[i], block_mask=mask, enable_gqa=True), built


def contenders(shape: Shape, inputs: list[list[torch.Tensor]], rows: torch.Tensor, has_flex: bool) -> dict[str, Run]:
    """Ours and everything else that gives the same answer."""
    scale, hi = shape.dim**-0.5, rows.int()
    plan = ragged_plan(inputs[0][0], inputs[0][1], hi)
    runs: dict[str, Run] = {"kvrag": lambda i: ragged_attention(*inputs[i], hi, scale=scale, plan=plan)}
    if len(rows) * shape.keys <= 2**28:
        mask = rows[:, None] >= torch.arange(shape.keys, device=rows.device)
        groups = shape.heads // shape.kv_heads
        for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if rows.is_cuda else ("MATH",):
            name = backend.split("_")[0].lower()
            runs[f"sdpa {name}, mask"] = lambda i, b=backend: sdpa(*inputs[i], b, attn_mask=mask, enable_gqa=True)  # type: ignore[misc]
            runs[f"sdpa {name}, mask, K and V repeated"] = (
                lambda i, b=backend: sdpa(  # type: ignore[misc]
                    inputs[i][0], *(x.repeat_interleave(groups, 1) for x in inputs[i][1:]), b, attn_mask=mask
                )
            )
    if shape.ratio == 1.0:
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION") if rows.is_cuda else ("MATH",):
            runs[f"sdpa {backend.split('_')[0].lower()}, causal"] = lambda i, b=backend: sdpa(  # type: ignore[misc]
                *inputs[i], b, is_causal=True, enable_gqa=True
            )
    if has_flex:
        runs["flex attention"], _ = flex(inputs, rows)
    return runs


def errors(shape: Shape, inputs: list[torch.Tensor], rows: torch.Tensor) -> dict[str, float]:
    """Largest error against float64 over 64 of the rows: ours, and two masks that are not exact."""
    q, k, v = inputs
    picked = torch.linspace(0, len(rows) - 1, min(64, len(rows)), device=rows.device).long()
    scale = shape.dim**-0.5
    want, _ = reference.attention(q[:, :, picked], k, v, rows[picked], scale=scale)
    j = torch.arange(shape.keys, device=rows.device)
    aligned = j <= (shape.keys - len(rows) + torch.arange(len(rows), device=rows.device))[:, None]
    last = rows[(torch.arange(len(rows), device=rows.device) // 32 * 32 + 31).clamp(max=len(rows) - 1)]
    blocks = (j // 32) < (last // 32)[:, None]
    groups = shape.heads // shape.kv_heads
    k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    found = {"kvrag": ragged_attention(*inputs, rows.int(), scale=scale)[0][:, :, picked]}
    for name, mask in (("causal mask aligned bottom-right", aligned), ("32 × 32 block mask", blocks)):
        found[name] = F.scaled_dot_product_attention(q[:, :, picked].float(), k, v, attn_mask=mask[picked]).nan_to_num()
    return {name: float((x.double() - want).abs().max()) for name, x in found.items()}


def attention_row(shape: Shape, device: torch.device, dtype: torch.dtype, has_flex: bool) -> dict[str, Any]:
    """Everything about one shape."""
    rows = shape.rows().to(device)
    sizes = [(1, shape.heads, len(rows), shape.dim), *[(1, shape.kv_heads, shape.keys, shape.dim)] * 2]
    inputs = [[torch.randn(s, device=device, dtype=dtype) for s in sizes] for _ in range(COPIES)]
    times = {name: tried(run, device) for name, run in contenders(shape, inputs, rows, has_flex).items()}
    useful = {n: shape.flops() / t / 1e9 for n, t in times.items() if isinstance(t, float)}
    others = [t for n, t in times.items() if isinstance(t, float) and n.startswith("sdpa") and "mask" in n]
    ours = times["kvrag"]
    return {
        "shape": shape.name,
        "useful_gflop": shape.flops() / 1e9,
        "ms": times,
        "useful_tflops": useful,
        "times_faster_than_best_masked_sdpa": min(others) / ours if others and isinstance(ours, float) else None,
        "max_error": errors(shape, inputs[0], rows) if shape.keys <= 8192 else None,
    }


def stitch_row(device: torch.device, dtype: torch.dtype, is_dry: bool) -> dict[str, Any]:
    """Stitch 16 chunks of int8 and of 16-bit KV into all layers of an 8B shape, launch included, beside the chain of torch operations."""
    layers, heads, dim, chunk, count = (2, 2, 64, 40, 2) if is_dry else (32, 8, 128, 512, 16)
    angles = torch.rand(1, chunk * count, dim // 2, device=device) * 6
    places = [
        [torch.empty(heads, chunk * count, dim, device=device, dtype=dtype) for _ in range(layers)] for _ in range(2)
    ]
    starts, tables = [i * chunk for i in range(count)], [0] * layers
    found: dict[str, Any] = {}
    for codec in ("16-bit", "int8"):
        scales = [torch.rand(heads, 1, dim, device=device).half()] * (layers * count) if codec == "int8" else None
        random = (torch.randn(heads, chunk, dim, device=device) * 40 for _ in range(2 * layers * count))
        stored = [x.clamp(-127, 127).to(torch.int8 if scales else dtype) for x in random]
        parts = stored[: layers * count], stored[layers * count :]
        options = {"key_scales": scales, "value_scales": scales}
        moved = sum(x.nbytes for x in stored) + sum(x.nbytes for side in places for x in side)
        for mode in ("auto", "torch"):
            os.environ["KVRAG_KERNEL"] = mode
            run = functools.partial(stitch, *parts, *places, starts, angles.cos(), angles.sin(), tables, **options)
            ms = wall_milliseconds(run)
            found[f"{codec}, {mode}"] = {"ms": ms, "moved_bytes": moved, "gb_s": moved / ms / 1e6}
    del os.environ["KVRAG_KERNEL"]
    return found


def wall_milliseconds(run: Callable[[], object]) -> float:
    """Median time of one call from start to the device's rest."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", choices=("short", "full"), default="short")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which compiles for a minute")
    parser.add_argument(
        "--out", type=Path, help="folder for kernels.json; default: results/ after a run on a GPU, none after a dry run"
    )
    args = parser.parse_args()
    is_dry = args.dry_run or not torch.cuda.is_available()
    device, dtype = (torch.device("cpu"), torch.float32) if is_dry else (torch.device("cuda"), torch.bfloat16)
    shapes = DRY if is_dry else FULL if args.shapes == "full" else SHORT
    result: dict[str, Any] = {
        "measured": not is_dry,
        "device": platform.processor() if is_dry else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "paths": {name: kvrag_kernels.info()[name] for name in ("mode", "devices", "attention_elsewhere")},
        **yardsticks(device, dtype, is_dry),
        "attention": [],
        "stitch": stitch_row(device, dtype, is_dry),
    }
    for shape in shapes:
        result["attention"].append(attention_row(shape, device, dtype, not is_dry and not args.no_flex))
        print(json.dumps(result["attention"][-1]), flush=True)
    out = args.out or (None if is_dry else Path(__file__).parent / "results")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "attention"}, indent=1))


if __name__ == "__main__":
    main()
