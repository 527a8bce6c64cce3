"""The stitch op: torch path and the real ``stitch.cu`` in the emulator, against float64."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import needs_compiler, reserve, sampled
from emulator.build import EmulatedModule
from planted_bugs import STITCH
from stitch_cases import (
    CASES,
    StitchCase,
    as_options,
    assert_stitched,
    placed,
    read_back,
    stitching_of,
)

from kvrag_kernels import reference, runtime, stitch, stitch_launch
from kvrag_kernels.stitch import rotate
from kvrag_kernels.stitch_launch import FP8, Stitching, Stored

BY_NAME = {c.name: c for c in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_parts_come_to_their_rows(case):
    call = stitching_of(case)
    stitch(**as_options(call))
    assert_stitched(call, case)


def run_emulated(call: Stitching, planted: list[tuple[str, str]], seed: int = 0) -> None:
    options = stitch_launch.defines(call)
    assert options is not None
    module = EmulatedModule("stitch.cu", options, replace=planted, seed=seed)
    inputs = [x for p in [*call.keys, *call.values] for x in (p.data, p.scales, p.zeros)]

    def to_device(table: torch.Tensor) -> torch.Tensor:
        module.allow(
            [*inputs, table, call.cos, call.sin, call.skip], [*call.out_keys, *call.out_values]
        )
        run_emulated.table = table  # as the allocator would, it lives until the launch is over
        return table

    stitch_launch.run(module, call, to_device)


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_kernel_does_the_same(case):
    call = stitching_of(case)
    run_emulated(call, [])
    assert_stitched(call, case)


ROUNDED = [c for c in CASES if c.kept != "auto"]


def assert_as_read(call: Stitching, case: StitchCase) -> None:
    """The buffers' rows have the bits of what torch reads from the same codes; the layers don't turn."""
    for layer, k, v, rows, kept in placed(call):
        outs = call.out_keys[layer], call.out_values[layer]
        for out, want in zip(outs, read_back(k, v, case.dtype), strict=True):
            assert torch.equal(out[:, rows][:, kept], want[:, kept])


def still(case: StitchCase) -> Stitching:
    """The case without rotation, which the reader of codes knows nothing of."""
    call = stitching_of(replace(case, tables=(-1,) * case.layers))
    assert call.keys[0].zeros is not None
    return call


@pytest.mark.parametrize("case", ROUNDED, ids=lambda c: c.name)
def test_codes_are_read_to_the_bit(case):
    call = still(case)
    stitch(**as_options(call))
    assert_as_read(call, case)


@needs_compiler
@pytest.mark.parametrize("case", ROUNDED, ids=lambda c: c.name)
def test_the_kernel_reads_codes_to_the_bit(case):
    call = still(case)
    run_emulated(call, [])
    assert_as_read(call, case)


@pytest.mark.parametrize("case", ROUNDED, ids=lambda c: c.name)
def test_turned_keys_are_one_rounding_from_reading_first(case):
    """Torch rounds what it reads before it turns it; the op does not, so it is the closer of the two."""
    case = replace(case, tables=(0, 1))
    call = stitching_of(case)
    stitch(**as_options(call))
    step = torch.finfo(case.dtype).eps
    for layer, k, v, rows, kept in placed(call):
        first = read_back(k, v, case.dtype)[0].float()
        want = rotate(
            first, call.cos[layer, rows], call.sin[layer, rows], interleaved=call.interleaved
        )
        # of either element of a pair, and of the result
        bound = step * (first.abs().amax(2, keepdim=True) * 2 + want.abs())
        got = call.out_keys[layer][:, rows].float()
        assert bool(((got - want).abs() <= bound)[:, kept].all())


def far_apart(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same tensor with 2^31 elements from one index of a dimension to the next: no page between them is ever touched."""
    strides = list(x.contiguous().stride())
    strides[dim] = 2**31
    memory = reserve((2**31 * (x.shape[dim] - 1) + x.numel()) * x.element_size())
    view = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides)
    return view.copy_(x)


def spread_out(call: Stitching) -> Stitching:
    """The same call, all that it reads and writes far apart: heads of data and buffers; of scales, layers and groups of rows."""
    first, values = call.keys[0], call.values[0]
    assert first.scales is not None
    assert first.zeros is not None
    assert values.scales is not None
    keys = Stored(far_apart(first.data, 1), far_apart(first.scales, 2), far_apart(first.zeros, 2))
    values = Stored(far_apart(values.data, 0), far_apart(values.scales, 0))
    outs = ([far_apart(out, 0) for out in side] for side in (call.out_keys, call.out_values))
    return replace(call, keys=[keys], values=[values], out_keys=next(outs), out_values=next(outs))


FAR = StitchCase("far", kept="int4", heads=2, layers=2, lengths=(60,), starts=(90,))


@needs_compiler
def test_offsets_are_64_bit():
    call = spread_out(stitching_of(FAR))
    run_emulated(call, [])
    assert_stitched(call, FAR)


@needs_compiler
@pytest.mark.parametrize("bug", sampled(STITCH))
def test_planted_bugs_are_caught(bug):
    name, old, new = STITCH[bug]
    case = FAR if name == "far" else BY_NAME[name]
    call = spread_out(stitching_of(case)) if name == "far" else stitching_of(case)

    def check():
        run_emulated(call, [(old, new)])
        assert_stitched(call, case)

    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_rotates_like_complex_numbers(interleaved):
    x, angles = torch.randn(2, 5, 8), torch.randn(5, 4)
    turned = reference.rotated(x, angles.cos(), angles.sin(), interleaved=interleaved)
    pairs = x.unflatten(2, (4, 2)) if interleaved else x.unflatten(2, (2, 4)).transpose(2, 3)
    want = torch.view_as_complex(pairs.contiguous().double()) * torch.polar(
        torch.ones(5, 4).double(), angles.double()
    )
    got = (
        turned.unflatten(2, (4, 2)) if interleaved else turned.unflatten(2, (2, 4)).transpose(2, 3)
    )
    torch.testing.assert_close(torch.view_as_complex(got.contiguous()), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        rotate(x, angles.cos(), angles.sin(), interleaved=interleaved).double(),
        turned,
        atol=1e-6,
        rtol=0,
    )


def test_what_the_kernel_has_no_form_for_is_left_to_torch():
    call = stitching_of(CASES[0])
    assert stitch_launch.defines(call) is not None
    assert (
        stitch_launch.defines(replace(call, cos=call.cos[..., :20], sin=call.sin[..., :20])) is None
    )
    mixed = [*call.keys[:-1], stitching_of(BY_NAME["float16"]).keys[-1]]
    assert stitch_launch.defines(replace(call, keys=mixed)) is None
    wide = [torch.empty(o.shape, dtype=torch.float32) for o in call.out_keys]
    assert stitch_launch.defines(replace(call, out_keys=wide)) is None


def wider(x: torch.Tensor, pad: int) -> torch.Tensor:
    """The same tensor in rows that are longer, with NaN or nonsense between them."""
    fill = float("nan") if x.dtype.is_floating_point and x.dtype != FP8 else 77
    longer = torch.full((*x.shape[:-1], x.shape[-1] + pad), fill, dtype=x.dtype)
    longer[..., : x.shape[-1]] = x
    return longer[..., : x.shape[-1]]


def with_strides(call: Stitching, **pads: int) -> Stitching:
    """The same call with rows that don't follow each other."""

    def padded(p: Stored) -> Stored:
        return replace(
            p, **{n: wider(x, pad) for n, pad in pads.items() if (x := getattr(p, n)) is not None}
        )

    return replace(call, keys=[*map(padded, call.keys)], values=[*map(padded, call.values)])


@needs_compiler
@pytest.mark.parametrize(
    "name", ["kept-int8-skip", "kept-int4-skip", "kept-fp8", "half", "int8-token"]
)
def test_rows_may_lie_apart(name):
    call = with_strides(stitching_of(BY_NAME[name]), data=16, scales=8, zeros=8)
    assert not call.keys[1].data.is_contiguous()
    run_emulated(call, [])
    assert_stitched(call, BY_NAME[name])


@pytest.mark.parametrize("pads", [{"data": 1}, {"scales": 3}, {"zeros": 3}])
@pytest.mark.parametrize("name", ["kept-int8-skip", "kept-int4-skip"])
def test_rows_that_no_wide_access_can_read_are_left_to_torch(name, pads):
    call = with_strides(stitching_of(BY_NAME[name]), **pads)
    assert stitch_launch.defines(stitching_of(BY_NAME[name])) is not None
    assert stitch_launch.defines(call) is None
    stitch(**as_options(call))
    assert_stitched(call, BY_NAME[name])


def moved_by(x: torch.Tensor, count: int) -> torch.Tensor:
    """The same tensor, with the same strides, so many elements behind a place where wide accesses may begin."""
    memory = torch.empty(x.numel() + 16 + count, dtype=x.dtype)
    first = -memory.data_ptr() // x.element_size() % (16 // x.element_size()) + count
    return memory[first : first + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("name", ["half", "kept-int8"])
def test_memory_that_begins_between_wide_accesses_is_left_to_torch(name):
    call = stitching_of(BY_NAME[name])
    whole = call.keys[0]
    tensors = {
        n: x.contiguous()
        for n in ("data", "scales", "zeros")
        if (x := getattr(whole, n)) is not None
    }
    first = replace(whole, **tensors)
    for count, is_found in ((0, True), (1, False)):
        changes: list[dict[str, Any]] = [
            {"cos": moved_by(call.cos, count)},
            {"sin": moved_by(call.sin, count)},
            {
                "out_values": [
                    moved_by(call.out_values[0].contiguous(), count),
                    *call.out_values[1:],
                ]
            },
        ]
        shifted = [replace(first, **{n: moved_by(x, count)}) for n, x in tensors.items()]
        changes += [{"keys": [part, *call.keys[1:]]} for part in shifted]
        for changed in changes:
            assert (stitch_launch.defines(replace(call, **changed)) is not None) is is_found, (
                changed.keys()
            )


def test_scales_by_twos_are_left_to_torch():
    whole = stitching_of(BY_NAME["int4"])
    by_twos = [
        replace(p, scales=torch.stack([p.scales] * 2, dim=-1)[..., 0])
        for p in whole.keys
        if p.scales is not None
    ]
    assert stitch_launch.defines(whole) is not None
    assert stitch_launch.defines(replace(whole, keys=by_twos)) is None


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


@pytest.mark.parametrize("name", ["half", "kept-int4", "kept-fp8"])
def test_the_table_has_a_line_per_segment_and_layer(name):
    """So it is short, however many layers and segments there are: a launch has S · 28 + L · 8 numbers."""
    call = stitching_of(BY_NAME[name])
    numbers = stitch_launch.table_of(call).tolist()
    assert len(numbers) == 28 * len(call.keys) + 8 * len(call.out_keys)
    for i, (k, v, start) in enumerate(zip(call.keys, call.values, call.starts, strict=True)):
        *sides, first, count = numbers[28 * i : 28 * (i + 1)]
        assert (first, count) == (start, k.num_rows)
        for part, found in ((k, sides[:13]), (v, sides[13:])):
            size = part.data.element_size()
            want = [0 if x is None else x.data_ptr() for x in (part.data, part.scales, part.zeros)]
            want += [s * size for s in part.data.stride()[:3]]
            for x in (part.scales, part.zeros):
                want += (
                    [0] * 3
                    if x is None
                    else [*x.stride()[:2], x.stride(2) if x.shape[2] > 1 else 0]
                )
            assert found == [*want, {1: 0, 32: 5}[part.tokens]]
    places = numbers[28 * len(call.keys) :]
    for i, (k, v, table) in enumerate(
        zip(call.out_keys, call.out_values, call.tables, strict=True)
    ):
        strides = [[x.data_ptr(), *x.stride()[:2]] for x in (k, v)]
        assert places[8 * i : 8 * (i + 1)] == [*strides[0], table, *strides[1], -1]


def test_the_table_is_made_on_the_host_whatever_the_default_device_is():
    call = stitching_of(CASES[0])
    want = stitch_launch.table_of(call)
    torch.set_default_device("meta")
    try:
        got = stitch_launch.table_of(call)
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want)


def test_where_there_are_no_rows_nothing_is_launched():
    call = stitching_of(replace(BY_NAME["half"], lengths=(0, 0, 0)))
    stitch_launch.run(None, call, lambda table: table)  # type: ignore[arg-type]  # would fail if it launched
    stitch([], [], call.out_keys, call.out_values, [], call.cos, call.sin, [0, 0])
    stitch([], [], [], [], [], call.cos, call.sin, [])


@pytest.mark.parametrize("is_capturing", [False, True])
def test_a_captured_stitch_is_left_to_torch(is_capturing, monkeypatch):
    """Its table would be gone by the first replay."""
    asked = []
    monkeypatch.setattr(runtime, "has_stitch", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(stitch_launch, "defines", lambda call: asked.append(call))
    assert not runtime.stitch(stitching_of(BY_NAME["half"]))
    assert bool(asked) is not is_capturing


def test_compiles_into_one_graph():
    call = stitching_of(CASES[0])

    def step(cos):
        stitch(**(as_options(call) | {"cos": cos * 1.0}))
        return call.out_keys[0][:, 80:85].float() + 1

    torch.compile(step, fullgraph=True, backend="aot_eager")(call.cos)
    assert_stitched(call, CASES[0])


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(2, 3, *shape).half()


REFUSED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "3 values were given for 2 starts": lambda o: {"starts": (80, 7)},
    "1 tables": lambda o: {"tables": (0,)},
    "a buffer of 160 rows": lambda o: {"starts": (80, 7, 150)},
    "keys of segment 1 need rows 100 to 170": lambda o: {"starts": (80, 100, 120)},
    "keys of segment 0 need rows -1": lambda o: {"starts": (-1, 7, 120)},
    "keys of segment 2 need rows 120 to 153 of a buffer of 150": lambda o: {"out_keys": [x[:, :150] for x in o["out_keys"]]},
    "layer 1 asks for 153 rows of table 2": lambda o: {"tables": (0, 2)},
    "layer 0 asks for 153 rows of table 0": lambda o: {"cos": o["cos"][:, :152], "sin": o["sin"][:, :152]},
    "both need float32": lambda o: {"cos": torch.zeros(2, 160, 32, dtype=torch.float64)},
    "bfloat16 with scales": lambda o: {"key_scales": [ones(1, 64)] * 3},
    "2 scales were given for the keys of 3 segments": lambda o: {"key_scales": [ones(1, 64)] * 2},
    "2 zeros were given for the keys of 3 segments": lambda o: {"key_zeros": [ones(1, 64)] * 2},
    "keys of segment 0 have zeros": lambda o: {"key_zeros": [ones(1, 64)] * 3},
    "int8 without scales": lambda o: {"keys": [torch.zeros(2, 3, 5, 64, dtype=torch.int8)] * 3},
    "stored KV is one of": lambda o: {"values": [*o["values"][:-1], o["values"][-1].double()]},
    "keys of segment 0 have the shape .* layers, heads or head dims differ": lambda o: {"keys": [x[..., :32] for x in o["keys"]]},
    "values of segment 2 have the shape .* layers": lambda o: {"values": [*o["values"][:-1], o["values"][-1][:1]]},
    "buffers of values have the shapes": lambda o: {"out_values": [o["out_values"][0], o["out_values"][1][:, :, :32]]},
    "keys of segment 2 have 33 rows and its values 32": lambda o: {"values": [*o["values"][:-1], o["values"][-1][:, :, :32]]},
    "one bool per row": lambda o: {"skip": torch.zeros(160)},
    "153 at least": lambda o: {"skip": torch.zeros(152, dtype=torch.bool)},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_what_does_not_fit(message):
    options = as_options(stitching_of(CASES[0]))
    with pytest.raises(ValueError, match=message):
        stitch(**(options | REFUSED[message](options)))


def test_scales_have_to_divide_the_channels():
    options = as_options(stitching_of(BY_NAME["int8-token"]))
    with pytest.raises(ValueError, match="a divisor of D"):
        stitch(
            **(options | {"key_scales": [s.expand(-1, -1, -1, 63) for s in options["key_scales"]]})
        )


def test_scales_and_zeros_are_for_the_same_groups_of_tokens():
    options = as_options(stitching_of(BY_NAME["kept-int4"]))
    with pytest.raises(ValueError, match="the number of groups of 32 tokens"):
        stitch(
            **(
                options
                | {"key_scales": [s[:, :, :2].expand(-1, -1, 2, -1) for s in options["key_scales"]]}
            )
        )
    with pytest.raises(ValueError, match="have zeros"):
        stitch(**(options | {"key_zeros": [z[:, :, :1] for z in options["key_zeros"]]}))
