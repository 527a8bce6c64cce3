"""Tile sizes of the kernels, and their consequences on the host: options, memory, plan sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures that the tests compile every variant for.

Other architectures of compute capability 7.5 and later compile the same source.
"""

OLDEST = (7, 5)
"""Least compute capability that has a kernel."""

HOPPER = (9, 0)
"""Compute capability with a kernel of its own.

Its instructions (``sm_90a``) exist on no other, newer capabilities included.
"""

HOPPER_REGISTERS = 168
"""Registers per thread of ``ragged_sm90.cu`` at launch.

384 × 168 equal the 128 × 40 and 256 × 232 that its warpgroups request. With fewer, they would wait
forever.
"""

ITEMS_PER_PROCESSOR = 1.5
"""Target of work items per multiprocessor.

With the longest first, it fills the chip best, and partial results stay under 52 MiB.
"""

PLAN_THREADS = 256
COMBINE_THREADS = 128
COMBINE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Geometry:
    """Tile sizes of a compiled variant.

    Parameters
    ----------
    dim
        Head dim.
    rows
        Packed query rows of a tile (``BM``).
    keys
        Keys of a tile (``BN``).
    warps
        Warps of a block that multiply matrices.
    uses_tma
        Whether this is ``ragged_sm90.cu``: an extra warpgroup loads keys and values, in panels of
        64 columns.
    """

    dim: int
    rows: int
    keys: int
    warps: int
    uses_tma: bool = False

    @property
    def kernel(self) -> str:
        """Name of the attention kernel, and of its source file."""
        if self.uses_tma:
            return "ragged_sm90"
        return "ragged_mma"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps + (128 if self.uses_tma else 0)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block in bytes: the queries, and two stages of keys and of values.

        With TMA, the barriers of the stages, too.
        """
        if self.uses_tma:
            return (self.rows + 4 * self.keys) * -(-self.dim // 64) * 128 + 8 * 8
        return (self.rows + 4 * self.keys) * self.dim * 2

    def defines(self, dtype: torch.dtype, *, has_softcap: bool = False) -> tuple[str, ...]:
        """Return the compiler's options for this variant."""
        sizes = {"D": self.dim, "BM": self.rows, "BN": self.keys, "WARPS": self.warps}
        flags = {"BF16": int(dtype == torch.bfloat16), "SOFTCAP": int(has_softcap)}
        return tuple(f"-D{name}={value}" for name, value in (sizes | flags).items())


_TILES = {64: (128, 64, 4), 96: (128, 64, 8), 128: (128, 64, 8), 256: (64, 32, 4)}
# Half as many registers per thread: four warps of two slabs spill with a soft cap, or on sm_100.
_TILES_LIGHT = {64: (128, 64, 8)}
_TILES_SM75 = {64: (128, 64, 4), 96: (64, 32, 4), 128: (64, 32, 4), 256: (64, 16, 4)}


def geometry_of(
    dim: int, capability: tuple[int, int] = (8, 0), *, has_softcap: bool = False
) -> Geometry:
    """Return the tile sizes for a head dim.

    From sm_80 on, 99 KiB of shared memory suffice; on sm_75, 64 KiB. A soft cap may change the
    warps, never the tile: layers with and without it share a plan.
    """
    if capability < (8, 0):
        return Geometry(dim, *_TILES_SM75[dim])
    return Geometry(
        dim, *(_TILES | _TILES_LIGHT if has_softcap or capability >= (10, 0) else _TILES)[dim]
    )


_TILES_TMA = {64: (128, 128, 8), 96: (128, 128, 8), 128: (128, 128, 8), 256: (128, 64, 8)}


def hopper_geometry(dim: int) -> Geometry:
    """Return the tile sizes of ``ragged_sm90.cu``.

    Two warpgroups of 64 rows; up to 193 KiB of shared memory.
    """
    return Geometry(dim, *_TILES_TMA[dim], uses_tma=True)


def supports(dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether a kernel exists: sm_75 has no bfloat16 tensor cores, and Volta no ldmatrix."""
    return (
        dim in HEAD_DIMS
        and dtype in DTYPES
        and capability >= ((8, 0) if dtype == torch.bfloat16 else OLDEST)
    )


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Size of a plan, computed from sizes alone, because the limits are on the device.

    Parameters
    ----------
    batch
        Batch size.
    tiles
        Row tiles of a batch entry.
    target
        Work items to aim at per key head.
    keys
        Keys of a tile.
    """

    batch: int
    tiles: int
    target: int
    keys: int

    @property
    def max_items(self) -> int:
        """Upper bound of items: ``sum(ceil(count / per_item)) <= tiles + target``."""
        return self.batch * self.tiles + self.target

    @property
    def max_slots(self) -> int:
        """Upper bound of partial results per key head.

        A tile of ``c > n`` keys gives ``ceil(c / n) < 2 c / n`` of them.
        """
        return 2 * self.target

    @property
    def ints(self) -> int:
        """Number of int32 elements: 8 of a header, 8 per tile, 4 per item, and padding.

        The padding makes plans for different tile sizes differ in length, so that they can't be
        confused; all other parts are multiples of 4.
        """
        return (
            8
            + 8 * self.batch * self.tiles
            + 4 * self.max_items
            + {16: 0, 32: 1, 64: 2, 128: 3}[self.keys]
        )


def plan_shape(
    geometry: Geometry, batch: int, rows: int, heads: int, kv_heads: int, processors: int
) -> PlanShape:
    """Return the size of a plan on a device with ``processors`` multiprocessors."""
    tiles = -(-rows * (heads // kv_heads) // geometry.rows)
    return PlanShape(
        batch, tiles, max(1, int(ITEMS_PER_PROCESSOR * processors) // kv_heads), geometry.keys
    )
