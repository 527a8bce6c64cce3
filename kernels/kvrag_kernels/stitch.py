"""The stitch op in torch: stored KV to its rows of the buffer, dequantised, corrected and rotated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import overload

import numpy as np
import torch

from kvrag_kernels.stitch_layers import Kind, alike

FP8 = torch.float8_e4m3fn
CODECS = {torch.bfloat16: "same", torch.float16: "same", torch.int8: "int8", torch.uint8: "int4", FP8: "fp8"}
"""How stored elements are read, by dtype; ``uint8`` holds two signed 4-bit integers, offset by 8, the lower one first."""

TOKEN_GROUP = 32
"""Neighbouring rows that share scales, where neither each row nor the whole part has its own."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys or values of one segment in one layer.

    Parameters
    ----------
    data
        ``(H_kv, T, D)``, or ``(H_kv, T, D / 2)`` for 4-bit integers.
    scales
        Float16 ``(H_kv, G, C)`` with ``C`` dividing ``D``: per channel ``(H_kv, 1, D)``, per token ``(H_kv, T, 1)``, in groups of ``D / C``
        channels, and of :data:`TOKEN_GROUP` tokens where ``G`` is neither 1 nor ``T``; ``None`` for 16-bit data.
    residual
        Float32 ``(H_kv, D)``, added to every row, or ``None``.
    zeros
        Float16 ``(H_kv, G, D)``, what scaled codes are counted from, or ``None``.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @property
    def dim(self) -> int:
        """Head dim, unpacked."""
        return int(self.data.shape[2]) * (2 if self.data.dtype == torch.uint8 else 1)

    @property
    def group(self) -> int:
        """Neighbouring channels that share a scale."""
        return self.dim if self.scales is None else self.dim // int(self.scales.shape[2])

    @property
    def tokens(self) -> int:
        """Neighbouring rows that share a row of scales; 1 where all rows do, for there is only one."""
        is_grouped = self.scales is not None and self.scales.shape[1] not in (1, self.data.shape[1])
        return TOKEN_GROUP if is_grouped else 1

    @property
    def is_plain(self) -> bool:
        """Whether the stored bits are the values."""
        return self.scales is None and self.residual is None

    def to(self, device: torch.device) -> Stored:
        """Return the part on a device."""
        tensors = (self.data, self.scales, self.residual, self.zeros)
        return Stored(*(x if x is None else x.to(device, non_blocking=True) for x in tensors))  # type: ignore[arg-type]

    def read(self) -> torch.Tensor:
        """Return the values in float32, ``(H_kv, T, D)``."""
        x = self.data
        if x.dtype == torch.uint8:
            x = torch.stack([x & 15, x >> 4], dim=-1).flatten(-2).float() - 8.0
        x = x.float()
        if self.scales is not None:
            x = x * self._each_row(self.scales).repeat_interleave(self.group, dim=2)
        if self.zeros is not None:
            x = x + self._each_row(self.zeros)
        return x if self.residual is None else x + self.residual[:, None]

    def _each_row(self, shared: torch.Tensor) -> torch.Tensor:
        """Repeat what a group of rows shares; what all share is broadcast anyway."""
        return shared.float().repeat_interleave(self.tokens, dim=1)[:, : max(1, self.data.shape[1])]


class Parts(Sequence[Stored]):
    """Parts as the op is given them, a list of tensors for each field of :class:`Stored`; one is put together where it is looked at.

    Parameters
    ----------
    data, scales, residual, zeros
        One tensor per part, or ``None`` where no part has one.

    Raises
    ------
    ValueError
        If lists differ in length.
    """

    def __init__(
        self,
        data: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] | None = None,
        residual: Sequence[torch.Tensor] | None = None,
        zeros: Sequence[torch.Tensor] | None = None,
    ) -> None:
        for name, given in (("scales", scales), ("residuals", residual), ("zeros", zeros)):
            if given is not None and len(given) != len(data):
                raise ValueError(f"{len(given)} {name} were given for {len(data)} parts; each part needs its own")
        self.columns = (data, scales, residual, zeros)

    @classmethod
    def of(cls, parts: Sequence[Stored]) -> Parts:
        """Return the same parts as columns."""
        if isinstance(parts, cls):
            return parts
        columns = ([getattr(p, name) for p in parts] for name in ("data", "scales", "residual", "zeros"))
        given = ([x for x in column if x is not None] for column in columns)
        data, *others = given
        return cls(data, *(column or None for column in others))

    @cached_property
    def pointers(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]] | None, ...]:
        """Addresses, by column."""
        return tuple(None if column is None else addresses(column) for column in self.columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[Stored]:
        data, *others = self.columns
        return map(Stored, data, *(repeat(None) if column is None else column for column in others))

    @overload
    def __getitem__(self, index: int) -> Stored: ...
    @overload
    def __getitem__(self, index: slice) -> Parts: ...
    def __getitem__(self, index: int | slice) -> Stored | Parts:
        data, *others = self.columns
        if isinstance(index, slice):
            return Parts(data[index], *(None if column is None else column[index] for column in others))
        return Stored(data[index], *(None if column is None else column[index] for column in others))


def addresses(tensors: Sequence[torch.Tensor]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return where tensors begin."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))


@dataclass(frozen=True)
class Stitching:
    """One call of the op: parts layer by layer, buffers ``(H_kv, capacity, D)``, and rotations; see :func:`kvrag_kernels.stitch`."""

    keys: Sequence[Stored]
    values: Sequence[Stored]
    out_keys: Sequence[torch.Tensor]
    out_values: Sequence[torch.Tensor]
    starts: Sequence[int]
    cos: torch.Tensor
    sin: torch.Tensor
    tables: Sequence[int]
    interleaved: bool = False
    skip: torch.Tensor | None = None

    @property
    def rotary(self) -> int:
        """Channels that are rotated."""
        return 2 * self.cos.shape[2] if any(t >= 0 for t in self.tables) else 0

    @cached_property
    def sides(self) -> tuple[Parts, Parts]:
        """Keys and values as columns."""
        return Parts.of(self.keys), Parts.of(self.values)

    @cached_property
    def alike(self) -> dict[Kind, Sequence[int]]:
        """Layers of which one stands for all, by what their checks and strides follow from: starts, and forms of parts and buffers."""
        count = len(self.starts)
        columns = [(column, count) for side in self.sides for column in side.columns]
        return alike(len(self.out_keys), [*columns, (self.out_keys, 1), (self.out_values, 1)], *self.starts)

    def in_layer(self, layer: int) -> tuple[list[Stored], list[Stored]]:
        """Return a layer's keys and values."""
        count = len(self.starts)
        keys, values = (list(side[layer * count : (layer + 1) * count]) for side in self.sides)
        return keys, values


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first ``2 · len(cos[0])`` channels of float ``x (H_kv, T, D)`` by ``cos, sin (T, R / 2)``.

    An angle of zero leaves its pair as it is, to the bit: ``x · 1 - y · 0`` would turn some negative zeros.
    """
    half = cos.shape[1]
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
    is_still = (cos == 1) & (sin == 0)
    turned = torch.where(is_still, a, a * cos - b * sin), torch.where(is_still, b, b * cos + a * sin)
    rotated = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([rotated, x[..., 2 * half :]], dim=-1)


def stitch_in_torch(call: Stitching) -> None:
    """Stitch part by part."""
    for index, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        layer, segment = divmod(index, len(call.starts))
        start = call.starts[segment]
        rows = slice(start, start + k.data.shape[1])
        out_k, out_v = call.out_keys[layer], call.out_values[layer]
        new_k = _keys(k.to(out_k.device), call, call.tables[layer], rows, out_k.dtype)
        v = v.to(out_v.device)
        for out, new in ((out_k, new_k), (out_v, v.data if v.is_plain else v.read())):
            new = new.to(out.dtype)
            # By a mask, not by indices: their number would have to be known on the host, which a CUDA graph can't ask.
            out[:, rows] = new if call.skip is None else torch.where(call.skip[rows, None], out[:, rows], new)


def _keys(k: Stored, call: Stitching, table: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    if table < 0:
        return k.data if k.is_plain else k.read()
    cos, sin = call.cos[table, rows], call.sin[table, rows]
    return rotate(k.read(), cos, sin, interleaved=call.interleaved).to(dtype)
