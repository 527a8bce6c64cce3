"""``make gpu-check`` without a GPU: its steps, their limits, and the scripts that they run on tiny shapes."""

import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import Step

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_passes_its_arguments_on():
    # Called by make itself, as in CI, make would say where it is.
    outside = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    command = [
        "make",
        "--no-print-directory",
        "-n",
        "gpu-check",
        "PART=b",
        "DRY_RUN=1",
        "OUT=here",
        "ARGS=--only ttft",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert line.endswith("tests/gpu_check.py b --dry-run --out here --only ttft")


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


def test_each_kernel_runs_in_processes_of_its_own_and_the_riskier_one_comes_last():
    names = [s.name for s in gpu_check.steps("a", False, Path("out"))]
    assert names.index("sm90, diagnosis") + 1 == names.index("sm90, head dim 64")
    assert max(i for i, n in enumerate(names) if n.startswith("mma")) < names.index(
        "sm90, diagnosis"
    )
    for part in "ac":
        for step in gpu_check.steps(part, False, Path("out")):
            for kernel in ("mma", "sm90"):
                if kernel in step.name and "diagnosis" not in step.name:
                    assert step.environment["KVRAG_KERNEL"] == kernel


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


FAULT = "import ctypes, sys; print('x' * 5000 + 'last words', flush=True); ctypes.string_at(0)"


def test_after_a_fault_log_and_json_have_what_was_printed(tmp_path):
    """The log all of it, as it came; the JSON the last 3,000 characters, in which an aborted Python says where it stood."""
    hang = "import time\ndef waits_for_a_barrier():\n    print('waits', flush=True); time.sleep(100)\nwaits_for_a_barrier()"
    late = (
        f"assert 'last words' in open({str(tmp_path / 'gpu-check-a.log')!r}).read(); print('came')"
    )
    status, found = checked(
        tmp_path, python("fault", FAULT), python("hang", hang, limit=4), python("late", late)
    )
    assert status == 1
    fault, hung, after = found
    assert "last words" in fault["tail"]
    assert "Segmentation fault" in fault["tail"]
    assert len(fault["tail"]) == gpu_check.TAIL
    assert "waits_for_a_barrier" in hung["tail"]
    assert after["outcome"] == "passed", "the log was not written as the output came"
    assert "tail" not in after
    log = (tmp_path / "gpu-check-a.log").read_text()
    assert "x" * 5000 in log
    assert (
        log.index("── fault")
        < log.index("── hang")
        < log.index("waits")
        < log.index("── late")
        < log.index("came")
    )


def test_a_check_that_is_killed_leaves_what_it_has(tmp_path):
    look = f"""
import gpu_check, sys
kill = "print('so far', flush=True); import os; os.kill(os.getppid(), 9)"
todo = [gpu_check.Step(name, (sys.executable, "-c", code), 30, ()) for name, code in (("first", ""), ("kills", kill))]
gpu_check.main(["a", "--out", {str(tmp_path)!r}], lambda *_: todo)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run([sys.executable, "-c", look], env=environment, check=False)
    assert done.returncode == -9
    found = json.loads((tmp_path / "gpu-check-a.json").read_text())["steps"]
    assert [s["outcome"] for s in found] == ["passed"]
    assert "so far" in (tmp_path / "gpu-check-a.log").read_text()


def test_the_time_for_all_steps_is_kept(tmp_path):
    todo = [python("hangs", "import time; time.sleep(100)"), python("late", "")]
    status, found = checked(tmp_path, *todo, options=("--seconds", "1.5"))
    assert status == 1
    assert found[0]["why"].startswith("not over after 1.")
    assert found[1]["why"] == "no time was left"
    assert found[1]["outcome"] == "left out"


TESTED = "print('= 2 passed, 1 skipped in 1.00s =')"


@pytest.mark.parametrize(
    ("steps", "is_proven"),
    [
        ([python("diagnosis", "", proves="sm90"), python("tests", TESTED, proves="sm90")], True),
        (
            [
                python("diagnosis", "", proves="sm90"),
                python("tests", "print('= 3 skipped in 1s =')", proves="sm90"),
            ],
            False,
        ),
        ([python("diagnosis", "", proves="sm90")], False),
        (
            [
                python("diagnosis", "raise SystemExit(1)", proves="sm90"),
                python("tests", TESTED, proves="sm90"),
            ],
            False,
        ),
        (
            [
                python("diagnosis", "", needs=("no_such",), proves="sm90"),
                python("tests", TESTED, proves="sm90"),
            ],
            False,
        ),
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


def test_the_diagnosis_and_all_head_dims_of_sm90_count():
    counted = [s.name for s in gpu_check.steps("a", False, Path("out")) if s.proves == "sm90"]
    assert counted == ["sm90, diagnosis", *(f"sm90, head dim {dim}" for dim in (64, 96, 128, 256))]
    assert not any(s.proves for part in "bc" for s in gpu_check.steps(part, False, Path("out")))


def test_a_dry_run_proves_nothing(tmp_path):
    checked(tmp_path, python("tests", TESTED, proves="sm90"), options=("--dry-run",))
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


def test_the_sanitizers_have_cases():
    """Of each kernel, the same; a process collects them, so one of the four steps stands for all."""
    steps = [step for step in gpu_check.steps("c", False, Path("out")) if step.is_optional]
    chosen = {step.command[step.command.index("-m") :] for step in steps}
    assert (len(steps), len(chosen)) == (4, 2)
    command = [sys.executable, *sorted(chosen)[0], "--collect-only", "-qq"]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "long-window" in done.stdout
    assert "-mma]" in done.stdout
    assert not re.search(r"-(auto|sm90)]", done.stdout)
    assert 5 <= done.stdout.count("::") <= 20


def test_results_are_written_before_the_next_step(tmp_path):
    """What a step finds when it looks: the outcome of the one before."""
    look = f"import json; assert len(json.load(open({str(tmp_path / 'gpu-check-a.json')!r}))['steps']) == 1"
    assert checked(tmp_path, python("first", ""), python("second", look))[0] == 0


def test_only_some_steps(tmp_path):
    todo = [
        python("kernels", ""),
        python("kernel benchmark", ""),
        python("ttft", "raise SystemExit(1)"),
    ]
    status, found = checked(tmp_path, *todo, options=("--only", "kernel"))
    assert status == 0
    assert len(found) == 2


def test_without_a_gpu_nothing_is_called_proven(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "capability", lambda: None)
    assert gpu_check.main(["a"]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_a_part_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["d"])
    assert "no part d" in capsys.readouterr().err


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
    assert [(run["kept"], run["length"]) for run in result["runs"]] == [
        (kept, length)
        for kept in ("auto", "int8", "auto, on the device")
        for length in (1000, 1500)
    ]
    for run in result["runs"]:
        assert set(run["summary"]) == set(run["work"]) == {"default", "unrepaired", "ratio 0.10"}
        assert all(row["exactness"] == ["repaired"] for row in run["summary"].values())
        assert run["memory_bytes"] > 0
        assert all(prompt["default"]["loaded_bytes"] > 0 for prompt in run["prompts"])
    exact, rounded = (run["prompts"][0]["default"]["loaded_bytes"] for run in result["runs"][:4:2])
    assert rounded < 0.5 * exact


def test_a_dry_run_of_the_kernels_benchmark_has_every_part(tmp_path):
    command = [sys.executable, "bench_kernels.py", "--dry-run", "--out", str(tmp_path)]
    subprocess.run(
        command, cwd=ROOT / "tests" / "benchmarks", capture_output=True, text=True, check=True
    )
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert result["measured"] is False
    assert result["targets"] == result["failed"] == result["left_out"] == []
    assert len(result["attention"]) == 2
    assert all(row["rms_error"]["kvrag torch"] < 1e-5 for row in result["attention"])
    assert {"packed_ms", "one_at_a_time_ms", "causal_prefill_ms"} <= set(result["precompute"])
    codecs = ("16-bit", "int8", "int8 with zeros", "int4 with zeros")
    assert set(result["stitch"]) == {f"{c}, {mode}" for c in codecs for mode in ("auto", "torch")}
    assert set(result["shift"]) == {"a layer", "weights"}
    rows = [*result["stitch"].values(), *result["shift"].values()]
    assert all(row["device_ms"] > 0 and row["wall_ms"] > 0 for row in rows)
    moved = {c: result["stitch"][f"{c}, auto"]["moved_bytes"] for c in codecs}
    assert moved["16-bit"] > moved["int8 with zeros"] > moved["int8"] > moved["int4 with zeros"]


@pytest.mark.slow
def test_a_second_process_adds_to_the_kernels_benchmark(tmp_path):
    """A kernel that ends its process takes no other's figures with it."""
    command = [
        sys.executable,
        "bench_kernels.py",
        "--dry-run",
        "--out",
        str(tmp_path),
        "--name",
        "k",
        "--parts",
    ]
    run = functools.partial(
        subprocess.run, cwd=ROOT / "tests" / "benchmarks", capture_output=True, check=True
    )
    run([*command, "attention"])
    first = json.loads((tmp_path / "k.json").read_text())
    assert "stitch" not in first
    run([*command, "flex", "--add"])
    second = json.loads((tmp_path / "k.json").read_text())
    for before, after in zip(first["attention"], second["attention"], strict=True):
        assert after["ms"].items() > before["ms"].items()
        assert set(after["ms"]) - set(before["ms"]) == {"flex attention"}
    (tmp_path / "k.json").write_text("{")
    run([*command, "attention", "--add"])
    assert len(json.loads((tmp_path / "k.json").read_text())["attention"]) == 2, (
        "what can't be read is made anew"
    )
