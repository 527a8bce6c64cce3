"""The stitch op: torch path and the real ``stitch.cu`` in the emulator, against float64."""

from dataclasses import fields, replace

import pytest
import torch
from emulated import needs_compiler, reserve, sampled
from emulator.build import EmulatedModule
from planted_bugs import STITCH
from stitch_cases import CASES, StitchCase, as_options, assert_stitched, read_back, stitching_of

from kvrag_kernels import reference, stitch, stitch_launch
from kvrag_kernels.stitch import FP8, Stitching, Stored, rotate

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
    inputs = [x for p in [*call.keys, *call.values] for x in (p.data, p.scales, p.residual, p.zeros)]

    def to_device(jobs: torch.Tensor) -> torch.Tensor:
        module.allow([*inputs, jobs, call.cos, call.sin, call.skip], [*call.out_keys, *call.out_values])
        run_emulated.jobs = jobs  # as the allocator would, it lives until the launch is over
        return jobs

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
    for index, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        layer, segment = divmod(index, len(call.starts))
        rows = slice(call.starts[segment], call.starts[segment] + k.data.shape[1])
        kept = slice(None) if call.skip is None else ~call.skip[rows]
        outs = call.out_keys[layer], call.out_values[layer]
        for out, want in zip(outs, read_back(k, v, case.dtype), strict=True):
            assert torch.equal(out[:, rows][:, kept], want[:, kept])


def still(case: StitchCase) -> Stitching:
    """The case without rotation and residuals, which the reader of codes knows nothing of."""
    call = stitching_of(replace(case, tables=(-1, -1), has_residual=False))
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
    case = replace(case, tables=(0, 1), has_residual=False)
    call = stitching_of(case)
    stitch(**as_options(call))
    step = torch.finfo(case.dtype).eps
    for index, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        layer, segment = divmod(index, len(call.starts))
        rows = torch.arange(call.starts[segment], call.starts[segment] + k.data.shape[1])
        kept = torch.ones_like(rows, dtype=torch.bool) if call.skip is None else ~call.skip[rows]
        first = read_back(k, v, case.dtype)[0].float()
        want = rotate(first, call.cos[layer, rows], call.sin[layer, rows], interleaved=call.interleaved)
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
    """The same call, all that it reads and writes far apart: heads, and of scales and zeros the groups of rows."""
    first = call.keys[0]
    assert first.scales is not None
    assert first.zeros is not None
    by_group = {"scales": far_apart(first.scales, 1), "zeros": far_apart(first.zeros, 1)}
    keys = [replace(first, data=far_apart(first.data, 0), **by_group)]
    values = [
        replace(p, **{n: None if x is None else far_apart(x, 0) for n, x in vars_of(p).items()}) for p in call.values
    ]
    outs = ([far_apart(out, 0) for out in side] for side in (call.out_keys, call.out_values))
    return replace(call, keys=keys, values=values, out_keys=next(outs), out_values=next(outs))


def vars_of(part: Stored) -> dict[str, torch.Tensor | None]:
    return {f.name: getattr(part, f.name) for f in fields(part)}


FAR = StitchCase("far", kept="int4", heads=2, layers=1, lengths=(60,), starts=(90,), tables=(0,), has_residual=True)


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
    want = torch.view_as_complex(pairs.contiguous().double()) * torch.polar(torch.ones(5, 4).double(), angles.double())
    got = turned.unflatten(2, (4, 2)) if interleaved else turned.unflatten(2, (2, 4)).transpose(2, 3)
    torch.testing.assert_close(torch.view_as_complex(got.contiguous()), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        rotate(x, angles.cos(), angles.sin(), interleaved=interleaved).double(), turned, atol=1e-6, rtol=0
    )


def test_shapes_that_the_kernel_has_no_form_for_are_left_to_torch():
    call = stitching_of(CASES[0])
    assert stitch_launch.defines(call) is not None
    assert stitch_launch.defines(replace(call, cos=call.cos[..., :20], sin=call.sin[..., :20])) is None
    mixed = [*call.keys[:-1], stitching_of(BY_NAME["float16"]).keys[-1]]
    assert stitch_launch.defines(replace(call, keys=mixed)) is None
    wide = [torch.empty(o.shape, dtype=torch.float32) for o in call.out_keys]
    assert stitch_launch.defines(replace(call, out_keys=wide)) is None


def wider(x: torch.Tensor | None, pad: int) -> torch.Tensor | None:
    """The same tensor in rows that are longer, with NaN or nonsense between them."""
    if x is None:
        return None
    fill = float("nan") if x.dtype.is_floating_point and x.dtype != FP8 else 77
    longer = torch.full((*x.shape[:-1], x.shape[-1] + pad), fill, dtype=x.dtype)
    longer[..., : x.shape[-1]] = x
    return longer[..., : x.shape[-1]]


def with_strides(call: Stitching, data_pad: int) -> Stitching:
    """The same call with rows of data, scales, zeros and residuals that don't follow each other."""
    pads = {"data": data_pad, "scales": 3, "zeros": 5, "residual": 1}
    keys, values = (
        [replace(p, **{n: wider(x, pads[n]) for n, x in vars_of(p).items()}) for p in side]
        for side in (call.keys, call.values)
    )
    return replace(call, keys=keys, values=values)


@needs_compiler
@pytest.mark.parametrize("name", ["kept-int8-shift", "kept-int4-shift", "kept-fp8-shift", "residual"])
def test_rows_may_lie_apart(name):
    call = with_strides(stitching_of(BY_NAME[name]), data_pad=16)
    assert not call.keys[1].data.is_contiguous()
    run_emulated(call, [])
    assert_stitched(call, BY_NAME[name])


@pytest.mark.parametrize("name", ["kept-int8-shift", "kept-int4-shift", "kept-fp8-shift"])
def test_rows_that_no_copy_can_read_are_left_to_torch(name):
    call = with_strides(stitching_of(BY_NAME[name]), data_pad=1)
    assert stitch_launch.defines(call) is None
    stitch(**as_options(call))
    assert_stitched(call, BY_NAME[name])
    whole = stitching_of(BY_NAME[name])
    by_twos = [replace(p, zeros=torch.stack([p.zeros] * 2, dim=-1)[..., 0]) for p in whole.keys]
    assert stitch_launch.defines(whole) is not None
    assert stitch_launch.defines(replace(whole, keys=by_twos)) is None


def test_compiles_into_one_graph():
    call = stitching_of(CASES[0])

    def step(cos):
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
        ({"skip": torch.zeros(152, dtype=torch.bool)}, "153 at least"),
        ({"key_zeros": [torch.ones(3, 1, 64).half()] * 6}, "have zeros"),
        ({"key_zeros": [torch.ones(3, 1, 64).half()] * 4}, "4 zeros were given for 6 parts"),
    ],
)
def test_refusals_name_what_does_not_fit(changed, message):
    with pytest.raises(ValueError, match=message):
        stitch(**(as_options(stitching_of(CASES[0])) | changed))


def test_scales_have_to_divide_the_channels():
    options = as_options(stitching_of(BY_NAME["int8-token"]))
    with pytest.raises(ValueError, match="a divisor of D"):
        stitch(**(options | {"key_scales": [s.expand(-1, -1, 63) for s in options["key_scales"]]}))


def test_scales_and_zeros_are_for_the_same_groups_of_tokens():
    options = as_options(stitching_of(BY_NAME["kept-int4"]))
    with pytest.raises(ValueError, match="the number of groups of 32 tokens"):
        stitch(**(options | {"key_scales": [s[:, :2].expand(-1, 2, -1) for s in options["key_scales"]]}))
    with pytest.raises(ValueError, match="have zeros"):
        stitch(**(options | {"key_zeros": [z[:, :1] for z in options["key_zeros"]]}))
