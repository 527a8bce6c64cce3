"""What layers of a stitch share is worked out once, and for no call that differs in anything it follows from."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import needs_compiler
from kit import noted, raising
from stitch_cases import CAPACITY, CASES, StitchCase, as_options, assert_stitched, stitching_of
from test_stitch import run_emulated

from kvrag_kernels import runtime, stitch, stitch_launch
from kvrag_kernels import stitch_check as checks
from kvrag_kernels.stitch import Parts, Stitching, Stored
from kvrag_kernels.stitch_layers import Kind, Remembered, alike

BY_NAME = {c.name: c for c in CASES}


@pytest.fixture
def forgotten(monkeypatch):
    monkeypatch.setattr(checks, "_ROWS", Remembered())
    monkeypatch.setattr(stitch_launch, "_PLANS", Remembered())


def stacked(case: StitchCase, count: int) -> Stitching:
    """A call of so many layers, all of which look alike; each has tensors of its own."""
    return stitching_of(replace(case, layers=count, tables=(0,) * count))


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", ["half", "kept-int4-shift"])
def test_one_layer_of_those_that_look_alike_is_checked_and_described(name, monkeypatch):
    checked = noted(monkeypatch, checks, "_check_part")
    sides = noted(monkeypatch, stitch_launch, "_side")
    case = BY_NAME[name]
    first = stacked(case, 5)
    parts = 2 * len(case.lengths)
    for call in (first, stacked(case, 3)):  # the second has other tensors and fewer layers, and needs nothing anew
        stitch(**as_options(call))
        stitch_launch.jobs_of(call)
        assert len(checked) == len(sides) == parts
    moved = replace(first, starts=[start + 1 for start in first.starts])
    stitch(**as_options(moved))
    assert len(checked) == 2 * parts, "other rows are another check"


def table_by_part(call: Stitching) -> list[list[int]]:
    """The table of parts, written down part by part as ``csrc/stitch.cu`` lists it."""

    def strides(x: torch.Tensor | None) -> list[int]:
        return [0, 0] if x is None else [x.stride(0), x.stride(1) if x.shape[1] > 1 else 0]

    def side(p: Stored, out: torch.Tensor) -> list[int]:
        size, residual = p.data.element_size(), p.residual
        pointers = [0 if x is None else x.data_ptr() for x in (p.data, p.scales, p.zeros, residual, out)]
        rows = [p.data.stride(0) * size, p.data.stride(1) * size, *strides(p.scales), *strides(p.zeros)]
        shared = [{1: 0, 32: 5}[p.tokens], 0 if residual is None else residual.stride(0)]
        return [*pointers, *rows, *shared, out.stride(0), out.stride(1)]

    found = []
    for index, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        layer, segment = divmod(index, len(call.starts))
        sides = [*side(k, call.out_keys[layer]), *side(v, call.out_values[layer])]
        found.append([*sides, call.starts[segment], k.data.shape[1], call.tables[layer]])
    return found


def uneven(call: Stitching) -> Stitching:
    """The same call, its last layer's buffers and first part in memory of another order."""
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (call.out_keys[-1], call.keys[-1].data)]
    outs = [*call.out_keys[:-1], call.out_keys[-1].contiguous()]
    keys = [*call.keys[:-1], replace(call.keys[-1], data=turned[1])]
    return replace(call, keys=keys, out_keys=outs)


@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_table_says_what_each_part_is(case, is_uneven):
    call = stitching_of(case)
    call = uneven(call) if is_uneven else call
    assert len(call.alike) == (2 if is_uneven else 1)
    assert stitch_launch.jobs_of(call).flatten(0, 1).tolist() == table_by_part(call)


@needs_compiler
@pytest.mark.parametrize("name", ["half", "kept-int8"])
def test_layers_that_differ_have_plans_of_their_own(name):
    call = uneven(stitching_of(BY_NAME[name]))
    run_emulated(call, [])
    assert_stitched(call, BY_NAME[name])


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "heads or head dims differ": lambda o: {"out_values": [o["out_values"][0], o["out_values"][1][:, :, :32]]},
    "keys of layer 1, segment 2 need rows": lambda o: {"out_keys": [o["out_keys"][0], o["out_keys"][1][:, :150]]},
    "values of layer 1, segment 2 are torch.float64": lambda o: {"values": [*o["values"][:-1], o["values"][-1].double()]},
    "keys of layer 1, segment 2 have 33 rows and its values 32": lambda o: {
        "values": [*o["values"][:-1], o["values"][-1][:, :32]]
    },
    "keys of layer 0, segment 0 have 5 rows and its values 4": lambda o: {"values": [x[:, :-1] for x in o["values"]]},
    "keys of layer 0, segment 1 need rows 100 to 170": lambda o: {"starts": (80, 100, 120)},
    "keys of layer 0, segment 0 need rows -1": lambda o: {"starts": (-1, 7, 120)},
    "keys of layer 0, segment 0 are torch.bfloat16 with scales": lambda o: {"key_scales": [torch.ones(3, 1, 64).half()] * 6},
    "layer 1 asks for 153 rows of table 1": lambda o: {"cos": o["cos"][:1], "sin": o["sin"][:1]},
}  # fmt: skip


@pytest.mark.parametrize("message", CHANGES)
def test_what_fitted_before_is_refused_once_it_differs(message):
    options = as_options(stitching_of(BY_NAME["half"]))
    stitch(**options)
    for _ in range(2):  # and what was refused is refused again
        with pytest.raises(ValueError, match=message):
            stitch(**(options | CHANGES[message](options)))


def test_rows_that_begin_between_copies_are_left_to_torch():
    """The same strides at another address: what is remembered of a layer says nothing of addresses."""
    call = stitching_of(BY_NAME["half"])
    assert stitch_launch.defines(call) is not None
    data = call.keys[-1].data
    memory = torch.empty(data.numel() + 1, dtype=data.dtype)[1:].view(data.shape).copy_(data)
    shifted = replace(call, keys=[*call.keys[:-1], replace(call.keys[-1], data=memory)])
    assert len(shifted.alike) == 1
    assert memory.data_ptr() % 16 == 2
    assert stitch_launch.defines(shifted) is None
    buffer = torch.empty(CAPACITY * 3 * 64 + 1, dtype=data.dtype)[1:].view(CAPACITY, 3, 64).transpose(0, 1)
    assert stitch_launch.defines(replace(call, out_values=[call.out_values[0], buffer])) is None


def test_everything_has_to_be_on_one_device():
    call = stitching_of(BY_NAME["skip"])
    assert stitch_launch.defines(call) is not None
    assert call.skip is not None
    elsewhere = torch.device("meta")
    first = call.keys[0]
    assert first.scales is not None
    for changed in (
        {"skip": call.skip.to(elsewhere)},
        {"sin": call.sin.to(elsewhere)},
        {"keys": [replace(first, scales=first.scales.to(elsewhere)), *call.keys[1:]]},
    ):
        assert stitch_launch.defines(replace(call, **changed)) is None


def test_layers_without_parts_are_launched_nowhere():
    call = stitching_of(replace(BY_NAME["half"], lengths=(0, 0, 0)))
    stitch_launch.run(None, call, lambda jobs: jobs)  # would fail if it launched
    stitch([], [], [], [], [], call.cos, call.sin, [])
    assert alike(0, [([], 0)]) == {}


def test_parts_are_what_their_columns_say():
    whole = stitching_of(BY_NAME["kept-fp8-shift"]).keys
    parts = Parts.of(whole)
    assert Parts.of(parts) is parts
    assert len(parts) == len(whole)
    for found in (list(parts), [parts[i] for i in range(len(parts))], list(parts[:])):
        for one, other in zip(found, whole, strict=True):
            assert one.data is other.data
            assert one.scales is other.scales
            assert one.zeros is other.zeros
            assert one.residual is other.residual
    with pytest.raises(ValueError, match="2 residuals were given for 6 parts"):
        Parts.of([*whole[:2], *(replace(p, residual=None) for p in whole[2:])])


def test_the_newest_kinds_are_remembered():
    remembered = Remembered[int](limit=3)
    for i in range(5):
        assert remembered.get(Kind("layer", i), lambda i=i: i) == i
    assert len(remembered) == 3
    assert remembered.get(Kind("layer", 4), lambda: -1) == 4
    assert remembered.get(Kind("layer", 0), lambda: -1) == -1

    with pytest.raises(ValueError, match="does not fit"):
        remembered.get(Kind("other"), raising(ValueError, "does not fit"))
    assert remembered.get(Kind("other"), lambda: 7) == 7


def test_which_columns_there_are_is_part_of_a_kind():
    """Zeros without residuals are not residuals without zeros, of whatever shapes."""
    x = [torch.zeros(2, 3)]
    kinds = [
        next(iter(alike(1, columns))) for columns in ([(x, 1), (None, 1)], [(None, 1), (x, 1)], [(x, 1), (None, 1)])
    ]
    assert kinds[0] == kinds[2] != kinds[1]


def test_kinds_of_one_hash_are_still_two():
    one, other = Kind(-1), Kind(-2)  # Python gives both the same hash
    assert hash(-1) == hash(-2)
    assert one != other
    assert one == Kind(-1)
    assert one != (-1,)


@pytest.mark.parametrize("is_capturing", [False, True])
def test_a_captured_stitch_is_left_to_torch(is_capturing, monkeypatch):
    """Its table of parts would be gone by the first replay."""
    asked = []
    monkeypatch.setattr(runtime, "has_stitch", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(stitch_launch, "defines", lambda call: asked.append(call))
    assert not runtime.stitch(stitching_of(BY_NAME["half"]))
    assert bool(asked) is not is_capturing


def test_the_table_is_made_on_the_host_whatever_the_default_device_is():
    call = stitching_of(CASES[0])
    want = stitch_launch.jobs_of(call)
    torch.set_default_device("meta")
    try:
        got = stitch_launch.jobs_of(call)
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want)
