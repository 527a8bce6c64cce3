"""What an image build compiles is what the engine asks for."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from kit import mapped
from stitch_cases import StitchCase, stitching_of

import kvrag.blend.stitch as stitching
import kvrag_kernels
from kvrag.blend.layout import place
from kvrag.kv.quantise import pack
from kvrag.model import CausalLM
from kvrag.model.rows import KVBuffer
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.testing.models import tiny_model
from kvrag_kernels import ahead, nvrtc, runtime, stitch_launch
from kvrag_kernels.geometry import ARCHS, DTYPES, HEAD_DIMS, supports
from kvrag_kernels.stitch import stitch_in_torch


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kept", ["auto", "int8", "int4", "fp8"])
def test_every_way_of_keeping_kv_is_built_for_every_kind_of_rotation(kept, arch):
    """Repairs too, whose launches skip rows, and layers that don't turn."""
    built = {
        v.options for v in ahead.stitch_variants(arch) if v.source == "stitch.cu" and v.arch == arch
    }
    sizes = [(dim, dim // n) for dim in HEAD_DIMS for n in (1, 2, 4) if dim // n % 16 == 0]
    for dtype in (d for d in DTYPES if supports(64, d, runtime.capability_of(arch))):
        for dim, rotary in sizes:
            for interleaved in (False, True):
                case = StitchCase(
                    "",
                    kept=kept,
                    dim=dim,
                    rotary=rotary,
                    interleaved=interleaved,
                    dtype=dtype,
                    heads=1,
                )
                case = replace(case, lengths=(33,), starts=(0,))
                assert stitch_launch.defines(stitching_of(case)) in built
                plain = replace(case, layers=1, tables=(-1,), has_skip=True)
                assert stitch_launch.defines(stitching_of(plain)) in built


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["smollm3", "cohere2"])
def test_what_the_engine_launches_was_built(name, kv_dtype, monkeypatch):
    """The engine's own calls, with layers that don't turn, at a head dim of the kernels."""
    asked: list[tuple[str, ...] | None] = []

    def note(call):
        asked.append(stitch_launch.defines(call))
        stitch_in_torch(call)

    monkeypatch.setattr(stitching, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(import_module("kvrag_kernels.stitch"), "stitch_in_torch", note)
    model = CausalLM(wide(name))
    prefix, _ = encode_prefix(model, [1, 2, 3])
    kvs = [
        pack(mapped(kv, torch.Tensor.bfloat16), kv_dtype)
        for kv in encode_chunks(model, prefix, [list(range(30, 76))])
    ]
    layout = place(
        [
            (3, "live", False, -1, False),
            (46, "chunk", False, 0, False),
            (2, "live", False, -1, False),
        ]
    )
    buffer = KVBuffer.empty(
        model.shapes, layout.num_tokens, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    stitching.stitch(buffer, layout, kvs, model.rotary(layout.num_tokens))
    built = {v.options for v in ahead.stitch_variants("sm_90", (64,))}
    assert asked
    assert set(asked) <= built


def wide(name: str) -> Any:
    """A tiny model with heads of 64 channels."""
    config = tiny_model(name).config
    config.head_dim = 64
    config.hidden_size = 64 * config.num_attention_heads
    return type(tiny_model(name))(config).eval()


def test_forms_are_counted_once_and_turing_has_no_bfloat16():
    for arch, count in (("sm_75", 120), ("sm_90", 240)):
        forms = ahead.stitch_variants(arch)
        assert len(forms) == len(set(forms)) == count
    assert not any("-DBF16=1" in v.options for v in ahead.stitch_variants("sm_75"))


def test_building_fills_the_cache(tmp_path, monkeypatch):
    """Of one head dim, all that there is; a second time, nothing is compiled."""
    monkeypatch.setenv("KVRAG_CACHE", str(tmp_path))
    compiled: list[str] = []

    def compile_(_, source, options, arch):
        compiled.append(arch)
        return nvrtc.Compiled(b"cubin", {})

    compiler = nvrtc.Nvrtc.__new__(nvrtc.Nvrtc)
    compiler.version = (13, 0)
    monkeypatch.setattr(nvrtc, "find", lambda: compiler)
    monkeypatch.setattr(nvrtc.Nvrtc, "archs", lambda _: (80, 90))
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compile_)
    expected = {"sm_80": 8 + 48, "sm_90": 12 + 48}
    assert kvrag_kernels.build(("sm_80", "sm_90"), (96,)) == expected
    assert len(list((tmp_path / "kernels").iterdir())) == len(compiled) == sum(expected.values())
    assert {a: compiled.count(a) for a in ("sm_80", "sm_90", "sm_90a")} == {
        "sm_80": 56,
        "sm_90": 56,
        "sm_90a": 4,
    }
    assert kvrag_kernels.build(("sm_80",), (96,)) == {"sm_80": 56}
    assert len(compiled) == sum(expected.values())
