"""Which layers' attention should choose the rows to repair: the default strategy with the probe's span varied.

The same questions, measures and reference as bench_quality.py, chunks encoded behind the prefix.

    KVRAG_EVAL_DATA=... python tests/benchmarks/bench_probe.py [--count 20] [--threads N]
"""

from __future__ import annotations

import time
from typing import Any

import torch
from bench_quality import Case
from common import items, machine, means, parser, small_engine, write_result

from kvrag import RepairConfig
from kvrag.blend.stitch import stitch

SPANS = ((0.0, 1.0), (0.0, 0.8), (1 / 3, 0.5), (1 / 3, 2 / 3), (1 / 3, 0.8), (1 / 3, 1.0), (0.5, 0.8))
RATIOS = (0.03, 0.10)


def measure(case: Case) -> dict[str, dict[str, float]]:
    """Measure every span at every ratio on one question."""
    kvs, layout = case.encode("prefix")
    rotary = case.lm.rotary(layout.num_tokens)
    stitched = case.lm.buffer(layout.num_tokens)
    stitch(stitched, layout, kvs, rotary)
    out = {}
    masses = dict[object, torch.Tensor]()
    for span in SPANS:
        for ratio in RATIOS:
            config = RepairConfig(recompute_ratio=ratio, probe_span=span)
            first, rows = case.repaired(stitched, layout, config, rotary, masses)
            out[f"{span[0]:.2f}-{span[1]:.2f}@{ratio:.2f}"] = case.compare(case.scratch, first, rows, layout)
    return out


def main() -> None:
    """Measure and write ``probe.json``."""
    args = parser(__doc__, count=20, threads=torch.get_num_threads()).parse_args()
    engine = small_engine(args.threads)
    cases: list[dict[str, Any]] = []
    for item in items(engine.tokenizer, count=args.count):
        start = time.perf_counter()
        with torch.inference_mode():
            cases.append(measure(Case(engine, item)))
        print(f"question {len(cases)}/{args.count}: {time.perf_counter() - start:.0f} s", flush=True)
    summary = {name: means([case[name] for case in cases]) for name in cases[0]}
    for name, row in summary.items():
        print(f"{name:16} KL own {row['kl_own']:.4f}, first {row['kl_first']:.4f}, gold {row['kl_gold']:.4f}")
    found = {"machine": machine(), "model": "SmolLM2-135M-Instruct", "cases": cases, "summary": summary}
    write_result("probe", found, args.out)


if __name__ == "__main__":
    main()
