"""Turns stored parts into a launch of the stitch kernel, on a device or in the emulator."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kvrag_kernels.launch import Empty, Module

FP8 = torch.float8_e4m3fn
CODECS = {
    torch.bfloat16: "same",
    torch.float16: "same",
    torch.int8: "int8",
    torch.uint8: "int4",
    FP8: "fp8",
}
"""Codec of stored elements by dtype.

``uint8`` holds two signed 4-bit integers, offset by 8, the lower first.
"""

TOKEN_GROUP = 32
"""Neighbouring rows that share scales, unless scales are per row or per part."""

# Constants of csrc/stitch.cu.
THREADS = 256  # of a block
TILE_ROWS = 64  # rows of a block
PART = 28  # numbers in struct Part
PLACE = 4  # numbers in struct Place

WIDE = 16  # bytes of scales, zeros and angles that the kernel reads, and writes, at a time
_STITCH = struct.Struct("5Q q 3i 4x")
_CODEC_NUMBERS = {"same": 0, "int8": 1, "int4": 2, "fp8": 3}
_PIECE_BYTES = {"same": 16, "int8": 8, "int4": 4, "fp8": 8}


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys or values of a segment in all layers, or in a single layer without the first dimension.

    Parameters
    ----------
    data
        ``(L, H_kv, T, D)``, or ``(L, H_kv, T, D / 2)`` for 4-bit integers.
    scales
        Float16 ``(L, H_kv, G, C)`` with ``C`` dividing ``D``: per channel ``(L, H_kv, 1, D)``, per
        token ``(L, H_kv, T, 1)``, in groups of ``D / C`` channels, and of :data:`TOKEN_GROUP`
        tokens where ``G`` is neither 1 nor ``T``; absent for 16-bit data.
    zeros
        Float16 ``(L, H_kv, G, D)``, added to scaled codes, or ``None``.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows ``T``."""
        return self.data.shape[-2]

    @property
    def dim(self) -> int:
        """Head dim, unpacked."""
        return int(self.data.shape[-1]) * (2 if self.data.dtype == torch.uint8 else 1)

    @property
    def group(self) -> int:
        """Number of neighbouring channels that share a scale."""
        if self.scales is None:
            return self.dim
        return self.dim // int(self.scales.shape[-1])

    @property
    def tokens(self) -> int:
        """Number of neighbouring rows that share a row of scales.

        1 if scales are per row, and also if all rows share the only row of scales.
        """
        if self.scales is not None and self.scales.shape[-2] not in (1, self.num_rows):
            return TOKEN_GROUP
        return 1

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Stored:
        """Return the part with ``change`` applied to every tensor."""
        parts = (x if x is None else change(x) for x in (self.data, self.scales, self.zeros))
        return Stored(*parts)  # type: ignore[arg-type]

    def read(self) -> torch.Tensor:
        """Return the dequantised values in float32, ``(…, T, D)``; unscaled data unchanged."""
        x = self.data
        if self.scales is None:
            return x
        if x.dtype == torch.uint8:
            x = torch.stack([x & 15, x >> 4], dim=-1).flatten(-2).float() - 8.0
        x = x.float() * self._each_row(self.scales).repeat_interleave(self.group, dim=-1)
        if self.zeros is None:
            return x
        return x + self._each_row(self.zeros)

    def _each_row(self, shared: torch.Tensor) -> torch.Tensor:
        """Repeat rows that groups share; a single row for all rows is broadcast anyway."""
        return shared.float().repeat_interleave(self.tokens, dim=-2)[
            ..., : max(1, self.num_rows), :
        ]


@dataclass(frozen=True)
class Stitching:
    """A call of the op: parts per segment, buffers ``(H_kv, capacity, D)`` per layer, rotations.

    See :func:`kvrag_kernels.stitch`.
    """

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
        """Number of channels that are rotated."""
        if any(t >= 0 for t in self.tables):
            return 2 * self.cos.shape[2]
        return 0


def defines(call: Stitching) -> tuple[str, ...] | None:
    """Return the compiler's options for a call; ``None`` if the kernel does not support it.

    The kernel needs the same codec, head dim and scale groups for all parts, 16-bit buffers, a head
    dim and a number of rotated channels that are multiples of 16, all tensors on the same device,
    and aligned memory, because it reads several bytes at a time.
    """
    outs = [*call.out_keys, *call.out_values]
    parts = [*call.keys, *call.values]
    beside = [x for x in (call.cos, call.sin, call.skip) if x is not None]
    used = [x for p in parts for x in (p.data, p.scales, p.zeros) if x is not None]
    kinds = {(p.data.dtype, p.dim) for p in parts}
    key_groups, value_groups = ({p.group for p in side} for side in (call.keys, call.values))
    dtypes = {x.dtype for x in outs}
    if not len(kinds) == len(key_groups) == len(value_groups) == len(dtypes) == 1:
        return None
    ((stored, dim),), (dtype,) = kinds, dtypes
    is_fit = (
        stored in CODECS
        and dtype in (torch.bfloat16, torch.float16)
        and dim % 16 == call.rotary % 16 == 0
    )
    is_fit = is_fit and call.cos.data_ptr() % WIDE == call.sin.data_ptr() % WIDE == 0
    if (
        not is_fit
        or len({x.device for x in (*outs, *used, *beside)}) > 1
        or not _can_copy(parts, outs)
    ):
        return None
    options = {
        "D": dim,
        "BF16": int(dtype == torch.bfloat16),
        "CODEC": _CODEC_NUMBERS[CODECS[stored]],
        "SOURCE_BF16": int(stored == torch.bfloat16),
        "K_GROUP": key_groups.pop(),
        "V_GROUP": value_groups.pop(),
        "ROTARY": call.rotary,
        "INTERLEAVED": int(call.interleaved),
    }
    return tuple(f"-D{name}={value}" for name, value in options.items())


def _can_copy(parts: Iterable[Stored], outs: Iterable[torch.Tensor]) -> bool:
    """Whether all rows are aligned for the kernel's reads and writes of several bytes."""
    for part in parts:
        scales = part.scales
        zeros = part.zeros
        if not _is_aligned(part.data, _PIECE_BYTES[CODECS[part.data.dtype]]):
            return False
        if scales is not None and not (
            _is_aligned(scales, WIDE) if part.group == 1 else _has_rows(scales)
        ):
            return False
        if zeros is not None and not _is_aligned(zeros, WIDE):
            return False
    return all(_is_aligned(x, WIDE) for x in outs)


def _has_rows(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] == 1


def _is_aligned(x: torch.Tensor, num_bytes: int) -> bool:
    """Whether rows are contiguous and begin at multiples of ``num_bytes``, a power of two."""
    *strides, last = x.stride()
    size = x.element_size()
    bits = x.data_ptr()
    for stride in strides:
        bits |= stride * size
    return last == 1 and bits % num_bytes == 0


def table_of(call: Stitching, empty: Empty = torch.empty) -> torch.Tensor:
    """Return the kernel's table, int64 on the CPU.

    It holds ``struct Part`` per segment, then ``struct Place`` per layer, for keys and values.
    """
    numbers: list[int] = []
    for k, v, start in zip(call.keys, call.values, call.starts, strict=True):
        numbers += [*_side(k), *_side(v), start, k.num_rows]
    for out_k, out_v, table in zip(call.out_keys, call.out_values, call.tables, strict=True):
        for out, its_table in ((out_k, table), (out_v, -1)):
            numbers += [out.data_ptr(), out.stride(0), out.stride(1), its_table]
    # Filled through NumPy: torch.tensor() would allocate memory that is not pinned.
    made = empty(len(numbers), dtype=torch.int64, device="cpu")  # not the default device
    made.numpy()[:] = numbers
    return made


def _side(part: Stored) -> list[int]:
    """Return ``struct Side``; the stride is 0 where all rows share scales or zeros."""
    data = part.data
    size = data.element_size()
    found = [0 if x is None else x.data_ptr() for x in (data, part.scales, part.zeros)]
    found += [s * size for s in data.stride()[:3]]
    for x in (part.scales, part.zeros):
        found += (
            (0, 0, 0)
            if x is None
            else (x.stride(0), x.stride(1), x.stride(2) if x.shape[2] > 1 else 0)
        )
    # The kernel shifts: a group has a power of two of rows.
    return [*found, part.tokens.bit_length() - 1]


def run(
    module: Module,
    call: Stitching,
    to_device: Callable[[torch.Tensor], torch.Tensor],
    empty: Empty = torch.empty,
) -> None:
    """Launch the kernel a single time for all layers and segments.

    ``empty`` allocates the table on the host, and ``to_device`` copies it.
    """
    tiles = -(-max((k.num_rows for k in call.keys), default=0) // TILE_ROWS)
    if not tiles or not call.out_keys:
        return
    table = to_device(table_of(call, empty))
    cos = call.cos.contiguous()
    sin = call.sin.contiguous()
    parts = len(call.keys)
    heads = call.out_keys[0].shape[0]
    skip = 0 if call.skip is None else call.skip.contiguous().data_ptr()
    places = table.data_ptr() + parts * PART * table.element_size()
    pointers = table.data_ptr(), places, cos.data_ptr(), sin.data_ptr(), skip
    arguments = _STITCH.pack(*pointers, cos.stride(0), parts, heads, tiles)
    module.launch("stitch", len(call.out_keys) * parts * 2 * heads * tiles, THREADS, 0, arguments)
