"""Inputs of the attention op by name: one table for every path, so that none is tested less than another."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Case:
    """One call of the op. ``limits`` names a pattern of ``hi`` and ``lo``; see :func:`limits_of`."""

    name: str
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    rows: int = 37
    keys: int = 131
    batch: int = 1
    limits: str = "holes"
    prefix: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    layout: str = "plain"  # plain, view (rows of a wider buffer), hf (heads and rows swapped), odd (unaligned, strided)
    seed: int = 0

    @property
    def scale(self) -> float:
        return 1.0 / self.dim**0.5


def limits_of(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``hi`` and ``lo`` of a pattern."""
    rows, keys = case.rows, case.keys
    if case.limits == "causal":
        return torch.arange(keys - rows, keys, dtype=torch.int32), None
    picked = torch.randperm(keys, generator=generator)[: min(rows, keys)]
    picked = torch.cat([picked, torch.randint(keys, (rows - len(picked),), generator=generator)])
    hi = picked.sort().values.int()
    if case.limits == "holes":
        return hi, None
    if case.limits == "unsorted":
        return hi[torch.randperm(rows, generator=generator)], None
    if case.limits == "window":
        return hi, hi - 40
    if (
        case.limits == "empty"
    ):  # every third row sees nothing; so does the whole first block of rows
        lo = torch.where(torch.arange(rows) % 3 == 0, hi + 1, torch.zeros_like(hi))
        return torch.where(torch.arange(rows) < 40, torch.full_like(hi, -1), hi), lo
    if (
        case.limits == "chunks"
    ):  # rows are keys prefix..; chunks of 29 keys each see themselves and the prefix
        hi = torch.arange(case.prefix, case.prefix + rows, dtype=torch.int32)
        return hi, (hi - case.prefix) // 29 * 29 + case.prefix
    if (
        case.limits == "pool"
    ):  # rows of three requests, each in its own run of the slots, and spare rows at the end
        request = torch.arange(rows, dtype=torch.int32) * 3 // rows
        first = torch.tensor([0, keys // 4, keys // 2], dtype=torch.int32)[request]
        hi, lo = first + torch.arange(rows, dtype=torch.int32) % (keys // 8), first
        hi[rows // 2 :: 5], lo[rows // 2 :: 5] = keys - 1, keys
        return hi, lo
    if case.limits == "per_batch":
        offsets = torch.arange(case.batch, dtype=torch.int32)[:, None]
        hi = (hi[None] - 3 * offsets).contiguous()
        return hi, (hi - 50).clamp(min=0)
    if case.limits == "beyond":  # limits outside the keys, as unclamped arithmetic gives them
        return hi + keys // 2, hi - keys
    raise ValueError(case.limits)


def inputs_of(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    """Return ``q, k, v, hi, lo, sinks`` of a case; what lies around the keys in their buffer is NaN."""
    g = torch.Generator().manual_seed(case.seed + case.dim + 7 * case.rows + 13 * case.keys)
    shape_q, shape_k = (
        (case.batch, case.heads, case.rows, case.dim),
        (case.batch, case.kv_heads, case.keys, case.dim),
    )
    q, k, v = (
        (torch.randn(s, generator=g) * f).to(dtype)
        for s, f in ((shape_q, 1.5), (shape_k, 1.0), (shape_k, 1.0))
    )
    hi, lo = limits_of(case, g)
    q, k, v = (_laid_out(x, case.layout) for x in (q, k, v))
    sinks = torch.randn(case.heads, generator=g) if case.has_sinks else None
    if sinks is not None and case.limits == "empty":
        sinks[0] = -torch.inf  # no sink, and in some rows no key either
    return {"q": q, "k": k, "v": v, "hi": hi, "lo": lo, "sinks": sinks}


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    batch, heads, rows, dim = x.shape
    if layout == "plain":
        return x
    if layout == "hf":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "view":
        buffer = torch.full((batch, heads, rows + 70, dim), float("nan"), dtype=x.dtype)
        view = buffer[:, :, 3 : rows + 3]
    else:  # odd
        buffer = torch.full((batch, heads, rows, 2 * dim + 3), float("nan"), dtype=x.dtype)
        view = buffer[..., 1 : 2 * dim + 1 : 2]
    view.copy_(x)
    return view


BASE = Case("holes")
CASES = [
    *(replace(BASE, name=f"dim{d}", dim=d, rows=21, keys=83) for d in (64, 96, 128, 256)),
    *(
        replace(BASE, name=f"gqa{h}-{g}", heads=h, kv_heads=g, rows=45)
        for h, g in ((3, 1), (4, 4), (6, 2), (14, 2))
    ),
    replace(BASE, name="one-row", rows=1, keys=1),
    replace(BASE, name="decode", rows=1, keys=257, limits="causal"),
    replace(BASE, name="causal", rows=150, keys=150, limits="causal"),
    replace(BASE, name="suffix", rows=40, keys=333, limits="causal"),
    replace(BASE, name="batch", batch=3, rows=33),
    replace(BASE, name="pool", rows=40, keys=1030, limits="pool"),
    replace(BASE, name="per-batch", batch=3, limits="per_batch", dim=96),
    replace(BASE, name="unsorted", limits="unsorted", rows=90, keys=200),
    replace(BASE, name="window", limits="window", rows=90, keys=200),
    replace(BASE, name="window-sinks", limits="window", rows=90, keys=200, prefix=4, dim=128),
    replace(BASE, name="empty", limits="empty", rows=100),
    replace(BASE, name="empty-tile", limits="empty", rows=100, heads=8),
    replace(BASE, name="empty-prefix", limits="empty", rows=100, prefix=5),
    replace(BASE, name="chunks", limits="chunks", prefix=70, rows=130, keys=200),
    replace(BASE, name="beyond", limits="beyond", prefix=3),
    replace(BASE, name="prefix-beyond", limits="window", prefix=1000),
    replace(BASE, name="softcap", softcap=5.0, dim=256, heads=2, kv_heads=1),
    replace(BASE, name="sinks", has_sinks=True),
    replace(BASE, name="sinks-empty", has_sinks=True, limits="empty", rows=70),
    replace(
        BASE,
        name="everything",
        has_sinks=True,
        softcap=3.0,
        limits="window",
        prefix=4,
        rows=77,
        keys=300,
        batch=2,
        heads=6,
    ),
    *(replace(BASE, name=f"layout-{x}", layout=x, batch=2) for x in ("view", "hf", "odd")),
]
LONG = [
    replace(BASE, name="long", rows=60, keys=1000),
    replace(
        BASE, name="long-window", rows=60, keys=1000, limits="window", prefix=4, has_sinks=True
    ),
    replace(BASE, name="dense-window", rows=200, keys=220, limits="window"),
    replace(BASE, name="long-batch", rows=60, keys=700, batch=2, limits="per_batch", dim=128),
    replace(BASE, name="long-wide", rows=30, keys=500, dim=256, heads=8, kv_heads=1),
    replace(BASE, name="long-empty", rows=100, keys=600, limits="empty"),
    replace(
        BASE,
        name="long-chunks",
        rows=600,
        keys=700,
        prefix=100,
        limits="chunks",
        heads=2,
        kv_heads=1,
    ),
]
