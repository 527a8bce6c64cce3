"""Tensors of a layer: their shapes, their conversion to bytes, and the checks on these bytes."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvrag.errors import StoreError
from kvrag.kv.buffers import BUFFERS
from kvrag.types import ChunkIdentity, ChunkKV, KVDtype, LayerKV, Scales

# Tokens that share a scale of int4 keys; most channels that share a scale of int4 values.
GROUP = 32
FP8 = torch.float8_e4m3fn
# Dtype of the codes; uint8 holds two 4-bit integers, offset by 8, the lower integer first.
CODES: dict[KVDtype, torch.dtype] = {"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}
# Safetensors' names of the dtypes of keys and values, and of all stored dtypes.
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in FLOATS.items()} | {
    torch.int8: "I8",
    torch.uint8: "U8",
    FP8: "F8_E4M3",
}
MAX_LAYERS = 512  # more are neither written nor read
# Alignment of tensors on a device: its kernels read this many bytes at once.
PLACE_BYTES = 16
# Bytes checked and hashed at once: fits the processor's cache, and holds whole values of any dtype.
SCAN_BYTES = 1280 * 1024
# Bits of positive infinity; NaN has larger bits. Negative values also have the sign bit 0x8000.
INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
# Names in messages.
TENSORS = (
    "keys",
    "values",
    "scales of keys",
    "zeros of keys",
    "scales of values",
)
TENSOR = '"layer.%03d.%s":{"dtype":"%s","shape":[%d,%d,%d],"data_offsets":[%d,%d]}'
Shape = tuple[int, ...]  # (H_kv, T, D)
Shapes = tuple[tuple[Shape, Shape], ...]  # of keys and values, per layer


@dataclass(frozen=True, slots=True)
class Part:
    """Name, dtype and shape of a stored tensor of a layer."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@functools.lru_cache(maxsize=256)
def parts(kv_dtype: KVDtype, dtype: torch.dtype, keys: Shape, values: Shape) -> tuple[Part, ...]:
    """Return the stored tensors of a layer, in the order of :attr:`~kvrag.types.LayerKV.tensors`.

    ``dtype``, ``keys`` and ``values`` are the dtype and shapes of its keys and values. Raises
    ``StoreError`` if the type can't hold these shapes.
    """
    if kv_dtype == "auto":
        return Part("keys", dtype, keys), Part("values", dtype, values)
    (heads, tokens, dim), (value_heads, _, value_dim) = keys, values
    packed = 1
    half = torch.float16
    codes = CODES[kv_dtype]
    groups = 1
    key_channels = dim
    scales = (tokens, 1)
    if kv_dtype == "fp8":
        key_channels = 1
        scales = (1, 1)
    elif kv_dtype == "int4":
        if dim % 2 or value_dim % 2:
            raise StoreError(
                f"int4 packs two channels into a byte; the head dim {dim} or {value_dim} is odd; "
                "use int8"
            )
        packed = 2
        groups = -(-tokens // GROUP)
        scales = (tokens, -(-value_dim // group_of(value_dim)))
    return (
        Part("keys", codes, (heads, tokens, dim // packed)),
        Part("values", codes, (value_heads, tokens, value_dim // packed)),
        Part("key_scales", half, (heads, groups, key_channels)),
        Part("key_zeros", half, (heads, groups, dim)),
        Part("value_scales", half, (value_heads, *scales)),
    )


class BlobLayout(NamedTuple):
    """Layout of a blob's data.

    ``layers`` are the tensors per layer. ``offsets`` are the start of every layer in the data, and
    the end of the last layer. ``json`` is the tensors' part of the header.
    """

    layers: tuple[tuple[Part, ...], ...]
    offsets: tuple[int, ...]
    json: str


@functools.lru_cache(maxsize=32)
def layout_of(kv_dtype: KVDtype, dtype: torch.dtype, shapes: Shapes) -> BlobLayout:
    """Lay out a blob's tensors; chunks of the same model and length share the result."""
    layers = tuple(parts(kv_dtype, dtype, keys, values) for keys, values in shapes)
    offsets = [0]
    tensors = list[str]()
    end = 0
    for i, layer in enumerate(layers):
        for part in layer:
            start = end
            end += part.num_bytes
            tensors.append(TENSOR % (i, part.name, NAMES[part.dtype], *part.shape, start, end))
        offsets.append(end)
    return BlobLayout(layers, tuple(offsets), ",".join(tensors))


def group_of(dim: int) -> int:
    """Return how many neighbouring channels of int4 values share a scale.

    The largest divisor of the head dim in [16, 32] if it has any, else 32; at most the head dim.
    """
    if dim > GROUP:
        return next((size for size in range(GROUP, GROUP // 2 - 1, -1) if dim % size == 0), GROUP)
    return dim


def layer_of(dtype: torch.dtype, tensors: Sequence[Tensor]) -> LayerKV:
    """Build a layer from its tensors; ``dtype`` is the dtype of its keys and values."""
    keys, values, *scales = tensors
    return LayerKV(keys, values, Scales(dtype, *scales) if scales else None)


def view_layer(dtype: torch.dtype, layer: Sequence[Part], data: Tensor) -> LayerKV:
    """View the bytes of a layer, uint8, as its tensors."""
    tensors = []
    start = 0
    for part in layer:
        own = data[start : start + part.num_bytes]
        start += part.num_bytes
        size = part.dtype.itemsize
        # Scales behind an odd number of codes are not aligned.
        if own.data_ptr() % size or own.storage_offset() % size:
            own = own.clone()
        tensors.append(own.view(part.dtype).view(part.shape))
    return layer_of(dtype, tensors)


def shapes_of(identity: ChunkIdentity, kv: ChunkKV) -> tuple[torch.dtype, Shapes]:
    """Return the dtype and the shapes of a chunk's keys and values.

    Raises ``StoreError`` if the tensors don't form a chunk of this identity.
    """
    tokens = len(identity.token_ids)
    kv_dtype = identity.kv_dtype
    shapes = list[tuple[Shape, Shape]]()
    if not tokens or not 0 < len(kv.layers) <= MAX_LAYERS:
        raise StoreError(
            f"the chunk has {tokens} tokens and {len(kv.layers)} layers and can't be stored; a "
            f"file holds at most {MAX_LAYERS} layers, "
            "and nothing with no layers or no tokens"
        )
    dtype = kv.layers[0].dtype
    packed = 2 if kv_dtype == "int4" else 1
    for index, layer in enumerate(kv.layers):
        found = [(tensor.dtype, tuple(tensor.shape)) for tensor in layer.tensors]
        sizes = [
            (*shape[:-1], packed * shape[-1])
            for _, shape in found[:2]
            if len(shape) == 3 and shape[1] == tokens
        ]
        is_right = (
            len(sizes) == 2
            and min(map(min, sizes)) > 0
            and dtype in FLOATS.values()
            and (layer.scales is None or layer.scales.dtype == dtype)
        )
        if not is_right or found != [
            (part.dtype, part.shape) for part in parts(kv_dtype, dtype, *sizes)
        ]:
            raise StoreError(
                f"layer {index} of the chunk can't be stored as {kv_dtype!r}: its tensors are "
                f"{found}; pass keys and values of shape "
                f"(heads, {tokens}, head dim), one row per token, all one of float32, float16 and "
                "bfloat16, or what "
                "kvrag.kv.quantise.pack makes of them"
            )
        shapes.append((sizes[0], sizes[1]))
    return dtype, tuple(shapes)


def bytes_of(layers: Iterable[Sequence[Tensor]]) -> list[memoryview]:
    """View the bytes of contiguous tensors on the host, as long as the caller keeps the tensors.

    Torch's own conversions take three times as long.
    """
    tensors = [tensor for layer in layers for tensor in layer]
    return [
        memoryview((ctypes.c_char * x.nbytes).from_address(x.data_ptr())).cast("B") for x in tensors
    ]


def scanned(
    index: int, tensors: Sequence[Tensor], look: Callable[..., object] = len
) -> list[memoryview]:
    """Return the bytes of a layer in pieces, and call ``look`` on every piece.

    Raises ``StoreError`` if a value is not finite, because attention would spread it.
    """
    pieces = []
    for name, tensor, view in zip(TENSORS, tensors, bytes_of([tensors]), strict=False):
        for start in range(0, len(view), SCAN_BYTES):
            pieces.append(view[start : start + SCAN_BYTES])
            if not _is_finite(pieces[-1], tensor.dtype):
                raise StoreError(
                    f"{name} of layer {index} of the chunk hold a value that is not finite; "
                    "the chunk is not stored, compute it again"
                )
            look(pieces[-1])
    return pieces


def own_kv(kv: ChunkKV, device: torch.device | str, *, copy: bool = False) -> ChunkKV:
    """Return a chunk on a device; neighbouring layers of the same shape are views of a stack.

    Parameters are those of :func:`together`. Raises ``MemoryError`` or ``RuntimeError``.
    """
    layers = list[LayerKV]()
    dtype = kv.layers[0].dtype
    for run in runs_alike([(layer.keys.shape, layer.values.shape) for layer in kv.layers]):
        whole = together(kv.layers[run.start : run.stop], device, copy=copy)
        layers += map(
            partial(layer_of, dtype),
            zip(*[stack.unbind() for stack in whole.tensors], strict=True),
        )
    return ChunkKV(tuple(layers))


def runs_alike(shapes: Sequence[object], most: int = MAX_LAYERS) -> list[range]:
    """Cut layers into runs of neighbours of the same shape, of at most ``most`` layers."""
    runs = list[range]()
    for i, shape in enumerate(shapes):
        if runs and shapes[runs[-1].start] == shape and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def together(
    layers: Sequence[LayerKV], device: torch.device | str, *, copy: bool = False
) -> LayerKV:
    """Stack layers of the same shape on a device; layers become the tensors' first dimension.

    Tensors that already lie there at an equal distance from layer to layer become views, unless
    ``copy``. Otherwise all tensors are copied to new memory. Runs of bytes that are contiguous on
    both sides take a single copy, which is asynchronous from pinned memory to CUDA: the layers must
    live until it is done (:func:`kvrag.kv.buffers.held`).
    """
    rows = [layer.tensors for layer in layers]
    device = torch.device(device)
    is_there = layers[0].keys.device == device and not copy
    columns = zip(*rows, strict=True) if is_there else ()
    tensors = [x for x in map(_as_one, columns) if x is not None]
    if len(tensors) < len(rows[0]):
        tensors = _gathered(rows, device)
    return layer_of(layers[0].dtype, tensors)


def _as_one(column: Sequence[Tensor]) -> Tensor | None:
    """View the tensors of ``L`` layers as a single tensor ``(L, …)``.

    Return ``None`` if they don't lie in the same memory at equal distances.
    """
    first = column[0]
    stride = first.stride()
    places = [x.data_ptr() for x in column]
    gap = places[1] - places[0] if len(column) > 1 else first.nbytes
    step, rest = divmod(gap, first.itemsize)
    is_even = not rest and places == [places[0] + i * gap for i in range(len(column))]
    memory = first.untyped_storage()
    # as_strided() must not reach beyond the memory of the first.
    is_one = (
        memory.data_ptr() <= min(places)
        and max(places) + first.nbytes <= memory.data_ptr() + memory.nbytes()
    )
    if not (gap > 0 and is_even and is_one and all(x.stride() == stride for x in column)):
        return None
    return first.as_strided((len(column), *first.shape), (step, *stride))


def _gathered(rows: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Copy the tensors of layers to a device, layer after layer, aligned to :data:`PLACE_BYTES`."""
    offsets = [*accumulate((-(-x.nbytes // PLACE_BYTES) * PLACE_BYTES for x in rows[0]), initial=0)]
    step = offsets.pop()
    if device.type == "cpu":
        whole = torch.frombuffer(BUFFERS.take(len(rows) * step), dtype=torch.uint8)
    else:
        whole = torch.empty(len(rows) * step, dtype=torch.uint8, device=device)
    # Mapped in C: a prompt has hundreds of tensors.
    tensors = [*map(Tensor.contiguous, chain.from_iterable(rows))]
    sizes = [x.nbytes for x in rows[0]] * len(rows)
    places = [start + offset for start in range(0, whole.numel(), step) for offset in offsets]
    for to, source in _stretches(tensors, sizes, places):
        whole[to : to + len(source)].copy_(source, non_blocking=whole.is_cuda)
    views = []
    for x, offset in zip(rows[0], offsets, strict=True):
        (heads, count, dim), size = x.shape, x.itemsize
        strides = step // size, count * dim, dim, 1
        views.append(
            whole.view(x.dtype).as_strided((len(rows), heads, count, dim), strides, offset // size)
        )
    return views


def _stretches(
    tensors: Sequence[Tensor], sizes: Sequence[int], places: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the destination offset and the bytes of contiguous tensors.

    Tensors that are neighbours in the source and in the destination are merged.
    """
    starts = [*map(Tensor.data_ptr, tensors)]
    count = len(starts)
    first = 0
    while first < count:
        # Don't merge tensors of two memories that are neighbours by chance: the driver refuses a
        # copy that spans two pinned allocations.
        memory = tensors[first].untyped_storage()
        begin = starts[first]
        place = places[first]
        stop = first + 1
        end = begin + sizes[first]
        limit = memory.data_ptr() + memory.nbytes()
        while (
            stop < count
            and (starts[stop], places[stop]) == (end, place + end - begin)
            and end + sizes[stop] <= limit
        ):
            end += sizes[stop]
            stop += 1
        # A view of the bytes, whatever the tensors' dtypes and shapes.
        source = torch.empty(0, dtype=torch.uint8, device=memory.device)
        start = begin - memory.data_ptr()
        yield place, source.set_(memory, start, (end - begin,))  # type: ignore[call-overload]
        first = stop


def _is_finite(view: memoryview, dtype: torch.dtype) -> bool:
    """Whether every value is finite.

    Half precision is checked by bits: torch would convert the numbers individually.
    """
    if dtype == FP8:  # no infinity; NaN has all bits set except the sign
        return bool(((np.frombuffer(view, np.uint8) & 0x7F) != 0x7F).all())
    if dtype in (torch.int8, torch.uint8):
        return True
    infinity = INFINITY.get(dtype)
    if infinity is None:
        values = torch.from_numpy(np.frombuffer(view, np.float32))
        # A finite sum has no infinity and no NaN in it.
        return math.isfinite(values.sum().item()) or bool(values.isfinite().all())
    # As signed numbers, the largest bits are of a positive value; as unsigned ones, of a negative.
    signed = np.frombuffer(view, np.int16)
    return bool(signed.max() < infinity and signed.view(np.uint16).max() < 0x8000 | infinity)
