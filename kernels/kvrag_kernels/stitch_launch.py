"""From stored parts to one launch of the stitch kernel, on a device or in the emulator alike."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvrag_kernels.launch import Empty, Module
from kvrag_kernels.stitch import CODECS, Stitching, Stored, addresses
from kvrag_kernels.stitch_layers import Remembered

SIDE, ADDRESSES = 15, 5
"""Numbers of ``struct Side``, of which the first are addresses."""

JOB = 2 * SIDE + 3
"""Numbers of ``struct Job``."""

THREADS, TILE_ROWS = 256, 64
_STITCH = struct.Struct("4Q q 2i")
_CODEC_NUMBERS = {"same": 0, "int8": 1, "int4": 2, "fp8": 3}
_CHUNK_BYTES = {"same": 16, "int8": 8, "int4": 4, "fp8": 8}


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What the kernel has to be compiled for, of one layer; call :func:`defines` for the whole."""

    device: torch.device
    dtype: torch.dtype
    out_dtype: torch.dtype
    dim: int
    heads: int
    key_group: int
    value_group: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What all launches of layers that look alike share.

    Parameters
    ----------
    form
        ``None`` where the kernel has none.
    jobs
        The layer's rows of the table of parts, ``(S, 33)``, with zeros where addresses and the rotation's table go.
    longest
        Rows of the longest part.
    """

    form: LayerForm | None
    jobs: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    longest: int


_PLANS = Remembered[LayerPlan]()


def _plans(call: Stitching) -> list[tuple[LayerPlan, Sequence[int]]]:
    """Return the plan of each kind of layer, and its layers."""
    return [(_PLANS.get(kind, partial(_plan_of, call, layers[0])), layers) for kind, layers in call.alike.items()]


def _plan_of(call: Stitching, layer: int) -> LayerPlan:
    (keys, values), outs = call.in_layer(layer), (call.out_keys[layer], call.out_values[layer])
    jobs = [
        [*_side(k, outs[0]), *_side(v, outs[1]), start, k.data.shape[1], 0]
        for k, v, start in zip(keys, values, call.starts, strict=True)
    ]
    longest = max((k.data.shape[1] for k in keys), default=0)
    return LayerPlan(_form_of(keys, values, outs), np.array(jobs, np.int64).reshape(-1, JOB), longest)


def _form_of(keys: list[Stored], values: list[Stored], outs: tuple[torch.Tensor, torch.Tensor]) -> LayerForm | None:
    parts = [*keys, *values]
    used = [x for p in parts for x in (p.data, p.scales, p.zeros, p.residual) if x is not None]
    kinds = {(p.data.dtype, p.dim, p.data.shape[0]) for p in parts}
    groups = [{p.group for p in side} for side in (keys, values)]
    on, into = {x.device for x in [*used, *outs]}, {o.dtype for o in outs}
    if not len(kinds) == len(on) == len(into) == len(groups[0]) == len(groups[1]) == 1:
        return None
    ((dtype, dim, heads),), ((key_group,), (value_group,)) = kinds, groups
    is_fit = dtype in CODECS and outs[0].dtype in (torch.bfloat16, torch.float16) and dim % 16 == 0
    if not is_fit or not all(_can_copy(p) for p in parts) or not all(_has_rows_of(o, 16) for o in outs):
        return None
    return LayerForm(outs[0].device, dtype, outs[0].dtype, dim, heads, key_group, value_group)


def defines(call: Stitching) -> tuple[str, ...] | None:
    """Return the compiler's options for a call, or ``None`` where the kernel has no form for it.

    The kernel wants one codec and one shape for all parts, 16-bit buffers, and channels, rotated and other, in sixteens, and
    everything on one device.
    """
    forms = {plan.form for plan, _ in _plans(call)}
    form = forms.pop() if len(forms) == 1 else None
    angles = [x for x in (call.cos, call.sin, call.skip) if x is not None]
    if form is None or call.rotary % 16 or any(x.device != form.device for x in angles) or not _can_reach(call, form):
        return None
    options = {
        "D": form.dim,
        "BF16": int(form.out_dtype == torch.bfloat16),
        "CODEC": _CODEC_NUMBERS[CODECS[form.dtype]],
        "SOURCE_BF16": int(form.dtype == torch.bfloat16),
        "K_GROUP": form.key_group,
        "V_GROUP": form.value_group,
        "ROTARY": call.rotary,
        "INTERLEAVED": int(call.interleaved),
    }
    return tuple(f"-D{name}={value}" for name, value in options.items())


def _can_reach(call: Stitching, form: LayerForm) -> bool:
    """Whether all rows begin where copies of several bytes may; strides are :class:`LayerPlan`'s."""
    data, outs = (side.pointers[0] for side in call.sides), (call.out_keys, call.out_values)
    wide = [(x, _CHUNK_BYTES[CODECS[form.dtype]]) for x in data] + [(addresses(x), 16) for x in outs]
    return not any(int(np.bitwise_or.reduce(x)) % num_bytes for x, num_bytes in wide if x is not None)


def _can_copy(part: Stored) -> bool:
    has_rows = _has_rows_of(part.data, _CHUNK_BYTES[CODECS[part.data.dtype]])
    beside = [x for x in (part.scales, part.zeros, part.residual) if x is not None]
    return has_rows and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in beside)


def _has_rows_of(x: torch.Tensor, num_bytes: int) -> bool:
    size = x.element_size()
    return x.stride(2) == 1 and all(s * size % num_bytes == 0 for s in x.stride()[:2])


def _side(part: Stored, out: torch.Tensor) -> list[int]:
    """Return ``struct Side`` without its addresses."""
    data, size = part.data, part.data.element_size()
    shared = [n for x in (part.scales, part.zeros) for n in _shared_strides(x)]
    beside = 0 if part.residual is None else part.residual.stride(0)
    steps = [data.stride(0) * size, data.stride(1) * size, *shared, part.tokens.bit_length() - 1, beside]
    return [*[0] * ADDRESSES, *steps, out.stride(0), out.stride(1)]


def _shared_strides(x: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of heads and of groups of rows; a stride of 0 where all rows share."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1) if x.shape[1] > 1 else 0)


def jobs_of(call: Stitching, empty: Empty = torch.empty) -> torch.Tensor:
    """Return the kernel's table of parts, int64 ``(L, S, 33)``, on the CPU: ``struct Job`` of ``csrc/stitch.cu``."""
    layers, count = len(call.out_keys), len(call.starts)
    jobs = empty((layers, count, JOB), dtype=torch.int64, device="cpu")  # whatever the default device is
    table = jobs.numpy()
    for plan, same in _plans(call):
        table[same] = plan.jobs
    for first, side, outs in zip((0, SIDE), call.sides, (call.out_keys, call.out_values), strict=True):
        data, scales, residual, zeros = side.pointers
        for column, found in enumerate((data, scales, zeros, residual), start=first):
            if found is not None:
                table[:, :, column] = found.reshape(layers, count)
        table[:, :, first + ADDRESSES - 1] = addresses(outs)[:, None]
    table[:, :, JOB - 1] = np.array(call.tables)[:, None]
    return jobs


def run(
    module: Module, call: Stitching, to_device: Callable[[torch.Tensor], torch.Tensor], empty: Empty = torch.empty
) -> None:
    """Launch the kernel once for all layers and segments; ``to_device`` copies the table of parts, made in memory of ``empty``."""
    longest = max((plan.longest for plan, _ in _plans(call)), default=0)
    if longest == 0:
        return
    jobs, cos, sin = to_device(jobs_of(call, empty)), call.cos.contiguous(), call.sin.contiguous()
    heads, tiles = call.out_keys[0].shape[0], -(-longest // TILE_ROWS)
    skip = 0 if call.skip is None else call.skip.contiguous().data_ptr()
    arguments = _STITCH.pack(jobs.data_ptr(), cos.data_ptr(), sin.data_ptr(), skip, cos.stride(0), heads, tiles)
    module.launch("stitch", len(call.keys) * heads * tiles, THREADS, 0, arguments)
