"""Turns tensors into launches of the attention kernels, on a device or in the emulator."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvrag_kernels.geometry import (
    COMBINE_ROWS,
    COMBINE_THREADS,
    PLAN_THREADS,
    Geometry,
    PlanShape,
    plan_shape,
)

_ATTENTION = struct.Struct("12Q 11q 9i 2f 4x")
"""``struct Attention`` of ``csrc/tiles.cuh``."""

MAP_ALIGNMENT = 128
"""Alignment in bytes of tensor maps and of the arguments that hold them.

CUDA 13 requires it; it is twice CUDA 12's.
"""

_MAX_MAP_STRIDE = 2**40
"""Limit in bytes; strides of a tensor map are shorter."""

Empty = Callable[..., torch.Tensor]
"""Allocator with the interface of ``torch.empty``; tests pass poisoned and guarded memory."""


class Module(Protocol):
    """Compiled variant that can launch its kernels."""

    processors: int

    def launch(
        self, kernel: str, blocks: int, threads: int, shared_bytes: int, arguments: bytes
    ) -> None:
        """Launch a one-dimensional grid on the current stream."""

    def tensor_map(self, x: torch.Tensor, box_rows: int) -> bytes:
        """Describe ``(B, H, N, D)`` to the copies of ``ragged_sm90.cu``.

        Boxes have 64 columns and ``box_rows`` rows, and zeros beyond the tensor.
        """


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the attention op, with tensors that kernels can read; see :func:`prepare`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    hi: torch.Tensor
    lo: torch.Tensor | None
    prefix: int
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def prepare(call: Call) -> Call:
    """Return the call with tensors that the kernels can read.

    Rows suit 16-byte copies, limits are int32, sinks float32, and the prefix lies within the keys.
    """
    # A clone, because `contiguous` leaves a contiguous tensor at its address, aligned or not.
    q, k, v = (
        x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)
        for x in (call.q, call.k, call.v)
    )
    hi, lo = (x if x is None else _int32(x) for x in (call.hi, call.lo))
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    prefix = max(0, min(call.prefix, k.shape[2]))
    return Call(q, k, v, hi, lo, prefix, call.scale, call.softcap, sinks)  # type: ignore[arg-type]


def mapped(call: Call, empty: Empty = torch.empty) -> Call:
    """Return a prepared call with keys and values that tensor maps can describe."""
    k, v = (
        x if can_map(x) else empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        for x in (call.k, call.v)
    )
    return replace(call, k=k, v=v)


def _is_aligned(x: torch.Tensor) -> bool:
    strides_fit = all(s % 8 == 0 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1)
    return x.stride(3) == 1 and strides_fit and x.data_ptr() % 16 == 0


def _int32(limit: torch.Tensor) -> torch.Tensor:
    if limit.dtype == torch.int32:
        return limit.contiguous()
    # Clamped first: a larger limit would wrap round.
    return limit.long().clamp(-(2**31), 2**31 - 1).to(torch.int32).contiguous()


def shape_of(module: Module, geometry: Geometry, call: Call) -> PlanShape:
    """Return the shape of the call's plan."""
    batch, heads, rows, _ = call.q.shape
    return plan_shape(geometry, batch, rows, heads, call.k.shape[1], module.processors)


def make_plan(
    module: Module, geometry: Geometry, call: Call, empty: Empty = torch.empty
) -> torch.Tensor:
    """Launch the planning kernel; return the plan, an int32 tensor on the device.

    The plan is valid for every layer with the same shapes and limits. Where :func:`attend` has
    nothing to launch, nothing is planned, and the content is never read.
    """
    shape = shape_of(module, geometry, call)
    plan = empty(shape.ints, dtype=torch.int32, device=call.q.device)
    if _has_work(call):
        arguments = pack(call, shape, {"plan": plan})
        module.launch("ragged_plan", 1, PLAN_THREADS, 4 * PLAN_THREADS, arguments)
    return plan


def _has_work(call: Call) -> bool:
    """Whether there are rows (in a batch of at least one) and keys for them."""
    return call.q.numel() > 0 and call.k.shape[2] > 0


def attend(
    module: Module,
    geometry: Geometry,
    call: Call,
    plan: torch.Tensor | None = None,
    empty: Empty = torch.empty,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the attention kernels on a prepared call.

    See :func:`kvrag_kernels.ragged_attention` for the results.
    """
    batch, heads, rows, dim = call.q.shape
    kv_heads = call.k.shape[1]
    device = call.q.device
    out = empty((batch, rows, heads, dim), dtype=call.q.dtype, device=device)
    lse = empty((batch, heads, rows), dtype=torch.float32, device=device)
    if not _has_work(call):
        return out.zero_().transpose(1, 2), lse.fill_(float("-inf"))
    shape = shape_of(module, geometry, call)
    # A plan for other tiles has another length: see PlanShape.ints.
    if plan is None or plan.numel() != shape.ints:
        plan = make_plan(module, geometry, call, empty)
    part_out = empty(
        (shape.max_slots, kv_heads, geometry.rows, dim), dtype=torch.float32, device=device
    )
    part_lse = empty(part_out.shape[:3], dtype=torch.float32, device=device)
    if geometry.uses_tma:
        call = mapped(call, empty)
    made = {"out": out, "lse": lse, "plan": plan, "part_out": part_out, "part_lse": part_lse}
    arguments = pack(call, shape, made)
    whole = _with_maps(module, geometry, call, arguments) if geometry.uses_tma else arguments
    module.launch(
        geometry.kernel, shape.max_items * kv_heads, geometry.threads, geometry.shared_bytes, whole
    )
    combining = batch * shape.tiles * kv_heads * geometry.rows // COMBINE_ROWS
    module.launch("ragged_combine", combining, COMBINE_THREADS, 0, arguments)
    return out.transpose(1, 2), lse


def _with_maps(module: Module, geometry: Geometry, call: Call, arguments: bytes) -> bytes:
    """Return the bytes of ``struct TmaAttention``: maps of keys and values, then the arguments."""
    maps = [module.tensor_map(x, geometry.keys) for x in (call.k, call.v)]
    # The size of a struct is a multiple of its alignment.
    return b"".join(maps) + arguments + bytes(-len(arguments) % MAP_ALIGNMENT)


def map_sizes(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes and strides of ``(B, H, N, D)`` in a tensor map, innermost first.

    Four sizes in elements, three strides in bytes.
    """
    batch, heads, rows, dim = x.shape
    sizes = (rows, heads, batch)
    strides = (
        # The stride of a single row may be anything, as it is never taken; the driver checks it.
        s if n > 1 else dim
        for s, n in zip((x.stride(2), x.stride(1), x.stride(0)), sizes, strict=True)
    )
    return (dim, *sizes), tuple(s * x.element_size() for s in strides)


def can_map(x: torch.Tensor) -> bool:
    """Whether a tensor map can describe a tensor: no stride is 0 (expanded tensor) or too long."""
    return all(0 < stride < _MAX_MAP_STRIDE for stride in map_sizes(x)[1])


def probe(
    module: Module, geometry: Geometry, call: Call, lse: torch.Tensor, empty: Empty = torch.empty
) -> torch.Tensor:
    """Run the probe kernel on a prepared call: attention mass per key, float32 ``(B, N)``."""
    batch, kv_heads, keys, _ = call.k.shape
    parts = empty((batch, kv_heads, keys), dtype=torch.float32, device=call.q.device)
    tiles = -(-keys // geometry.rows)
    arguments = pack(call, shape_of(module, geometry, call), {"lse": lse, "mass": parts})
    shared_bytes = (geometry.rows + 2 * geometry.keys) * geometry.dim * 2
    if parts.numel():
        module.launch("probe", batch * kv_heads * tiles, geometry.threads, shared_bytes, arguments)
    # Summed here: atomic additions in the kernel would round in another order every time.
    return parts.sum(dim=1)


def pack(call: Call, shape: PlanShape, made: dict[str, torch.Tensor]) -> bytes:
    """Return the bytes of ``struct Attention``; ``made`` has the output tensors by name."""
    pointers = [
        *(x.data_ptr() for x in (call.q, call.k, call.v)),
        *(_pointer(made.get(name)) for name in ("out", "lse")),
        *(_pointer(x) for x in (call.hi, call.lo, call.sinks)),
        *(_pointer(made.get(name)) for name in ("plan", "part_out", "part_lse", "mass")),
    ]
    strides = [s for x in (call.q, call.k, call.v) for s in x.stride()[:3]]
    # With a stride of 0, all entries of the batch share their limits.
    batches = [0 if x is None or x.dim() == 1 else x.stride(0) for x in (call.hi, call.lo)]
    batch, heads, rows, _ = call.q.shape
    sizes = (
        batch,
        rows,
        call.k.shape[2],
        heads,
        call.k.shape[1],
        call.prefix,
        shape.tiles,
        shape.max_items,
        shape.target,
    )
    return _ATTENTION.pack(*pointers, *strides, *batches, *sizes, call.scale, call.softcap)


def _pointer(x: torch.Tensor | None) -> int:
    if x is None:
        return 0
    return x.data_ptr()
