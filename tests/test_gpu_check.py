"""``make gpu-check`` without a GPU: its commands, and the time-to-first-token script on a tiny shape."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_command_of_a_dry_run_is_one() -> None:
    done = subprocess.run(
        ["make", "-n", "gpu-check", "ARGS=--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    benches = [line for line in done.stdout.splitlines() if "bench_" in line]
    assert [line.split("bench_")[1].split(".py")[0] for line in benches] == ["kernels", "ttft", "ttft"]
    assert all(line.endswith("--dry-run") for line in benches)


def test_a_dry_run_goes_through_every_step_and_says_that_nothing_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, "bench_ttft.py", "--shape", "llama-3.1-8b", "--dry-run", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "tests" / "benchmarks", capture_output=True, text=True, check=True)
    (written,) = tmp_path.iterdir()
    result = json.loads(written.read_text())
    assert result["measured"] is False
    for tier in ("memory", "disk"):
        summary = result[tier]["summary"]
        assert set(summary) == {"default", "ratio 0.05"}
        assert all(row["exactness"] == ["repaired"] for row in summary.values())
