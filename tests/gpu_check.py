"""``make gpu-check``: everything that a GPU has to prove, in three parts of ten minutes, each in steps with a time limit.

Needs torch, transformers with what it depends on, and pytest; no network, no installed kvrag. Part a needs no transformers. A step whose
packages are missing is left out and says so, which counts as a failure unless the step is optional. A step that fails or takes too long
is ended and the next one begins. The output of all steps goes to ``gpu-check-PART.log`` as it comes, and what became of each step to
``gpu-check-PART.json`` when it is over, so that a run that is cut short leaves what it has. See docs/gpu.md.

    python tests/gpu_check.py [a] [b] [c] [--dry-run] [--only NAME ...] [--seconds 570] [--out FOLDER]

The file is also a plugin of pytest (``-p gpu_check``) that picks the tests of one kernel (``--kernel``) and head dim (``--head-dim``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS, BENCHMARKS = ROOT / "tests", ROOT / "benchmarks"
STAND_INS = TESTS / "stand_ins"
"""Modules in the place of packages that a bare machine lacks."""
KERNELS_NEED = ("torch", "pytest")
ENGINE_NEEDS = (
    *KERNELS_NEED,
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "tqdm",
    "pydantic",
)

PARTS = ("a", "b", "c")
PART_SECONDS = 570.0
"""For all steps of a part: a remote machine may end a command after ten minutes, start-up included."""
TAIL = 3000
"""Characters of a failed step's output that its outcome keeps."""
HOPPER = (9, 0)
DIMS = {64: 50.0, 96: 30.0, 128: 50.0, 256: 30.0}
"""Head dims of the kernels, and seconds for the tests of each: most cases have 64, and 128 has the longest."""
WITHOUT_OTHERS = ("attention", "stitch", "shift", "precompute")
"""Parts of the kernels' benchmark but for other libraries, which compile for a minute a shape."""
SANITIZED = ("long-window", "long-batch", "long-chunks", "everything", "half")
"""Cases for tools that slow a kernel down a hundredfold: few, and of every kind. Long keys fill the stages and are split."""


@dataclass(frozen=True)
class Step:
    """One command, its limit in seconds, what it needs installed, and settings of its environment.

    ``is_optional``: it may be left out without failing the check. ``proves``: a kernel that is not proven without this step.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    needs: tuple[str, ...] = KERNELS_NEED
    folder: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)
    is_optional: bool = False
    proves: str = ""


def steps(part: str, is_dry: bool, out: Path) -> list[Step]:
    """Return the steps of a part, the most telling first; results go to ``out``.

    A process has one kernel to run: after an illegal address nothing else in it would pass. The Hopper kernel might hang
    after a change, so it comes after the others.
    """
    return {"a": _kernels, "b": _engine, "c": _at_length}[part](is_dry, out)


def _pytest(*arguments: str, alone: bool = True) -> tuple[str, ...]:
    """Return a pytest command; ``alone``: without the tests' fixtures, which need transformers."""
    fixtures = ("--confcutdir=tests/kernels",) if alone else ()
    plain = (
        "-c",
        os.devnull,
        "--rootdir=.",
        "-p",
        "no:cacheprovider",
        "-v",
        "-o",
        "faulthandler_timeout=25",
    )
    return (sys.executable, "-m", "pytest", *plain, *fixtures, *arguments)


def _on_gpu(kernel: str, *arguments: str) -> tuple[str, ...]:
    return _pytest("-p", "gpu_check", "--kernel", kernel, "tests/kernels/test_gpu.py", *arguments)


def _bench(name: str, kernel: str, limit: float, is_dry: bool, out: Path, *options: str) -> Step:
    """Return a step of the kernels' benchmark; it stops a few seconds before its limit, with what it has written."""
    dry = ("--dry-run",) if is_dry else ()
    command = (
        sys.executable,
        "bench_kernels.py",
        "--seconds",
        f"{limit - 8:g}",
        *options,
        *dry,
        "--out",
        str(out),
    )
    return Step(name, command, limit, folder=BENCHMARKS, environment={"KVRAG_KERNEL": kernel})


def _kernels(is_dry: bool, out: Path) -> list[Step]:
    diagnosis = (
        sys.executable,
        "tests/kernels/diagnose_sm90.py",
        *(["--dry-run"] if is_dry else []),
        "--out",
        str(out),
    )

    def tested(kernel: str) -> Iterator[Step]:
        settings, proves = {"KVRAG_KERNEL": kernel}, kernel if kernel == "sm90" else ""
        attention = ("-k", "not parts_come_to and not each_key_gets", "--head-dim")
        for dim, limit in DIMS.items():
            name = f"{kernel}, head dim {dim}"
            yield Step(
                name,
                _on_gpu(kernel, *attention, str(dim)),
                limit,
                environment=settings,
                proves=proves,
            )

    return [
        Step("torch path", _pytest("tests/kernels/test_torch_path.py"), 40),
        *tested("mma"),
        Step("stitch", _on_gpu("mma", "-k", "parts_come_to"), 35),
        Step("probe", _on_gpu("mma", "-k", "each_key_gets"), 35),
        Step("sm90, diagnosis", diagnosis, 30, proves="sm90"),
        *tested("sm90"),
        _bench("kernel benchmark, mma", "mma", 65, is_dry, out, "--parts", *WITHOUT_OTHERS),
        _bench("kernel benchmark, sm90", "sm90", 40, is_dry, out, "--add", "--parts", "attention"),
    ]


def _engine(is_dry: bool, out: Path) -> list[Step]:
    options = (
        "--tokens",
        "6000",
        "31000",
        "--count",
        "3",
        *(["--dry-run"] if is_dry else []),
        "--out",
        str(out),
    )
    ttft = (sys.executable, "bench_ttft.py", *options, "--shape")
    dry = ("--dry-run",) if is_dry else ()
    streams = (sys.executable, "bench_streams.py", *dry, "--out", str(out))
    tests = (
        "tests/engine/test_buffers.py",
        "tests/model/test_recorded_cuda.py",
        "tests/engine/test_equivalence.py",
    )
    exact = _pytest("-m", "gpu", *tests, alone=False)
    return [
        Step("ttft, 8B shape", (*ttft, "llama-3.1-8b"), 240, ENGINE_NEEDS, BENCHMARKS),
        Step("streams, 8B shape", streams, 130, ENGINE_NEEDS, BENCHMARKS),
        Step("exactness on CUDA", exact, 120, ENGINE_NEEDS),
        Step("ttft, 3B shape", (*ttft, "qwen2.5-3b"), 80, ENGINE_NEEDS, BENCHMARKS),
    ]


def _at_length(is_dry: bool, out: Path) -> list[Step]:
    sanitizer = ("compute-sanitizer", "--error-exitcode", "1", "--tool")
    # Else the allocator's blocks of megabytes hide an access beyond a tensor's end.
    exactly = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    full = ("--shapes", "full", "--name", "kernels-full", "--parts")

    def sanitized(tool: str, settings: dict[str, str]) -> Iterator[Step]:
        for kernel in ("mma", "sm90"):
            chosen = _on_gpu(kernel, "-k", f"({' or '.join(SANITIZED)}) and not dtype1")
            own = settings | {"KVRAG_KERNEL": kernel}
            yield Step(
                f"{tool}, {kernel}",
                (*sanitizer, tool, *chosen),
                55,
                environment=own,
                is_optional=True,
            )

    return [
        _bench("full kernel benchmark, mma", "mma", 170, is_dry, out, *full, *WITHOUT_OTHERS),
        _bench("full kernel benchmark, sm90", "sm90", 70, is_dry, out, *full, "attention", "--add"),
        _bench("other libraries", "mma", 100, is_dry, out, *full, "others", "--add"),
        *sanitized("memcheck", exactly),
        *sanitized("racecheck", {}),
    ]


# -- the plugin of pytest ----------------------------------------------------------------------------------------------


def pytest_addoption(parser: Any) -> None:
    """Add the options that pick tests."""
    parser.addoption("--kernel", help="the kernel that attends: mma or sm90")
    parser.addoption(
        "--head-dim", type=int, help="of the attention's cases; tests without cases count as 128"
    )


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests that :func:`is_picked` picks."""
    chosen = config.getoption("--kernel"), config.getoption("--head-dim")
    picked = [
        i for i in items if is_picked(getattr(getattr(i, "callspec", None), "params", {}), *chosen)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in picked])
    items[:] = picked


def is_picked(params: dict[str, Any], kernel: str, dim: int | None) -> bool:
    """Whether a test with these parameters is of a kernel and head dim; those that name neither run with each, by ``KVRAG_KERNEL``."""
    return params.get("mode", kernel) == kernel and dim in (
        None,
        getattr(params.get("case"), "dim", 128),
    )


def capability() -> tuple[int, int] | None:
    """Compute capability of the CUDA device that torch sees; ``None`` without one."""
    import torch

    return (
        torch.cuda.get_device_capability()
        if torch.cuda.is_available() and torch.version.cuda
        else None
    )


# -- running -----------------------------------------------------------------------------------------------------------


def missing(step: Step) -> list[str]:
    """Return what the step needs and does not find: its program, its script, or modules."""
    scripts = [a for a in step.command[1:] if a.endswith(".py") and not (step.folder / a).is_file()]
    modules = [name for name in step.needs if importlib.util.find_spec(name) is None]
    return [*([] if shutil.which(step.command[0]) else step.command[:1]), *scripts, *modules]


def stood_in() -> dict[str, str]:
    """Return the packages that are missing and have a stand-in here, and its folder."""
    return {
        f.stem: str(STAND_INS)
        for f in STAND_INS.glob("*.py")
        if importlib.util.find_spec(f.stem) is None
    }


def run(step: Step, seconds: float, log: Path) -> dict[str, Any]:
    """Run one step for at most so many seconds; returns what became of it. Its output is added to ``log``."""
    if absent := missing(step):
        return {
            "step": step.name,
            "outcome": "left out",
            "why": f"not here: {', '.join(absent)}",
            "seconds": 0.0,
        }
    if seconds < 1:
        return {"step": step.name, "outcome": "left out", "why": "no time was left", "seconds": 0.0}
    with log.open("ab") as stream:
        stream.write(f"\n── {step.name}\n".encode())
        stream.flush()
        begin, start = stream.tell(), time.monotonic()
        why = _why_not(step, seconds, stream)
    outcome: dict[str, Any] = {"step": step.name, "outcome": "failed" if why else "passed"}
    outcome["seconds"] = round(time.monotonic() - start, 2)
    with log.open("rb") as stream:
        stream.seek(begin)
        # Of an aborted Python.
        printed = re.sub(r"\nExtension modules:.*", "", stream.read().decode(errors="replace"))
    if counts := re.findall(
        r"(\d+) (passed|failed|skipped|deselected|errors?)\b", printed.rpartition("\n=")[2]
    ):
        outcome["tests"] = {what: int(count) for count, what in counts}
    return outcome | ({"why": why, "tail": printed[-TAIL:]} if why else {})


def _why_not(step: Step, seconds: float, log: Any) -> str:
    """Run the command, and say why it did not pass: nothing where it did."""
    paths = [
        str(ROOT),
        str(ROOT / "kernels"),
        str(TESTS),
        os.environ.get("PYTHONPATH", ""),
        *stood_in().values(),
    ]
    always = {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "HF_HUB_OFFLINE": "1"}
    always |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    environment = os.environ | always | step.environment
    process = subprocess.Popen(
        step.command,
        cwd=step.folder,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=seconds)
        return f"exit status {code}" if code else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # on which Python says where it stands
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        return f"not over after {seconds:.1f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(todo: Sequence[Step], seconds: float, log: Path) -> Iterator[dict[str, Any]]:
    """Run steps one after the other, within a time for all of them."""
    end = time.monotonic() + seconds
    for step in todo:
        print(f"── {step.name}", flush=True)
        outcome = run(step, min(step.limit, end - time.monotonic()), log)
        print(outcome.get("tail", ""), flush=True)
        print(
            f"── {step.name}: {outcome['outcome']} {outcome.get('why', '')} [{outcome['seconds']:.1f} s]",
            flush=True,
        )
        if step.is_optional and outcome["outcome"] == "left out":
            outcome["is_optional"] = True
        yield outcome | ({"proves": step.proves} if step.proves else {})


def proven(outcomes: Sequence[dict[str, Any]], facts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the evidence for each kernel all of whose steps passed, with tests that ran; ``facts`` say where."""
    found = {}
    for kernel in sorted({o["proves"] for o in outcomes if "proves" in o}):
        own = [o for o in outcomes if o.get("proves") == kernel]
        tests = [o["tests"] for o in own if "tests" in o]
        if (
            all(o["outcome"] == "passed" for o in own)
            and tests
            and all(t.get("passed") for t in tests)
        ):
            found[kernel] = facts
    return found


def facts() -> dict[str, str]:
    """Say on what device, with what and when the check ran."""
    import torch

    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "commit": git.stdout.strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def run_part(
    part: str, todo: Sequence[Step], seconds: float, out: Path, *, is_dry: bool
) -> list[dict[str, Any]]:
    """Run the steps of a part; after each, ``gpu-check-PART.json`` says what became of those so far."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"gpu-check-{part}.log"
    log.write_bytes(b"")
    report: dict[str, Any] = {
        "measured": not is_dry,
        "python": platform.python_version(),
        "steps": [],
    }
    if stood_in():
        report["stand_ins"] = sorted(stood_in())
    for outcome in run_all(todo, seconds, log):
        report["steps"].append(outcome)
        (out / f"gpu-check-{part}.json").write_text(json.dumps(report, indent=1) + "\n")
    if not is_dry and (found := proven(report["steps"], facts())):
        (out / "proven.json").write_text(json.dumps(found, indent=1) + "\n")
    return list(report["steps"])


def main(
    arguments: Sequence[str] | None = None, todo: Callable[[str, bool, Path], list[Step]] = steps
) -> int:
    """Run the parts, and write what became of each step; returns 1 where one failed, or was left out and may not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="a, b or c; default: all, one after the other"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="small shapes on the CPU: a check of the steps, no measurement",
    )
    parser.add_argument("--only", nargs="+", default=[], help="steps whose names begin so")
    parser.add_argument(
        "--seconds", type=float, default=PART_SECONDS, help="for the steps of a part together"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for all that is written; default: results/, or a new one with --dry-run",
    )
    args = parser.parse_args(arguments)
    # Steps may be aborted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    device = capability() if not args.dry_run and todo is steps else HOPPER
    if device is None:
        print(
            "torch sees no CUDA device here, so there is nothing to prove; --dry-run checks the steps"
        )
        return 2
    out = (
        args.out
        or (Path(tempfile.mkdtemp(prefix="kvrag-")) if args.dry_run else BENCHMARKS / "results")
    ).resolve()
    outcomes = list[dict[str, Any]]()
    for part in args.parts or PARTS:
        chosen = [
            s
            for s in todo(part, args.dry_run, out)
            if not args.only or s.name.startswith(tuple(args.only))
        ]
        if device != HOPPER:  # it has no such kernel
            chosen = [s for s in chosen if "sm90" not in s.name]
        patience = 4 if args.dry_run else 1  # a check of the steps may wait for a busy machine
        chosen = [replace(s, limit=s.limit * patience) for s in chosen]
        outcomes += run_part(part, chosen, args.seconds * patience, out, is_dry=args.dry_run)
    for outcome in outcomes:
        print(
            f"{outcome['outcome']:9} {outcome['seconds']:7.1f} s  {outcome['step']}  {outcome.get('why', '')}"
        )
    print(f"results: {out}")
    return int(any(o["outcome"] != "passed" and not o.get("is_optional") for o in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
