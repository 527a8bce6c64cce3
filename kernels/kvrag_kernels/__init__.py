"""kvrag's kernels as torch ops with torch paths: ``ragged_attention``, ``probe_mass``, ``stitch``.

This package does not import kvrag, so it can be used alone. :mod:`kvrag_kernels.reference` has the
reference of every op.
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
