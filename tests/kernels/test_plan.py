"""The plan as the device makes it: every tile's keys once, the longest items first, and how well they fill a GPU."""

import heapq
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from emulated import HOPPER, Guarded, emulated_module, geometry_for, needs_compiler
from kernel_cases import BASE, Case

import kvrag_kernels
from kvrag_kernels import geometry, launch

pytestmark = needs_compiler

PROCESSORS = 132  # of an H100
ROWS = 64  # of the question, behind the rows to repair


def planned(
    case: Case, hi: torch.Tensor, lo: torch.Tensor | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the plan's tiles and items; the kernel reads no queries nor keys, whose memory is one element."""
    module, geometry = (
        emulated_module(case, torch.bfloat16, arch=HOPPER, processors=PROCESSORS),
        geometry_for(case, HOPPER),
    )
    one = torch.zeros(1, dtype=torch.bfloat16)
    q, k = (
        one.expand(case.batch, heads, n, case.dim)
        for heads, n in ((case.heads, len(hi)), (case.kv_heads, case.keys))
    )
    call = launch.Call(q, k, k, hi, lo, case.prefix, case.scale)
    plan = launch.make_plan(module, geometry, call, Guarded(module, [hi, lo]))
    shape = launch.shape_of(module, geometry, call)
    tiles = plan[8:].view(-1)[: 8 * shape.batch * shape.tiles].view(-1, 8)
    items = plan[8 + tiles.numel() :][: 4 * int(plan[0])].view(-1, 4)
    return tiles.tolist(), items.tolist()


def repaired(keys: int, share: float = 0.15) -> torch.Tensor:
    picked = torch.randperm(keys - ROWS, generator=torch.Generator().manual_seed(0))[
        : int(share * keys)
    ]
    return torch.cat([picked.sort().values, torch.arange(keys - ROWS, keys)]).int()


def efficiency(counts: list[int], kv_heads: int) -> float:
    """How much of the processors' time is work, where each takes the next block as soon as it is free."""
    busy_until = [0] * PROCESSORS
    for count in counts:
        for _ in range(kv_heads):
            heapq.heapreplace(busy_until, busy_until[0] + count)
    return sum(counts) * kv_heads / (PROCESSORS * max(busy_until))


@pytest.mark.parametrize(
    ("keys", "heads", "kv_heads", "least"),
    [(32768, 32, 8, 0.99), (8192, 32, 8, 0.95), (8192, 16, 2, 0.88), (32768, 16, 2, 0.96)],
)
def test_repairs_fill_the_chip(keys, heads, kv_heads, least):
    case = replace(BASE, dim=128, heads=heads, kv_heads=kv_heads, keys=keys)
    _, items = planned(case, repaired(keys))
    counts = [count for _, _, count, _ in items]
    assert efficiency(counts, kv_heads) >= least
    slack = 1 + keys // 128 // 256  # of a tile's items, and of lengths that are told apart
    assert all(after <= before + slack for before, after in pairwise(counts))


@pytest.mark.parametrize("limits", ["holes", "window"])
def test_items_cover_every_tile_once(limits):
    case = replace(BASE, keys=8192, heads=16, prefix=4)
    hi = repaired(case.keys)
    tiles, items = planned(case, hi, hi - 1000 if limits == "window" else None)
    covered = dict.fromkeys(range(len(tiles)), 0)
    for tile, first, count, _ in sorted(items, key=lambda item: item[:2]):
        assert first == covered[tile]
        covered[tile] += count
    assert list(covered.values()) == [count for _, _, count, *_ in tiles]
    slots = [slot for *_, slot in items if slot >= 0]
    assert sorted(slots) == list(range(len(slots)))
    of_tile = {tile: [slot for t, _, _, slot in items if t == tile] for tile in covered}
    for tile, (*_, slot, splits, _, _) in enumerate(tiles):
        assert of_tile[tile] == ([*range(slot, slot + splits)] if splits > 1 else [-1])


def test_the_blocks_that_combine_parts_cover_each_tile_of_rows():
    text = (Path(kvrag_kernels.__file__).parent / "csrc" / "rows.cuh").read_text()
    for name in ("COMBINE_THREADS", "COMBINE_ROWS"):
        assert re.search(rf"#define {name} (\d+)", text)[1] == str(getattr(geometry, name))
    tiles = [
        geometry.geometry_of(dim, capability)
        for dim in geometry.HEAD_DIMS
        for capability in ((7, 5), (8, 0), (10, 0))
    ]
    for tile in [*tiles, *map(geometry.hopper_geometry, geometry.HEAD_DIMS)]:
        assert tile.rows % geometry.COMBINE_ROWS == 0
