"""docs/support.md on quantised weights: every method of transformers, and the sentences that users see."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from quantised_kit import save_base
from transformers.quantizers import auto

from kvrag import ModelError
from kvrag.model.load import load
from kvrag.model.source import ModelSource

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
MEASURED = {
    "bitsandbytes": {"bitsandbytes_4bit", "bitsandbytes_8bit"},
    "compressed-tensors": {"compressed-tensors"},
    "hqq": {"hqq"},
    "optimum-quanto": {"quanto"},
    "torch": set(),
    "torchao": {"torchao"},
    "transformers": {"fbgemm_fp8", "fp8", "mxfp4"},
}
"""Names of methods by the library that the measured table lists them under."""
ABSENT = {"gptq": ("optimum", "gptqmodel"), "awq": ("gptqmodel",), "auto-round": ("auto_round",)}
"""Packages whose absence the page speaks of, by method."""

pytestmark = pytest.mark.skipif(
    not PAGE.is_file(), reason="the documents are not here: run from a checkout"
)


def section():
    return PAGE.read_text().partition("## Quantised weights\n")[2].partition("\n## ")[0]


def rows():
    path = ROOT / "benchmarks" / "results" / "quantised_weights.json"
    return json.loads(path.read_text())["rows"]


def others():
    """Methods of the second table."""
    table = section().partition("| method |")[2]
    names = (line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    return [name for cell in names for name in re.findall(r"`([\w-]+)`", cell)]


def test_every_method_of_transformers_is_measured_or_told_about():
    assert {row["package"] for row in rows()} == set(MEASURED)
    told = others()
    assert len(told) == len(set(told))
    assert not {*told} & set().union(*MEASURED.values())
    assert set(auto.AUTO_QUANTIZATION_CONFIG_MAPPING) <= {*told}.union(*MEASURED.values())


def test_quoted_refusals_are_those_that_were_measured():
    refused, not_loaded = re.findall(r"```text\n(.*)\n```", section())
    assert any(row["why"].startswith(refused) for row in rows())
    words = not_loaded.replace("MODEL", "base").replace("gptq", "{}")
    whys = [row["why"] for row in rows() if row["reuse"] == "not loaded"]
    said = [why for why in whys if why.startswith("could not load")]
    assert said
    for why in said:
        name = re.search(r"quantisation \(([\w-]+)\)", why)[1]
        assert why.startswith(f"{words.format(name)} (")


@pytest.mark.parametrize("method", ABSENT)
def test_a_checkpoint_whose_package_is_absent_is_refused_in_the_quoted_words(method, tmp_path):
    if any(map(importlib.util.find_spec, ABSENT[method])):
        pytest.skip("a package of this method is installed")
    place = shutil.copytree(save_base(str(tmp_path / "base")), tmp_path / "quantised")
    file = place / "config.json"
    packed = {"quant_method": method, "bits": 4, "group_size": 64}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": packed}))
    words = re.findall(r"```text\n(.*)\n```", section())[1].partition("its quantisation")[2]
    with pytest.raises(ModelError, match=re.escape(words.replace("gptq", method))):
        load(ModelSource(str(place)))
