"""The probe op: torch path and the real ``probe.cu`` in the emulator, against the float64 probabilities."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import Guarded, geometry_for, needs_compiler, sampled
from emulator.build import EmulatedModule
from kernel_cases import BASE, CASES, Case, inputs_of
from planted_bugs import PROBE

from kvrag_kernels import launch, probe_mass, ragged_attention, reference

MORE = [
    replace(BASE, name="many-keys", rows=70, keys=300),
    replace(BASE, name="many-wide", rows=40, keys=150, dim=256, heads=8),
    replace(
        BASE, name="many-batches", rows=40, keys=150, batch=2, limits="per_batch", has_sinks=True
    ),
]
BY_NAME = {c.name: c for c in [*CASES, *MORE]}


def prepared(
    case: Case, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return inputs, options, the log-sum-exps, and the mass to expect."""
    inputs: dict[str, Any] = inputs_of(case, dtype)
    v = inputs.pop("v")
    options = {
        "prefix": case.prefix,
        "scale": case.scale,
        "softcap": case.softcap,
        "sinks": inputs.pop("sinks"),
    }
    p, lse = reference.probabilities(**inputs, **options)
    assert ragged_attention(**inputs, v=v, **options)[1].shape == lse.shape
    return inputs, options, lse.float(), reference.mass(p, v.shape[1])


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda c: c.name)
def test_each_key_gets_its_probability(case):
    inputs, options, lse, want = prepared(case, torch.float32)
    got = probe_mass(**inputs, lse=lse, **options)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)


def emulated(
    case: Case, planted: list[tuple[str, str]], dtype: torch.dtype = torch.bfloat16, arch: int = 900
) -> None:
    inputs, options, lse, want = prepared(case, dtype)
    sinks = options.pop("sinks")
    call = launch.prepare(
        launch.Call(
            inputs["q"],
            inputs["k"],
            inputs["k"],
            inputs["hi"],
            inputs["lo"],
            **options,
            sinks=sinks,
        )
    )
    geometry = geometry_for(case, arch)
    defines = geometry.defines(dtype, has_softcap=case.softcap > 0)
    module = EmulatedModule("probe.cu", defines, arch=arch, replace=planted)
    guarded = Guarded(module, [call.q, call.k, call.hi, call.lo, call.sinks, lse])
    got = launch.probe(module, geometry, call, lse, empty=guarded)
    torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=1e-5)
    assert module.bank_conflicts == 0


@needs_compiler
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda c: c.name)
def test_the_kernel_does_the_same(case):
    emulated(case, [])


@needs_compiler
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_turing(dim):
    emulated(replace(BY_NAME["many-keys"], dim=dim), [], torch.float16, arch=750)


@needs_compiler
@pytest.mark.parametrize("bug", sampled(PROBE))
def test_planted_bugs_are_caught(bug):
    name, old, new = PROBE[bug]
    with pytest.raises(AssertionError):
        emulated(BY_NAME[name], [(old, new)])


def test_torch_finds_no_fault_in_the_op():
    inputs, options, lse, _ = prepared(BASE, torch.float32)
    args = (inputs["q"], inputs["k"], lse, inputs["hi"])
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.kvrag.probe_mass.default, args, {"scale": options["scale"]}, test_utils=checks
    )


def test_log_sums_of_other_rows_are_refused():
    inputs, options, lse, _ = prepared(BASE, torch.float32)
    with pytest.raises(ValueError, match="lse has the shape"):
        probe_mass(**inputs, lse=lse[:, :2], **options)
    with pytest.raises(ValueError, match="lse is on meta"):
        probe_mass(**inputs, lse=lse.to("meta"), **options)
