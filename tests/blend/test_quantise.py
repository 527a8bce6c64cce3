"""Rounded keys and values: every element within the bound that docs/quantised.md states, whatever the values are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag import StoreError
from kvrag.kv.quantise import CODES, GROUP, group_of, pack, parts, unpack
from kvrag.types import ChunkKV, LayerKV

LOSSY = ("int8", "int4", "fp8")
TINY = 2.0**-24
"""Smallest scale: what is much smaller than this is read as nothing."""


def layer_of(keys: torch.Tensor, values: torch.Tensor | None = None) -> LayerKV:
    return LayerKV(keys, keys if values is None else values)


def rounded(layer: LayerKV, kv_dtype: str) -> LayerKV:
    return pack(ChunkKV((layer,)), kv_dtype).layers[0]


def unpacked(
    layer: LayerKV, kv_dtype: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    return unpack(
        rounded(layer, kv_dtype), layer.keys.shape[1], device=torch.device("cpu"), dtype=dtype
    )


def groups_of(x: torch.Tensor, size: int, dim: int, fold: str) -> torch.Tensor:
    """The smallest or largest of each group of neighbours, repeated for each of its members."""
    folded = torch.cat(
        [getattr(part, fold)(dim, keepdim=True).expand_as(part) for part in x.split(size, dim)], dim
    )
    assert folded.shape == x.shape
    return folded


def off_zero(x: torch.Tensor) -> torch.Tensor:
    """How far a float16 may be from the zero that is wanted, of this magnitude at most."""
    return x.abs() * 2.0**-11 + TINY + (x.abs() - 65504).clamp_min(0)


def bounds(layer: LayerKV, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest error of each element, from the values alone: the formulas of docs/quantised.md."""
    k, v = layer.keys.double(), layer.values.double()
    float_noise = 2.0**-22
    if kv_dtype == "fp8":
        zero = (k.amin(1, keepdim=True) + k.amax(1, keepdim=True)) / 2
        rest = (k - zero).abs() + off_zero(zero)
        scale = rest.amax((1, 2), keepdim=True) / 448 * (1 + 2.0**-10) + TINY
        value_scale = v.abs().amax((1, 2), keepdim=True) / 448 * (1 + 2.0**-10) + TINY
        key_bound = torch.maximum(rest / 16, scale / 1024)
        value_bound = torch.maximum(v.abs() / 16, value_scale / 1024)
    else:
        codes, largest = (255, 127) if kv_dtype == "int8" else (15, 7)
        rows, group = (
            (GROUP, group_of(v.shape[2])) if kv_dtype == "int4" else (k.shape[1], v.shape[2])
        )
        low, high = groups_of(k, rows, 1, "amin"), groups_of(k, rows, 1, "amax")
        key_bound = (
            (high - low) / codes + off_zero(torch.maximum(low.abs(), high.abs())) / largest
        ) * (1 + 2.0**-10) / 2 + TINY
        value_bound = groups_of(v.abs(), group, 2, "amax") / largest * (1 + 2.0**-10) / 2 + TINY
    return key_bound + k.abs() * float_noise, value_bound + v.abs() * float_noise


def assert_within_bounds(layer: LayerKV, kv_dtype: str) -> None:
    keys, values = unpacked(layer, kv_dtype)
    key_bound, value_bound = bounds(layer, kv_dtype)
    assert bool(((keys.double() - layer.keys.double()).abs() <= key_bound).all())
    assert bool(((values.double() - layer.values.double()).abs() <= value_bound).all())


def outlier_keys(tokens: int = 250, dim: int = 64, seed: int = 0) -> torch.Tensor:
    """Keys with a few channels fifty times larger than the others, and with channels far from zero, as biased projections make them."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(3, tokens, dim, generator=random)
    keys[:, :, :4] *= 50
    keys[:, :, 4:8] += 30
    return keys


shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 70), st.sampled_from([2, 6, 16, 20, 34, 64, 74, 80])
)


@st.composite
def layers(draw: st.DrawFn) -> LayerKV:
    """Keys and values of any shape, magnitude and offset; some channels and tokens constant or zero."""
    shape = draw(shapes)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    made = []
    for _ in range(2):
        x = torch.randn(shape, generator=random) * 10.0 ** draw(st.integers(-9, 4))
        x += draw(st.sampled_from([0.0, 1.0, -300.0])) * torch.randn(
            shape[0], 1, shape[2], generator=random
        )
        if draw(st.booleans()):
            x[:, :, draw(st.integers(0, shape[2] - 1))] = draw(
                st.sampled_from([0.0, 1e-8, 7.3, -4000.0])
            )
        if draw(st.booleans()):
            x[:, draw(st.integers(0, shape[1] - 1))] = 0.0
        made.append(x)
    return LayerKV(*made)


@pytest.mark.parametrize("kv_dtype", LOSSY)
@given(layer=layers())
@settings(max_examples=60, deadline=None)
def test_no_element_is_further_off_than_documented(kv_dtype, layer):
    assert_within_bounds(layer, kv_dtype)


@pytest.mark.parametrize("kv_dtype", LOSSY)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-12, 6e-8, 1234.5, -60000.0, 400000.0])
def test_constant_channels_come_back(kv_dtype, value):
    """What is constant has no spread: its error is that of float16's own rounding of the zero, divided by the codes."""
    layer = layer_of(torch.full((2, 33, 20), value))
    assert_within_bounds(layer, kv_dtype)
    if abs(value) <= 65504:
        keys, _ = unpacked(layer, kv_dtype)
        assert float((keys - layer.keys).abs().max()) <= abs(value) * 2.0**-11 / 7 + TINY


def test_keys_with_outlier_channels_need_their_own_axis():
    """KIVI's axes: the same codec on swapped axes is many times worse on the channels that are not outliers."""
    keys = outlier_keys()
    normal = slice(8, None)

    def error(found):
        return float((found - keys)[..., normal].square().mean().sqrt())

    for kv_dtype, factor in (("int8", 10), ("int4", 5)):
        right = error(unpacked(layer_of(keys), kv_dtype)[0])
        # values are rounded token by token: keys in their place are keys on the wrong axis
        swapped = error(unpacked(layer_of(keys), kv_dtype)[1])
        assert swapped > factor * right, (kv_dtype, right, swapped)
        assert_within_bounds(layer_of(keys), kv_dtype)


def test_values_with_outlier_tokens_need_their_own_axis():
    values = outlier_keys(seed=1).transpose(1, 2).contiguous()  # tokens instead of channels

    def error(found):
        return float((found - values)[:, 8:].square().mean().sqrt())

    right, swapped = (error(x) for x in reversed(unpacked(layer_of(values), "int8")))
    assert swapped > 10 * right


def test_a_bias_of_a_channel_costs_no_precision():
    """Without zeros, a channel around 300 would have scales for ±300: its spread of 1 would be one or two codes of int4."""
    keys = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    for kv_dtype, factor in (("int8", 2), ("int4", 2), ("fp8", 2)):
        plain, biased = (unpacked(layer_of(x), kv_dtype)[0] - x for x in (keys, keys + 300))
        assert biased.abs().max() < factor * plain.abs().max(), kv_dtype


@pytest.mark.parametrize("kv_dtype", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["keys", "values"])
def test_what_is_not_finite_is_refused_before_it_is_rounded(kv_dtype, bad, name):
    x = torch.ones(1, 4, 8)
    x[0, 2, 3] = bad
    good = torch.ones(1, 4, 8)
    layer = LayerKV(x, good) if name == "keys" else LayerKV(good, x)
    with pytest.raises(StoreError, match=f"{name} of layer 0 hold a value that is not finite"):
        rounded(layer, kv_dtype)


@pytest.mark.parametrize(
    ("kv_dtype", "value"), [("int8", 2e7), ("int4", 1e6), ("fp8", 1e8), ("int8", 3e38)]
)
@pytest.mark.parametrize("name", ["keys", "values"])
def test_what_float16_scales_can_not_hold_is_refused(kv_dtype, value, name):
    x, good = torch.ones(1, 4, 8), torch.ones(1, 4, 8)
    x[0, 2, 3], x[0, 1, 3] = value, -value
    layer = LayerKV(x, good) if name == "keys" else LayerKV(good, x)
    with pytest.raises(StoreError, match=f"{name} of layer 0 are too large for {kv_dtype}"):
        rounded(layer, kv_dtype)


def test_an_odd_head_dim_is_refused_by_int4_alone():
    layer = layer_of(torch.randn(2, 5, 7))
    with pytest.raises(StoreError, match="odd; use int8"):
        rounded(layer, "int4")
    assert_within_bounds(layer, "int8")
    assert_within_bounds(layer, "fp8")


def test_kv_is_rounded_once():
    kv = pack(ChunkKV((layer_of(torch.randn(2, 5, 8)),)), "int8")
    with pytest.raises(StoreError, match="rounded before"):
        pack(kv, "int4")
    assert pack(kv, "auto") is kv


@pytest.mark.parametrize("kv_dtype", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_rows_are_read_with_the_bits_of_the_whole(kv_dtype, dtype):
    """A stitch may take the first rows of a chunk alone."""
    kv = ChunkKV((LayerKV(outlier_keys(77, 34).to(dtype), torch.randn(3, 77, 74).to(dtype)),))
    (layer,) = pack(kv, kv_dtype).layers
    both = unpack(layer, 77, device=torch.device("cpu"), dtype=dtype)
    for rows in (1, 32, 33, 77):
        direct = unpack(layer, rows, device=torch.device("cpu"), dtype=dtype)
        for part, whole in zip(direct, both, strict=True):
            assert part.dtype == dtype
            assert torch.equal(part, whole[:, :rows])


@pytest.mark.parametrize("kv_dtype", LOSSY)
def test_rounding_is_a_function_of_the_values(kv_dtype):
    """The same KV gives the same bytes: strides, batches and repetition don't matter."""
    x = outlier_keys(40, 32)
    one, two = (
        rounded(layer_of(x), kv_dtype),
        rounded(layer_of(x.transpose(0, 1).contiguous().transpose(0, 1)), kv_dtype),
    )
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one.tensors, two.tensors, strict=True)
    )


@pytest.mark.parametrize("kv_dtype", LOSSY)
@pytest.mark.parametrize(
    ("tokens", "dim", "value_dim"), [(1, 2, 4), (31, 64, 64), (33, 80, 34), (250, 128, 74)]
)
def test_parts_are_what_is_made(kv_dtype, tokens, dim, value_dim):
    layer = LayerKV(torch.randn(2, tokens, dim), torch.randn(3, tokens, value_dim))
    made = rounded(layer, kv_dtype)
    wanted = parts(kv_dtype, torch.float32, (2, tokens, dim), (3, tokens, value_dim))
    assert [(p.dtype, p.shape, p.num_bytes) for p in wanted] == [
        (t.dtype, tuple(t.shape), t.nbytes) for t in made.tensors
    ]
    assert wanted[0].dtype == CODES[kv_dtype]


@pytest.mark.parametrize(
    ("dim", "group"),
    [
        (2, 2),
        (20, 20),
        (32, 32),
        (34, 17),
        (64, 32),
        (72, 24),
        (74, 32),
        (80, 20),
        (96, 32),
        (128, 32),
    ],
)
def test_groups_of_channels_divide_the_head_where_they_can(dim, group):
    assert group_of(dim) == group


@pytest.mark.parametrize(("kv_dtype", "limit"), [("int8", 0.53), ("fp8", 0.53), ("int4", 0.32)])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 64), (8, 128), (4, 80), (8, 96), (4, 256)])
def test_rounded_kv_takes_that_share_of_bfloat16(kv_dtype, limit, heads, dim):
    shape = (heads, 250, dim)
    size = sum(part.num_bytes for part in parts(kv_dtype, torch.bfloat16, shape, shape))
    assert size <= limit * 2 * 2 * heads * 250 * dim


@pytest.mark.parametrize("kv_dtype", LOSSY)
def test_the_stitch_kernel_reads_the_same_values(kv_dtype):
    """The layouts are the kernel's: codes, scales per channel or token or group of either, and zeros."""
    kvrag_kernels = pytest.importorskip("kvrag_kernels.stitch")
    layer = LayerKV(outlier_keys(70, 64), torch.randn(3, 70, 64))
    packed = rounded(layer, kv_dtype)
    keys, values = unpacked(layer, kv_dtype)
    scales = packed.scales
    assert scales is not None
    assert torch.equal(kvrag_kernels.Stored(packed.values, scales.values).read(), values)
    assert torch.equal(
        kvrag_kernels.Stored(packed.keys, scales.keys, zeros=scales.zeros).read(), keys
    )
    assert kvrag_kernels.TOKEN_GROUP == GROUP
