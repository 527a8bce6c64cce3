"""Speed and exactness of the kernels, beside a matmul, a device copy, SDPA with a mask on each backend, and FlexAttention.

Useful TFLOP/s count only the keys that rows see. Times are medians over CUDA graphs of several launches with inputs that rotate through
more memory than the L2 cache. Every target of ``kernel_targets.py`` gets its verdict. The JSON is written anew after every shape, so that a
run that is cut short leaves what it has. Without a GPU, or with ``--dry-run``, small shapes go through the torch path: a check of the
script, no measurement, and nothing is written but to ``--out``.

    python tests/benchmarks/bench_kernels.py [--shapes short|full] [--seconds 150] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernel_precompute import precompute_row
from kernel_shapes import DRY, FULL, SHORT, Shape
from kernel_targets import verdicts

import kvrag_kernels
from kvrag_kernels import ragged_attention, ragged_plan, reference, runtime, stitch

Run = Callable[[int], object]
COPIES = 3
LAUNCHES = 12
MAX_MASK = 2**28
"""Elements of a mask: more would not fit beside the rest."""


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


def kernels_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """Return what computes here by name, and the mode that brings it: on Hopper two kernels, elsewhere one."""
    found: dict[str, str] = {}
    for mode in ("auto", "mma"):
        with kernel_mode(mode):
            found.setdefault(f"kvrag {runtime.tier(shape.dim, dtype, device)}", mode)
    return found


def ours(mode: str, shape: Shape, inputs: list[list[torch.Tensor]], hi: torch.Tensor) -> Run:
    """Our attention with its plan made before, as in all layers but the first."""
    with kernel_mode(mode):
        plan = ragged_plan(inputs[0][0], inputs[0][1], hi)

    def run(i: int) -> object:
        with kernel_mode(mode):
            return ragged_attention(*inputs[i], hi, scale=shape.dim**-0.5, plan=plan)

    return run


def contenders(shape: Shape, inputs: list[list[torch.Tensor]], rows: torch.Tensor) -> dict[str, Run]:
    """Ours and everything else of torch's that gives the same answer. A mask is made before, as a bias: in SDPA's favour."""
    dtype = inputs[0][0].dtype
    runs = {name: ours(mode, shape, inputs, rows.int()) for name, mode in kernels_of(shape, dtype, rows.device).items()}
    if len(rows) * shape.keys <= MAX_MASK:
        bias = torch.zeros(len(rows), shape.keys, dtype=dtype, device=rows.device)
        bias.masked_fill_(rows[:, None] < torch.arange(shape.keys, device=rows.device), float("-inf"))
        groups = shape.heads // shape.kv_heads
        for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if rows.is_cuda else ("MATH",):
            name = backend.split("_")[0].lower()
            runs[f"sdpa {name}, mask"] = lambda i, b=backend: sdpa(*inputs[i], b, attn_mask=bias, enable_gqa=True)  # type: ignore[misc]
            runs[f"sdpa {name}, mask, K and V repeated"] = (
                lambda i, b=backend: sdpa(  # type: ignore[misc]
                    inputs[i][0], *(x.repeat_interleave(groups, 1) for x in inputs[i][1:]), b, attn_mask=bias
                )
            )
    if shape.ratio == 1.0:
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION") if rows.is_cuda else ("MATH",):
            runs[f"sdpa {backend.split('_')[0].lower()}, causal"] = lambda i, b=backend: sdpa(  # type: ignore[misc]
                *inputs[i], b, is_causal=True, enable_gqa=True
            )
    return runs


def errors(shape: Shape, inputs: list[torch.Tensor], rows: torch.Tensor) -> dict[str, dict[str, float]]:
    """Errors against float64 over 64 of the rows, largest and root mean square: ours, SDPA's in the same dtype, two inexact masks'."""
    q, k, v = inputs
    picked = torch.linspace(0, len(rows) - 1, min(64, len(rows)), device=rows.device).long()
    scale = shape.dim**-0.5
    want, _ = reference.attention(q[:, :, picked], k, v, rows[picked], scale=scale)
    j = torch.arange(shape.keys, device=rows.device)
    aligned = j <= (shape.keys - len(rows) + torch.arange(len(rows), device=rows.device))[:, None]
    last = rows[(torch.arange(len(rows), device=rows.device) // 32 * 32 + 31).clamp(max=len(rows) - 1)]
    blocks = (j // 32) < (last // 32)[:, None]
    groups = shape.heads // shape.kv_heads
    found: dict[str, torch.Tensor] = {}
    for name, mode in kernels_of(shape, q.dtype, rows.device).items():
        with kernel_mode(mode):
            found[name] = ragged_attention(*inputs, rows.int(), scale=scale)[0][:, :, picked]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    found["sdpa"] = F.scaled_dot_product_attention(q[:, :, picked], k, v, attn_mask=j <= rows[picked, None])
    k, v = k.float(), v.float()
    for name, mask in (("causal mask aligned bottom-right", aligned), ("32 × 32 block mask", blocks)):
        found[name] = F.scaled_dot_product_attention(q[:, :, picked].float(), k, v, attn_mask=mask[picked]).nan_to_num()
    off = {name: (x.double() - want).abs() for name, x in found.items()}
    return {
        "max_error": {name: float(x.max()) for name, x in off.items()},
        "rms_error": {name: float(x.square().mean().sqrt()) for name, x in off.items()},
    }


def inputs_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return the rows to compute and, several times, queries, keys and values."""
    rows = shape.rows().to(device)
    sizes = [(1, shape.heads, len(rows), shape.dim), *[(1, shape.kv_heads, shape.keys, shape.dim)] * 2]
    return rows, [[torch.randn(s, device=device, dtype=dtype) for s in sizes] for _ in range(COPIES)]


def attention_row(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Everything about one shape, but FlexAttention."""
    rows, inputs = inputs_of(shape, device, dtype)
    times = {name: tried(run, device) for name, run in contenders(shape, inputs, rows).items()}
    still = kernels_of(shape, dtype, device)
    times |= {n: "given up: see failures" for n in times if n.startswith("kvrag") and n not in still}
    row = {
        "shape": shape.name,
        "dim": shape.dim,
        "keys": shape.keys,
        "ratio": shape.ratio,
        "useful_gflop": shape.flops() / 1e9,
        "ms": times,
        "useful_tflops": {n: shape.flops() / t / 1e9 for n, t in times.items() if isinstance(t, float)},
    }
    return row | (errors(shape, inputs[0], rows) if shape.keys <= 32768 else {})


def add_flex(row: dict[str, Any], shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Add FlexAttention to a shape's row: its time, and apart from it that of building its mask."""
    rows, inputs = inputs_of(shape, device, dtype)
    try:
        run, row["flex_mask_ms"] = flex(inputs, rows)
    except Exception as error:  # as in `tried`: what it refuses with is a result
        row["ms"]["flex attention"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return
    row["ms"]["flex attention"] = tried(run, device)
    if isinstance(row["ms"]["flex attention"], float):
        row["useful_tflops"]["flex attention"] = shape.flops() / row["ms"]["flex attention"] / 1e9


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
            run = functools.partial(stitch, *parts, *places, starts, angles.cos(), angles.sin(), tables, **options)
            with kernel_mode(mode):
                ms = wall_milliseconds(run)
            found[f"{codec}, {mode}"] = {"ms": ms, "moved_bytes": moved, "gb_s": moved / ms / 1e6}
    return found


def wall_milliseconds(run: Callable[[], object]) -> float:
    """Median time of one call from start to the device's rest; the first one compiles, and does not count."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


class Report:
    """The result so far, written anew whenever a part of it is done."""

    def __init__(self, result: dict[str, Any], out: Path | None, seconds: float) -> None:
        self.result, self._out, self._end = result, out, time.monotonic() + seconds

    def run(self, name: str, action: Callable[[], object]) -> None:
        """Run a part if there is time left for it; a part that fails is told and does not end the run."""
        if time.monotonic() > self._end:
            self.result["left_out"].append(f"{name}: no time was left")
        else:
            try:
                action()
            except ModuleNotFoundError as error:
                self.result["left_out"].append(f"{name}: {error.name} is not installed")
            except Exception as error:
                self.result["failed"].append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        self.result["failures"] = list(runtime.modules.failures)
        self.result["targets"] = verdicts(self.result) if self.result["measured"] else []
        if self._out is not None:
            self._out.mkdir(parents=True, exist_ok=True)
            (self._out / "kernels.json").write_text(json.dumps(self.result, indent=1) + "\n")


def measure(report: Report, shapes: list[Shape], device: torch.device, dtype: torch.dtype, has_flex: bool) -> None:
    """Measure everything, what matters most first."""
    result, is_dry = report.result, not report.result["measured"]
    report.run("yardsticks", lambda: result.update(yardsticks(device, dtype, is_dry)))
    for shape in shapes:
        report.run(shape.name, lambda shape=shape: result["attention"].append(attention_row(shape, device, dtype)))  # type: ignore[misc]
        print(json.dumps(result["attention"][-1:]), flush=True)
    report.run("stitch", lambda: result.update(stitch=stitch_row(device, dtype, is_dry)))
    report.run("precompute", lambda: result.update(precompute=precompute_row(device, dtype, is_dry=is_dry)))
    for shape in shapes if has_flex else []:
        for row in result["attention"]:
            if row["shape"] == shape.name:
                report.run(f"flex attention, {shape.name}", functools.partial(add_flex, row, shape, device, dtype))


def main() -> int:
    """Measure and write; returns 1 where a part failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", choices=("short", "full"), default="short")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which compiles for a minute")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no part later than this")
    parser.add_argument(
        "--out", type=Path, help="folder for kernels.json; default: results/ after a run on a GPU, none after a dry run"
    )
    args = parser.parse_args()
    is_dry = args.dry_run or not torch.cuda.is_available()
    device, dtype = (torch.device("cpu"), torch.float32) if is_dry else (torch.device("cuda"), torch.bfloat16)
    result: dict[str, Any] = {
        "measured": not is_dry,
        "device": platform.processor() if is_dry else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "paths": {name: kvrag_kernels.info()[name] for name in ("mode", "devices", "attention_elsewhere")},
        "attention": [],
        "left_out": [],
        "failed": [],
    }
    report = Report(result, args.out or (None if is_dry else Path(__file__).parent / "results"), args.seconds)
    shapes = DRY if is_dry else FULL if args.shapes == "full" else SHORT
    measure(report, shapes, device, dtype, has_flex=not is_dry and not args.no_flex)
    print(json.dumps({k: v for k, v in result.items() if k != "attention"}, indent=1))
    return int(bool(result["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
