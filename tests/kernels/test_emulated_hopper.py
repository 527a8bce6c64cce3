"""The real ``ragged_sm90.cu`` in the emulator: the cases of the other kernel, and what TMA and wgmma add to go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import (
    HOPPER,
    TOLERANCE,
    Guarded,
    assert_equals_reference,
    attend,
    emulated_module,
    needs_compiler,
    sampled,
)
from hopper_bugs import BUGS
from kernel_cases import BASE, CASES, Case, inputs_of

from kvrag_kernels import launch, reference, selftest
from kvrag_kernels.driver import DriverError
from kvrag_kernels.geometry import HEAD_DIMS, hopper_geometry

pytestmark = needs_compiler

LONG = [
    replace(BASE, name="long", rows=60, keys=1000),
    replace(BASE, name="long-window", rows=60, keys=1000, limits="window", prefix=4, has_sinks=True),
    replace(BASE, name="dense-window", rows=200, keys=220, limits="window"),
    replace(BASE, name="long-batch", rows=60, keys=700, batch=2, limits="per_batch", dim=128),
    replace(BASE, name="long-wide", rows=30, keys=500, dim=256, heads=8, kv_heads=1),
    replace(BASE, name="long-chunks", rows=600, keys=700, prefix=100, limits="chunks", heads=2, kv_heads=1),
    replace(BASE, name="unseen", rows=40, keys=500),
    replace(BASE, name="batch", batch=2),
]
BY_NAME = {c.name: c for c in [*CASES, *LONG]}


def run(case: Case, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[torch.Tensor, ...]:
    """Run a case; in ``unseen``, what no row sees is NaN."""
    inputs = inputs_of(case, dtype)
    changed: dict[str, Any] = {}
    if case.name == "unseen":
        changed["hi"] = inputs["hi"] - 150  # type: ignore[operator]
        last = int(changed["hi"].max())
        for name in ("k", "v"):
            changed[name] = inputs[name].clone()  # type: ignore[union-attr]
            changed[name][:, :, last + 1 :] = float("nan")
    out, lse, want, want_lse = attend(
        case, dtype, emulated_module(case, dtype, arch=HOPPER, **options), HOPPER, **changed
    )
    if changed:
        seen = {n: x[:, :, : last + 1] for n, x in changed.items() if n != "hi"}
        want, want_lse = reference.attention(inputs["q"], seen["k"], seen["v"], changed["hi"], scale=case.scale)  # type: ignore[arg-type]
    return out, lse, want, want_lse


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_see_exactly_their_keys(case: Case) -> None:
    assert_equals_reference(*run(case), atol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_float16(dim: int) -> None:
    case = replace(BY_NAME["window-sinks"], dim=dim, rows=60, keys=300)
    assert_equals_reference(*run(case, torch.float16), atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize("processors", [1, 64])
@pytest.mark.parametrize("case", LONG, ids=lambda c: c.name)
def test_keys_split_over_blocks_are_combined(case: Case, processors: int) -> None:
    assert_equals_reference(*run(case, processors=processors, min_item=1), atol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["long", "unseen", "long-wide"])
def test_the_order_of_warps_and_of_copies_changes_no_bit(name: str, seed: int) -> None:
    one, other = (run(BY_NAME[name], processors=1, seed=s)[0] for s in (0, seed))
    assert torch.equal(one, other)


def test_keys_that_are_expanded_are_made_whole() -> None:
    """A tensor map has no stride of 0."""
    case = replace(BASE, batch=2)
    inputs: dict[str, Any] = inputs_of(case, torch.bfloat16)
    same = {n: inputs[n][:1].expand(2, -1, -1, -1) for n in ("k", "v")}
    got = attend(case, torch.bfloat16, emulated_module(case, torch.bfloat16, arch=HOPPER), HOPPER, **same)
    assert_equals_reference(*got, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_the_self_test_passes_a_kernel_that_is_right(dim: int, softcap: float) -> None:
    case = replace(BASE, dim=dim, softcap=softcap)
    check_itself(case, [])


def test_the_self_test_fails_one_that_is_not() -> None:
    with pytest.raises(DriverError, match=r"came out wrong by \d"):
        check_itself(BASE, [("return key < prefix ||", "return key <= prefix ||")])


def check_itself(case: Case, planted: list[tuple[str, str]]) -> None:
    module, geometry = emulated_module(case, torch.bfloat16, arch=HOPPER, replace=planted), hopper_geometry(case.dim)
    call = launch.prepare(
        selftest.call_of(geometry, geometry.defines(torch.bfloat16, has_softcap=case.softcap > 0), "cpu")
    )
    assert call.softcap == case.softcap
    guarded = Guarded(module, [call.q, call.k, call.v, call.hi, call.lo])
    selftest.compare(call, *(x.float() for x in launch.attend(module, geometry, call, empty=guarded)))


def check(name: str, planted: list[tuple[str, str]]) -> None:
    for seed in (0, 1):
        assert_equals_reference(
            *run(BY_NAME[name], processors=1, seed=seed, replace=planted), atol=TOLERANCE[torch.bfloat16]
        )


@pytest.mark.parametrize("bug", sampled(BUGS))
def test_planted_bugs_are_caught(bug: str) -> None:
    name, old, new = BUGS[bug]
    with pytest.raises(AssertionError):  # EmulatorError is one; a build that fails is none
        check(name, [(old, new)])


@pytest.mark.parametrize("name", sorted({name for name, *_ in BUGS.values()}))
def test_without_a_bug_the_same_checks_pass(name: str) -> None:
    check(name, [])
