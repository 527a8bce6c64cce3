"""The stitch op: torch path and the real ``stitch.cu`` in the emulator, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import needs_compiler, sampled
from emulator.build import EmulatedModule
from stitch_cases import CASES, StitchCase, as_options, assert_stitched, stitching_of

from kvrag_kernels import reference, stitch, stitch_launch
from kvrag_kernels.stitch import rotate
from kvrag_kernels.stitch_launch import Stitching

BY_NAME = {c.name: c for c in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_parts_come_to_their_rows(case: StitchCase) -> None:
    call = stitching_of(case)
    stitch(**as_options(call))
    assert_stitched(call, case)


def run_emulated(call: Stitching, planted: list[tuple[str, str]], seed: int = 0) -> None:
    options = stitch_launch.defines(call)
    assert options is not None
    module = EmulatedModule("stitch.cu", options, replace=planted, seed=seed)
    inputs = [x for p in [*call.keys, *call.values] for x in (p.data, p.scales, p.residual)]

    def to_device(jobs: torch.Tensor) -> torch.Tensor:
        module.allow([*inputs, jobs, call.cos, call.sin, call.skip], [*call.out_keys, *call.out_values])
        run_emulated.jobs = jobs  # type: ignore[attr-defined]  # as the allocator would, it lives until the launch is over
        return jobs

    stitch_launch.run(module, call, to_device)


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_kernel_does_the_same(case: StitchCase) -> None:
    call = stitching_of(case)
    run_emulated(call, [])
    assert_stitched(call, case)


BUGS = {
    "the rotation turns the other way": ("half", "a = x * c - b * s;", "a = x * c + b * s;"),
    "the second half uses the turned first": ("half", "b = b * c + x * s;", "b = b * c + a * s;"),
    "halves are taken as neighbours": ("half", "split = rotated && !INTERLEAVED;", "split = false;"),
    "a partial rotation pairs across the whole head": ("partial", "unit + ROTARY / 16 : 2", "unit + UNITS / 2 : 2"),
    "angles start at the chunk, not at its rows": ("half", "(job.start + row) * (ROTARY / 2)", "row * (ROTARY / 2)"),
    "every layer takes the first table": ("half", "job.table * p.table_stride +", "0 * p.table_stride +"),
    "an angle of zero multiplies": ("zero-angles", "if (c == 1.0f && s == 0.0f) return true;", ""),
    "rows that will be recomputed are written": ("skip", "(p.skip && load(p.skip + job.start + row))", "false"),
    "rows beyond the chunk are read": ("half", "if (row >= job.rows ||", "if ("),
    "residuals come after the rotation's scale": ("fp8", "if (s.residual) UNROLL", "if (false) UNROLL"),
    "nibbles are swapped": ("int4", "bits >> (4 * i) & 15) - 8", "bits >> (4 * (i ^ 1)) & 15) - 8"),
    "scales of another row": ("int8-token", "+ row * s.scale_row;", "+ 0 * s.scale_row;"),
    "fp8 has the wrong bias": ("fp8", "0x1p120f", "0x1p121f"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("bug", sampled(BUGS))
def test_planted_bugs_are_caught(bug: str) -> None:
    name, old, new = BUGS[bug]
    call = stitching_of(BY_NAME[name])

    def check() -> None:
        run_emulated(call, [(old, new)])
        assert_stitched(call, BY_NAME[name])

    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_rotates_like_complex_numbers(interleaved: bool) -> None:
    x, angles = torch.randn(2, 5, 8), torch.randn(5, 4)
    turned = reference.rotated(x, angles.cos(), angles.sin(), interleaved=interleaved)
    pairs = x.unflatten(2, (4, 2)) if interleaved else x.unflatten(2, (2, 4)).transpose(2, 3)
    want = torch.view_as_complex(pairs.contiguous().double()) * torch.polar(torch.ones(5, 4).double(), angles.double())
    got = turned.unflatten(2, (4, 2)) if interleaved else turned.unflatten(2, (2, 4)).transpose(2, 3)
    torch.testing.assert_close(torch.view_as_complex(got.contiguous()), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        rotate(x, angles.cos(), angles.sin(), interleaved=interleaved).double(), turned, atol=1e-6, rtol=0
    )


def test_shapes_that_the_kernel_has_no_form_for_are_left_to_torch() -> None:
    call = stitching_of(CASES[0])
    assert stitch_launch.defines(call) is not None
    assert stitch_launch.defines(replace(call, cos=call.cos[..., :20], sin=call.sin[..., :20])) is None
    mixed = [*call.keys[:-1], stitching_of(BY_NAME["int8-token"]).keys[-1]]
    assert stitch_launch.defines(replace(call, keys=mixed)) is None
    wide = [torch.empty(o.shape, dtype=torch.float32) for o in call.out_keys]
    assert stitch_launch.defines(replace(call, out_keys=wide)) is None


def test_compiles_into_one_graph() -> None:
    call = stitching_of(CASES[0])

    def step(cos: torch.Tensor) -> torch.Tensor:
        stitch(**(as_options(call) | {"cos": cos * 1.0}))
        return call.out_keys[0][:, 80:85].float() + 1

    torch.compile(step, fullgraph=True, backend="aot_eager")(call.cos)
    assert_stitched(call, CASES[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"starts": (80, 7)}, "one part per start"),
        ({"starts": (80, 7, 150)}, "a buffer of 160 rows"),
        ({"tables": (0, 2)}, "layer 1 asks for"),
        ({"cos": torch.zeros(2, 160, 32, dtype=torch.float64)}, "both need float32"),
        ({"key_scales": [torch.ones(3, 1, 64).half()] * 6}, "with scales"),
        ({"key_scales": [torch.ones(3, 1, 64).half()] * 5}, "5 scales were given for 6 parts"),
        ({"keys": [torch.zeros(3, 5, 64, dtype=torch.int8)] * 6}, "without scales"),
        ({"keys": [torch.zeros(3, 5, 32).bfloat16()] * 6}, "heads or head dims differ"),
        ({"keys": [torch.zeros(3, 5, 64, dtype=torch.float64)] * 6}, "stored KV is one of"),
        ({"key_residuals": [torch.zeros(3, 63)] * 6}, "a residual"),
        ({"skip": torch.zeros(160)}, "one bool per row"),
    ],
)
def test_refusals_name_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stitch(**(as_options(stitching_of(CASES[0])) | changed))


def test_scales_have_to_divide_the_channels() -> None:
    options = as_options(stitching_of(BY_NAME["int8-token"]))
    with pytest.raises(ValueError, match="a divisor of D"):
        stitch(**(options | {"key_scales": [s.expand(-1, -1, 63) for s in options["key_scales"]]}))
