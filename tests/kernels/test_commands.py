"""``kvrag kernels`` on a machine without a GPU, and what it says of devices and compilers that are played."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import raising
from typer.testing import CliRunner

import kvrag_kernels
from kvrag.cli.app import app
from kvrag_kernels import ahead, nvrtc, runtime


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


@pytest.fixture
def play(monkeypatch):
    """Let there be a device, and a compiler that knows some architectures, or none."""

    def choose(capability, *archs):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "played")
        monkeypatch.delenv("KVRAG_KERNEL", raising=False)
        compiler = nvrtc.Nvrtc.__new__(nvrtc.Nvrtc)
        compiler.path, compiler.version = "libnvrtc.so.13", (13, 0)
        monkeypatch.setattr(nvrtc.Nvrtc, "archs", lambda _: archs)
        monkeypatch.setattr(nvrtc, "installed", lambda: iter([compiler] if archs else []))

    return choose


def path() -> str:
    (device,) = kvrag_kernels.info()["devices"]
    assert device["name"] == "played"
    return str(device["attention"])


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), "ragged_sm90 (bfloat16, float16)"),
        ((8, 6), "ragged_mma (bfloat16, float16)"),
        ((12, 1), "ragged_mma (bfloat16, float16)"),
        ((7, 5), "ragged_mma (float16)"),
        ((7, 0), "torch, because the kernels need sm_75 or newer and this is sm_70"),
        (
            (13, 0),
            "torch, because NVRTC 13.0 knows no architecture that sm_130 runs; install a newer one",
        ),
    ],
)
def test_each_device_has_its_path(capability, expected, play):
    play(capability, 75, 80, 90, 120)
    assert path() == expected


def test_without_the_compiler_torch_computes(play):
    play((9, 0))
    assert path().startswith("torch, because no NVRTC for CUDA 13.0 was found")
    assert kvrag_kernels.info()["nvrtc"] in path()


def test_a_compiler_without_hoppers_own_instructions_leaves_the_other_kernel(play, monkeypatch):
    play((9, 0), 80, 90)
    known = nvrtc.Nvrtc.nearest

    def refuse(self, arch):
        if arch == "sm_90a":
            raise nvrtc.CompileError("no sm_90a here")
        return known(self, arch)

    monkeypatch.setattr(nvrtc.Nvrtc, "nearest", refuse)
    monkeypatch.setenv("KVRAG_KERNEL", "sm90")
    assert path() == "ragged_mma (bfloat16, float16), because no sm_90a here"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("mma", "ragged_mma (bfloat16, float16)"),
        ("sm90", "ragged_sm90 (bfloat16, float16)"),
        ("torch", "torch, because KVRAG_KERNEL is torch"),
    ],
)
def test_the_mode_counts(mode, expected, play, monkeypatch):
    play((9, 0), 80, 90)
    monkeypatch.setenv("KVRAG_KERNEL", mode)
    assert path() == expected


@pytest.mark.parametrize("mode", ["auto", "mma", "sm90"])
def test_what_is_named_is_what_the_runtime_tries_first(mode, play, monkeypatch):
    for capability in ((9, 0), (8, 0), (10, 0)):
        play(capability, 80, 90, 100)
        monkeypatch.setenv("KVRAG_KERNEL", mode)
        q: Any = SimpleNamespace(
            is_cuda=True, device="cuda:0", dtype=torch.bfloat16, shape=(1, 1, 1, 64)
        )
        first, *_ = runtime.attention_variants(q, q, 0.0)
        assert path().split()[0] == first.source.removesuffix(".cu")


def test_elsewhere_torch_computes(monkeypatch):
    monkeypatch.delenv("KVRAG_KERNEL", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    info = kvrag_kernels.info()
    assert info["mode"] == "auto"
    assert info["devices"] == []
    assert info["attention_elsewhere"] == "torch"
    assert set(info) == {"mode", "devices", "attention_elsewhere", "nvrtc", "cache", "failures"}
