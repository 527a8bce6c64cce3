"""Host time of planning a stitch: the op's dispatch, its checks, and the kernel's options and table of parts, beside another commit's.

Nothing is launched: what a GPU would be given is made in ordinary memory and thrown away, so neither the copy of the table nor the launch
is in the times. Each commit has a process of its own, and they take turns call by call. ``first`` times have starts that no call before has
had, as a prompt's first launch has; ``again`` times are the same call once more, as the launches for its other layers are.

    python tests/benchmarks/bench_stitch_host.py --base COMMIT
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine, write_result

ROOT = Path(__file__).parents[2]
HEADS, DIM, CAPACITY = 8, 128, 1024


@dataclass(frozen=True)
class Shape:
    """Layers and segments of one call, how its KV is kept, and whether residuals are added."""

    layers: int
    segments: int = 16
    is_rounded: bool = False
    has_residuals: bool = False


SHAPES = {
    "all layers of an 8B model, 16-bit": Shape(32),
    "all layers of an 8B model, int8": Shape(32, is_rounded=True),
    "eight layers, 16-bit": Shape(8),
    "eight layers, int8": Shape(8, is_rounded=True),
    "one layer's shift, 16-bit": Shape(1, has_residuals=True),
    "one layer's shift, int8": Shape(1, is_rounded=True, has_residuals=True),
}


def call_of(shape: Shape) -> Callable[[int], None]:
    """Return what calls the op with segments of different lengths, moved by so many rows; parts are short, for none is copied."""
    from kvrag_kernels import stitch

    count = shape.layers * shape.segments
    dtype = torch.int8 if shape.is_rounded else torch.bfloat16
    lengths = [8 + i % shape.segments for i in range(count)]
    keys, values = ([torch.zeros(HEADS, n, DIM, dtype=dtype) for n in lengths] for _ in range(2))
    outs = [
        [torch.zeros(1, CAPACITY, HEADS, DIM, dtype=torch.bfloat16)[0].transpose(0, 1) for _ in range(shape.layers)]
        for _ in range(2)
    ]
    options: dict[str, Any] = {}
    if shape.is_rounded:
        names = ("key_scales", "key_zeros")
        options |= {name: [torch.ones(HEADS, 1, DIM).half() for _ in lengths] for name in names}
        options["value_scales"] = [torch.ones(HEADS, n, 4).half() for n in lengths]
    if shape.has_residuals:
        names = ("key_residuals", "value_residuals")
        options |= {name: list(torch.zeros(HEADS, count, DIM).unbind(1)) for name in names}
    angles, tables = torch.ones(1, CAPACITY, DIM // 2), [0] * shape.layers

    def call(moved: int) -> None:
        starts = [moved + i * 32 for i in range(shape.segments)]
        stitch(keys, values, *outs, starts, angles, angles, tables, **options)

    return call


class Nowhere:
    """A module that launches nothing."""

    processors = 1

    def launch(self, *_: Any) -> None:
        """Do nothing."""

    def tensor_map(self, *_: Any) -> bytes:
        """Describe nothing."""
        return b""


def work() -> None:
    """Answer each line ``shape's name, rows`` with two times in milliseconds; for the commit whose packages are on the path."""
    from kvrag_kernels import stitch_launch, stitch_op

    def plan(call: Any) -> None:
        assert stitch_launch.defines(call) is not None
        stitch_launch.run(Nowhere(), call, lambda jobs: jobs)

    stitch_op.stitch_in_torch = plan  # in place of the torch path, which would compute here
    torch.set_num_threads(1)
    calls = {name: call_of(shape) for name, shape in SHAPES.items()}
    for line in sys.stdin:
        name, moved = line.rstrip("\n").split("\t")
        times = []
        for _ in range(2):
            start = time.perf_counter()
            calls[name](int(moved))
            times.append(round((time.perf_counter() - start) * 1e3, 4))
        print(*times, flush=True)


def worker(tree: Path) -> subprocess.Popen[str]:
    """Start a process that measures the packages of a tree."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "kernels"))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--work"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], name: str, moved: int) -> list[float]:
    """Return the times of a call that comes first with its starts, and of the same again."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(name, moved, sep="\t", file=process.stdin, flush=True)
    return [float(x) for x in process.stdout.readline().split()]


def measure(workers: dict[str, subprocess.Popen[str]], repeats: int) -> dict[str, Any]:
    """Let the workers take turns; the first call of each is not counted."""
    times: dict[str, Any] = {n: {w: {"first": [], "again": []} for w in workers} for n in SHAPES}
    for repeat in range(repeats + 1):
        for name in SHAPES:
            for which in sorted(workers, reverse=bool(repeat % 2)):
                found = ask(workers[which], name, repeat)
                if repeat:
                    for kind, ms in zip(("first", "again"), found, strict=True):
                        times[name][which][kind].append(ms)
    return times


def commit_of(name: str) -> str:
    """Return a commit's full name."""
    return subprocess.run(
        ["git", "rev-parse", name], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="commit to compare with")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder for stitch_host.json; default: results/")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work()
    if args.base is None:
        parser.error("--base is missing: name the commit to compare with")
    base = commit_of(args.base)
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", base, "kernels"], capture_output=True, check=True, cwd=ROOT).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
            tree.extractall(folder, filter="data")
        workers = {"base": worker(Path(folder)), "here": worker(ROOT)}
        times = measure(workers, args.repeats)
        for process in workers.values():
            process.communicate()
    medians = {
        n: {w: {k: statistics.median(ms) for k, ms in kinds.items()} for w, kinds in row.items()}
        for n, row in times.items()
    }
    found = {"machine": machine(), "base": base, "repeats": args.repeats, "median_ms": medians, "ms": times}
    write_result("stitch_host", found, args.out)
    for name, row in medians.items():
        print(name, {w: {k: round(ms, 3) for k, ms in kinds.items()} for w, kinds in row.items()})
    return None


if __name__ == "__main__":
    main()
