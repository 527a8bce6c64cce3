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
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_attention import add_flex, attention_row, milliseconds
from kernel_precompute import precompute_row
from kernel_shapes import DRY, FULL, SHORT, Shape
from kernel_stitch import shift_row, stitch_row
from kernel_targets import verdicts

import kvrag_kernels
from kvrag_kernels import runtime


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


PART_SECONDS, FLEX_SECONDS = 15.0, 70.0
"""What a part takes at most, as a rule; FlexAttention compiles for most of a minute."""


class Report:
    """The result so far, written anew whenever a part of it is done."""

    def __init__(self, result: dict[str, Any], out: Path | None, seconds: float) -> None:
        self.result, self._out, self._end = result, out, time.monotonic() + seconds

    def run(self, name: str, action: Callable[[], object], *, seconds: float = PART_SECONDS) -> None:
        """Run a part if there is so much time left for it; a part that fails is told and does not end the run."""
        if time.monotonic() + seconds > self._end:
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
    report.run("shift", lambda: result.update(shift=shift_row(device, dtype, is_dry)))
    report.run("precompute", lambda: result.update(precompute=precompute_row(device, dtype, is_dry=is_dry)))
    # It compiles anew for most shapes: those that have a target first.
    for shape in sorted(shapes, key=lambda s: (s.keys < 8192, s.ratio == 1.0, -s.dim)) if has_flex else []:
        for row in result["attention"]:
            if row["shape"] == shape.name:
                add = functools.partial(add_flex, row, shape, device, dtype)
                report.run(f"flex attention, {shape.name}", add, seconds=FLEX_SECONDS)


def main() -> int:
    """Measure and write; returns 1 where a part failed, or a kernel was given up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", choices=("short", "full"), default="short")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which compiles for a minute")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="for all parts: one begins only if it can be over by then"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for kernels.json; default: results/ after a run on a GPU, none after a dry run"
    )
    args = parser.parse_args()
    is_dry = args.dry_run or not torch.cuda.is_available()
    device, dtype = (torch.device("cpu"), torch.float32) if is_dry else (torch.device("cuda"), torch.bfloat16)
    result: dict[str, Any] = {
        "measured": not is_dry,
        "device": platform.processor() if is_dry else torch.cuda.get_device_name(),
        "capability": None if is_dry else list(torch.cuda.get_device_capability()),
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
    return int(bool(result["failed"] or result["failures"]))


if __name__ == "__main__":
    raise SystemExit(main())
