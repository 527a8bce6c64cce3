"""The real ``ragged_mma.cu`` in the emulator: the contract against float64, and no race, conflict or stray access on the way."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from emulated import TOLERANCE, assert_equals_reference, attend, emulated_module, needs_compiler, sampled
from kernel_cases import BASE, CASES, Case, inputs_of
from planted_bugs import BUGS

from kvrag_kernels import launch, reference
from kvrag_kernels.geometry import geometry_of

pytestmark = needs_compiler

LONG = [
    replace(BASE, name="long", rows=60, keys=900),
    replace(BASE, name="long-window", rows=60, keys=900, limits="window", prefix=4, has_sinks=True),
    replace(BASE, name="dense-window", rows=200, keys=220, limits="window"),
    replace(BASE, name="long-batch", rows=60, keys=700, batch=2, limits="per_batch", dim=128),
    replace(BASE, name="long-wide", rows=30, keys=500, dim=256, heads=8, kv_heads=1),
    replace(BASE, name="long-empty", rows=100, keys=600, limits="empty"),
    replace(BASE, name="long-chunks", rows=600, keys=700, prefix=100, limits="chunks", heads=2, kv_heads=1),
]
BY_NAME = {c.name: c for c in [*CASES, *LONG]}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_see_exactly_their_keys(case: Case) -> None:
    module = emulated_module(case, torch.bfloat16)
    assert_equals_reference(*attend(case, torch.bfloat16, module), atol=TOLERANCE[torch.bfloat16])
    assert module.bank_conflicts == 0


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_float16(dim: int) -> None:
    case = replace(BY_NAME["window-sinks"], dim=dim, rows=60, keys=150)
    module = emulated_module(case, torch.float16)
    assert_equals_reference(*attend(case, torch.float16, module), atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_turing_has_no_copy_unit_and_smaller_tiles(dim: int) -> None:
    case = replace(BY_NAME["window-sinks"], dim=dim, rows=50, keys=150)
    module = emulated_module(case, torch.float16, arch=750)
    assert_equals_reference(*attend(case, torch.float16, module, arch=750), atol=TOLERANCE[torch.float16])
    assert module.bank_conflicts == 0


@pytest.mark.parametrize("processors", [1, 5, 64])
@pytest.mark.parametrize("case", LONG, ids=lambda c: c.name)
def test_keys_split_over_blocks_are_combined(case: Case, processors: int) -> None:
    module = emulated_module(case, torch.bfloat16, processors=processors, min_item=1)
    assert_equals_reference(*attend(case, torch.bfloat16, module), atol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["dim96", "long-batch", "long-wide"])
def test_the_order_of_warps_changes_no_bit(name: str, seed: int) -> None:
    case = BY_NAME[name]
    one, other = (attend(case, torch.bfloat16, emulated_module(case, torch.bfloat16, seed=s))[0] for s in (0, seed))
    assert torch.equal(one, other)


def test_one_plan_serves_every_layer() -> None:
    case = BY_NAME["long"]
    module, geometry = emulated_module(case, torch.bfloat16, min_item=1), geometry_of(case.dim)
    inputs = inputs_of(case, torch.bfloat16)
    call = launch.prepare(launch.Call(inputs["q"], inputs["k"], inputs["v"], inputs["hi"], None, 0, case.scale))  # type: ignore[arg-type]
    module.allow([call.q, call.k, call.v, call.hi], [])
    made: list[torch.Tensor] = []

    def empty(*args: object, **options: object) -> torch.Tensor:
        made.append(torch.empty(*args, **options))  # type: ignore[call-overload]
        module.allow([call.q, call.k, call.v, call.hi], made)
        return made[-1]

    plan = launch.make_plan(module, geometry, call, empty)
    items, slots = plan[:2].tolist()
    shape = launch.shape_of(module, geometry, call)
    assert shape.batch * shape.tiles <= items <= shape.max_items
    assert 0 < slots <= shape.max_slots
    first, second = (launch.attend(module, geometry, call, plan, empty)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_the_error_is_at_most_that_of_torch() -> None:
    """Promise 8, as far as arithmetic goes: the same dtype, against float64, at most 1.5 × SDPA's own error."""
    case = replace(BASE, rows=96, keys=400, dim=128, limits="causal")
    out, _, want, _ = attend(case, torch.bfloat16, emulated_module(case, torch.bfloat16))
    inputs = inputs_of(case, torch.bfloat16)
    mask = reference.visible(inputs["hi"], None, 0, case.keys)  # type: ignore[arg-type]
    theirs = F.scaled_dot_product_attention(
        *(inputs[n] for n in ("q", "k", "v")), attn_mask=mask, scale=case.scale, enable_gqa=True
    )  # type: ignore[arg-type]
    assert (out.double() - want).abs().max() <= 1.5 * (theirs.double() - want).abs().max()
    assert (out.double() - want).square().mean() <= 1.5**2 * (theirs.double() - want).square().mean()


def far_apart(x: torch.Tensor, memory: mmap.mmap) -> torch.Tensor:
    """The same heads, 2^31 elements from one to the next: no page between them is ever touched."""
    flat = torch.frombuffer(memory, dtype=x.dtype)
    view = flat.as_strided(x.shape, (0, 2**31, x.shape[3], 1))
    view.copy_(x)
    return view


def reserve(num_bytes: int) -> mmap.mmap:
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, ValueError):
        pytest.skip("this system reserves no 5 GiB of address space")


def test_offsets_are_64_bit() -> None:
    case = replace(BASE, rows=10, keys=70)
    inputs = inputs_of(case, torch.bfloat16)
    far = {n: far_apart(inputs[n], reserve(5 * 2**30)) for n in ("k", "v")}  # type: ignore[arg-type]
    got = attend(case, torch.bfloat16, emulated_module(case, torch.bfloat16), **far)
    assert_equals_reference(*got, atol=TOLERANCE[torch.bfloat16])


def check(name: str, seed: int, planted: list[tuple[str, str]]) -> None:
    case = BY_NAME[{"split": "long-window", "far": "dim64"}.get(name, name)]
    far = {"k": far_apart(inputs_of(case, torch.bfloat16)["k"], reserve(5 * 2**30))} if name == "far" else {}  # type: ignore[arg-type]
    options = {"min_item": 1, "processors": 64} if name == "split" else {}
    module = emulated_module(case, torch.bfloat16, seed=seed, replace=planted, **options)  # type: ignore[arg-type]
    assert_equals_reference(*attend(case, torch.bfloat16, module, **far), atol=TOLERANCE[torch.bfloat16])
    assert module.bank_conflicts == 0


@pytest.mark.parametrize("bug", sampled(BUGS))
def test_planted_bugs_are_caught(bug: str) -> None:
    name, old, new = BUGS[bug]
    with pytest.raises(AssertionError):  # EmulatorError is one; a build that fails is none
        check(name, 0, [(old, new)])


@pytest.mark.parametrize("name", sorted({name for name, *_ in BUGS.values()}))
def test_without_a_bug_the_same_checks_pass(name: str) -> None:
    check(name, 0, [])
