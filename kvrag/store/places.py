"""Where the tensors of a blob lie, and how its header says so."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvrag.blend.quantise import FP8, Part, parts
from kvrag.types import KVDtype

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CODE_NAMES = {torch.int8: "I8", torch.uint8: "U8", FP8: "F8_E4M3"}

ENCODER = json.JSONEncoder(separators=(",", ":"))

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a blob and their places.

    Parameters
    ----------
    layers
        Tensors of each layer.
    offsets
        Where each layer begins in the data, in bytes, and where the last one ends.
    json
        What the header says of them.
    """

    layers: tuple[tuple[Part, ...], ...]
    offsets: tuple[int, ...]
    json: bytes


@functools.lru_cache(maxsize=256)
def tensors_of(kv_dtype: KVDtype, dtype: torch.dtype, shapes: tuple[tuple[Shape, Shape], ...]) -> Tensors:
    """Lay out a blob's tensors. They are the same for all chunks of a model that have one length, and most of a header's work."""
    layers = tuple(parts(kv_dtype, dtype, keys, values) for keys, values in shapes)
    names, places, offsets = NAMES | CODE_NAMES, {}, [0]
    for i, layer in enumerate(layers):
        start = offsets[-1]
        for part in layer:
            stop = start + part.num_bytes
            place = {"dtype": names[part.dtype], "shape": list(part.shape), "data_offsets": [start, stop]}
            places[f"layer.{i:03d}.{part.name}"] = place
            start = stop
        offsets.append(start)
    return Tensors(layers, tuple(offsets), dump(places))


def shape_of(value: list[int]) -> Shape:
    """Check three sizes; ``ValueError`` if they are no shape."""
    heads, tokens, dim = value
    # Written out, because it is run twice per layer of every blob that is read.
    is_shape = type(heads) is type(tokens) is type(dim) is int and min(heads, tokens, dim) > 0
    if not is_shape or max(heads, tokens, dim) >= 2**31:
        raise ValueError("not a shape")
    return heads, tokens, dim


def unpacked(shape: Shape, kv_dtype: KVDtype) -> Shape:
    """Shape of what codes of this shape stand for."""
    heads, tokens, dim = shape
    return heads, tokens, 2 * dim if kv_dtype == "int4" else dim


def dump(fields: Mapping[str, Any]) -> bytes:
    """Write JSON as headers have it."""
    return ENCODER.encode(fields).encode("ascii")
