"""Inputs of the stitch op by name, and what has to come out, in float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvrag.kv.quantise import GROUP, pack, unpack
from kvrag.types import ChunkKV, KVDtype, LayerKV, Scales
from kvrag_kernels import reference
from kvrag_kernels.stitch_launch import FP8, Stitching, Stored


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
    StitchCase("fp8", codec="fp8"),
    StitchCase("skip", has_skip=True, codec="int4"),
    StitchCase("one-layer", layers=1, tables=(1,)),
    StitchCase("empty", lengths=(0, 70, 0), starts=(80, 7, 160)),
    StitchCase("kept-int8", kept="int8", dim=128, rotary=64),
    StitchCase("kept-int8-skip", kept="int8", has_skip=True, interleaved=True, tables=(0, -1)),
    StitchCase("kept-int4", kept="int4", dim=80, rotary=32, lengths=(5, 73, 32), tables=(1, -1)),
    StitchCase(
        "kept-int4-skip", kept="int4", has_skip=True, dtype=torch.float16, lengths=(33, 70, 0)
    ),
    StitchCase("kept-fp8", kept="fp8", dim=96, rotary=96, tables=(-1, 0)),
    StitchCase("kept-fp8-short", kept="fp8", lengths=(1, 64, 0)),
]


def quantise(x: torch.Tensor, case: StitchCase) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return stored data and scales of float ``x (L, H_kv, T, D)``."""
    if case.codec in ("same", "other"):
        other = torch.float16 if case.dtype == torch.bfloat16 else torch.bfloat16
        return x.to(case.dtype if case.codec == "same" else other), None
    if case.codec == "int4":
        groups = x.unflatten(-1, (-1, 32))
        scales = (groups.abs().amax(-1) / 7).half()
        n = (groups / scales[..., None]).round().clamp(-8, 7).flatten(-2).int() + 8
        return (n[..., 0::2] | n[..., 1::2] << 4).to(torch.uint8), scales
    most = 448 if case.codec == "fp8" else 127
    scales = (x.abs().amax(-1 if case.codec == "token" else -2, keepdim=True) / most).half()
    scaled = x / scales
    return (
        scaled.clamp(-448, 448).to(FP8)
        if case.codec == "fp8"
        else scaled.round().clamp(-127, 127).to(torch.int8)
    ), scales


def kept_parts(case: StitchCase, length: int, g: torch.Generator) -> tuple[Stored, Stored]:
    """The first rows of a longer chunk, as the store keeps it; its keys have channels that are far from zero."""
    layers = []
    for _ in range(case.layers):
        keys, values = torch.randn(2, case.heads, length + 6, case.dim, generator=g)
        keys = keys * 10 ** torch.randn(case.dim, generator=g) + 20 * torch.randn(
            case.dim, generator=g
        )
        layers.append(LayerKV(keys.to(case.dtype), values.to(case.dtype)))
    packed = pack(ChunkKV(tuple(layers)), case.kept).layers
    keys, values, key_scales, zeros, scales = (
        torch.stack(x) for x in zip(*(y.tensors for y in packed), strict=True)
    )
    groups = slice(0, -(-length // GROUP) if zeros.shape[2] > 1 else 1)
    stored = Stored(keys[:, :, :length], key_scales[:, :, groups], zeros[:, :, groups])
    return stored, Stored(
        values[:, :, :length], scales[:, :, :length] if scales.shape[2] > 1 else scales
    )


def read_back(k: Stored, v: Stored, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`kvrag.kv.quantise.unpack` gives for keys and values of a layer."""
    assert k.scales is not None
    assert k.zeros is not None
    assert v.scales is not None
    kv = LayerKV(k.data, v.data, Scales(dtype, k.scales, k.zeros, v.scales))
    return unpack(kv, k.num_rows, device=torch.device("cpu"), dtype=dtype)


def _parts(case: StitchCase, g: torch.Generator) -> tuple[list[Stored], list[Stored]]:
    def part(length: int) -> Stored:
        x = torch.randn(case.layers, case.heads, length, case.dim, generator=g)
        x[:, 0, :1, : case.dim // 2] = -0.0
        return Stored(*quantise(x, case))

    if case.kept != "auto":
        pairs = [kept_parts(case, n, g) for n in case.lengths]
        return [k for k, _ in pairs], [v for _, v in pairs]
    return [part(n) for n in case.lengths], [part(n) for n in case.lengths]


def stitching_of(case: StitchCase) -> Stitching:
    """Return the op's arguments; buffers hold NaN where nothing has been written."""
    g = torch.Generator().manual_seed(len(case.name) + case.dim)
    parts = _parts(case, g)
    outs = [
        [
            torch.full((1, CAPACITY, case.heads, case.dim), float("nan"), dtype=case.dtype)[
                0
            ].transpose(0, 1)
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
    }


def placed(call: Stitching) -> Iterator[tuple[int, Stored, Stored, torch.Tensor, torch.Tensor]]:
    """Yield each layer of each segment: its number, keys and values, their rows, and which of these may be written."""
    for k, v, start in zip(call.keys, call.values, call.starts, strict=True):
        rows = torch.arange(start, start + k.num_rows)
        kept = torch.ones_like(rows, dtype=torch.bool) if call.skip is None else ~call.skip[rows]
        for layer in range(len(call.out_keys)):
            yield layer, *(part.map(lambda x, i=layer: x[i]) for part in (k, v)), rows, kept


def assert_stitched(call: Stitching, case: StitchCase) -> None:
    """Compare the buffers with float64, to one rounding; rows that nobody may write are still NaN."""
    written = torch.zeros(CAPACITY, dtype=torch.bool)
    for layer, k, v, rows, kept in placed(call):
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
    if case.codec == "same" and case.kept == "auto":
        _assert_bits(call, case)


def _assert_bits(call: Stitching, case: StitchCase) -> None:
    """What is only copied keeps its bits: values, and keys whose angle is zero."""
    for layer, k, v, rows, _ in placed(call):
        is_still = case.zero_angles or call.tables[layer] < 0
        for part, out in [
            (v, call.out_values[layer]),
            *([(k, call.out_keys[layer])] if is_still else []),
        ]:
            assert torch.equal(
                out[:, rows].contiguous().view(torch.int16),
                part.data.contiguous().view(torch.int16),
            )
