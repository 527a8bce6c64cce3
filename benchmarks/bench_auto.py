"""What ``mode="auto"`` costs beside transformers' own prefill: prompts of 200 to 6,000 tokens, of whose chunks none to all are stored.

SmolLM2 on MuSiQue passages of as many questions as a prompt has chunks. The stored chunks are spread over the prompt, from its end: the
first one, which would be exact, is stored only where all are. KV is read from the disk through the page cache. Both sides take turns on
the same token ids. The first request is not timed: it measures the model's costs if no earlier process has. Planning counts for auto only.

    KVRAG_EVAL_DATA=... python benchmarks/bench_auto.py            # --quick: two lengths, once
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench_ttft import full_prefill, measured
from common import INSTRUCTION, eval_data, machine, parser, small_model, write_result

from kvrag import KVRagEngine, StoreConfig

LENGTHS = {200: (4, 38), 500: (4, 105), 1000: (4, 235), 2500: (10, 245), 6000: (24, 247)}
"""By tokens of the prompt, about: chunks, and tokens of each."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
LIMIT = 1.05


def chunks_of(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """Cut the passages of ``count`` questions, one each, which have nothing in common, to chunks."""
    texts = [
        " ".join(passage["text"] for passage in row["ctxs"][:3]) for row in eval_data()[:count]
    ]
    return [tokenizer.decode(tokenizer(text)["input_ids"][:tokens]).strip() for text in texts]


def cell(engine: KVRagEngine, chunks: list[str], share: float, repeats: int) -> dict[str, Any]:
    """Time one length and share; chunks are stored in a namespace of the cell's own."""
    count, space = round(share * len(chunks)), f"{len(chunks)} {len(chunks[0])} {share}"
    engine.precompute(
        [chunks[-1 - i * len(chunks) // count] for i in range(count)], namespace=space
    )
    question = f"\n\n{INSTRUCTION}\nQuestion: {eval_data()[0]['question']}"
    prompt = [{"role": "user", "content": "\n\n".join(chunks) + question}]
    ids, runs = engine.prefill(prompt, namespace=space).prompt_ids, list[dict[str, Any]]()
    for _ in range(repeats):
        before, _ = measured(lambda: full_prefill(engine, ids))
        auto, result = measured(lambda: engine.prefill(prompt, namespace=space))
        after, _ = measured(lambda: full_prefill(engine, ids))
        assert result.prompt_ids == ids, "the comparison must be of the same token ids"
        both = {name: (before[name] + after[name]) / 2 for name in ("ms", "cpu_ms")}
        how = {
            "exactness": result.exactness,
            "cached": result.cached_tokens,
            "repaired": result.repaired_tokens,
        }
        how |= {
            "reason": result.fallback_reason,
            "stages_ms": {k: round(v, 2) for k, v in result.timings_ms.items()},
        }
        runs.append({"auto": auto, "full": both, "full_prefills": [before, after], **how})
    summary = dict[str, Any]()
    for name in ("ms", "cpu_ms"):
        summary |= {
            f"{who}_{name}": statistics.median(run[who][name] for run in runs)
            for who in ("auto", "full")
        }
        summary[f"ratio_{name}"] = statistics.median(
            run["auto"][name] / run["full"][name] for run in runs
        )
    how = {"exactness": runs[-1]["exactness"], "cached": runs[-1]["cached"], "stored": count}
    return {"tokens": len(ids), "chunks": len(chunks), **how, **summary, "runs": runs}


def main() -> None:
    """Measure the grid and write JSON."""
    arguments = parser(__doc__, repeats=5, threads=torch.get_num_threads())
    arguments.add_argument(
        "--quick", action="store_true", help="two lengths, once; nothing is written"
    )
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    lengths = [200, 1000] if args.quick else list(LENGTHS)
    where, cells = machine(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder:
        engine = KVRagEngine.from_pretrained(
            small_model(),
            dtype="float32",
            kv_dir=Path(folder) / "kv",
            store_config=StoreConfig(ram_bytes=0),
        )
        for length in lengths:
            count, tokens = LENGTHS[length]
            chunks = chunks_of(engine.tokenizer, count, tokens)
            for share in SHARES:
                found = cell(engine, chunks, share, 1 if args.quick else args.repeats)
                cells.append({"length": length, "share": share, **found})
                line = "{tokens} tokens, {stored} of {chunks} chunks stored: {exactness}, "
                line += "{ratio_ms:.2f} of the time, {ratio_cpu_ms:.2f} of the CPU time"
                print(line.format(**found), found["runs"][-1]["reason"] or "", flush=True)
        costs = engine._answering.costs.costs
        engine.close()
    worst = max(cells, key=lambda each: each["ratio_ms"])
    print(
        "most: {ratio_ms:.2f} of the time at {tokens} tokens, {share:.0%} stored;".format(**worst),
        f"limit {LIMIT}",
    )
    if not args.quick:
        what = {
            "model": "SmolLM2-135M-Instruct",
            "dtype": "float32",
            "seed": 0,
            "limit": LIMIT,
            "costs": asdict(costs),
        }
        print(
            "written:",
            write_result("auto", {"machine": where, **what, "cells": cells}, args.out).name,
        )


if __name__ == "__main__":
    main()
