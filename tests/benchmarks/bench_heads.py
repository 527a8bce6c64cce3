"""What the rows at the heads of chunks are worth: ``first_k`` on questions over passages, on few-shot prompts and on code.

The passages are those of bench_quality, with its measures; few-shot prompts and code are those of bench_peers, of which the first token's
KL from the full prefill is measured. One thread a process.

    KVRAG_EVAL_DATA=... python tests/benchmarks/bench_heads.py [--count 30] [--prompts 6] [--processes N] [--only few-shot code]
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import bench_quality
import torch
from bench_peers import float32_model, words_of
from common import (
    RESULTS,
    bootstrap,
    eval_data,
    in_processes,
    items,
    machine,
    means,
    parser,
    process_engine,
    write_result,
)
from peers.workloads import Workload, all_workloads

from kvrag import Chunk, KVRagEngine, RepairConfig
from kvrag.verify import kl_divergence

RATIOS, HEADS = (0.03, 0.10), (0, 1, 2, 4)
QUESTIONS = "passages"


def name_of(ratio: float, first_k: int) -> str:
    """As ``0.03/1``."""
    return f"{ratio:.2f}/{first_k}"


def questions(count: int, processes: int) -> dict[str, Any]:
    """Measure questions over passages: KL of the own answer, of its first token and of the gold answer."""
    todo = items(process_engine().tokenizer, count=count)
    rows = list(in_processes(_question, todo, processes))
    return {"prompts": rows, "summary": {name: means([row[name] for row in rows]) for name in rows[0]}}


def _question(item: Any) -> dict[str, Any]:
    configs = {name_of(r, k): RepairConfig(recompute_ratio=r, first_k=k) for r in RATIOS for k in HEADS}
    bench_quality.CONFIGS["prefix"] = configs
    found: dict[str, Any] = bench_quality.measure(item, ["prefix"])["prefix"]
    return found


def workload(engine: KVRagEngine, work: Workload) -> dict[str, Any]:
    """Measure the prompts of a workload: KL and top-1 agreement at the first token."""
    engine.precompute(work.used, batch_size=4)
    rows = []
    for given in work.prompts:
        prompt = [Chunk(s.text) if s.is_chunk else s.text for s in given.segments]
        full = engine.prefill(prompt, mode="full").logits
        row = {}
        for ratio in RATIOS:
            for first_k in HEADS:
                repair = RepairConfig(recompute_ratio=ratio, first_k=first_k)
                found = engine.prefill(prompt, mode="stitch", repair=repair).logits
                row[name_of(ratio, first_k)] = {
                    "kl_first": float(kl_divergence(full, found)),
                    "top1_first": float(full.argmax() == found.argmax()),
                }
        rows.append(row)
        print(work.name, {name: round(each["kl_first"], 3) for name, each in row.items()}, flush=True)
    summary = {
        name: means([row[name] for row in rows]) | {"kl_first_ci": bootstrap([row[name]["kl_first"] for row in rows])}
        for name in rows[0]
    }
    return {"prompts": rows, "summary": summary}


def main() -> None:
    """Measure what was asked for, and write it beside what the file has of the rest."""
    options = parser(__doc__, count=30, processes=torch.get_num_threads())
    options.add_argument("--prompts", type=int, default=6, help="of each workload")
    options.add_argument("--only", nargs="+", choices=(QUESTIONS, "few-shot", "code"))
    args = options.parse_args()
    path = (args.out or RESULTS) / "heads.json"
    found: dict[str, Any] = json.loads(path.read_text())["found"] if args.only and path.is_file() else {}
    about = {"machine": machine(), "model": "SmolLM2-135M-Instruct", "seed": 0}
    if not args.only or QUESTIONS in args.only:
        found[QUESTIONS] = questions(args.count, args.processes)
        write_result("heads", {**about, "found": found}, args.out)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = float32_model(Path(folder) / "model")
        words, _ = words_of(model)
        engine = KVRagEngine.from_pretrained(str(model), dtype="float32")
        counts = dict.fromkeys(("rag", "chat", "shots", "code"), args.prompts)
        for work in all_workloads(eval_data(), words, counts, 0):
            if work.name in (args.only or ("few-shot", "code")):
                found[work.name] = workload(engine, work)
                write_result("heads", {**about, "found": found}, args.out)


if __name__ == "__main__":
    main()
