"""Keys and values rounded to 8 or 4 bits: codes and scales are stored, and stand for ``code · scale (+ zero)``.

Scales run along KIVI's axes (arXiv 2402.02750): per channel for keys, per token for values. Some channels of keys are many times larger
than the others, for all tokens; along the other axis they would set the scale of every channel. Keys are position-free, so a channel keeps
its meaning from token to token, and its middle (``zeros``), which a bias of the projection moves far from zero, is kept apart.

======  ==================================  ==========================================  ================================
type    keys                                values                                      error of an element
======  ==================================  ==========================================  ================================
int8    a scale and a zero per channel      a scale per token                           half a scale
int4    the same, for every 32 tokens       a scale per token and ≤ 32 channels         half a scale
fp8     a zero per channel, one scale       one scale                                   1/16 of the distance from zero,
                                                                                        or scale / 1024 if larger
======  ==================================  ==========================================  ================================

Each head has its own. Scales and zeros are float16, scales rounded up, so that no code is clipped. The layouts are those of
:func:`kvrag_kernels.stitch`. Measured errors: docs/quantised.md.
"""

from __future__ import annotations

import math

import torch

from kvrag.errors import StoreError
from kvrag.layers import CODES, GROUP, group_of, layer_of, parts
from kvrag.types import ChunkKV, KVDtype, LayerKV

LARGEST_CODE = {"int8": 127, "int4": 7, "fp8": 448}
LARGEST_SCALE = torch.finfo(torch.float16).max


def pack(kv: ChunkKV, kv_dtype: KVDtype) -> ChunkKV:
    """Round a chunk, as computed in float32, float16 or bfloat16 and on any device, to codes; ``"auto"`` returns it as it is.

    Raises
    ------
    StoreError
        If it has been rounded before, holds a value that is not finite or too large for float16 scales, or an odd head dim for int4.
    """
    if kv_dtype == "auto":
        return kv
    if kv.kv_dtype != "auto":
        raise StoreError(
            f"the chunk was rounded to {kv.kv_dtype} before; round the KV that was computed, once"
        )
    return ChunkKV(
        tuple(_pack_layer(layer, kv_dtype, i) for i, layer in enumerate(kv.layers)), kv_dtype
    )


def _pack_layer(layer: LayerKV, kv_dtype: KVDtype, index: int) -> LayerKV:
    keys, values = layer.keys.float(), layer.values.float()
    wanted = parts(kv_dtype, layer.keys.dtype, _shape(keys), _shape(values))
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
                f"{name} of layer {index} are too large for {kv_dtype}, whose scales are float16; keep them as 'auto'"
            )
    codes = [
        _nibbles(c) if kv_dtype == "int4" else c.to(CODES[kv_dtype])
        for c in (key_codes, value_codes)
    ]
    made = layer_of(layer.keys.dtype, (*codes, key_scales, zeros, value_scales))
    assert [tuple(t.shape) for t in made.tensors] == [part.shape for part in wanted]
    return made


def _key_codes(
    x: torch.Tensor, largest: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round each channel of each group of tokens between its own smallest and largest value, using all ``2 · largest + 2`` codes."""
    codes, scales, zeros = [], [], []
    for rows in torch.split(x, group, dim=1):
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        step = high / (2 * largest + 1) - low / (
            2 * largest + 1
        )  # one by one: their difference may overflow
        zero = _half(low + (largest + 1) * step)
        scale = _scale(
            torch.maximum((high - zero.float()) / largest, (zero.float() - low) / (largest + 1))
        )
        codes.append(((rows - zero.float()) / scale.float()).round().clamp(-largest - 1, largest))
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1)


def _value_codes(x: torch.Tensor, largest: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each group of channels of each token by its largest magnitude."""
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


def _float_codes(
    x: torch.Tensor, *, centred: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to 8-bit floats around the middle of each channel (or around zero), scaled so that the head's largest is the largest code."""
    zero = _half((x.amin(1, keepdim=True) / 2 + x.amax(1, keepdim=True) / 2) * centred)
    rest = x - zero.float()
    scale = _scale(rest.abs().amax((1, 2), keepdim=True) / LARGEST_CODE["fp8"])
    largest = LARGEST_CODE["fp8"]  # beyond it, the cast gives NaN
    return (rest / scale.float()).clamp(-largest, largest), scale, zero


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST_SCALE, LARGEST_SCALE).half()


def _scale(x: torch.Tensor) -> torch.Tensor:
    """Round positive numbers up to float16, to its smallest at least; numbers too large for it become infinite."""
    half = x.half()
    bits = half.view(torch.int16) + (half.float() < x).to(
        torch.int16
    )  # the next float16 is the next integer
    return bits.clamp_min(1).view(torch.float16)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    unsigned = (codes + 8).to(torch.uint8)
    return unsigned[..., 0::2] | (unsigned[..., 1::2] << 4)


def unpack(
    layer: LayerKV, num_rows: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``(H_kv, num_rows, D)`` of a layer's first rows, with or without codes, on a device.

    Codes are moved there as they are, unpacked there in float32, and rounded to ``dtype`` once.
    """
    keys, values = (
        x[:, :num_rows].to(device, non_blocking=True) for x in (layer.keys, layer.values)
    )
    scales = layer.scales
    if scales is None:
        return keys.to(dtype), values.to(dtype)
    moved = [
        x.to(device, non_blocking=True).float() for x in (scales.zeros, scales.keys, scales.values)
    ]
    zeros, key_scales = (_spread(x, GROUP, 1, num_rows) for x in moved[:2])
    floats = _floats(values)
    group = group_of(floats.shape[2]) if values.dtype == torch.uint8 else floats.shape[2]
    value_scales = _spread(moved[2][:, :num_rows], group, 2, floats.shape[2])
    return torch.addcmul(zeros, _floats(keys), key_scales).to(dtype), (floats * value_scales).to(
        dtype
    )


def _floats(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.uint8:
        return codes.float()
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float() - 8.0


def _spread(x: torch.Tensor, group: int, dim: int, size: int) -> torch.Tensor:
    """Repeat what a group shares for each of its members, of ``size`` in all; what everyone shares is broadcast anyway."""
    return x if x.shape[dim] == 1 else x.repeat_interleave(group, dim).narrow(dim, 0, size)


def _shape(x: torch.Tensor) -> tuple[int, int, int]:
    heads, tokens, dim = x.shape
    return heads, tokens, dim
