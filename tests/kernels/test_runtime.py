"""Compilation, cache, choice of path and fallback, without a GPU: the driver is played by the emulator or refuses."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import Guarded, emulated_module, needs_compiler
from kernel_cases import BASE, CASES, inputs_of
from kit import at_once, raising

import kvrag_kernels
from kvrag_kernels import driver, launch, nvrtc, reference, runtime
from kvrag_kernels.geometry import (
    ARCHS,
    HEAD_DIMS,
    geometry_of,
    hopper_geometry,
    plan_shape,
    supports,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRAG_CACHE", str(tmp_path))
    monkeypatch.delenv("KVRAG_KERNEL", raising=False)
    return tmp_path / "kernels"


def test_the_cache_compiles_once(own_cache):
    made: list[int] = []

    def make():
        made.append(1)
        return b"cubin"

    assert [nvrtc.cached("key", make) for _ in range(3)] == [b"cubin"] * 3
    assert len(made) == 1
    assert [p.name for p in own_cache.iterdir()] == ["key.cubin"]


@pytest.mark.parametrize("damage", [b"", b"short", bytes(100)])
def test_a_damaged_cubin_is_made_anew(own_cache, damage):
    nvrtc.cached("key", lambda: b"cubin")
    (own_cache / "key.cubin").write_bytes(damage)
    assert nvrtc.cached("key", lambda: b"again") == b"again"
    assert nvrtc.cached("key", lambda: b"never") == b"again"


def test_a_cache_that_cannot_be_written_costs_a_compilation(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KVRAG_CACHE", str(tmp_path / "file"))
    assert nvrtc.cached("key", lambda: b"cubin") == b"cubin"


def test_a_user_without_a_home_compiles_each_time(monkeypatch):
    """As in a container that runs under a number without a name."""

    for name in ("KVRAG_CACHE", "KVRAG_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", raising(RuntimeError, "Could not determine home directory."))
    assert nvrtc.cache_folder() is None
    assert nvrtc.cached("key", lambda: b"cubin") == b"cubin"
    assert "KVRAG_CACHE" in kvrag_kernels.info()["cache"]


def test_everything_that_changes_a_cubin_changes_its_key():
    base: list[Any] = ["source", ("-DD=64",), (13, 0), "sm_90"]
    changed = [
        ["source2", *base[1:]],
        [base[0], ("-DD=96",), *base[2:]],
        [*base[:2], (12, 9), base[3]],
        [*base[:3], "sm_80"],
    ]
    changed.append([base[0] + "-DD=64", (), *base[2:]])
    assert len({nvrtc.key_of(*c) for c in [base, *changed]}) == 6


def test_sources_need_no_include_path():
    for file in nvrtc.CSRC.glob("*.cu"):
        text = nvrtc.flat(file.name)
        included = [line for line in text.splitlines() if line.startswith("#include")]
        assert (
            included == ['#include "emu.h"', '#include "emu_sm90.h"'][: 1 + ("sm90" in file.name)]
        )
        assert text.count("struct __align__(16) Quad") == 1


def test_asm_lives_where_the_emulator_stands_in():
    has_asm = [p.name for p in sorted(nvrtc.CSRC.iterdir()) if "asm volatile(" in p.read_text()]
    assert has_asm == ["ptx.cuh", "ptx_sm90.cuh"]


def test_shared_memory_fits_the_smallest_device_of_each_kind():
    for dim in HEAD_DIMS:
        assert geometry_of(dim).shared_bytes <= 99 * 1024
        assert geometry_of(dim, (7, 5)).shared_bytes <= 64 * 1024
        assert hopper_geometry(dim).shared_bytes <= 227 * 1024
        capped = geometry_of(dim, has_softcap=True)
        assert (capped.rows, capped.keys) == (geometry_of(dim).rows, geometry_of(dim).keys)


def test_partial_results_stay_small():
    for geometry in [make(dim) for dim in HEAD_DIMS for make in (geometry_of, hopper_geometry)]:
        for kv_heads in (1, 2, 8, 32):
            shape = plan_shape(geometry, 1, 5000, 32, kv_heads, processors=132)
            assert shape.max_slots * kv_heads * geometry.rows * geometry.dim * 4 <= 52 * 2**20


def test_what_has_a_kernel():
    assert supports(128, torch.bfloat16, (9, 0))
    assert supports(64, torch.float16, (7, 5))
    assert not supports(64, torch.bfloat16, (7, 5))
    assert not supports(64, torch.float16, (7, 0))
    assert not supports(80, torch.float16, (9, 0))
    assert not supports(64, torch.float32, (9, 0))
    assert all(runtime.variants(arch) for arch in ARCHS)


def test_a_mode_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("KVRAG_KERNEL", "fast")
    with pytest.raises(ValueError, match="KVRAG_KERNEL is 'fast'"):
        runtime.mode()
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="KVRAG_KERNEL is 'fast'"):  # on a CPU too
        kvrag_kernels.ragged_attention(x, x, x, torch.zeros(1, dtype=torch.int32), scale=1.0)
    monkeypatch.setenv("KVRAG_KERNEL", "")
    assert runtime.mode() == "auto"


class FakeCuda:
    """Answers what the runtime asks a tensor on a device."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.is_cuda, self.device = (
            x.shape,
            x.dtype,
            True,
            torch.device("cuda", 0),
        )


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(runtime, "modules", runtime.Modules())


@pytest.mark.usefixtures("cuda")
def test_the_path_is_chosen_by_shape_dtype_and_mode(monkeypatch):
    q: Any = FakeCuda(torch.empty(1, 4, 3, 128, dtype=torch.bfloat16))
    monkeypatch.setenv("KVRAG_KERNEL", "sm90")
    best, other = runtime.attention_variants(q, q, 0.0)
    assert [(v.source, v.arch) for v in (best, other)] == [
        ("ragged_sm90.cu", "sm_90a"),
        ("ragged_mma.cu", "sm_90"),
    ]
    assert {"-DD=128", "-DBF16=1", "-DSOFTCAP=0"} <= set(best.options)
    assert all("-DSOFTCAP=1" in v.options for v in runtime.attention_variants(q, q, 30.0))
    assert runtime.attention_variants(q, FakeCuda(torch.empty(1, 4, 3, 64)), 0.0) == []
    assert runtime.attention_variants(FakeCuda(torch.empty(1, 4, 3, 128)), q, 0.0) == []
    (probe,) = runtime.probe_variants(q, q, 0.0)
    assert (probe.source, probe.arch) == ("probe.cu", "sm_90")
    monkeypatch.setenv("KVRAG_KERNEL", "mma")
    assert runtime.attention_variants(q, q, 0.0) == [other]
    monkeypatch.setenv("KVRAG_KERNEL", "torch")
    assert runtime.attention_variants(q, q, 0.0) == runtime.probe_variants(q, q, 0.0) == []
    monkeypatch.setenv("KVRAG_KERNEL", "sm90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert [v.source for v in runtime.attention_variants(q, q, 0.0)] == ["ragged_mma.cu"]


@pytest.mark.usefixtures("cuda")
def test_the_hopper_kernel_is_the_default_once_a_gpu_has_proven_it(monkeypatch, tmp_path):
    q: Any = FakeCuda(torch.empty(1, 4, 3, 128, dtype=torch.bfloat16))
    assert runtime.proven() <= {"sm90"}
    for written, first in (
        ("{}", "ragged_mma.cu"),
        ('{"sm90": {"gpu": "H100"}}', "ragged_sm90.cu"),
    ):
        monkeypatch.setattr(runtime, "PROVEN", tmp_path / "proven.json")
        runtime.PROVEN.write_text(written)
        runtime.proven.cache_clear()
        assert runtime.attention_variants(q, q, 0.0)[0].source == first
    monkeypatch.setenv("KVRAG_KERNEL", "mma")
    assert runtime.attention_variants(q, q, 0.0)[0].source == "ragged_mma.cu"
    runtime.proven.cache_clear()


@pytest.mark.usefixtures("cuda")
def test_a_call_like_one_before_is_one_look_up(monkeypatch):
    """Layer after layer: what computes is worked out for the first one, and anew after a failure or in another mode."""
    asked: list[str] = []
    monkeypatch.setattr(runtime.Modules, "_load", lambda _, variant, device: variant.source)
    monkeypatch.setattr(
        runtime, "takes_hopper", lambda _: asked.append("asked") or runtime.mode() == "sm90"
    )
    q: Any = FakeCuda(torch.empty(1, 4, 3, 128, dtype=torch.bfloat16))

    def computes() -> str:
        best = runtime.modules.best(runtime.attention_variants, q, q, 0.0)
        return "torch" if best is None else str(best[1])

    assert [computes() for _ in range(3)] == ["ragged_mma.cu"] * 3
    assert len(asked) == 1
    assert runtime.has_kernel(q, q)
    assert len(asked) == 1
    monkeypatch.setenv("KVRAG_KERNEL", "sm90")
    assert [computes() for _ in range(3)] == ["ragged_sm90.cu"] * 3
    assert len(asked) == 2
    with pytest.warns(RuntimeWarning, match="no room"):
        runtime.modules.give_up(
            runtime.attention_variants(q, q, 0.0)[0], 0, driver.DriverError("no room")
        )
    assert computes() == "ragged_mma.cu"


def test_plans_of_different_tiles_are_never_taken_for_each_other():
    """What a kernel falls back to may have other tiles, and a plan tells its own by nothing but its length."""
    for dim in HEAD_DIMS:
        for rows in (1, 40, 500, 5000):
            geometries = {
                g.keys: g
                for g in (hopper_geometry(dim), geometry_of(dim), geometry_of(dim, (7, 5)))
            }
            sizes = {
                plan_shape(g, 1, rows, 32, 8, processors=132).ints for g in geometries.values()
            }
            assert len(sizes) == len(geometries)


@pytest.mark.usefixtures("cuda")
def test_a_kernel_that_cannot_be_had_is_told_once(monkeypatch):
    monkeypatch.setattr(nvrtc, "find", raising(nvrtc.CompileError, "no compiler here"))
    variant = runtime.variants("sm_90")[0]
    with pytest.warns(RuntimeWarning, match="torch computes instead: no compiler here"):
        assert runtime.modules.get(variant, 0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.modules.get(variant, 0) is None
    assert len(runtime.modules.failures) == 1


@pytest.mark.usefixtures("cuda")
def test_threads_compile_a_variant_once(monkeypatch):
    loads: list[int] = []
    monkeypatch.setattr(runtime.Modules, "_load", lambda *_: loads.append(1) or "module")
    variant = runtime.variants("sm_90")[0]
    at_once(*[lambda: runtime.modules.get(variant, 0)] * 8)
    assert len(loads) == 1


@pytest.mark.usefixtures("cuda")
def test_nothing_is_loaded_while_a_graph_is_captured(monkeypatch):
    """Nor given up for it: the next call loads."""
    is_capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    monkeypatch.setattr(runtime.Modules, "_load", lambda *_: "module")
    variant = runtime.variants("sm_90")[0]
    with pytest.raises(RuntimeError, match=r"not loaded yet .* run the call once before"):
        runtime.modules.get(variant, 0)
    is_capturing[0] = False
    assert runtime.modules.get(variant, 0) == "module"


class Refuses:
    processors = 4

    def launch(self, *_: object) -> None:
        raise driver.DriverError("no room")

    def tensor_map(self, *_: object) -> bytes:
        return bytes(128)


@pytest.mark.usefixtures("cuda")
def test_a_launch_that_fails_leaves_the_work_to_the_next_kernel_and_then_to_torch(monkeypatch):
    inputs: dict[str, Any] = inputs_of(BASE, torch.bfloat16)
    call = launch.Call(inputs["q"], inputs["k"], inputs["v"], inputs["hi"], None, 0, BASE.scale)
    monkeypatch.setenv("KVRAG_KERNEL", "sm90")
    variants = runtime.attention_variants(FakeCuda(call.q), call.v, 0.0)
    monkeypatch.setattr(runtime, "attention_variants", lambda *_: variants)
    monkeypatch.setattr(runtime.Modules, "_load", lambda *_: Refuses())
    monkeypatch.setattr(torch.cuda, "device", lambda _: warnings.catch_warnings(record=False))
    with pytest.warns(RuntimeWarning) as told:
        assert runtime.attend(call, None) is None
    assert [str(w.message) for w in told] == [
        "a launch of ragged_sm90.cu for sm_90a failed, ragged_mma.cu computes instead: no room",
        "a launch of ragged_mma.cu for sm_90 failed, torch computes instead: no room",
    ]
    assert [runtime.modules.get(v, None) for v in variants] == [None, None]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("code", [700, 715, 716, 717, 718, 719])
def test_a_fault_of_an_earlier_kernel_is_not_taken_for_a_launch_that_fails(code, monkeypatch):
    """The driver tells it at whatever call comes next; torch could not compute either."""
    call = launch.Call(
        *(inputs_of(BASE, torch.bfloat16)[n] for n in ("q", "k", "v", "hi")), None, 0, BASE.scale
    )
    variants = runtime.attention_variants(FakeCuda(call.q), call.v, 0.0)
    monkeypatch.setattr(runtime, "attention_variants", lambda *_: variants)
    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuGetErrorString=lambda *_: 0))
    module = SimpleNamespace(
        processors=4, launch=lambda *_: driver._check(code, "launching ragged_plan")
    )
    monkeypatch.setattr(runtime.Modules, "_load", lambda *_: module)
    monkeypatch.setattr(torch.cuda, "device", lambda _: warnings.catch_warnings(record=False))
    with pytest.raises(driver.DeviceFault, match=f"CUresult {code}.* start the process anew"):
        runtime.attend(call, None)
    assert runtime.modules.failures == []


@pytest.mark.usefixtures("cuda")
def test_a_kernel_that_is_wrong_on_the_device_is_not_used(monkeypatch):
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    monkeypatch.setattr(runtime.Variant, "cubin", lambda *_: b"cubin")
    monkeypatch.setattr(runtime, "CudaModule", lambda *_: "module")
    monkeypatch.setattr(
        runtime.selftest, "check", raising(driver.DriverError, "a small case came out wrong by 1")
    )
    q: Any = FakeCuda(torch.empty(1, 4, 3, 128, dtype=torch.bfloat16))
    monkeypatch.setenv("KVRAG_KERNEL", "sm90")
    best, other = runtime.attention_variants(q, q, 0.0)
    with pytest.warns(
        RuntimeWarning, match=r"ragged_mma.cu computes instead: a small case came out wrong"
    ):
        assert runtime.modules.get(best, 0) is None
    assert runtime.modules.get(other, 0) == "module"
    assert runtime.has_kernel(q, q)


def test_a_tensor_map_says_sizes_and_strides():
    x = torch.empty(2, 100, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert launch.map_sizes(x) == ((64, 100, 3, 2), (3 * 128, 128, 300 * 128))
    assert launch.map_sizes(x[:1, :1]) == ((64, 100, 1, 1), (3 * 128, 128, 128))
    assert launch.can_map(x)
    assert not launch.can_map(x[:, :1].expand(-1, 3, -1, -1))
    assert not launch.can_map(torch.empty_strided((1, 2, 3, 64), (0, 2**40, 64, 1), device="meta"))


@needs_compiler
def test_the_host_side_of_a_launch_is_the_one_that_the_device_gets():
    """The runtime's own way from tensors to launches, with the emulator where the driver's module would be; limits of every dtype."""
    case = CASES[0]
    inputs: dict[str, Any] = inputs_of(case, torch.bfloat16)
    module = emulated_module(case, torch.bfloat16)
    for dtype in (torch.int64, torch.int16):
        call = launch.prepare(
            launch.Call(
                inputs["q"], inputs["k"], inputs["v"], inputs["hi"].to(dtype), None, -3, case.scale
            )
        )
        assert call.hi.dtype == torch.int32
        assert call.prefix == 0
        guarded = Guarded(module, [call.q, call.k, call.v, call.hi])
        out, _ = launch.attend(module, geometry_of(case.dim), call, empty=guarded)
        want, _ = reference.attention(
            inputs["q"], inputs["k"], inputs["v"], inputs["hi"], scale=case.scale
        )
        torch.testing.assert_close(out.double(), want, atol=1.5e-2, rtol=0)


@pytest.mark.parametrize(("batch", "rows"), [(1, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("geometry", [geometry_of(64), hopper_geometry(64)], ids=lambda g: g.kernel)
def test_no_rows_and_no_batch_need_no_launch(batch, rows, geometry):
    """Neither of the plan nor of attention, with limits for all of the batch or for each; ``Refuses`` raises at a launch."""
    q = torch.empty(batch, 4, rows, 64, dtype=torch.bfloat16)
    keys = torch.empty(batch, 2, 5, 64, dtype=torch.bfloat16)
    for hi in (torch.zeros(rows, dtype=torch.int64), torch.zeros((batch, rows), dtype=torch.int64)):
        call = launch.prepare(launch.Call(q, keys, keys, hi, None, 0, 1.0))
        plan = launch.make_plan(Refuses(), geometry, call)
        out, lse = launch.attend(Refuses(), geometry, call, plan)
        assert out.shape == (batch, 4, rows, 64)
        assert lse.shape == (batch, 4, rows)


def test_no_batch_needs_no_launch_of_the_probe():
    q, k = (
        torch.empty(0, 4, 3, 64, dtype=torch.bfloat16),
        torch.empty(0, 2, 5, 64, dtype=torch.bfloat16),
    )
    call = launch.prepare(launch.Call(q, k, k, torch.zeros(3, dtype=torch.int32), None, 0, 1.0))
    assert launch.probe(Refuses(), geometry_of(64), call, torch.empty(0, 4, 3)).shape == (0, 5)


def test_no_keys_need_no_launch():
    q = torch.randn(1, 4, 3, 64, dtype=torch.bfloat16)
    none = torch.empty(1, 2, 0, 64, dtype=torch.bfloat16)
    call = launch.Call(q, none, none, torch.zeros(3, dtype=torch.int32), None, 0, 1.0)
    out, lse = launch.attend(Refuses(), hopper_geometry(64), call)
    assert bool((out == 0).all())
    assert bool((lse == float("-inf")).all())


def test_an_architecture_newer_than_the_compiler_takes_its_nearest(monkeypatch):
    compiler = nvrtc.Nvrtc.__new__(nvrtc.Nvrtc)
    compiler.version = (13, 0)
    monkeypatch.setattr(nvrtc.Nvrtc, "archs", lambda _: (75, 80, 86, 120))
    assert [compiler.nearest(a) for a in ("sm_86", "sm_89", "sm_121")] == [
        "sm_86",
        "sm_86",
        "sm_120",
    ]
    with pytest.raises(nvrtc.CompileError, match="no architecture that sm_90 runs"):
        compiler.nearest("sm_90")
    monkeypatch.setattr(nvrtc.Nvrtc, "archs", lambda _: (80, 90))
    assert compiler.nearest("sm_90a") == "sm_90a"
    monkeypatch.setattr(nvrtc.Nvrtc, "archs", lambda _: (80, 86))
    with pytest.raises(nvrtc.CompileError, match="no architecture that sm_90a runs"):
        compiler.nearest("sm_90a")


def test_a_plan_is_needed_by_kernels_alone():
    inputs: dict[str, Any] = inputs_of(BASE, torch.float32)
    assert kvrag_kernels.ragged_plan(inputs["q"], inputs["k"], inputs["hi"]).numel() == 0
