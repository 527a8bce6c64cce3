"""The diagnosis of the Hopper kernel names what is wrong: planted bugs in the emulator."""

import json

import diagnose_sm90 as diagnosis
import pytest
import torch
from emulated import Guarded, needs_compiler
from emulator.build import EmulatedModule

from kvrag_kernels import launch
from kvrag_kernels.geometry import hopper_geometry

GEOMETRY = hopper_geometry(64)
SHIFT = 2


@needs_compiler
def test_a_wrong_element_is_told_with_what_came_in_its_place():
    """Sixteen columns of the keys are multiplied with those beside theirs."""
    bug = ("+ step), k > 0);", "+ (step ^ 32)), k > 0);")
    defines = (*GEOMETRY.defines(torch.bfloat16), "-DBOUNDED_WAITS=400")
    # Copies that land early: the emulator holds late ones back while somebody polls.
    module = EmulatedModule("ragged_sm90.cu", defines, processors=1, seed=1, replace=[bug])
    reporting = diagnosis.Reporting(module, "cpu")

    def run(call: launch.Call):
        guarded = Guarded(module, [call.q, call.k, call.v, call.hi, call.lo])
        guarded.made.append(reporting.lines)
        return launch.attend(reporting, GEOMETRY, call, empty=guarded)

    found = diagnosis.examine(GEOMETRY, run, (SHIFT,), reporting)
    assert (found["scores"]["wrong"], found["outputs"]["wrong"]) == (GEOMETRY.rows, 0)
    first = found["examples"][0]
    assert (first["score"], first["key"]) == ([0], SHIFT + SHIFT * GEOMETRY.keys)
    assert (first["wanted"]["column"], first["got"]["column"]) == (0, 16)
    assert first["wanted"]["key"] == first["got"]["key"] == SHIFT


@pytest.mark.parametrize("wrong", [False, True])
def test_the_dry_run_checks_the_script(wrong, tmp_path, monkeypatch, capsys):
    if wrong:
        attend = diagnosis.torch_path.attend
        monkeypatch.setattr(
            diagnosis.torch_path, "attend", lambda call: [x.roll(1, dims=2) for x in attend(call)]
        )
        monkeypatch.setattr(diagnosis, "SWEEP", ())
    assert diagnosis.main(["--dry-run", "--out", str(tmp_path)]) == int(wrong)
    report = json.loads((tmp_path / "diagnose_sm90.json").read_text())
    assert not report["measured"]
    assert [*report["head_dims"]] == ["64", "96", "128", "256"]
    assert all((found["scores"]["wrong"] > 0) is wrong for found in report["head_dims"].values())
    assert ("head dim 64: right" in capsys.readouterr().out) is not wrong
