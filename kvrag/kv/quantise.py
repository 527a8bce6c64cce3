"""Quantisation of keys and values to 8 or 4 bits: an element is ``code · scale (+ zero)``.

Scales run along KIVI's axes (arXiv 2402.02750): per channel for keys, per token for values. Some
channels of keys are many times larger than the rest, for all tokens. With a scale per token, they
would set the scale of every channel. Keys are position-free, so a channel keeps its meaning from
token to token. A bias of the projection can move a channel's middle far from zero, so the middle is
stored as ``zeros``.

======  ===============================  =====================================  ====================
type    keys                             values                                 error of an element
======  ===============================  =====================================  ====================
int8    a scale and a zero per channel   a scale per token                      half a scale
int4    the same, for every 32 tokens    a scale per token and ≤ 32 channels    half a scale
fp8     a zero per channel, a scale      a scale                                1/16 of the distance
                                                                                from zero, or
                                                                                scale / 1024 if
                                                                                larger
======  ===============================  =====================================  ====================

Every head has its own scales and zeros; with fp8, a single scale for keys and a single scale for
values. Scales and zeros are float16. Scales are rounded up, so no code is clipped. The layouts are
as in :func:`kvrag_kernels.stitch`. Measured errors: docs/quantised.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvrag.errors import StoreError
from kvrag.kv.layers import CODES, GROUP, group_of, layer_of, parts
from kvrag.types import ChunkKV, KVDtype, LayerKV

LARGEST_CODE = {"int8": 127, "int4": 7, "fp8": 448}
LARGEST_SCALE = torch.finfo(torch.float16).max


def pack(kv: ChunkKV, kv_dtype: KVDtype) -> ChunkKV:
    """Quantise a chunk; ``"auto"`` returns it unchanged.

    The chunk is float32, float16 or bfloat16, on any device.

    Raises
    ------
    StoreError
        If the chunk is quantised already, if a value is not finite or too large for float16 scales,
        or if a head dim is odd and the type is int4.
    """
    if kv_dtype == "auto":
        return kv
    if kv.layers[0].scales is not None:
        raise StoreError("the chunk was rounded before; round the KV that was computed, once")
    return ChunkKV(tuple(_pack_layer(layer, kv_dtype, i) for i, layer in enumerate(kv.layers)))


def _pack_layer(layer: LayerKV, kv_dtype: KVDtype, index: int) -> LayerKV:
    keys = layer.keys.float()
    values = layer.values.float()
    parts(kv_dtype, layer.keys.dtype, keys.shape, values.shape)  # raises for odd head dims
    for name, tensor in (("keys", keys), ("values", values)):
        low, high = torch.aminmax(tensor)
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            raise StoreError(
                f"{name} of layer {index} hold a value that is not finite; compute the chunk again"
            )
    if kv_dtype == "fp8":
        key_codes, key_scales, zeros = _float_codes(keys, centred=True)
        value_codes, value_scales, _ = _float_codes(values, centred=False)
    else:
        largest = LARGEST_CODE[kv_dtype]
        key_codes, key_scales, zeros = _key_codes(
            keys, largest, GROUP if kv_dtype == "int4" else keys.shape[1]
        )
        group = group_of(values.shape[2]) if kv_dtype == "int4" else values.shape[2]
        value_codes, value_scales = _value_codes(values, largest, group)
    for name, scales in (("keys", key_scales), ("values", value_scales)):
        if not bool(torch.isfinite(scales).all()):
            raise StoreError(
                f"{name} of layer {index} are too large for {kv_dtype}, whose scales are float16; "
                "keep them as 'auto'"
            )
    codes = [
        _nibbles(c) if kv_dtype == "int4" else c.to(CODES[kv_dtype])
        for c in (key_codes, value_codes)
    ]
    return layer_of(layer.keys.dtype, (*codes, key_scales, zeros, value_scales))


def _key_codes(x: Tensor, largest: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise keys per channel and group of tokens.

    All ``2 · largest + 2`` codes cover the range from the group's smallest to its largest value.
    """
    codes = []
    scales = []
    zeros = []
    for rows in torch.split(x, group, dim=1):
        low = rows.amin(1, keepdim=True)
        high = rows.amax(1, keepdim=True)
        # Divide first, because the difference may overflow.
        step = high / (2 * largest + 1) - low / (2 * largest + 1)
        zero = _half(low + (largest + 1) * step)
        # From the zero as it is stored, so that its rounding clips no code.
        scale = _scale(
            torch.maximum((high - zero.float()) / largest, (zero.float() - low) / (largest + 1))
        )
        codes.append(((rows - zero.float()) / scale.float()).round().clamp(-largest - 1, largest))
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1)


def _value_codes(x: Tensor, largest: int, group: int) -> tuple[Tensor, Tensor]:
    """Quantise values per token and group of channels, scaled by the group's largest magnitude."""
    scale = torch.cat(
        [
            _scale(part.abs().amax(2, keepdim=True) / largest)
            for part in torch.split(x, group, dim=2)
        ],
        2,
    )
    return (x / _spread(scale.float(), group, 2, x.shape[2])).round().clamp(
        -largest, largest
    ), scale


def _float_codes(x: Tensor, *, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise to 8-bit floats around the channel's middle (if ``centred``) or around zero.

    The head's largest magnitude is scaled to the largest code.
    """
    # Halved first, because the sum may overflow.
    zero = _half((x.amin(1, keepdim=True) / 2 + x.amax(1, keepdim=True) / 2) * centred)
    rest = x - zero.float()
    largest = LARGEST_CODE["fp8"]  # the cast turns larger values into NaN
    scale = _scale(rest.abs().amax((1, 2), keepdim=True) / largest)
    return (rest / scale.float()).clamp(-largest, largest), scale, zero


def _half(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_SCALE, LARGEST_SCALE).half()


def _scale(x: Tensor) -> Tensor:
    """Round non-negative numbers up to float16, at least its smallest positive number.

    Numbers that are too large become infinite.
    """
    half = x.half()
    # The next float16 is the next integer.
    bits = half.view(torch.int16) + (half.float() < x).to(torch.int16)
    return bits.clamp_min(1).view(torch.float16)


def _nibbles(codes: Tensor) -> Tensor:
    unsigned = (codes + 8).to(torch.uint8)
    # The lower integer first.
    return unsigned[..., 0::2] | (unsigned[..., 1::2] << 4)


def unpack(
    layer: LayerKV, num_rows: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the keys and values ``(H_kv, num_rows, D)`` of a layer's first rows on a device.

    Codes are copied there as they are, dequantised there in float32, and rounded to ``dtype`` once.
    Layers without codes are only cast.
    """
    is_cuda = device.type == "cuda"
    keys, values = (
        x[:, :num_rows].to(device, non_blocking=is_cuda) for x in (layer.keys, layer.values)
    )
    scales = layer.scales
    if scales is None:
        return keys.to(dtype), values.to(dtype)
    moved = [
        x.to(device, non_blocking=is_cuda).float()
        for x in (scales.zeros, scales.keys, scales.values)
    ]
    zeros, key_scales = (_spread(x, GROUP, 1, num_rows) for x in moved[:2])
    floats = _floats(values)
    group = group_of(floats.shape[2]) if values.dtype == torch.uint8 else floats.shape[2]
    value_scales = _spread(moved[2][:, :num_rows], group, 2, floats.shape[2])
    return torch.addcmul(zeros, _floats(keys), key_scales).to(dtype), (floats * value_scales).to(
        dtype
    )


def _floats(codes: Tensor) -> Tensor:
    if codes.dtype != torch.uint8:
        return codes.float()
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float() - 8.0


def _spread(x: Tensor, group: int, dim: int, size: int) -> Tensor:
    """Repeat the value of every group for its members, ``size`` in all, unless it broadcasts."""
    if x.shape[dim] == 1:
        return x
    return x.repeat_interleave(group, dim).narrow(dim, 0, size)
