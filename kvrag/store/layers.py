"""The tensors of a layer: which there are, how they become bytes, and which bytes are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvrag.errors import StoreError
from kvrag.types import ChunkIdentity, ChunkKV, KVDtype, LayerKV, Scales

GROUP = 32
"""Tokens that share a scale of int4 keys, and the most channels that share one of int4 values."""

FP8 = torch.float8_e4m3fn
CODES: dict[KVDtype, torch.dtype] = {"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}
"""Dtype of the codes; uint8 holds two 4-bit integers, offset by 8, the lower one first."""

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    FP8: "F8_E4M3",
}
"""What safetensors calls a dtype."""

FLOATS = {NAMES[dtype]: dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
"""Dtypes that keys and values may have."""

MAX_LAYERS = 512
"""More layers are neither written nor read."""

INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""Bits of positive infinity; NaN has more. With the sign bit, 0x8000, they are those of the negative ones."""

SCAN_BYTES = 1280 * 1024
"""Scanned at once: short enough to stay in the processor's cache. Whole values of any dtype."""

TENSORS = ("keys", "values", "scales of keys", "zeros of keys", "scales of values")
"""What error messages call the tensors of a layer."""

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """Name, dtype and shape of one stored tensor of a layer."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def parts(kv_dtype: KVDtype, dtype: torch.dtype, keys: Shape, values: Shape) -> tuple[Part, ...]:
    """Return the tensors that a layer is stored as, in the order of :attr:`~kvrag.types.LayerKV.tensors`.

    Parameters
    ----------
    kv_dtype
        How the layer is stored.
    dtype
        Of its keys and values.
    keys, values
        Their shapes, ``(H_kv, T, D)``.

    Raises
    ------
    StoreError
        If the type can't hold these shapes.
    """
    if kv_dtype == "auto":
        return Part("keys", dtype, keys), Part("values", dtype, values)
    (heads, tokens, dim), (value_heads, _, value_dim) = keys, values
    packed, half, codes = 1, torch.float16, CODES[kv_dtype]
    groups, key_channels, scales = 1, dim, (tokens, 1)
    if kv_dtype == "fp8":
        key_channels, scales = 1, (1, 1)
    elif kv_dtype == "int4":
        if dim % 2 or value_dim % 2:
            raise StoreError(
                f"int4 packs two channels into a byte, and the head dim {dim} or {value_dim} is odd; use int8"
            )
        packed, groups = 2, -(-tokens // GROUP)
        scales = (tokens, -(-value_dim // group_of(value_dim)))
    return (
        Part("keys", codes, (heads, tokens, dim // packed)),
        Part("values", codes, (value_heads, tokens, value_dim // packed)),
        Part("key_scales", half, (heads, groups, key_channels)),
        Part("key_zeros", half, (heads, groups, dim)),
        Part("value_scales", half, (value_heads, *scales)),
    )


def group_of(dim: int) -> int:
    """Return how many neighbouring channels of int4 values share a scale: a divisor of the head dim in [16, 32] where there is one."""
    return next((size for size in range(GROUP, GROUP // 2 - 1, -1) if dim % size == 0), GROUP) if dim > GROUP else dim


def layer_of(dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> LayerKV:
    """Put a layer's tensors together; ``dtype`` is that of its keys and values."""
    keys, values, *scales = tensors
    return LayerKV(keys, values, Scales(dtype, *scales) if scales else None)


def view_layer(dtype: torch.dtype, layer: Sequence[Part], flat: torch.Tensor) -> LayerKV:
    """See the bytes of a layer, uint8 ``(num_bytes,)``, as its tensors."""
    tensors, start = [], 0
    for part in layer:
        piece = flat[start : start + part.num_bytes]
        if piece.storage_offset() % part.dtype.itemsize:  # scales behind an odd number of codes
            piece = piece.clone()
        tensors.append(piece.view(part.dtype).view(part.shape))
        start += part.num_bytes
    return layer_of(dtype, tensors)


def shapes_of(identity: ChunkIdentity, kv: ChunkKV) -> tuple[torch.dtype, tuple[tuple[Shape, Shape], ...]]:
    """Check that a chunk can be stored, and return the dtype and the shapes of its keys and values, per layer.

    Raises
    ------
    StoreError
        If its shapes or dtypes are not those of one chunk.
    """
    if not kv.layers or not identity.token_ids:
        raise StoreError("the chunk has no layers or no tokens and can't be stored; pass the KV of at least one token")
    if len(kv.layers) > MAX_LAYERS:
        raise StoreError(
            f"the chunk has {len(kv.layers)} layers and can't be stored; a file holds at most {MAX_LAYERS}"
        )
    if kv.kv_dtype != identity.kv_dtype:
        raise StoreError(
            f"the chunk is to be stored as {identity.kv_dtype!r} and its KV is {kv.kv_dtype!r}; pass it through kvrag.blend.quantise.pack"
        )
    first = kv.layers[0]
    dtype = first.keys.dtype if first.scales is None else first.scales.dtype
    return dtype, tuple(_check_layer(identity, layer, index, dtype) for index, layer in enumerate(kv.layers))


def _check_layer(identity: ChunkIdentity, layer: LayerKV, index: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
    """Return the shapes of keys and values, after a look at every tensor."""
    tokens, shapes = len(identity.token_ids), []
    packed = 2 if identity.kv_dtype == "int4" else 1
    for name, tensor in (("keys", layer.keys), ("values", layer.values)):
        where, shape = f"{name} of layer {index} of the chunk", tuple(tensor.shape)
        if tensor.ndim != 3 or tensor.shape[1] != tokens or not tensor.numel():
            raise StoreError(f"{where} have shape {shape}; it must be (heads, {tokens}, head dim), one row per token")
        if identity.kv_dtype == "auto" and (tensor.dtype not in FLOATS.values() or tensor.dtype != dtype):
            raise StoreError(f"{where} are {tensor.dtype}; all must be one of float32, float16 and bfloat16")
        shapes.append((shape[0], shape[1], packed * shape[2]))
    wanted = [(part.dtype, part.shape) for part in parts(identity.kv_dtype, dtype, shapes[0], shapes[1])]
    is_right = layer.scales is None or (layer.scales.dtype == dtype and dtype in FLOATS.values())
    if not is_right or wanted != [(tensor.dtype, tuple(tensor.shape)) for tensor in _tensors(layer)]:
        raise StoreError(
            f"codes or scales of layer {index} of the chunk are not those of {identity.kv_dtype!r}; "
            "make them with kvrag.blend.quantise.pack"
        )
    return shapes[0], shapes[1]


def _tensors(layer: LayerKV) -> Sequence[torch.Tensor]:
    """Return all tensors of a layer."""
    return (layer.keys, layer.values) if layer.scales is None else layer.tensors


def finite_bytes(layer: LayerKV, index: int, look: Callable[[memoryview], object] | None = None) -> list[memoryview]:
    """Return the bytes of a layer in pieces, after a look at each of them.

    Raises
    ------
    StoreError
        If a value is NaN or infinite: it would spread to every later answer.
    """
    pieces = []
    for name, tensor in zip(TENSORS, _tensors(layer), strict=False):
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(view), SCAN_BYTES):
            piece = view[start : start + SCAN_BYTES]
            if not _is_finite(piece, tensor.dtype):
                raise StoreError(
                    f"{name} of layer {index} of the chunk hold a value that is not finite; "
                    "the chunk is not stored, compute it again"
                )
            if look is not None:
                look(piece)
            pieces.append(piece)
    return pieces


def own_kv(kv: ChunkKV, *, device: torch.device | str = "cpu", copy: bool = False) -> ChunkKV:
    """Return a chunk with contiguous tensors on a device; with ``copy``, none of them is shared with ``kv``."""
    layers = []
    for layer in kv.layers:
        tensors = [
            tensor.detach().to(device, copy=copy, memory_format=torch.contiguous_format).contiguous()
            for tensor in _tensors(layer)
        ]
        layers.append(layer_of(tensors[0].dtype if layer.scales is None else layer.scales.dtype, tensors))
    return ChunkKV(tuple(layers), kv.kv_dtype)


def _is_finite(view: memoryview, dtype: torch.dtype) -> bool:
    """Whether every value is finite, by their bits: torch would convert half-precision numbers one by one."""
    if dtype == FP8:  # no infinity, and NaN in either sign: all bits but that of the sign
        return bool(((np.frombuffer(view, np.uint8) & 0x7F) != 0x7F).all())
    if dtype in (torch.int8, torch.uint8):
        return True
    infinity = INFINITY.get(dtype)
    if infinity is None:
        low, high = torch.aminmax(torch.from_numpy(np.frombuffer(view, np.float32)))
        return math.isfinite(low.item()) and math.isfinite(high.item())
    signed = np.frombuffer(view, np.int16)
    return bool(signed.max() < infinity and signed.view(np.uint16).max() < 0x8000 | infinity)
