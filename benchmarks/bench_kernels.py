"""Speed and exactness of the kernels, beside a matmul, a device copy, SDPA with a mask on each backend,
and other libraries: FlexAttention, FlashInfer and varlen FlashAttention (`kernel_neighbours.py`).

Useful TFLOP/s count only the keys that rows see. Times are medians over CUDA graphs of several launches with inputs that rotate through
more memory than the L2 cache. Every target of ``kernel_targets.py`` gets its verdict. The JSON is written anew after every shape, so that a
run that is cut short leaves what it has. Without a GPU, or with ``--dry-run``, small shapes go through the torch path: a check of the
script, no measurement, and nothing is written but to ``--out``.

With ``KVRAG_KERNEL`` one kernel attends, else all that the device has. ``--add`` adds to a result of another process, so that a kernel
that ends its process takes no other's figures with it.

    python benchmarks/bench_kernels.py [--shapes short|full] [--parts attention ...] [--add] [--seconds 150] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from kernel_attention import add_others, attention_row, milliseconds
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


PART_SECONDS, COMPILE_SECONDS = 15.0, 70.0
"""What a part takes at most, as a rule; other libraries compile for most of a minute."""


class Report:
    """The result so far, written anew whenever a part of it is done."""

    def __init__(self, result: dict[str, Any], file: Path | None, seconds: float) -> None:
        self.result, self._file, self._end = result, file, time.monotonic() + seconds

    def run(
        self, name: str, action: Callable[[], object], *, seconds: float = PART_SECONDS
    ) -> None:
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
        known = self.result["failures"]
        known += [failure for failure in runtime.modules.failures if failure not in known]
        self.result["targets"] = verdicts(self.result) if self.result["measured"] else []
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self.result, indent=1) + "\n")


PARTS = ("attention", "stitch", "shift", "precompute", "others")


def measure(
    report: Report,
    shapes: list[Shape],
    device: torch.device,
    dtype: torch.dtype,
    parts: Collection[str],
) -> None:
    """Measure the parts, what matters most first."""
    result, is_dry = report.result, not report.result["measured"]
    rows = {row["shape"]: row for row in result["attention"]}

    def attend(shape: Shape) -> None:
        row = attention_row(shape, device, dtype, rows.get(shape.name))
        result["attention"] = [*(r for r in result["attention"] if r["shape"] != shape.name), row]
        print(json.dumps(row), flush=True)

    if "matmul_tflops" not in result:
        report.run("yardsticks", lambda: result.update(yardsticks(device, dtype, is_dry)))
    for shape in shapes if "attention" in parts else []:
        report.run(shape.name, functools.partial(attend, shape))
    for name, row_of in (
        ("stitch", stitch_row),
        ("shift", shift_row),
        ("precompute", precompute_row),
    ):
        if name in parts:
            report.run(
                name,
                lambda name=name, row_of=row_of: result.update(
                    {name: row_of(device, dtype, is_dry)}
                ),
            )  # type: ignore[misc]
    # They compile anew for most shapes: those that have a target first.
    for shape in (
        sorted(shapes, key=lambda s: (s.keys < 8192, s.ratio == 1.0, -s.dim))
        if "others" in parts
        else []
    ):
        for row in result["attention"]:
            if row["shape"] == shape.name:
                add = functools.partial(add_others, row, shape, device, dtype)
                report.run(f"others, {shape.name}", add, seconds=1.0 if is_dry else COMPILE_SECONDS)


def started(file: Path | None, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a file has, if it is of the same device and versions, else a new result."""
    empty = {"attention": [], "left_out": [], "failed": [], "failures": []}
    try:
        known: dict[str, Any] = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):  # there is none, or it was being written
        known = {}
    same = ("measured", "device", "versions")
    return (
        known
        if [known.get(name) for name in same] == [facts[name] for name in same]
        else facts | empty
    )


def main() -> int:
    """Measure and write; returns 1 where a part failed, or a kernel was given up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", choices=("short", "full"), default="short")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="other libraries compile for a minute a shape",
    )
    parser.add_argument("--name", default="kernels", help="of the JSON")
    parser.add_argument(
        "--add", action="store_true", help="add to the JSON: what it has is not measured again"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="for all parts: one begins only if it can be over by then",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the JSON; default: results/ after a run on a GPU, none after a dry run",
    )
    args = parser.parse_args()
    is_dry = args.dry_run or not torch.cuda.is_available()
    device, dtype = (
        (torch.device("cpu"), torch.float32) if is_dry else (torch.device("cuda"), torch.bfloat16)
    )
    facts: dict[str, Any] = {
        "measured": not is_dry,
        "device": platform.processor() if is_dry else torch.cuda.get_device_name(),
        "capability": None if is_dry else list(torch.cuda.get_device_capability()),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "paths": {
            name: kvrag_kernels.info()[name] for name in ("mode", "devices", "attention_elsewhere")
        },
    }
    folder = args.out or (None if is_dry else Path(__file__).parent / "results")
    file = folder and folder / f"{args.name}.json"
    result = started(file if args.add else None, facts)
    failed_before = len(result["failed"]), len(result["failures"])
    report = Report(result, file, args.seconds)
    shapes = DRY if is_dry else FULL if args.shapes == "full" else SHORT
    measure(report, shapes, device, dtype, args.parts)
    print(json.dumps({k: v for k, v in result.items() if k != "attention"}, indent=1))
    return int((len(result["failed"]), len(result["failures"])) != failed_before)


if __name__ == "__main__":
    raise SystemExit(main())
