"""``kvrag kernels`` on a machine without a GPU."""

import json

import pytest
from kit import raising
from typer.testing import CliRunner

from kvrag.cli.app import app
from kvrag_kernels import ahead, nvrtc


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRAG_CACHE", str(tmp_path))
    monkeypatch.delenv("KVRAG_KERNEL", raising=False)


def test_info_names_the_path_and_the_reason():
    found = json.loads(CliRunner().invoke(app, ["kernels", "info", "--json"]).stdout)
    assert found["mode"] == "auto"
    assert found["attention_elsewhere"] == "torch"
    shown = CliRunner().invoke(app, ["kernels", "info"]).stdout
    assert "nvrtc" in shown
    assert "failures" in shown


def test_a_wrong_mode_is_one_sentence(monkeypatch):
    monkeypatch.setenv("KVRAG_KERNEL", "fastest")
    done = CliRunner().invoke(app, ["kernels", "info"])
    assert done.exit_code == 2
    assert "KVRAG_KERNEL is 'fastest'; it must be one of auto, torch, mma, sm90" in done.stderr


def test_build_compiles_what_is_asked(monkeypatch):
    try:
        nvrtc.find()
    except nvrtc.CompileError as error:
        pytest.skip(f"no kernel can be compiled here: {error}")
    command = ["kernels", "build", "--arch", "sm_75", "--head-dim", "96"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(done.stdout) == {"sm_75": 28}  # attention and probe: 4; stitch: 24
    assert "sm_75" in CliRunner().invoke(app, command).stdout
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", None)
    assert all(variant.cubin(nvrtc.find()) for variant in ahead.stitch_variants("sm_75", (96,)))


def test_build_says_what_it_compiles():
    shown = CliRunner().invoke(app, ["kernels", "build", "--help"], env={"COLUMNS": "200"}).stdout
    assert "attention, probe, stitch" in shown
    assert "--head-dim" in shown


def test_build_refuses_what_it_cannot_do(monkeypatch):
    done = CliRunner().invoke(app, ["kernels", "build", "--arch", "sm_70"])
    assert done.exit_code == 2
    assert "--arch is 'sm_70'" in done.stderr
    done = CliRunner().invoke(app, ["kernels", "build", "--head-dim", "72"])
    assert done.exit_code == 2
    assert "--head-dim is 72; it must be one of 64, 96, 128, 256" in done.stderr

    monkeypatch.setattr(nvrtc, "find", raising(nvrtc.CompileError, "no NVRTC at all"))
    done = CliRunner().invoke(app, ["kernels", "build", "--arch", "sm_80"])
    assert done.exit_code == 2
    assert "the kernels can't be built: no NVRTC at all" in done.stderr
