"""What rounding stored KV costs: bytes, error per element, and KL from the same reuse without rounding.

MuSiQue questions on SmolLM2-135M-Instruct, float32, chunks of 250 tokens behind the prefix, as in ``bench_quality.py``. The KL is
measured per token over the model's own answer and over the gold answer, unrepaired and with the default repair, from reuse with the same
repair and no rounding; beside it the KL of both from the full prefill. Errors are those of this model's own keys and values, and of keys
with outlier channels (a few channels fifty times larger than the rest), on the axes of the types and on swapped ones.

    KVRAG_EVAL_DATA=... python tests/benchmarks/bench_quantised.py [--count 8] [--chunks 10] [--threads N]
"""

from __future__ import annotations

import time
from typing import Any

import torch
from bench_quality import Case
from common import items, machine, means, parser, small_engine, write_result

from kvrag import RepairConfig
from kvrag.blend.layout import Layout
from kvrag.blend.quantise import pack, unpack
from kvrag.blend.stitch import stitch
from kvrag.model.rope import Rotations
from kvrag.precompute.quantise_check import judge
from kvrag.types import ChunkKV, KVDtype, LayerKV
from kvrag.verify import MAX_MEAN_KL, kl_divergence

TYPES: tuple[KVDtype, ...] = ("int8", "fp8", "int4")
REPAIRS = {"none": RepairConfig(strategy="none"), "default": RepairConfig()}
OUTLIERS, TIMES_LARGER = 4, 50


def blended(
    case: Case, kvs: list[ChunkKV], layout: Layout, rotary: Rotations, config: RepairConfig
) -> dict[str, torch.Tensor]:
    """Stitch and repair; logits over the own and over the gold answer."""
    stitched = case.lm.buffer(layout.num_tokens)
    stitch(stitched, layout, kvs, rotary)
    first, _ = case.repaired(stitched, layout, config, rotary, {})
    buffer = case.scratch
    return {"own": case.forced(buffer, first, case.own), "gold": case.forced(buffer, first, case.gold)}


def measure(case: Case) -> dict[str, dict[str, float]]:
    """KL of every type and repair, from reuse without rounding and from the full prefill."""
    kvs, layout = case.encode("prefix")
    rotary = case.lm.rotary(layout.num_tokens)
    full = {"own": case.full_own, "gold": case.full_gold}
    out: dict[str, dict[str, float]] = {}
    for repair_name, config in REPAIRS.items():
        reference = blended(case, kvs, layout, rotary, config)
        out[f"auto/{repair_name}"] = distances(reference, reference, full)
        for kv_dtype in TYPES:
            found = blended(case, [pack(kv, kv_dtype) for kv in kvs], layout, rotary, config)
            out[f"{kv_dtype}/{repair_name}"] = distances(found, reference, full)
    for kv_dtype in TYPES:
        out[f"{kv_dtype}/error"] = element_errors(kvs[1], kv_dtype)
    return out


def distances(
    found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], full: dict[str, torch.Tensor]
) -> dict[str, float]:
    """KL(reference ‖ found) and KL(full ‖ found) over both answers, and whether the first token is the same."""
    out = {"same_first": float(reference["own"][0].argmax() == found["own"][0].argmax())}
    for name, logits in found.items():
        out[f"kl_{name}"] = float(kl_divergence(reference[name], logits).mean())
        out[f"kl_{name}_from_full"] = float(kl_divergence(full[name], logits).mean())
    return out


def element_errors(kv: ChunkKV, kv_dtype: KVDtype) -> dict[str, float]:
    """Root mean square error of keys and of values, relative to their own root mean square, mean over layers."""
    pairs = list(zip(kv.layers, read_again(kv, kv_dtype), strict=True))
    return {
        "keys": sum(relative(layer.keys, keys) for layer, (keys, _) in pairs) / len(pairs),
        "values": sum(relative(layer.values, values) for layer, (_, values) in pairs) / len(pairs),
    }


def read_again(kv: ChunkKV, kv_dtype: KVDtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, rounded to a type and read from its codes."""
    like, packed = kv.layers[0].keys, pack(kv, kv_dtype)
    return [unpack(layer, kv.num_tokens, device=like.device, dtype=like.dtype) for layer in packed.layers]


def relative(x: torch.Tensor, found: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of ``x``."""
    return float((found - x).square().mean().sqrt() / x.square().mean().sqrt())


def outlier_errors() -> dict[str, dict[str, float]]:
    """Error of the ordinary channels of keys with outlier channels, on each type's axes and on swapped ones."""
    keys = torch.randn(8, 250, 128, generator=torch.Generator().manual_seed(0))
    keys[..., :OUTLIERS] *= TIMES_LARGER
    out = {}
    for kv_dtype in TYPES:
        (read,) = read_again(ChunkKV((LayerKV(keys, keys),)), kv_dtype)
        ours, swapped = (relative(keys[..., OUTLIERS:], x[..., OUTLIERS:]) for x in read)
        out[kv_dtype] = {"ours": ours, "swapped": swapped}  # values are rounded token by token: keys there are swapped
    return out


def main() -> None:
    """Measure, and write the result after every question."""
    args = parser(__doc__, count=8, chunks=10, threads=torch.get_num_threads()).parse_args()
    engine = small_engine(args.threads)
    lm = engine.loaded.reusable
    judged = {d: judge(engine.loaded, lm, d) for d in TYPES}
    gate = {d: {"mean_kl": v.mean_kl, "top1": v.top1, "tokens": v.tokens} for d, v in judged.items()}
    cases: list[dict[str, Any]] = []
    for item in items(engine.tokenizer, count=args.count, num_chunks=args.chunks):
        start = time.perf_counter()
        with torch.inference_mode():
            cases.append(measure(Case(engine, item)))
        print(f"question {len(cases)}/{args.count}: {time.perf_counter() - start:.0f} s", flush=True)
        result = {
            "machine": machine(),
            "model": "SmolLM2-135M-Instruct",
            "chunks": args.chunks,
            "max_mean_kl": MAX_MEAN_KL,
            "gate": gate,
            "outliers": outlier_errors(),
            "cases": cases,
            "summary": {name: means([case[name] for case in cases]) for name in cases[0]},
        }
        write_result("quantised", result, args.out)
    for name, row in result["summary"].items():
        print(name, {key: round(value, 5) for key, value in row.items() if isinstance(value, float)})


if __name__ == "__main__":
    main()
