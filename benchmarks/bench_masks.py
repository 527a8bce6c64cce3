"""What inexact masks cost: repaired rows under masks of other implementations, on the same inputs, against float64. Runs anywhere.

*Aligned bottom-right* is what a causal flag means when there are fewer rows than keys: row i of R sees the first N − R + i + 1 keys,
wherever it stands (CacheBlend's and LMCache's code). *Blocks* lets 32 rows share one limit, that of the last of them, rounded down to 32
keys.

    python benchmarks/bench_masks.py [--out FOLDER]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import machine, parser, write_result
from kernel_shapes import Shape

from kvrag_kernels import ragged_attention, reference

SHAPES = (
    Shape(9, 3, 64, 2048, 0.15),
    Shape(32, 8, 128, 2048, 0.05),
    Shape(32, 8, 128, 2048, 0.15),
    Shape(32, 8, 128, 2048, 0.15, "heads"),
    Shape(32, 8, 128, 2048, 0.15, "end"),
)
BLOCK = 32


def masks(rows: torch.Tensor, num_keys: int) -> dict[str, torch.Tensor]:
    """Which row sees which key, bool ``(R, N)``, under each rule."""
    j = torch.arange(num_keys)
    aligned = j <= (num_keys - len(rows) + torch.arange(len(rows)))[:, None]
    last = rows[(torch.arange(len(rows)) // BLOCK * BLOCK + BLOCK - 1).clamp(max=len(rows) - 1)]
    return {
        "exact": j <= rows[:, None],
        "aligned": aligned,
        "blocks": j < (last // BLOCK * BLOCK)[:, None],
    }


def measure(shape: Shape) -> dict[str, Any]:
    """Largest and mean error of each mask over all rows, and how many keys a row sees or misses that it must not."""
    torch.manual_seed(0)
    rows = shape.rows()
    q = torch.randn(1, shape.heads, len(rows), shape.dim)
    k, v = (torch.randn(1, shape.kv_heads, shape.keys, shape.dim) for _ in range(2))
    scale = shape.dim**-0.5
    want, _ = reference.attention(q, k, v, rows, scale=scale)
    found: dict[str, Any] = {"shape": shape.name, "rows": len(rows)}
    rules = masks(rows, shape.keys)
    groups = shape.heads // shape.kv_heads
    for name, mask in rules.items():
        if name == "exact":
            out = ragged_attention(q, k, v, rows.int(), scale=scale)[0]
        else:
            repeated = (x.repeat_interleave(groups, 1) for x in (k, v))
            out = F.scaled_dot_product_attention(
                q, *repeated, attn_mask=mask, scale=scale
            ).nan_to_num()
        error = (out.double() - want).abs()
        found[name] = {
            "max_error": float(error.max()),
            "mean_error": float(error.mean()),
            "future_keys": float((mask & ~rules["exact"]).sum() / len(rows)),
            "missed_keys": float((~mask & rules["exact"]).sum() / len(rows)),
        }
    return found


def main() -> None:
    """Measure every shape and write ``masks.json``."""
    args = parser(__doc__).parse_args()
    found = []
    for shape in SHAPES:
        found.append(measure(shape))
        print(found[-1], flush=True)
    write_result(
        "masks", {"machine": machine(), "dtype": "float32", "seed": 0, "shapes": found}, args.out
    )


if __name__ == "__main__":
    main()
