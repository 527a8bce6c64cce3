"""Test of a kernel at its first use on a device: a small case, compared with torch.

A kernel that fails is not used, and the next kernel computes. The emulator reflects our reading of
TMA and wgmma; the device may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvrag_kernels import launch, torch_path
from kvrag_kernels.driver import CudaModule, DriverError
from kvrag_kernels.geometry import HOPPER_REGISTERS, Geometry

_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Tolerances for outputs of size 1: a few roundings of the dtype. A misread tile is off by 1."""


def call_of(geometry: Geometry, options: Sequence[str], device: torch.device | str) -> launch.Call:
    """Return a small case that has every kind of tile.

    Tiles are whole, or cut by a limit, by a window or by the last key, or belong to the prefix.
    """
    dtype = torch.bfloat16 if "-DBF16=1" in options else torch.float16
    softcap = 20.0 if "-DSOFTCAP=1" in options else 0.0
    # On the host, so that the numbers are the same on every device.
    generator = torch.Generator("cpu").manual_seed(0)
    rows = geometry.rows // 2 + 9
    keys = 4 * geometry.keys + 5
    q, k, v = (
        torch.randn((1, heads, n, geometry.dim), generator=generator, device="cpu").to(
            device, dtype
        )
        for heads, n in ((4, rows), (2, keys), (2, keys))
    )
    hi = torch.randperm(keys, generator=generator, device="cpu")[:rows].sort().values.int()
    lo = (hi - 3 * geometry.keys).clamp(min=0)
    return launch.Call(q, k, v, hi.to(device), lo.to(device), 3, geometry.dim**-0.5, softcap)


def check(module: CudaModule, geometry: Geometry, options: Sequence[str], device: int) -> None:
    """Run the small case on a device and compare it with torch.

    Raises
    ------
    DriverError
        If the kernel can't be launched, would wait forever for registers, or differs from torch.
    """
    registers = module.registers(geometry.kernel)
    if geometry.uses_tma and registers != HOPPER_REGISTERS:
        raise DriverError(
            f"{geometry.kernel} has {registers} registers a thread and needs {HOPPER_REGISTERS}"
        )
    call = call_of(geometry, options, torch.device("cuda", device))
    with torch.cuda.device(device):
        got = launch.attend(module, geometry, launch.prepare(call), empty=poisoned)
        found = [x.float().cpu() for x in got]
    compare(call, *found)


def poisoned(*args: Any, **options: Any) -> torch.Tensor:
    """Allocate memory filled with NaN; else it may hold right results of an earlier kernel."""
    made = torch.empty(*args, **options)
    if made.is_floating_point():
        return made.fill_(math.nan)
    return made


def compare(call: launch.Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Compare a result on the host with torch's result.

    Raises
    ------
    DriverError
        If the results differ by more than rounding.
    """
    on_host = {name: getattr(call, name).float().cpu() for name in ("q", "k", "v")}
    lo = None if call.lo is None else call.lo.cpu()
    want, want_lse = torch_path.attend(replace(call, **on_host, hi=call.hi.cpu(), lo=lo))
    # NaN, as of poisoned memory, would compare as no error.
    error = float((out - want).abs().nan_to_num(float("inf")).max())
    lse_error = float((lse - want_lse).abs().nan_to_num(float("inf")).max())
    if error > _TOLERANCE[call.q.dtype] or lse_error > 1e-3:
        raise DriverError(
            f"a small case came out wrong by {error:.3g} (log-sum-exp: {lse_error:.3g}); please "
            "report it with `kvrag kernels info`"
        )
