"""The documents: tables come from results, quickstarts use names that exist, nothing points nowhere."""

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not here: run from a checkout")


@pytest.mark.parametrize("script", ["tables.py", "plots.py"])
def test_tables_and_plots_are_in_step_with_the_results(script):
    done = subprocess.run([sys.executable, ROOT / "docs" / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_pictures_are_there():
    for document in DOCUMENTS:
        for target in re.findall(r'(?:src|srcset)="([^"]+)"', document.read_text()):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_inside_the_repository_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_tests_named_as_promises_exist():
    text = (ROOT / "docs" / "promises.md").read_text()
    functions = {n for f in (ROOT / "tests").rglob("test_*.py") for n in re.findall(r"def (test_\w+)", f.read_text())}
    assert set(re.findall(r"::(test_\w+)", text)) <= functions
    for path in re.findall(r"`(tests/[\w/.]+)", text):
        assert (ROOT / path).exists(), path


def test_the_support_table_has_every_architecture_of_the_tests():
    from kvrag.testing.models import REFUSED, TINY

    runs = json.loads((ROOT / "tests" / "benchmarks" / "results" / "support.json").read_text())["runs"]
    newest = runs[max(runs, key=lambda version: [int(part) for part in version.split(".")[:3]])]["rows"]
    assert set(TINY) | set(REFUSED) <= set(newest), "run `make docs`"
    exact = {name for name, row in newest.items() if row["reuse"] == "exact"}
    assert len(exact) >= 25
    assert not exact & set(REFUSED)
    assert all(newest[name]["why"] for name in set(newest) - exact)


def test_quickstarts_import_what_exists():
    """Each Python block of the README parses, and each name that it imports from us is there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    imported = 0
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and "kvrag" in node.module:
                pytest.importorskip(node.module.split(".")[0])
                module = __import__(node.module, fromlist=["_"])
                assert all(hasattr(module, alias.name) for alias in node.names)
                imported += 1
    assert imported == 4


@pytest.mark.parametrize("script", sorted((ROOT / "tests" / "benchmarks").glob("*.py")), ids=lambda script: script.stem)
def test_benchmarks_find_what_they_measure(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    assert runpy.run_path(str(script), run_name="imported")["__doc__"]
