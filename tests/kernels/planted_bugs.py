"""Bugs to plant in the kernels' source: the case that has to notice, what stands there, and what the bug puts in its place."""

from __future__ import annotations

BUGS = {
    "missing barrier before a stage is used again": (
        "long",
        "        block_sync();  // this tile has landed",
        "        // this tile has landed",
    ),
    "missing wait for the copies": (
        "long",
        "        copy_wait<0>();\n        block_sync();",
        "        copy_wait<1>();\n        block_sync();",
    ),
    "the next tile goes over this one": ("long", "next = KV_BYTES - stage;", "next = stage;"),
    "copies are never committed": ("long", "        copy_commit();\n        if (KEEPS_Q", "        if (KEEPS_Q"),
    "the stage never changes": ("long", "stage = (n & 1) * KV_BYTES", "stage = 0"),
    "keys are read with another swizzle": ("dim64", "k * 2 + (lane >> 3 & 1)));", "(k * 2 + (lane >> 3 & 1)) ^ 2));"),
    "no swizzle at all": ("dim64", "return D == 96 ? (row >> 1) & 3 : row & 7;", "return 0;"),
    "head dim 96 swizzles like 64": ("dim96", "return D == 96 ? (row >> 1) & 3 : row & 7;", "return row & 7;"),
    "values are read untransposed": ("dim64", "matrix4_transposed(b, v_tile", "matrix4(b, v_tile"),
    "hi is exclusive": ("dim64", "key <= x.hi)", "key < x.hi)"),
    "lo is exclusive": ("window", "(key >= x.lo &&", "(key > x.lo &&"),
    "the prefix is one longer": ("window-sinks", "return key < prefix ||", "return key <= prefix ||"),
    "a tile at the limit is skipped": ("one-row", "(key <= w.max_hi &&", "(key < w.max_hi &&"),
    "a tile that a limit cuts is taken as whole": (
        "long",
        "key >= w.max_lo && last <= w.min_hi",
        "key >= w.max_lo && key <= w.min_hi",
    ),
    "a tile that a window cuts is taken as whole": (
        "dense-window",
        "(key >= w.max_lo && last <= w.min_hi)",
        "(last >= w.max_lo && last <= w.min_hi)",
    ),
    "a row without keys divides infinity by infinity": ("empty", "top == -infinity() ? 0.0f : top * c;", "top * c;"),
    "sums do not follow the top": ("long", "w.sum[m][h] *= fade;", ""),
    "outputs do not follow the top": ("long", "w.out[m][d][2 * h] *= fade;", ""),
    "parts are merged unweighted": ("split", "exp2_fast(load(p.part_lse + part) - base)", "1.0f"),
    "sinks take from every part": (
        "split",
        "if (slot < 0 && r.valid && sum > 0.0f) factor",
        "if (r.valid && sum > 0.0f) factor",
    ),
    "the plan drops the last key tile": ("long", "s.hi / BN + 1 - first", "s.hi / BN - first"),
    "the plan forgets the window's first tile": (
        "dense-window",
        "max_of(in_prefix, s.lo / BN)",
        "max_of(in_prefix, s.lo / BN + 1)",
    ),
    "the plan's parts overlap": (
        "split",
        "count) * (i + 1) / splits) - first",
        "count) * (i + 1) / splits) - first + 1",
    ),
    "the scan lacks a barrier": (
        "split",
        "        x += before;\n        put32(own, x);\n        block_sync();",
        "        x += before;\n        put32(own, x);",
    ),
    "keys beyond the last are read": ("dim64", "const bool valid = first + row < bound;", "const bool valid = true;"),
    "heads get their neighbour's keys": (
        "dim64",
        "p.k_batch + kv_head * p.k_head;",
        "p.k_batch + (kv_head + 1) % p.kv_heads * p.k_head;",
    ),
    "the output leaves before the warp has written it": (
        "dim64",
        "    if (slot >= 0) return;\n    warp_sync();",
        "    if (slot >= 0) return;",
    ),
    "queries land on top of the empty result": ("empty-tile", "if (count == 0) block_sync();", ""),
    "the log-sum-exp is in base 2": (
        "dim64",
        "if (slot < 0) store(p.lse + lse_offset(p, batch, r), total * LN2);",
        "if (slot < 0) store(p.lse + lse_offset(p, batch, r), total);",
    ),
    "offsets are 32-bit": (
        "far",
        "p.k_batch + kv_head * p.k_head;",
        "p.k_batch + static_cast<int>(kv_head * p.k_head);",
    ),
}
