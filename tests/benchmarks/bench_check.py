"""Does a check after repair tell how far a request is from its full prefill, and does it pay to give some requests more rows?

The questions, chunks and reference of bench_quality.py, chunks behind the prefix, the default repair. Each possible check is set beside the
true KL by Spearman's rank correlation over questions. Then repair at several ratios, so that policies can be compared at equal rows:
a ratio for all, a target of covered attention, and one escalation (rows chosen again, by the repaired question's attention).

    KVRAG_EVAL_DATA=... python tests/benchmarks/bench_check.py [--count 24] [--chunks 6] [--threads N]
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from bench_quality import Case
from common import items, machine, parser, small_engine, write_result

from kvrag import RepairConfig
from kvrag.blend.layout import Layout, mask_of, rows_of
from kvrag.blend.likeness import NOISE, Likeness
from kvrag.blend.repair import ResidualShift, probed_layers, residual_shift
from kvrag.blend.select import select_rows
from kvrag.blend.stitch import stitch
from kvrag.model.rope import Rotations
from kvrag.model.rows import KVBuffer, Rows
from kvrag.verify import kl_divergence

DEFAULT = RepairConfig("query_gain", recompute_ratio=0.05, first_k=4, shift=0.75)  # that of then
RATIOS = (0.03, 0.05, 0.07, 0.10, 0.15)
ESCALATED = 0.10
TARGETS = (0.35, 0.40, 0.45, 0.50, 0.55)
KLS = ("kl_own", "kl_first", "kl_gold")
MODEL = "SmolLM2-135M-Instruct"


class Measured:
    """A repair forward that also looks: at the question's attention, and at how much the repaired rows change."""

    def __init__(
        self,
        case: Case,
        layout: Layout,
        rotary: Rotations,
        selected: torch.Tensor,
        buffer: KVBuffer,
        likeness: Likeness,
    ) -> None:
        lm, changes = case.lm, list[float]()
        rows = torch.sort(torch.cat([selected, rows_of(layout.live)])).values
        shift: ResidualShift | None = None
        if len(selected):
            shift = residual_shift(likeness, layout, rows, DEFAULT.shift, rotary)
        at = mask_of(selected, layout.num_tokens)[rows]

        def look(layer: int, keys: Any, values: Any, fresh_keys: Any, fresh_values: Any) -> None:
            before, after = values[0, :, selected].float(), fresh_values[0, :, at].float()
            if layer and len(selected):
                changes.append(float((after - before).norm() / before.norm()))
            if shift is not None:
                shift(layer, keys, values, fresh_keys, fresh_values)

        layers = probed_layers(DEFAULT.probe_span, lm.num_layers)
        asked = {"mass_rows": layout.num_suffix, "mass_layers": layers, "before_write": look}
        logits, mass = lm.forward(case.ids[rows], Rows.at(rows), buffer, **asked)
        assert mass is not None
        self.logits, self.mass, self.change = logits[0, -1], mass, statistics.fmean(changes) if changes else 0.0


def covered(mass: torch.Tensor, rows: torch.Tensor, stale: torch.Tensor) -> float:
    """Share of the attention on stale rows that these rows hold."""
    return float(mass[rows].sum() / mass[stale].sum())


def left_over(likeness: Likeness, mass: torch.Tensor, rows: torch.Tensor, stale: torch.Tensor) -> float:
    """Variance that the Gaussian process leaves at the rows that are not repaired, weighed by the question's attention to all rows."""
    rest = stale[~torch.isin(stale, rows)]
    known, cross = likeness.covariance(rows, rows), likeness.covariance(rows, rest)
    known.diagonal().add_(NOISE)
    told = (cross * torch.linalg.solve(known, cross.T).T).sum(dim=1)
    own = torch.stack([likeness.covariance(row[None], row[None])[0, 0] for row in rest])
    return float((mass[rest] * (own - told)).sum() / mass.sum())


def checks(probe: Measured, done: Measured, likeness: Likeness, rows: torch.Tensor, layout: Layout) -> dict[str, float]:
    """Every check, so that a larger one should mean a larger divergence."""
    stale = rows_of(layout.stale)
    before, after = probe.mass / probe.mass.sum(), done.mass / done.mass.sum()
    on_before, on_after = before[stale] / before[stale].sum(), after[stale] / after[stale].sum()
    top = [set(mass.topk(len(rows)).indices.tolist()) for mass in (on_before, on_after)]
    rest = stale[~torch.isin(stale, rows)]
    best = done.logits.float().log_softmax(-1).topk(2).values.exp()
    left = left_over(likeness, done.mass, rows, stale)
    return {
        "attention: distance": float((before - after).abs().sum() / 2),
        "attention: distance on stale rows": float((on_before - on_after).abs().sum() / 2),
        "attention: top rows not shared": 1 - len(top[0] & top[1]) / len(rows),
        "attention: newly on unrepaired rows": float((after - before)[rest].clamp(min=0).sum()),
        "attention: on unrepaired rows": float(after[rest].sum()),
        "attention: not covered, probe": 1 - covered(probe.mass, rows, stale),
        "attention: not covered, repaired": 1 - covered(done.mass, rows, stale),
        "change of repaired rows": done.change,
        "variance left": left,
        "variance left × change": left * done.change,
        "first token: entropy": float(torch.distributions.Categorical(logits=done.logits.float()).entropy()),
        "first token: no margin": float(1 - (best[0] - best[1])),
        "first token: change by repair": float(kl_divergence(done.logits, probe.logits)),
    }


def measure(case: Case) -> dict[str, Any]:
    """Measure one question: every check of the default, and the KL of every policy's repair."""
    kvs, layout = case.encode("prefix")
    rotary, stale = case.lm.rotary(layout.num_tokens), rows_of(layout.stale)
    stitched = case.lm.buffer(layout.num_tokens)
    stitch(stitched, layout, kvs, rotary)

    def run(rows: torch.Tensor) -> tuple[Measured, dict[str, float]]:
        buffer = case.copy(stitched, case.scratch)
        done = Measured(case, layout, rotary, rows, buffer, likeness)
        own = case.forced(buffer, done.logits, case.own)
        gold = case.forced(buffer, done.logits, case.gold)
        return done, {
            "kl_own": float(kl_divergence(case.full_own, own).mean()),
            "kl_first": float(kl_divergence(case.full_own[0], own[0])),
            "kl_gold": float(kl_divergence(case.full_gold, gold).mean()),
            "rows": len(rows) / len(stale),
        }

    likeness = Likeness.of(stitched, layout)
    probe, unrepaired = run(stale[:0])
    likeness = Likeness.of(stitched, layout, probe.mass)
    out: dict[str, Any] = {"stale": len(stale), "unrepaired": unrepaired}
    for ratio in RATIOS:
        config = replace(DEFAULT, recompute_ratio=ratio)
        rows = select_rows(layout, config, mass=probe.mass, likeness=likeness)
        done, out[f"{ratio:.2f}"] = run(rows)
        out[f"{ratio:.2f}"]["covered"] = covered(probe.mass, rows, stale)
        if ratio == DEFAULT.recompute_ratio:
            out["checks"], after = checks(probe, done, likeness, rows, layout), done.mass
    rows = select_rows(layout, replace(DEFAULT, recompute_ratio=ESCALATED), mass=after, likeness=likeness)
    _, out["escalated"] = run(rows)
    return out


def ranks(values: list[float]) -> torch.Tensor:
    """Rank values; equal ones share their mean rank."""
    found = torch.tensor(values, dtype=torch.float64)
    return ((found[:, None] > found).sum(dim=1) + (found[:, None] >= found).sum(dim=1)) / 2.0


def spearman(one: list[float], other: list[float]) -> float:
    """Rank correlation."""
    return float(torch.corrcoef(torch.stack([ranks(one), ranks(other)]))[0, 1])


def figures(cases: list[dict[str, Any]], chosen: list[str]) -> dict[str, float]:
    """Mean, and mean of the worst quarter, of the KLs where each question is repaired as chosen; and the share of rows repaired."""
    out = {}
    for kl in KLS:
        found = sorted(case[name][kl] for case, name in zip(cases, chosen, strict=True))
        out |= {kl: statistics.fmean(found), f"{kl}_worst": statistics.fmean(found[-max(1, len(found) // 4) :])}
    repaired = sum(case[name]["rows"] * case["stale"] for case, name in zip(cases, chosen, strict=True))
    return {**out, "rows": repaired / sum(case["stale"] for case in cases)}


def uniform(cases: list[dict[str, Any]], rows: float) -> dict[str, float]:
    """Figures of one ratio for all at a share of rows, linear between the ratios measured."""
    grid = [figures(cases, [f"{ratio:.2f}"] * len(cases)) for ratio in RATIOS]
    for low, high in itertools.pairwise(grid):
        if low["rows"] <= rows <= high["rows"]:
            part = (rows - low["rows"]) / (high["rows"] - low["rows"])
            return {name: low[name] + part * (high[name] - low[name]) for name in low}
    return grid[-1] if rows > grid[-1]["rows"] else grid[0]


def escalations(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """By check: its correlations, and the figures where the quarter of highest check is repaired once more, with twice the rows."""
    plain, count = f"{DEFAULT.recompute_ratio:.2f}", round(len(cases) / 4)
    names = {name: [case["checks"][name] for case in cases] for name in cases[0]["checks"]}
    names |= {f"perfect: {kl}": [case[plain][kl] for case in cases] for kl in KLS[:2]}
    out = {}
    for name, values in names.items():
        limit = sorted(values)[-count]
        found = figures(cases, ["escalated" if value >= limit else plain for value in values])
        rho = {f"rho_{kl}": spearman(values, [case[plain][kl] for case in cases]) for kl in KLS}
        out[name] = {**rho, **found}
    computed = figures(cases, [plain] * len(cases))["rows"] + ESCALATED / 4
    return {
        "checks": out,
        "same rows in the end": uniform(cases, found["rows"]),
        "same rows computed": uniform(cases, computed),
    }


def targets(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """By target of covered attention: the figures where each question gets the least ratio that reaches it, and of one ratio for all."""
    names, out = [f"{ratio:.2f}" for ratio in RATIOS], {}
    for target in TARGETS:
        chosen = [next((name for name in names if case[name]["covered"] >= target), names[-1]) for case in cases]
        found = figures(cases, chosen)
        out[f"{target:.2f}"] = {"target": found, "uniform": uniform(cases, found["rows"])}
    return out


def summarise(cases: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Escalations and targets by number of chunks; targets over all questions."""
    pooled = [case for found in cases.values() for case in found]
    by_length = {name: {"escalation": escalations(found), "targets": targets(found)} for name, found in cases.items()}
    return {**by_length, "all": {"targets": targets(pooled)}}


def main() -> None:
    """Measure questions with so many chunks, add them to ``check.json``, and sum up after each question."""
    args = parser(__doc__, count=24, chunks=6, threads=1).parse_args()
    engine, path, about = small_engine(args.threads), args.out / "check.json", {"machine": machine(), "model": MODEL}
    cases: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    mine = cases[str(args.chunks)] = list[dict[str, Any]]()
    for item in items(engine.tokenizer, count=args.count, num_chunks=args.chunks):
        start = time.process_time()
        with torch.inference_mode():
            mine.append(measure(Case(engine, item)))
        print(f"question {len(mine)}/{args.count}: {time.process_time() - start:.0f} s", flush=True)
        if len(mine) > 3:
            write_result("check", {**about, "cases": cases, "summary": summarise(cases)}, args.out)


if __name__ == "__main__":
    main()
