"""Inputs of the stitch op by name, and what has to come out, in float64."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvrag.blend.quantise import GROUP, pack, unpack
from kvrag.types import ChunkKV, KVDtype, LayerKV, Scales
from kvrag_kernels import reference
from kvrag_kernels.stitch import FP8, Stitching, Stored


@dataclass(frozen=True)
class StitchCase:
    """One call of the op. ``codec``: same, other (the other 16-bit dtype), channel, token, int4, fp8; ``kept``: as kvrag keeps it."""

    name: str
    codec: str = "same"
    kept: KVDtype = "auto"
    dim: int = 64
    rotary: int = 64
    heads: int = 3
    layers: int = 2
    lengths: tuple[int, ...] = (5, 70, 33)
    starts: tuple[int, ...] = (80, 7, 120)
    interleaved: bool = False
    has_residual: bool = False
    has_skip: bool = False
    tables: tuple[int, ...] = (0, 1)
    dtype: torch.dtype = torch.bfloat16
    zero_angles: bool = False


CAPACITY = 160
CASES = [
    StitchCase("half"),
    StitchCase("float16", dtype=torch.float16),
    StitchCase("interleaved", interleaved=True),
    StitchCase("partial", rotary=32, dim=128),
    StitchCase("partial-interleaved", rotary=16, interleaved=True),
    StitchCase("no-rotation", tables=(0, -1)),
    StitchCase("zero-angles", zero_angles=True),
    StitchCase("other-dtype", codec="other"),
    StitchCase("int8-channel", codec="channel", dim=128, rotary=128),
    StitchCase("int8-token", codec="token"),
    StitchCase("int4", codec="int4", dim=96, rotary=96),
    StitchCase("fp8", codec="fp8", has_residual=True),
    StitchCase("residual", has_residual=True),
    StitchCase("skip", has_skip=True, has_residual=True, codec="int4"),
    StitchCase("empty", lengths=(0, 70, 0), starts=(80, 7, 160)),
    StitchCase("kept-int8", kept="int8", dim=128, rotary=64),
    StitchCase("kept-int8-shift", kept="int8", has_residual=True, has_skip=True, interleaved=True, tables=(0, -1)),
    StitchCase("kept-int4", kept="int4", dim=80, rotary=32, lengths=(5, 73, 32), tables=(1, -1)),
    StitchCase(
        "kept-int4-shift", kept="int4", has_residual=True, has_skip=True, dtype=torch.float16, lengths=(33, 70, 0)
    ),
    StitchCase("kept-fp8", kept="fp8", dim=96, rotary=96, tables=(-1, 0)),
    StitchCase("kept-fp8-shift", kept="fp8", has_residual=True, lengths=(1, 64, 0)),
]


def quantise(x: torch.Tensor, case: StitchCase) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return stored data and scales of float ``x (H_kv, T, D)``."""
    if case.codec in ("same", "other"):
        other = torch.float16 if case.dtype == torch.bfloat16 else torch.bfloat16
        return x.to(case.dtype if case.codec == "same" else other), None
    if case.codec == "int4":
        groups = x.unflatten(2, (-1, 32))
        scales = (groups.abs().amax(3) / 7).half()
        n = (groups / scales[..., None]).round().clamp(-8, 7).flatten(2).int() + 8
        return (n[..., 0::2] | n[..., 1::2] << 4).to(torch.uint8), scales
    most = 448 if case.codec == "fp8" else 127
    scales = (x.abs().amax(2 if case.codec == "token" else 1, keepdim=True) / most).half()
    scaled = x / scales
    return (
        scaled.clamp(-448, 448).to(FP8) if case.codec == "fp8" else scaled.round().clamp(-127, 127).to(torch.int8)
    ), scales


def kept_layer(case: StitchCase, length: int, g: torch.Generator) -> LayerKV:
    """The first rows of a longer chunk's layer, as the store keeps it; its keys have channels that are far from zero."""
    keys, values = torch.randn(2, case.heads, length + 6, case.dim, generator=g)
    keys = keys * 10 ** torch.randn(case.dim, generator=g) + 20 * torch.randn(case.dim, generator=g)
    (layer,) = pack(ChunkKV((LayerKV(keys.to(case.dtype), values.to(case.dtype)),)), case.kept).layers
    return layer


def kept_parts(layer: LayerKV, length: int) -> tuple[Stored, Stored]:
    """What the op is given of a kept layer's first rows."""
    s = layer.scales
    assert s is not None
    groups = slice(0, -(-length // GROUP) if s.keys.shape[1] > 1 else 1)
    keys = Stored(layer.keys[:, :length], s.keys[:, groups], zeros=s.zeros[:, groups])
    return keys, Stored(layer.values[:, :length], s.values[:, :length] if s.values.shape[1] > 1 else s.values)


def read_back(keys: Stored, values: Stored, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`kvrag.blend.quantise.read` gives for two parts."""
    assert keys.scales is not None
    assert keys.zeros is not None
    assert values.scales is not None
    layer = LayerKV(keys.data, values.data, Scales(dtype, keys.scales, keys.zeros, values.scales))
    return unpack(layer, keys.data.shape[1], device=torch.device("cpu"), dtype=dtype)


def _parts(case: StitchCase, g: torch.Generator) -> tuple[list[Stored], list[Stored]]:
    def part(length: int) -> Stored:
        x = torch.randn(case.heads, length, case.dim, generator=g)
        x[0, :1, : case.dim // 2] = -0.0
        return Stored(*quantise(x, case))

    lengths = [n for _ in range(case.layers) for n in case.lengths]
    if case.kept != "auto":
        pairs = [kept_parts(kept_layer(case, n, g), n) for n in lengths]
        keys, values = [k for k, _ in pairs], [v for _, v in pairs]
    else:
        keys, values = [part(n) for n in lengths], [part(n) for n in lengths]
    if case.has_residual:
        # Rows of a larger tensor, as the means of several chunks are.
        beside = torch.randn(2 * len(lengths), case.heads, 2, case.dim, generator=g)[:, :, 1]
        keys = [replace(p, residual=r) for p, r in zip(keys, beside, strict=False)]
        values = [replace(p, residual=r) for p, r in zip(values, beside[len(lengths) :], strict=True)]
    return keys, values


def stitching_of(case: StitchCase) -> Stitching:
    """Return the op's arguments; buffers hold NaN where nothing has been written."""
    g = torch.Generator().manual_seed(len(case.name) + case.dim)
    parts = _parts(case, g)
    outs = [
        [
            torch.full((1, CAPACITY, case.heads, case.dim), float("nan"), dtype=case.dtype)[0].transpose(0, 1)
            for _ in range(case.layers)
        ]
        for _ in range(2)
    ]
    angles = torch.randn(2, CAPACITY, case.rotary // 2, generator=g, dtype=torch.float64) * 3
    if case.zero_angles:
        angles.zero_()
    skip = torch.rand(CAPACITY, generator=g) < 0.3 if case.has_skip else None
    cos, sin = angles.cos().float(), angles.sin().float()
    return Stitching(*parts, *outs, case.starts, cos, sin, case.tables, case.interleaved, skip)


def as_options(call: Stitching) -> dict[str, Any]:
    """Return the call as the public op takes it."""

    def column(parts: Any, name: str) -> Any:
        found = [getattr(p, name) for p in parts]
        return None if found[0] is None else found

    return {
        "keys": column(call.keys, "data"),
        "values": column(call.values, "data"),
        "out_keys": call.out_keys,
        "out_values": call.out_values,
        "starts": call.starts,
        "cos": call.cos,
        "sin": call.sin,
        "tables": call.tables,
        "interleaved": call.interleaved,
        "skip": call.skip,
        "key_scales": column(call.keys, "scales"),
        "value_scales": column(call.values, "scales"),
        "key_zeros": column(call.keys, "zeros"),
        "key_residuals": column(call.keys, "residual"),
        "value_residuals": column(call.values, "residual"),
    }


def assert_stitched(call: Stitching, case: StitchCase) -> None:
    """Compare the buffers with float64, to one rounding; rows that nobody may write are still NaN."""
    written = torch.zeros(CAPACITY, dtype=torch.bool)
    for index, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        layer, segment = divmod(index, len(call.starts))
        rows = torch.arange(call.starts[segment], call.starts[segment] + k.data.shape[1])
        kept = torch.ones_like(rows, dtype=torch.bool) if call.skip is None else ~call.skip[rows]
        written[rows[kept]] = True
        want_k, want_v = k.read().double(), v.read().double()
        if call.tables[layer] >= 0:
            cos, sin = (x[call.tables[layer], rows] for x in (call.cos, call.sin))
            want_k = reference.rotated(want_k, cos, sin, interleaved=call.interleaved)
        for out, want in ((call.out_keys[layer], want_k), (call.out_values[layer], want_v)):
            got = out[:, rows[kept]].double()
            step = torch.finfo(case.dtype).eps
            noise = 5e-7 * max(4.0, float(want.abs().max()) if want.numel() else 0.0)
            torch.testing.assert_close(got, want[:, kept], rtol=0.51 * step + 1e-6, atol=noise)
    for out in [*call.out_keys, *call.out_values]:
        assert out[:, ~written].isnan().all(), "a row outside the segments was written"
        assert not out[:, written].isnan().any()
    if case.codec == "same" and case.kept == "auto" and not case.has_residual:
        _assert_bits(call, case)


def _assert_bits(call: Stitching, case: StitchCase) -> None:
    """What is only copied keeps its bits: values, and keys whose angle is zero."""
    for index, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        layer, segment = divmod(index, len(call.starts))
        rows = slice(call.starts[segment], call.starts[segment] + k.data.shape[1])
        is_still = case.zero_angles or call.tables[layer] < 0
        for part, out in [(v, call.out_values[layer]), *([(k, call.out_keys[layer])] if is_still else [])]:
            assert torch.equal(out[:, rows].contiguous().view(torch.int16), part.data.contiguous().view(torch.int16))
