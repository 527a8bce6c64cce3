"""``make gpu-check``: everything that a GPU has to prove, in steps with a time limit each, within ten minutes.

Needs torch, transformers with what it depends on, and pytest; no network, no installed kvrag. A step whose packages are missing is left
out and says so, which counts as a failure unless the step is optional. A step that fails or takes too long is ended and the next one
begins; where that is Hopper's kernel, those after it go without. What became of each goes to ``results/gpu-check.json`` after every
step; the benchmarks write results of their own, part by part.

    python tests/gpu_check.py [--dry-run] [--only NAME ...] [--seconds 590] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "tests" / "benchmarks"
KERNELS_NEED = ("torch", "pytest")
ENGINE_NEEDS = (*KERNELS_NEED, "transformers", "tokenizers", "safetensors", "numpy", "tqdm", "pydantic")
STAND_INS = ROOT / "tests" / "stand_ins"
"""Modules in the place of packages that a bare machine lacks."""


SANITIZED = ("long-window", "long-batch", "long-chunks", "everything", "half")
"""Cases for tools that slow a kernel down a hundredfold: few, and of every kind. Long keys fill the stages and are split."""


@dataclass(frozen=True)
class Step:
    """One command, its limit in seconds, what it needs installed, and settings of its environment.

    ``is_optional``: it may be left out without failing the check. ``otherwise``: settings of all steps after it, unless it passes.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = KERNELS_NEED
    folder: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)
    is_optional: bool = False
    otherwise: dict[str, str] = field(default_factory=dict)


def steps(is_dry: bool, out: Path | None) -> list[Step]:
    """Return the steps, the most telling first.

    The kernel that has never run on a device comes after the one beside it: it might hang. Of compute-sanitizer's tools, the one that finds
    most comes before the benchmarks, and the other last: they are the slowest.
    """
    python = sys.executable
    tests = (python, "-m", "pytest", "-c", os.devnull, "--rootdir=.", "-p", "no:cacheprovider", "-q", "--maxfail=8")
    alone = (*tests, "--confcutdir=tests/kernels")
    on_gpu = (*alone, "tests/kernels/test_gpu.py", "-k")
    bench = (*(["--dry-run"] if is_dry else []), *(["--out", str(out)] if out else []))
    ttft = (python, "bench_ttft.py", "--tokens", "6000", "--count", "3", *bench, "--shape")
    sanitizer = ("compute-sanitizer", "--error-exitcode", "1", "--tool")
    # Else the allocator's blocks of megabytes hide an access beyond a tensor's end.
    exactly = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    mma = {"KVRAG_KERNEL": "mma"}

    def sanitized(tool: str, settings: dict[str, str]) -> Iterator[Step]:
        for name, other, mode in ((tool, "mma", {}), (f"{tool}, mma", "auto", mma)):
            chosen = (*on_gpu, f"({' or '.join(SANITIZED)}) and not dtype1 and not {other}")
            yield Step(name, (*sanitizer, tool, *chosen), 60, environment=settings | mode, is_optional=True)

    return [
        Step("torch path", (*alone, "tests/kernels/test_torch_path.py"), 90),
        Step("kernels", (*on_gpu, "not auto"), 120, environment=mma),
        Step("kernels, Hopper's first", (*on_gpu, "not mma"), 120, otherwise=mma),
        *sanitized("memcheck", exactly),
        Step("kernel benchmark", (python, "bench_kernels.py", "--seconds", "150", *bench), 160, folder=BENCHMARKS),
        Step("exactness on CUDA", (*tests, "-m", "gpu", "tests/test_equivalence.py"), 90, ENGINE_NEEDS),
        Step("ttft, 3B shape", (*ttft, "qwen2.5-3b"), 90, ENGINE_NEEDS, BENCHMARKS),
        Step("ttft, 8B shape", (*ttft, "llama-3.1-8b"), 120, ENGINE_NEEDS, BENCHMARKS),
        *sanitized("racecheck", {}),
    ]


def missing(step: Step) -> list[str]:
    """Return what the step needs and does not find: modules, or its program."""
    modules = [name for name in step.needs if importlib.util.find_spec(name) is None]
    return modules if shutil.which(step.command[0]) else [step.command[0], *modules]


def stood_in() -> dict[str, str]:
    """Return the packages that are missing and have a stand-in here, and its folder."""
    return {f.stem: str(STAND_INS) for f in STAND_INS.glob("*.py") if importlib.util.find_spec(f.stem) is None}


def run(step: Step, seconds: float) -> dict[str, Any]:
    """Run one step for at most so many seconds; returns what became of it."""
    absent = missing(step)
    if absent:
        return {"step": step.name, "outcome": "left out", "why": f"not installed: {', '.join(absent)}", "seconds": 0.0}
    if seconds < 1:
        return {"step": step.name, "outcome": "left out", "why": "no time was left", "seconds": 0.0}
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""), *stood_in().values()]
    environment = (
        os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "HF_HUB_OFFLINE": "1"} | step.environment
    )
    start = time.monotonic()
    process = subprocess.Popen(step.command, cwd=step.folder, env=environment, start_new_session=True)
    why = ""
    try:
        code = process.wait(timeout=seconds)
        why = f"exit status {code}" if code else ""
    except subprocess.TimeoutExpired:
        why = f"not over after {seconds:.1f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    outcome = {"step": step.name, "outcome": "failed" if why else "passed", "seconds": time.monotonic() - start}
    return outcome | ({"why": why} if why else {})


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None


def run_all(todo: Sequence[Step], seconds: float) -> Iterator[dict[str, Any]]:
    """Run steps one after the other, within a time for all of them."""
    end, settings = time.monotonic() + seconds, dict[str, str]()
    for step in todo:
        print(f"── {step.name}", flush=True)
        step = replace(step, environment=step.environment | settings)
        outcome = run(step, min(step.limit, end - time.monotonic())) | ({"environment": settings} if settings else {})
        print(f"── {step.name}: {outcome['outcome']} {outcome.get('why', '')} [{outcome['seconds']:.1f} s]", flush=True)
        if outcome["outcome"] != "passed":
            settings = settings | step.otherwise
            if step.is_optional and outcome["outcome"] == "left out":
                outcome["is_optional"] = True
        yield outcome


def main(arguments: Sequence[str] | None = None, todo: Sequence[Step] | None = None) -> int:
    """Run the steps, and write what became of each; returns 1 where one failed, or was left out and may not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dry-run", action="store_true", help="small shapes on the CPU: a check of the steps, no measurement"
    )
    parser.add_argument("--only", nargs="+", default=[], help="steps whose names begin so")
    parser.add_argument("--seconds", type=float, default=590.0, help="for all steps together")
    parser.add_argument("--out", type=Path, help="folder for the JSON; default: results/, or none with --dry-run")
    args = parser.parse_args(arguments)
    out = args.out or (None if args.dry_run else BENCHMARKS / "results")
    if not args.dry_run and todo is None and not has_gpu():
        print("torch sees no CUDA device here, so there is nothing to prove; --dry-run checks the steps")
        return 2
    todo = steps(args.dry_run, args.out and args.out.resolve()) if todo is None else todo
    chosen = [s for s in todo if not args.only or s.name.startswith(tuple(args.only))]
    report: dict[str, Any] = {"measured": not args.dry_run, "python": platform.python_version(), "steps": []}
    if stood_in():
        report["stand_ins"] = sorted(stood_in())
    for outcome in run_all(chosen, args.seconds):
        report["steps"].append(outcome)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
    for outcome in report["steps"]:
        print(f"{outcome['outcome']:9} {outcome['seconds']:7.1f} s  {outcome['step']}  {outcome.get('why', '')}")
    return int(any(o["outcome"] != "passed" and not o.get("is_optional") for o in report["steps"]))


if __name__ == "__main__":
    raise SystemExit(main())
