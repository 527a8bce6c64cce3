"""``make gpu-check`` without a GPU: its steps, their limits, and the scripts that they run on tiny shapes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Step

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["gpu-check", "kernel-check"])
def test_make_passes_its_arguments_on(target):
    # Called by make itself, as in CI, make would say where it is.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--no-print-directory", "-n", target, "ARGS=--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert "tests/gpu_check.py" in line
    assert line.endswith("--dry-run")


def test_steps_name_files_that_exist_and_leave_each_other_time():
    for is_dry in (False, True):
        steps = gpu_check.steps(is_dry, None)
        assert len({s.name for s in steps}) == len(steps)
        assert all(s.limit <= 160 for s in steps), "one slow step would eat the others' time"
        for step in steps:
            files = [a for a in step.command[1:] if a.endswith(".py")]
            assert files
            assert all((step.folder / f).is_file() for f in files)
        benches = [s for s in steps if "bench_" in " ".join(s.command)]
        assert len(benches) == 3
        assert all(("--dry-run" in s.command) == is_dry for s in benches)


def python(name: str, code: str, limit: float = 30, needs: tuple[str, ...] = ()) -> Step:
    return Step(name, (sys.executable, "-c", code), limit, needs)


def test_a_step_that_fails_hangs_or_lacks_a_package_does_not_keep_the_next_from_running(tmp_path):
    todo = [
        python("fails", "raise SystemExit(3)"),
        python("hangs", "import time; time.sleep(100)", limit=1.5),
        python("lacks", "", needs=("torch", "no_such_package")),
        Step("no program", ("no-such-program",), 30, (), is_optional=True),
        python("sees", "import kvrag_kernels, os; assert os.environ['HF_HUB_OFFLINE'] == '1'"),
    ]
    assert gpu_check.main(["--out", str(tmp_path)], todo) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["steps"]
    assert [(s["step"], s["outcome"], s.get("why")) for s in found] == [
        ("fails", "failed", "exit status 3"),
        ("hangs", "failed", "not over after 1.5 s"),
        ("lacks", "left out", "not installed: no_such_package"),
        ("no program", "left out", "not installed: no-such-program"),
        ("sees", "passed", None),
    ]
    assert found[1]["seconds"] < 20
    lacks, tool = todo[2:4]
    assert [gpu_check.main(["--out", str(tmp_path)], steps) for steps in ([tool], [lacks, tool])] == [0, 1]


def test_the_time_for_all_steps_is_kept(tmp_path):
    todo = [python("hangs", "import time; time.sleep(100)"), python("late", "")]
    assert gpu_check.main(["--seconds", "1.5", "--out", str(tmp_path)], todo) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["steps"]
    assert found[0]["why"].startswith("not over after 1.")
    assert found[1]["why"] == "no time was left"
    assert found[1]["outcome"] == "left out"


def test_after_hoppers_kernel_has_failed_the_others_go_without_it(tmp_path):
    """A hang would otherwise eat every step that comes to the same kernel."""
    look = "import os; raise SystemExit(os.environ.get('KVRAG_KERNEL') != {})"
    mma = {"KVRAG_KERNEL": "mma"}
    hangs = Step("hangs", (sys.executable, "-c", "import time; time.sleep(100)"), 1.5, (), otherwise=mma)
    passes = Step("passes", (sys.executable, "-c", ""), 30, (), otherwise=mma)
    todo = [passes, python("before", look.format(None)), hangs, python("after", look.format("'mma'"))]
    assert gpu_check.main(["--out", str(tmp_path)], todo) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["steps"]
    assert [(s["step"], s["outcome"], s.get("environment")) for s in found] == [
        ("passes", "passed", None),
        ("before", "passed", None),
        ("hangs", "failed", None),
        ("after", "passed", mma),
    ]
    assert [s.otherwise for s in gpu_check.steps(False, None) if s.otherwise] == [mma]


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
    monkeypatch.setattr(gpu_check, "stood_in", lambda: dict.fromkeys(("diskcache", "xxhash"), str(gpu_check.STAND_INS)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import diskcache, xxhash; assert 'stand_ins' in xxhash.__file__ and 'stand_ins' in diskcache.__file__"
    assert gpu_check.run(python("bare", code), 60)["outcome"] == "passed"
    ttft = next(s for s in gpu_check.steps(True, tmp_path / "out") if s.name == "ttft, 3B shape")
    assert gpu_check.run(ttft, 300)["outcome"] == "passed"


@pytest.mark.parametrize("package", ["diskcache", "xxhash"])
def test_the_stand_ins_have_all_that_is_asked_of_them(package):
    sources = "\n".join(file.read_text() for file in (ROOT / "kvrag").rglob("*.py"))
    asked = set(re.findall(rf"\b{package}\.(\w+)", sources))
    asked |= {
        n.strip() for names in re.findall(rf"from {package}\.core import (.+)", sources) for n in names.split(",")
    }
    path = str(gpu_check.STAND_INS)
    code = f"import sys; sys.path.insert(0, {path!r}); import {package}; assert {asked!r} <= set(dir({package})) | {{'core'}}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_sanitizers_have_cases():
    """In both modes: on Hopper each brings another kernel."""
    steps = [step for step in gpu_check.steps(False, None) if step.is_optional]
    for chosen in {step.command[step.command.index("-m") :] for step in steps}:
        command = [sys.executable, *chosen, "--collect-only"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        mode = "mma" if "not auto" in chosen[-1] else "auto"
        assert "long-window" in done.stdout
        assert f"-{mode}]" in done.stdout.replace("dtype0-", "-")
        assert 5 <= done.stdout.count("::") <= 20


def test_results_are_written_before_the_next_step(tmp_path):
    """What a step finds when it looks: the outcome of the one before."""
    look = f"import json; assert len(json.load(open({str(tmp_path / 'gpu-check.json')!r}))['steps']) == 1"
    assert gpu_check.main(["--out", str(tmp_path)], [python("first", ""), python("second", look)]) == 0


def test_only_some_steps(tmp_path):
    todo = [python("kernels", ""), python("kernel benchmark", ""), python("ttft", "raise SystemExit(1)")]
    assert gpu_check.main(["--only", "kernel", "--out", str(tmp_path)], todo) == 0
    assert len(json.loads((tmp_path / "gpu-check.json").read_text())["steps"]) == 2


def test_without_a_gpu_nothing_is_called_proven(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: False)
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_a_dry_run_goes_through_every_part_and_says_that_nothing_was_measured(tmp_path):
    command = [sys.executable, "bench_ttft.py", "--shape", "llama-3.1-8b", "--dry-run", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "tests" / "benchmarks", capture_output=True, text=True, check=True)
    (written,) = tmp_path.iterdir()
    result = json.loads(written.read_text())
    assert result["measured"] is False
    for tier in ("memory", "disk"):
        summary = result[tier]["summary"]
        assert set(summary) == {"default", "ratio 0.10"}
        assert all(row["exactness"] == ["repaired"] for row in summary.values())


def test_a_dry_run_of_the_kernels_benchmark_has_every_part(tmp_path):
    command = [sys.executable, "bench_kernels.py", "--dry-run", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "tests" / "benchmarks", capture_output=True, text=True, check=True)
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
