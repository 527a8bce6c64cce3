"""The real ``ragged_mma.cu`` and ``ragged_sm90.cu`` in the emulator, against float64: no race, conflict or stray access on the way."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated import (
    HOPPER,
    TOLERANCE,
    Guarded,
    assert_equals_reference,
    attend,
    emulated_module,
    needs_compiler,
    reserve,
    sampled,
)
from kernel_cases import BASE, CASES, LONG, Case, inputs_of
from planted_bugs import HOPPER as HOPPER_BUGS
from planted_bugs import MMA as MMA_BUGS

from kvrag_kernels import launch, reference, selftest
from kvrag_kernels.driver import DriverError
from kvrag_kernels.geometry import HEAD_DIMS, geometry_of, hopper_geometry

pytestmark = needs_compiler

UNSEEN = replace(BASE, name="unseen", rows=40, keys=500)
BY_NAME = {c.name: c for c in [*CASES, *LONG, UNSEEN]}
MMA, TURING = 900, 750
both_kernels = pytest.mark.parametrize("arch", [MMA, HOPPER], ids=["mma", "sm90"])


def run(
    case: Case, arch: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Return what :func:`emulated.attend` does; in ``unseen``, keys and values that no row sees are NaN."""
    module = emulated_module(case, dtype, arch=arch, **options)
    changed: dict[str, Any] = {}
    if case is UNSEEN:
        inputs: dict[str, Any] = inputs_of(case, dtype)
        changed["hi"] = inputs["hi"] - 150
        last = int(changed["hi"].max())
        for name in ("k", "v"):
            changed[name] = inputs[name].clone()
            changed[name][:, :, last + 1 :] = float("nan")
    out, lse, *want = attend(case, dtype, module, arch, **changed)
    assert arch == HOPPER or module.bank_conflicts == 0
    if changed:
        k, v = (changed[name][:, :, : last + 1] for name in ("k", "v"))
        want = list(reference.attention(inputs["q"], k, v, changed["hi"], scale=case.scale))
    return out, lse, *want


def check(case: Case, arch: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    assert_equals_reference(*run(case, arch, dtype, **options), atol=TOLERANCE[dtype])


@both_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_see_exactly_their_keys(case, arch):
    check(case, arch)


@pytest.mark.parametrize("arch", [MMA, TURING, HOPPER], ids=["mma", "turing", "sm90"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_float16(dim, arch):
    """Turing has no copy unit, and smaller tiles."""
    check(
        replace(BY_NAME["window-sinks"], dim=dim, rows=60, keys=300 if arch == HOPPER else 150),
        arch,
        torch.float16,
    )


@pytest.mark.parametrize(
    ("arch", "processors"), [(MMA, 1), (MMA, 5), (MMA, 64), (HOPPER, 1), (HOPPER, 64)]
)
@pytest.mark.parametrize("case", [*LONG, UNSEEN, BY_NAME["batch"]], ids=lambda c: c.name)
def test_keys_split_over_blocks_are_combined(case, arch, processors):
    check(case, arch, processors=processors, min_item=1)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *((MMA, n) for n in ("dim96", "long-batch", "long-wide")),
        *((HOPPER, n) for n in ("long", "unseen", "long-wide")),
    ],
)
def test_the_order_of_warps_and_of_copies_changes_no_bit(arch, name, seed):
    processors = 1 if arch == HOPPER else 4
    one, other = (run(BY_NAME[name], arch, processors=processors, seed=s)[0] for s in (0, seed))
    assert torch.equal(one, other)


def test_one_plan_serves_every_layer():
    case = BY_NAME["long"]
    module, geometry = emulated_module(case, torch.bfloat16, min_item=1), geometry_of(case.dim)
    inputs: dict[str, Any] = inputs_of(case, torch.bfloat16)
    call = launch.prepare(
        launch.Call(inputs["q"], inputs["k"], inputs["v"], inputs["hi"], None, 0, case.scale)
    )
    empty = Guarded(module, [call.q, call.k, call.v, call.hi])
    plan = launch.make_plan(module, geometry, call, empty)
    items, slots = plan[:2].tolist()
    shape = launch.shape_of(module, geometry, call)
    assert shape.batch * shape.tiles <= items <= shape.max_items
    assert 0 < slots <= shape.max_slots
    first, second = (launch.attend(module, geometry, call, plan, empty)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_the_error_is_at_most_that_of_torch():
    """Promise 8, as far as arithmetic goes: the same dtype, against float64, at most 1.5 × SDPA's own error."""
    case = replace(BASE, rows=96, keys=400, dim=128, limits="causal")
    out, _, want, _ = run(case, MMA)
    inputs: dict[str, Any] = inputs_of(case, torch.bfloat16)
    mask = reference.visible(inputs["hi"], None, 0, case.keys)
    qkv = (inputs[n] for n in ("q", "k", "v"))
    theirs = F.scaled_dot_product_attention(*qkv, attn_mask=mask, scale=case.scale, enable_gqa=True)
    assert (out.double() - want).abs().max() <= 1.5 * (theirs.double() - want).abs().max()
    assert (out.double() - want).square().mean() <= 1.5**2 * (
        theirs.double() - want
    ).square().mean()


def far_apart(x: torch.Tensor | None) -> torch.Tensor:
    """The same heads, 2^31 elements from one to the next: no page between them is ever touched."""
    assert x is not None
    flat = torch.frombuffer(reserve(5 * 2**30), dtype=x.dtype)
    return flat.as_strided(x.shape, (0, 2**31, x.shape[3], 1)).copy_(x)


def check_far(names: tuple[str, ...], **options: Any) -> None:
    case = replace(BASE, rows=10, keys=70)
    inputs = inputs_of(case, torch.bfloat16)
    module = emulated_module(case, torch.bfloat16, **options)
    got = attend(case, torch.bfloat16, module, **{name: far_apart(inputs[name]) for name in names})
    assert_equals_reference(*got, atol=TOLERANCE[torch.bfloat16])


def test_offsets_are_64_bit():
    check_far(("k", "v"))


def test_keys_that_are_expanded_are_made_whole():
    """A tensor map has no stride of 0."""
    case = replace(BASE, batch=2)
    inputs: dict[str, Any] = inputs_of(case, torch.bfloat16)
    same = {n: inputs[n][:1].expand(2, -1, -1, -1) for n in ("k", "v")}
    got = attend(
        case, torch.bfloat16, emulated_module(case, torch.bfloat16, arch=HOPPER), HOPPER, **same
    )
    assert_equals_reference(*got, atol=TOLERANCE[torch.bfloat16])


def check_itself(case: Case, planted: list[tuple[str, str]]) -> None:
    module, geometry = (
        emulated_module(case, torch.bfloat16, arch=HOPPER, replace=planted),
        hopper_geometry(case.dim),
    )
    defines = geometry.defines(torch.bfloat16, has_softcap=case.softcap > 0)
    call = launch.prepare(selftest.call_of(geometry, defines, "cpu"))
    assert call.softcap == case.softcap
    guarded = Guarded(module, [call.q, call.k, call.v, call.hi, call.lo])
    selftest.compare(
        call, *(x.float() for x in launch.attend(module, geometry, call, empty=guarded))
    )


@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_the_self_test_passes_a_kernel_that_is_right(dim, softcap):
    check_itself(replace(BASE, dim=dim, softcap=softcap), [])


def test_the_self_test_fails_one_that_is_not():
    with pytest.raises(DriverError, match=r"came out wrong by \d"):
        check_itself(BASE, [("return (key < prefix)", "return (key <= prefix)")])


def check_with(name: str, arch: int, planted: list[tuple[str, str]]) -> None:
    """Run the case of a bug, under two orders of warps where copies run on their own."""
    if name == "far":
        check_far(("k",), replace=planted)
    elif arch == HOPPER:
        for seed in (0, 1):
            check(BY_NAME[name], arch, processors=1, seed=seed, replace=planted)
    elif name == "split":
        check(BY_NAME["long-window"], arch, min_item=1, processors=64, replace=planted)
    else:
        check(BY_NAME[name], arch, replace=planted)


BUGS = {(MMA, bug): row for bug, row in MMA_BUGS.items()} | {
    (HOPPER, bug): row for bug, row in HOPPER_BUGS.items()
}


@pytest.mark.parametrize(("arch", "bug"), sampled(BUGS))
def test_planted_bugs_are_caught(arch, bug):
    name, old, new = BUGS[arch, bug]
    with pytest.raises(AssertionError):  # EmulatorError is one; a build that fails is none
        check_with(name, arch, [(old, new)])


@pytest.mark.parametrize(
    ("arch", "name"), sorted({(arch, name) for (arch, _), (name, *_) in BUGS.items()})
)
def test_without_a_bug_the_same_checks_pass(arch, name):
    check_with(name, arch, [])
