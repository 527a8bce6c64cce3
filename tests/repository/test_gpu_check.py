"""``make gpu-check`` without a GPU: its steps, their limits, and the scripts that they run on tiny shapes."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import Step

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_steps_name_files_that_exist_and_leave_each_other_time(part, tmp_path):
    for is_dry in (False, True):
        steps = gpu_check.steps(part, is_dry, tmp_path)
        assert len({s.name for s in steps}) == len(steps)
        assert sum(s.limit for s in steps) <= gpu_check.PART_SECONDS, "the last step would not run"
        for step in steps:
            files = [a for a in step.command[1:] if a.endswith(".py")]
            assert files
            assert all((step.folder / f).is_file() for f in files) or (
                step.is_optional and "diagnosis" in step.name
            )
        writers = [
            s
            for s in steps
            if any(a.startswith(("bench_", "tests/kernels/diagnose")) for a in s.command)
        ]
        assert writers
        assert all(("--dry-run" in s.command) == is_dry for s in writers)
        assert all(s.command[s.command.index("--out") + 1] == str(tmp_path) for s in writers)
    assert gpu_check.PART_SECONDS <= 575, (
        "a command on a remote machine may be ended after 600 s, start-up included"
    )


def test_every_test_of_the_kernels_is_in_a_process_and_each_mode_in_one_kernels(monkeypatch):
    """Each pair of kernel and case in one process, and nothing of one kernel in the other's."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "kernels"))
    cases = [
        case
        for name in ("CASES", "LONG")
        for case in getattr(importlib.import_module("kernel_cases"), name)
    ]
    commands = [
        s.command for s in gpu_check.steps("a", False, Path("out")) if "--head-dim" in s.command
    ]
    picks = [(c[c.index("--kernel") + 1], int(c[c.index("--head-dim") + 1])) for c in commands]
    for params in [{"case": case, "mode": mode} for case in cases for mode in ("sm90", "mma")]:
        picked = [kernel for kernel, dim in picks if gpu_check.is_picked(params, kernel, dim)]
        assert picked == [params["mode"]], params
    assert sorted(kernel for kernel, dim in picks if gpu_check.is_picked({}, kernel, dim)) == [
        "mma",
        "sm90",
    ]
    # By name: what is neither the stitch's nor the probe's is the attention's.
    names = set(
        re.findall(r"def (test_\w+)", (ROOT / "tests" / "kernels" / "test_gpu.py").read_text())
    )
    chosen = {
        s.name: s.command[s.command.index("-k") + 1]
        for s in gpu_check.steps("a", False, Path("out"))
        if "-k" in s.command
    }
    assert all(any(chosen[part] in name for name in names) for part in ("stitch", "probe"))
    assert chosen["mma, head dim 64"] == f"not {chosen['stitch']} and not {chosen['probe']}"


def python(
    name: str, code: str, limit: float = 30, needs: tuple[str, ...] = (), **options: Any
) -> Step:
    return Step(name, (sys.executable, "-c", code), limit, needs, **options)


def checked(
    out: Path, *todo: Step, options: tuple[str, ...] = ()
) -> tuple[int, list[dict[str, Any]]]:
    """Run steps as part a; returns the exit status and what the JSON says of them."""
    status = gpu_check.main(["a", "--out", str(out), *options], lambda *_: list(todo))
    return status, json.loads((out / "gpu-check-a.json").read_text())["steps"]


def test_a_step_that_fails_hangs_or_lacks_a_package_does_not_keep_the_next_from_running(tmp_path):
    todo = [
        python("fails", "raise SystemExit(3)"),
        python("hangs", "import time; time.sleep(100)", limit=3),
        python("lacks", "", needs=("torch", "no_such_package")),
        Step("no program", ("no-such-program",), 30, (), is_optional=True),
        Step("no script", (sys.executable, "no_such_script.py"), 30, (), is_optional=True),
        python("sees", "import kvrag_kernels, os; assert os.environ['HF_HUB_OFFLINE'] == '1'"),
    ]
    status, found = checked(tmp_path, *todo)
    assert status == 1
    assert [(s["step"], s["outcome"], s.get("why")) for s in found] == [
        ("fails", "failed", "exit status 3"),
        ("hangs", "failed", "not over after 3.0 s"),
        ("lacks", "left out", "not here: no_such_package"),
        ("no program", "left out", "not here: no-such-program"),
        ("no script", "left out", "not here: no_such_script.py"),
        ("sees", "passed", None),
    ]
    assert found[1]["seconds"] < 20
    lacks, tool = todo[2:4]
    assert [checked(tmp_path, *steps)[0] for steps in ([tool], [lacks, tool])] == [0, 1]


DIAGNOSED = python("diagnosis", "", proves="sm90")
TESTED = python("tests", "print('= 2 passed, 1 skipped in 1.00s =')", proves="sm90")


@pytest.mark.parametrize(
    ("steps", "is_proven"),
    [
        ([DIAGNOSED, TESTED], True),
        ([DIAGNOSED, python("tests", "print('= 3 skipped in 1s =')", proves="sm90")], False),
        ([DIAGNOSED], False),
        ([python("diagnosis", "raise SystemExit(1)", proves="sm90"), TESTED], False),
        ([python("diagnosis", "", needs=("no_such",), proves="sm90"), TESTED], False),
    ],
    ids=["all pass", "skipped", "no tests", "a failure", "left out"],
)
def test_only_what_ran_and_passed_is_evidence(steps, is_proven, tmp_path):
    _, found = checked(tmp_path, python("of no kernel", ""), *steps)
    assert (tmp_path / "proven.json").exists() == is_proven
    if is_proven:
        assert found[-1]["tests"] == {"passed": 2, "skipped": 1}
        evidence = json.loads((tmp_path / "proven.json").read_text())
        assert set(evidence) == {"sm90"}
        assert set(evidence["sm90"]) == {"gpu", "torch", "commit", "date"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", evidence["sm90"]["date"])


def test_a_dry_run_proves_nothing(tmp_path):
    checked(tmp_path, TESTED, options=("--dry-run",))
    assert not (tmp_path / "proven.json").exists()


BARE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {"xxhash", "diskcache"} and not any("stand_ins" in p for p in sys.path):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""


def test_a_machine_without_kvrags_own_packages_can_run_all_of_it(tmp_path, monkeypatch):
    """Transformers and pytest bring all else; what hashes stored bytes has a stand-in, and so has what keeps the catalog."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    monkeypatch.setattr(
        gpu_check,
        "stood_in",
        lambda: dict.fromkeys(("diskcache", "xxhash"), str(gpu_check.STAND_INS)),
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import diskcache, xxhash; assert 'stand_ins' in xxhash.__file__ and 'stand_ins' in diskcache.__file__"
    assert gpu_check.run(python("bare", code), 60, tmp_path / "log")["outcome"] == "passed"
    ttft = next(
        s for s in gpu_check.steps("b", True, tmp_path / "out") if s.name == "ttft, 3B shape"
    )
    assert gpu_check.run(ttft, 300, tmp_path / "log")["outcome"] == "passed"


@pytest.mark.parametrize("package", ["diskcache", "xxhash"])
def test_the_stand_ins_have_all_that_is_asked_of_them(package):
    sources = "\n".join(file.read_text() for file in (ROOT / "kvrag").rglob("*.py"))
    asked = set(re.findall(rf"\b{package}\.(\w+)", sources))
    asked |= {
        n.strip()
        for names in re.findall(rf"from {package}\.core import (.+)", sources)
        for n in names.split(",")
    }
    path = str(gpu_check.STAND_INS)
    code = f"import sys; sys.path.insert(0, {path!r}); import {package}; assert {asked!r} <= set(dir({package})) | {{'core'}}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_gpu_nothing_is_called_proven(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "capability", lambda: None)
    assert gpu_check.main(["a"]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_a_dry_run_goes_through_every_part_and_says_that_nothing_was_measured(tmp_path):
    """Of the step with time to first token: all that it has goes to one folder."""
    assert gpu_check.main(["b", "--dry-run", "--out", str(tmp_path), "--only", "ttft, 8B"]) == 0
    assert {f.name for f in tmp_path.iterdir()} == {
        "gpu-check-b.json",
        "gpu-check-b.log",
        "ttft-llama-3.1-8b-cpu.json",
    }
    result = json.loads((tmp_path / "ttft-llama-3.1-8b-cpu.json").read_text())
    assert (
        result["measured"]
        is json.loads((tmp_path / "gpu-check-b.json").read_text())["measured"]
        is False
    )


def test_a_dry_run_of_the_streams_has_every_part(tmp_path):
    """Launched and replayed, and without a failure; it is no measurement."""
    assert gpu_check.main(["b", "--dry-run", "--out", str(tmp_path), "--only", "streams"]) == 0
    result = json.loads((tmp_path / "streams-llama-3.1-8b-cpu.json").read_text())
    assert result["measured"] is False
    assert [row["streams"] for row in result["streams"]] == [1, 3]
    assert len(result["at_once"][0]["each_ms"]) == 3
    assert all(
        row["replayed_ms"] and row["launched_ms"] for row in result["forwards"] + result["steps"]
    )
    assert result["pool"]["recordings"] > 0
    assert result["pool"]["taken"] == 0


def test_a_dry_run_of_the_kernels_benchmark_has_every_part(tmp_path):
    command = [sys.executable, "bench_kernels.py", "--dry-run", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert result["measured"] is False
    assert result["targets"] == result["failed"] == result["left_out"] == []
    assert {"attention", "stitch", "shift", "precompute"} <= set(result)
