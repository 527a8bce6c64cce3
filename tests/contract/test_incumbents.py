"""What other adapters for local models do wrong, and kvrag's don't: our column of the table that `make incumbents` writes."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the benchmarks are not here: run from a checkout"
)


@pytest.fixture(scope="module")
def incumbents():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("incumbents")
    for name in ("incumbents", "common"):  # other tests import modules of such names from elsewhere
        sys.modules.pop(name, None)


@pytest.mark.parametrize("adapter", [0, 1], ids=["LangChain", "LlamaIndex"])
def test_no_fault_of_the_incumbents_is_ours(incumbents, monkeypatch, tmp_path, adapter):
    # A prefill of half a second, where the benchmark has a minute.
    monkeypatch.setattr(incumbents, "GIVES_UP_S", -1.5)
    side = incumbents.ours(incumbents.saved_model(str(tmp_path)))[adapter]
    seen = {row.name: incumbents.seen_by(row, side) for row in incumbents.ROWS[adapter]}
    assert len(seen) >= 9
    assert {name: what for name, (what, is_fault) in seen.items() if is_fault} == {}


def test_the_published_table_has_every_row(incumbents):
    rows = json.loads((BENCHMARKS / "results" / "incumbents.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [row.name for rows in incumbents.ROWS for row in rows]
    assert not [row["name"] for row in rows if row["ours"]["is_fault"]]
