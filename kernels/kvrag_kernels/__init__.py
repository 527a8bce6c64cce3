"""The kernels of kvrag as torch ops, with a torch path behind each: ``ragged_attention``, ``probe_mass``, ``stitch``.

Nothing here imports kvrag: the package can be used alone. The reference of every op is in :mod:`kvrag_kernels.reference`.
"""

from __future__ import annotations

from kvrag_kernels.ahead import build
from kvrag_kernels.ops import ragged_attention, ragged_plan
from kvrag_kernels.probe import probe_mass
from kvrag_kernels.report import info
from kvrag_kernels.runtime import has_kernel, has_stitch, tier
from kvrag_kernels.stitch import stitch

__all__ = [
    "build",
    "has_kernel",
    "has_stitch",
    "info",
    "probe_mass",
    "ragged_attention",
    "ragged_plan",
    "stitch",
    "tier",
]
