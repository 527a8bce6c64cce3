"""From stored parts to one launch of the stitch kernel, on a device or in the emulator alike."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from kvrag_kernels.launch import Module
from kvrag_kernels.stitch import CODECS, Stitching, Stored

THREADS, TILE_ROWS = 256, 64
_STITCH = struct.Struct("4Q q 2i")
_CODEC_NUMBERS = {"same": 0, "int8": 1, "int4": 2, "fp8": 3}
_CHUNK_BYTES = {"same": 16, "int8": 8, "int4": 4, "fp8": 8}


def defines(call: Stitching) -> tuple[str, ...] | None:
    """Return the compiler's options for a call, or ``None`` where the kernel has no form for it.

    The kernel wants one codec and one shape for all parts, 16-bit buffers, and channels, rotated and other, in sixteens, and
    everything on one device.
    """
    parts, outs = [*call.keys, *call.values], [*call.out_keys, *call.out_values]
    if len({x.device for x in [*(p.data for p in parts), *outs, call.cos]}) != 1:
        return None
    kinds = {(p.data.dtype, p.data.shape[0], p.dim) for p in parts}
    groups = [{p.group for p in side} for side in (call.keys, call.values)]
    if (
        len(kinds) != 1
        or {o.dtype for o in outs} - {torch.bfloat16, torch.float16}
        or len({o.dtype for o in outs}) != 1
    ):
        return None
    ((dtype, _, dim),) = kinds
    is_fit = dim % 16 == 0 and call.rotary % 16 == 0 and all(len(g) == 1 for g in groups) and dtype in CODECS
    if not is_fit or not all(_can_copy(p) for p in parts) or not all(_is_aligned(o, 16) for o in outs):
        return None
    options = {
        "D": dim,
        "BF16": int(outs[0].dtype == torch.bfloat16),
        "CODEC": _CODEC_NUMBERS[CODECS[dtype]],
        "SOURCE_BF16": int(dtype == torch.bfloat16),
        "K_GROUP": groups[0].pop(),
        "V_GROUP": groups[1].pop(),
        "ROTARY": call.rotary,
        "INTERLEAVED": int(call.interleaved),
    }
    return tuple(f"-D{name}={value}" for name, value in options.items())


def _can_copy(part: Stored) -> bool:
    has_rows = _is_aligned(part.data, _CHUNK_BYTES[CODECS[part.data.dtype]])
    beside = [x for x in (part.scales, part.zeros, part.residual) if x is not None]
    return has_rows and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in beside)


def _is_aligned(x: torch.Tensor, num_bytes: int) -> bool:
    size = x.element_size()
    return x.stride(2) == 1 and x.data_ptr() % num_bytes == 0 and all(s * size % num_bytes == 0 for s in x.stride()[:2])


def jobs_of(call: Stitching) -> torch.Tensor:
    """Return the kernel's table of parts, int64 ``(parts, 33)``, on the CPU: ``struct Job`` of ``csrc/stitch.cu``."""
    table = []
    for index, (k, v) in enumerate(zip(call.keys, call.values, strict=True)):
        layer, segment = divmod(index, len(call.starts))
        sides = [*_side(k, call.out_keys[layer]), *_side(v, call.out_values[layer])]
        table.append([*sides, call.starts[segment], k.data.shape[1], call.tables[layer]])
    return torch.tensor(table, dtype=torch.int64)


def _side(part: Stored, out: torch.Tensor) -> list[int]:
    data, size = part.data, part.data.element_size()
    pointers = [0 if x is None else x.data_ptr() for x in (data, part.scales, part.zeros, part.residual, out)]
    shared = [n for x in (part.scales, part.zeros) for n in _shared_strides(x)]
    beside = 0 if part.residual is None else part.residual.stride(0)
    steps = [data.stride(0) * size, data.stride(1) * size, *shared, part.tokens.bit_length() - 1, beside]
    return [*pointers, *steps, out.stride(0), out.stride(1)]


def _shared_strides(x: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of heads and of groups of rows; a stride of 0 where all rows share."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1) if x.shape[1] > 1 else 0)


def run(module: Module, call: Stitching, to_device: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Launch the kernel once for all layers and segments; ``to_device`` copies the table of parts."""
    longest = max((k.data.shape[1] for k in call.keys), default=0)
    if longest == 0:
        return
    jobs, cos, sin = to_device(jobs_of(call)), call.cos.contiguous(), call.sin.contiguous()
    heads, tiles = call.keys[0].data.shape[0], -(-longest // TILE_ROWS)
    skip = 0 if call.skip is None else call.skip.contiguous().data_ptr()
    arguments = _STITCH.pack(jobs.data_ptr(), cos.data_ptr(), sin.data_ptr(), skip, cos.stride(0), heads, tiles)
    module.launch("stitch", len(call.keys) * heads * tiles, THREADS, 0, arguments)
