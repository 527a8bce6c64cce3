"""Compilation, cache, choice of path and fallback, without a GPU: the driver is played by the emulator or refuses."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import Guarded, emulated_module, needs_compiler
from kernel_cases import BASE, CASES, inputs_of

import kvrag_kernels
from kvrag_kernels import cubin_cache, driver, launch, nvrtc, reference, runtime, sources
from kvrag_kernels.geometry import ARCHS, HEAD_DIMS, geometry_of, plan_shape, supports


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRAG_CACHE", str(tmp_path))
    monkeypatch.delenv("KVRAG_KERNEL", raising=False)
    return tmp_path / "kernels"


def test_the_cache_compiles_once(own_cache: Path) -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"cubin"

    assert [cubin_cache.get("key", make) for _ in range(3)] == [b"cubin"] * 3
    assert len(made) == 1
    assert [p.name for p in own_cache.iterdir()] == ["key.cubin"]


@pytest.mark.parametrize("damage", [b"", b"short", bytes(100)])
def test_a_damaged_cubin_is_made_anew(own_cache: Path, damage: bytes) -> None:
    cubin_cache.get("key", lambda: b"cubin")
    (own_cache / "key.cubin").write_bytes(damage)
    assert cubin_cache.get("key", lambda: b"again") == b"again"
    assert cubin_cache.get("key", lambda: b"never") == b"again"


def test_a_cache_that_cannot_be_written_costs_a_compilation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KVRAG_CACHE", str(tmp_path / "file"))
    assert cubin_cache.get("key", lambda: b"cubin") == b"cubin"


def test_everything_that_changes_a_cubin_changes_its_key() -> None:
    base: list[Any] = ["source", ("-DD=64",), (13, 0), "sm_90"]
    changed = [
        ["source2", *base[1:]],
        [base[0], ("-DD=96",), *base[2:]],
        [*base[:2], (12, 9), base[3]],
        [*base[:3], "sm_80"],
    ]
    changed.append([base[0] + "-DD=64", (), *base[2:]])
    assert len({cubin_cache.key_of(*c) for c in [base, *changed]}) == 6


def test_sources_need_no_include_path() -> None:
    for file in sources.CSRC.glob("*.cu"):
        text = sources.flat(file.name)
        assert [line for line in text.splitlines() if line.startswith("#include")] == ['#include "emu.h"']
        assert text.count("struct __align__(16) Quad") == 1


def test_asm_lives_in_one_file() -> None:
    assert [p.name for p in sorted(sources.CSRC.iterdir()) if "asm" in p.read_text().replace("with asm", "")] == [
        "ptx.cuh"
    ]


def test_shared_memory_fits_the_smallest_device_of_each_kind() -> None:
    for dim in HEAD_DIMS:
        assert geometry_of(dim).shared_bytes <= 99 * 1024
        assert geometry_of(dim, (7, 5)).shared_bytes <= 64 * 1024
        capped = geometry_of(dim, has_softcap=True)
        assert (capped.rows, capped.keys) == (geometry_of(dim).rows, geometry_of(dim).keys)


def test_partial_results_stay_small() -> None:
    for dim in HEAD_DIMS:
        for kv_heads in (1, 2, 8, 32):
            shape = plan_shape(geometry_of(dim), 1, 5000, 32, kv_heads, processors=132)
            assert shape.max_slots * kv_heads * geometry_of(dim).rows * dim * 4 <= 64 * 2**20


def test_what_has_a_kernel() -> None:
    assert supports(128, torch.bfloat16, (9, 0))
    assert supports(64, torch.float16, (7, 5))
    assert not supports(64, torch.bfloat16, (7, 5))
    assert not supports(64, torch.float16, (7, 0))
    assert not supports(80, torch.float16, (9, 0))
    assert not supports(64, torch.float32, (9, 0))
    assert all(runtime.variants(arch) for arch in ARCHS)


def test_a_mode_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAG_KERNEL", "fast")
    with pytest.raises(ValueError, match="KVRAG_KERNEL is 'fast'"):
        runtime.mode()


class FakeCuda:
    """Answers what the runtime asks a tensor on a device."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.is_cuda, self.device = x.shape, x.dtype, True, torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(runtime, "modules", runtime.Modules())


@pytest.mark.usefixtures("cuda")
def test_the_path_is_chosen_by_shape_dtype_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    q: Any = FakeCuda(torch.empty(1, 4, 3, 128, dtype=torch.bfloat16))
    found = runtime.attention_variant(q, q, 0.0)
    assert found is not None
    assert found.arch == "sm_90"
    assert {"-DD=128", "-DBF16=1", "-DSOFTCAP=0"} <= set(found.options)
    assert "-DSOFTCAP=1" in runtime.attention_variant(q, q, 30.0).options  # type: ignore[union-attr]
    assert runtime.attention_variant(q, FakeCuda(torch.empty(1, 4, 3, 64)), 0.0) is None  # type: ignore[arg-type]
    assert runtime.attention_variant(FakeCuda(torch.empty(1, 4, 3, 128)), q, 0.0) is None  # type: ignore[arg-type]
    monkeypatch.setenv("KVRAG_KERNEL", "torch")
    assert runtime.attention_variant(q, q, 0.0) is None


@pytest.mark.usefixtures("cuda")
def test_a_kernel_that_cannot_be_had_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> nvrtc.Nvrtc:
        raise nvrtc.CompileError("no compiler here")

    monkeypatch.setattr(nvrtc, "find", refuse)
    variant = runtime.variants("sm_90")[0]
    with pytest.warns(RuntimeWarning, match="torch computes instead: no compiler here"):
        assert runtime.modules.get(variant, 0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.modules.get(variant, 0) is None
    assert len(runtime.modules.failures) == 1


@pytest.mark.usefixtures("cuda")
def test_threads_compile_a_variant_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    monkeypatch.setattr(runtime.Modules, "_load", lambda *_: loads.append(1) or "module")
    variant = runtime.variants("sm_90")[0]
    threads = [threading.Thread(target=runtime.modules.get, args=(variant, 0)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(loads) == 1


@pytest.mark.usefixtures("cuda")
def test_a_launch_that_fails_leaves_the_work_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        processors = 4

        def launch(self, *_: object) -> None:
            raise driver.DriverError("no room")

    inputs: dict[str, Any] = inputs_of(BASE, torch.bfloat16)
    call = launch.Call(inputs["q"], inputs["k"], inputs["v"], inputs["hi"], None, 0, BASE.scale)
    variant = runtime.variants("sm_90")[0]
    monkeypatch.setattr(runtime, "_module_for", lambda *_: (variant, Refuses(), geometry_of(64)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: warnings.catch_warnings(record=False))
    with pytest.warns(
        RuntimeWarning, match="launch of ragged_mma.cu for sm_90 failed, torch computes instead: no room"
    ):
        assert runtime.attend(call, None) is None
    assert runtime.modules.get(variant, None) is None  # type: ignore[arg-type]


@needs_compiler
def test_the_host_side_of_a_launch_is_the_one_that_the_device_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's own way from tensors to launches, with the emulator where the driver's module would be; limits of every dtype."""
    case = CASES[0]
    inputs: dict[str, Any] = inputs_of(case, torch.bfloat16)
    module = emulated_module(case, torch.bfloat16)
    for dtype in (torch.int64, torch.int16):
        call = launch.prepare(
            launch.Call(inputs["q"], inputs["k"], inputs["v"], inputs["hi"].to(dtype), None, -3, case.scale)
        )
        assert call.hi.dtype == torch.int32
        assert call.prefix == 0
        guarded = Guarded(module, [call.q, call.k, call.v, call.hi])
        out, _ = launch.attend(module, geometry_of(case.dim), call, empty=guarded)
        want, _ = reference.attention(inputs["q"], inputs["k"], inputs["v"], inputs["hi"], scale=case.scale)
        torch.testing.assert_close(out.double(), want, atol=1.5e-2, rtol=0)


def test_no_rows_need_no_launch() -> None:
    class Never:
        processors = 4

        def launch(self, *_: object) -> None:
            raise AssertionError("launched")

    none = torch.empty(1, 4, 0, 64, dtype=torch.bfloat16)
    keys = torch.empty(1, 2, 5, 64, dtype=torch.bfloat16)
    out, lse = launch.attend(
        Never(), geometry_of(64), launch.Call(none, keys, keys, torch.empty(0, dtype=torch.int32), None, 0, 1.0)
    )
    assert out.shape == (1, 4, 0, 64)
    assert lse.shape == (1, 4, 0)


def test_info_says_which_path_and_why() -> None:
    info = kvrag_kernels.info()
    assert info["mode"] == "auto"
    assert info["attention_elsewhere"] == "torch"
    assert set(info) == {"mode", "devices", "attention_elsewhere", "nvrtc", "cache", "failures"}


def test_building_fills_the_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        nvrtc.find()
    except nvrtc.CompileError as error:
        pytest.skip(f"no kernel can be compiled here: {error}")
    monkeypatch.setattr(runtime, "HEAD_DIMS", (96,))
    assert kvrag_kernels.build(("sm_80",)) == {"sm_80": 8}
    assert len(list(own_cache.iterdir())) == 8
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", None)
    assert kvrag_kernels.build(("sm_80",)) == {"sm_80": 8}


def test_an_architecture_newer_than_the_compiler_takes_its_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = nvrtc.Nvrtc.__new__(nvrtc.Nvrtc)
    compiler.version = (13, 0)
    monkeypatch.setattr(nvrtc.Nvrtc, "archs", lambda _: (75, 80, 86, 120))
    assert [compiler.nearest(a) for a in ("sm_86", "sm_89", "sm_121")] == ["sm_86", "sm_86", "sm_120"]
    with pytest.raises(nvrtc.CompileError, match="no architecture that sm_90 runs"):
        compiler.nearest("sm_90")


def test_a_plan_is_needed_by_kernels_alone() -> None:
    inputs: dict[str, Any] = inputs_of(BASE, torch.float32)
    assert kvrag_kernels.ragged_plan(inputs["q"], inputs["k"], inputs["hi"]).numel() == 0
