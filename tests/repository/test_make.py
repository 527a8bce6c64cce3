"""The connector's tests run on vLLM in the environment that ``KVRAG_VLLM`` names."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not (ROOT / "Makefile").is_file() or not shutil.which("make"),
    reason="needs make and a checkout",
)
@pytest.mark.parametrize("target", ["test", "test-all"])
@pytest.mark.parametrize(
    ("named", "pythons"),
    [("", []), ("1", [".venv-vllm/bin/python"]), ("/other", ["/other/bin/python"])],
)
def test_the_tests_go_on_with_vllm_where_an_environment_is_named(target, named, pythons):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--dry-run", target, f"KVRAG_VLLM={named}"],
        cwd=ROOT,
        env=outside,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if "tests/vllm_connector" in line]
    assert [line.split()[0] for line in lines] == pythons
