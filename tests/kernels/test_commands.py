"""``kvrag kernels`` on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrag.cli import app
from kvrag_kernels import nvrtc, runtime


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAG_CACHE", str(tmp_path))
    monkeypatch.delenv("KVRAG_KERNEL", raising=False)


def test_info_names_the_path_and_the_reason() -> None:
    found = json.loads(CliRunner().invoke(app, ["kernels", "info", "--json"]).stdout)
    assert found["mode"] == "auto"
    assert found["attention_elsewhere"] == "torch"
    shown = CliRunner().invoke(app, ["kernels", "info"]).stdout
    assert "nvrtc" in shown
    assert "failures" in shown


def test_a_wrong_mode_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAG_KERNEL", "fastest")
    done = CliRunner().invoke(app, ["kernels", "info"])
    assert done.exit_code == 2
    assert "KVRAG_KERNEL is 'fastest'; it must be one of auto, torch, mma, sm90" in done.stderr


def test_build_compiles_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        nvrtc.find()
    except nvrtc.CompileError as error:
        pytest.skip(f"no kernel can be compiled here: {error}")
    monkeypatch.setattr(runtime, "HEAD_DIMS", (96,))
    done = CliRunner().invoke(app, ["kernels", "build", "--arch", "sm_80", "--json"])
    assert json.loads(done.stdout) == {"sm_80": 8}
    assert "sm_80" in CliRunner().invoke(app, ["kernels", "build", "--arch", "sm_80"]).stdout


def test_build_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["kernels", "build", "--arch", "sm_70"])
    assert done.exit_code == 2
    assert "--arch is 'sm_70'" in done.stderr

    def refuse() -> None:
        raise nvrtc.CompileError("no NVRTC at all")

    monkeypatch.setattr(nvrtc, "find", refuse)
    done = CliRunner().invoke(app, ["kernels", "build", "--arch", "sm_80"])
    assert done.exit_code == 2
    assert "the kernels can't be built: no NVRTC at all" in done.stderr
