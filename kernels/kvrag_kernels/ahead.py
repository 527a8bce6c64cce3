"""Compile kernels ahead of their first use, for image builds; no device is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvrag_kernels import nvrtc, stitch_launch
from kvrag_kernels.geometry import ARCHS, DTYPES, HEAD_DIMS, supports
from kvrag_kernels.runtime import Variant, capability_of, variants
from kvrag_kernels.stitch_launch import FP8, Stitching, Stored

ROTATED = (1.0, 0.5, 0.25, 0.0)
"""Shares of a head's channels that models rotate.

0 is for layers without rotation, which are shifted in launches of their own.
"""

VALUE_GROUP = 32
"""Channels of 4-bit values that share a scale."""


def stitch_variants(arch: str, dims: Sequence[int] = HEAD_DIMS) -> list[Variant]:
    """Return the variants of the stitch kernel that the engine uses on an architecture.

    They cover all storage formats of KV, pairs of halves and of neighbours, and the usual shares of
    rotated channels. Skipped rows are an argument and need no variant.
    """
    return [
        Variant("stitch.cu", options, arch)
        for dim in dims
        for dtype in DTYPES
        if supports(dim, dtype, capability_of(arch))
        for options in _forms(dim, dtype)
    ]


def _forms(dim: int, dtype: torch.dtype) -> Iterator[tuple[str, ...]]:
    """Yield the compiler's options of all variants, by way of minimal calls."""
    out = torch.empty((1, 1, dim), dtype=dtype)
    for keys, values in _kept(dim, dtype):
        for rotary in (int(share * dim) for share in ROTATED):
            angles = torch.empty((1, 1, rotary // 2))
            for interleaved in (False, True):
                call = Stitching(
                    [keys], [values], [out], [out], [0], angles, angles, [0], interleaved
                )
                options = stitch_launch.defines(call)
                if options is not None:  # rotated channels must be a multiple of 16
                    yield options


def _kept(dim: int, dtype: torch.dtype) -> Iterator[tuple[Stored, Stored]]:
    """Yield a row of keys and values in every storage format, with its scales."""

    def row(kind: torch.dtype, channels: int, *scales: int) -> Stored:
        shared = [torch.empty((1, 1, 1, n), dtype=torch.float16) for n in scales]
        return Stored(torch.empty((1, 1, 1, channels), dtype=kind), *shared)

    yield row(dtype, dim), row(dtype, dim)
    yield row(torch.int8, dim, dim), row(torch.int8, dim, 1)
    yield row(torch.uint8, dim // 2, dim), row(torch.uint8, dim // 2, dim // VALUE_GROUP)
    yield row(FP8, dim, 1), row(FP8, dim, 1)


def build(archs: Sequence[str] = ARCHS, dims: Sequence[int] = HEAD_DIMS) -> dict[str, int]:
    """Compile every variant of every kernel into the cache.

    Parameters
    ----------
    archs
        Architectures, as ``sm_90``.
    dims
        Head dims, of :data:`kvrag_kernels.geometry.HEAD_DIMS`.

    Returns
    -------
    dict[str, int]
        Variants in the cache per architecture.

    Raises
    ------
    CompileError
        If NVRTC is missing, or refuses a variant.
    """
    compiler = nvrtc.find()
    return {
        arch: sum(
            1 for v in [*variants(arch, dims), *stitch_variants(arch, dims)] if v.cubin(compiler)
        )
        for arch in archs
    }
