"""How far reuse is from full prefill, for every strategy: MuSiQue questions on SmolLM2-135M-Instruct, float32.

For each question the full prefill of the same token ids is the reference. Measured: mean KL per token over the model's own greedy
answer (teacher-forced) and over the gold answer, KL and top-1 agreement of the first token, loss of the gold answer, token F1 of the
greedy answer. Chunks are encoded alone (as CacheBlend publishes it), behind the prompt's prefix, and behind prefix and context.

    KVRAG_EVAL_DATA=... python tests/benchmarks/bench_quality.py [--count 30] [--processes N] [--only context]
"""

from __future__ import annotations

import collections
import re
import string
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import Item, in_processes, items, machine, means, parser, process_engine, write_result

from kvrag import KVRagEngine, RepairConfig
from kvrag.blend.layout import Layout, place
from kvrag.blend.likeness import Likeness
from kvrag.blend.repair import deviation, probe, repair
from kvrag.blend.select import NEEDS, select_rows
from kvrag.blend.stitch import stitch
from kvrag.model import CausalLM
from kvrag.model.rope import Rotations
from kvrag.model.rows import KVBuffer, Rows
from kvrag.precompute.encode import context_ids, encode_chunks, encode_prefix
from kvrag.types import ChunkKV
from kvrag.verify import kl_divergence

OWN_TOKENS = 10
STRATEGIES = ("random", "first_k", "boundary", "hkvd", "query", "query_hkvd", "query_gain")
NONE, CACHEBLEND = {"none": RepairConfig(strategy="none")}, {"cacheblend@0.15": RepairConfig.cacheblend()}


def named(*ratios: float, strategies: Sequence[str] = ("query_gain",), **options: Any) -> dict[str, RepairConfig]:
    """Strategies at ratios, without heads and with a full shift unless ``options`` say so, which stand in the names."""
    change = "".join(f" {name} {value}" for name, value in options.items())
    pairs = [(strategy, ratio) for ratio in ratios for strategy in strategies]
    return {
        f"{s}@{r:.2f}{change}": RepairConfig(strategy=s, recompute_ratio=r, **{"first_k": 0, "shift": 1.0, **options})
        for s, r in pairs
    }


CONFIGS = {
    "alone": NONE | CACHEBLEND,
    "prefix": NONE
    | CACHEBLEND
    | named(0.01, 0.02, 0.03, 0.05, 0.10, 0.20)
    | named(0.05, strategies=STRATEGIES)
    | named(0.02, strategies=("query",))
    | named(0.03, 0.05, first_k=4)
    | named(0.03, 0.05, shift=0.75)
    | named(0.05, shift=0.0),
    "context": NONE | named(0.02, 0.03, 0.05, 0.10),
}
"""What is measured, by what chunks are encoded behind."""


def normalise(text: str) -> list[str]:
    """SQuAD's normalisation: lower case, no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def token_f1(answer: str, golds: list[str]) -> float:
    """Largest word-level F1 with any gold answer."""
    best = 0.0
    for gold in golds:
        a, g = normalise(answer), normalise(gold)
        same = sum((collections.Counter(a) & collections.Counter(g)).values())
        if same:
            best = max(best, 2 * same / (len(a) + len(g)))
    return best


class Case:
    """One question, prefilled in full once, against which configurations are measured."""

    def __init__(self, engine: KVRagEngine, item: Item) -> None:
        self.lm: CausalLM = engine.loaded.lm
        self.encoder, self.item = engine.loaded.encoder, item
        rendered = self.encoder.render(item.messages)
        head, tail = rendered.split(item.chunks[0])[0], rendered.split(item.chunks[-1])[-1]
        self.prefix = self.encoder.live_ids(head, at_start=True)
        self.chunks = [list(self.encoder.chunk_ids(c)) for c in item.chunks]
        self.glue, self.tail = self.encoder.live_ids("\n\n"), self.encoder.live_ids(tail)
        self.eos = engine.tokenizer.eos_token_id
        ids = list(self.prefix)
        for index, chunk in enumerate(self.chunks):
            ids += (self.glue if index else []) + chunk
        self.ids = torch.tensor(ids + self.tail)
        self.gold = self.encoder.live_ids(item.answers[0])
        buffer = self.lm.buffer(len(self.ids) + 64)
        first, _ = self.lm.forward(self.ids, Rows.span(0, len(self.ids)), buffer)
        self.scratch = buffer  # every configuration starts from a copy of the stitched prompt in here
        self.own = self.greedy(buffer, first[0, -1], OWN_TOKENS)
        self.full_own = self.forced(buffer, first[0, -1], self.own)
        self.full_gold = self.forced(buffer, first[0, -1], self.gold)
        self.full_answer = self.text(self.own)

    def text(self, ids: list[int]) -> str:
        """The answer's first line."""
        return self.encoder.decode(ids).strip().split("\n")[0]

    def forced(self, buffer: KVBuffer, first: torch.Tensor, answer: list[int]) -> torch.Tensor:
        """Logits that predict each token of a given answer, ``(T, vocab)``."""
        if len(answer) == 1:
            return first[None]
        count = len(answer) - 1
        rest, _ = self.lm.forward(torch.tensor(answer[:-1]), self.answer_rows(count), buffer, logits=count)
        return torch.cat([first[None], rest[0]])

    def answer_rows(self, count: int) -> Rows:
        """The rows behind the prompt's."""
        return Rows.span(len(self.ids), len(self.ids) + count)

    def greedy(self, buffer: KVBuffer, first: torch.Tensor, count: int, known: torch.Tensor | None = None) -> list[int]:
        """A greedy answer; with ``known``, logits of the own answer just forced, only from where it leaves that answer."""
        answer = [int(first.argmax())]
        for row, token in zip(known[1:], self.own, strict=False) if known is not None else ():
            if answer[-1] != token:
                break
            answer.append(int(row.argmax()))
        while len(answer) < count and answer[-1] != self.eos:
            at = len(self.ids) + len(answer) - 1
            step, _ = self.lm.forward(torch.tensor(answer[-1:]), Rows.span(at, at + 1), buffer)
            answer.append(int(step[0, -1].argmax()))
        return answer

    def encode(self, where: str) -> tuple[list[ChunkKV], Layout]:
        """Encode the chunks alone, behind the prefix, or behind prefix and context, and lay the prompt out."""
        context = context_ids("default", self.encoder, self.lm.reuse_window) if where == "context" else ()
        _, prefix_kv = encode_prefix(self.lm, self.prefix)
        behind, _ = encode_prefix(self.lm, [] if where == "alone" else self.prefix, context)
        kvs = [encode_chunks(self.lm, behind, [chunk])[0] for chunk in self.chunks]
        assert prefix_kv is not None
        segments: list[tuple[int, Any, bool, int, bool]] = [(len(self.prefix), "prefix", True, 0, False)]
        for index, chunk in enumerate(self.chunks):
            segments.append((len(self.glue) if index else 0, "live", False, -1, False))
            segments.append((len(chunk), "chunk", index == 0 and where == "prefix", index + 1, False))
        segments.append((len(self.tail), "live", False, -1, False))
        return [prefix_kv, *kvs], place(segments)

    def measure(self, where: str) -> dict[str, dict[str, float]]:
        """Measure every configuration with chunks encoded as ``where`` says."""
        kvs, layout = self.encode(where)
        rotary = self.lm.rotary(layout.num_tokens)
        stitched = self.lm.buffer(layout.num_tokens)
        stitch(stitched, layout, kvs, rotary)
        compared = self.copy(stitched, self.lm.buffer(layout.num_tokens))
        change, masses, out = deviation(self.lm, compared, layout, self.ids), dict[object, torch.Tensor](), {}
        for name, config in CONFIGS[where].items():
            start = compared if "deviation" in NEEDS.get(config.strategy, ()) else stitched
            first, rows = self.repaired(start, layout, config, rotary, masses, change)
            out[name] = self.compare(self.scratch, first, rows, layout)
        return out

    def repaired(
        self,
        stitched: KVBuffer,
        layout: Layout,
        config: RepairConfig,
        rotary: Rotations,
        masses: dict[object, torch.Tensor],
        change: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Repair a copy of a stitched prompt in the scratch buffer as the engine does; logits of the last row, and the rows.

        ``masses`` keeps what probes found, by span, for the next configuration.
        """
        span, mass, needs = config.probe_span, None, NEEDS.get(config.strategy, ())
        if "mass" in needs:
            if span not in masses:
                masses[span] = probe(self.lm, self.copy(stitched, self.scratch), layout, self.ids, span=span)
            mass = masses[span]
        likeness = Likeness.of(stitched, layout, mass)
        starts = torch.tensor(self.encoder.sentence_starts(self.ids.tolist()))
        rows = select_rows(layout, config, mass=mass, deviation=change, likeness=likeness, starts=starts)
        buffer = self.copy(stitched, self.scratch)
        first = repair(self.lm, buffer, layout, self.ids, rows, shift=config.shift, rotary=rotary, likeness=likeness)
        return first, rows

    def copy(self, source: KVBuffer, buffer: KVBuffer) -> KVBuffer:
        """Copy a stitched prompt into another buffer."""
        for layer in range(self.lm.num_layers):
            buffer.keys(layer)[:, :, : source.capacity] = source.keys(layer)
            buffer.values(layer)[:, :, : source.capacity] = source.values(layer)
        return buffer

    def compare(self, buffer: KVBuffer, first: torch.Tensor, rows: torch.Tensor, layout: Layout) -> dict[str, float]:
        """Compare with the full prefill."""
        gold, own = self.forced(buffer, first, self.gold), self.forced(buffer, first, self.own)
        answer = self.greedy(buffer, first, OWN_TOKENS, known=own)
        return {
            "kl_own": float(kl_divergence(self.full_own, own).mean()),
            "kl_first": float(kl_divergence(self.full_own[0], own[0])),
            "top1_first": float(self.full_own[0].argmax() == own[0].argmax()),
            "kl_gold": float(kl_divergence(self.full_gold, gold).mean()),
            "gold_loss": float(torch.nn.functional.cross_entropy(gold.float(), torch.tensor(self.gold))),
            "same_answer": float(answer == self.own),
            "f1": token_f1(self.text(answer), self.item.answers),
            "rows": len(rows) / max(1, sum(s.num_rows for s in layout.stale)),
        }

    def reference(self) -> dict[str, float]:
        """The full prefill's own figures."""
        loss = torch.nn.functional.cross_entropy(self.full_gold.float(), torch.tensor(self.gold))
        return {"gold_loss": float(loss), "f1": token_f1(self.full_answer, self.item.answers)}


def summarise(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over questions, with intervals of the KLs."""
    kls = ("kl_own", "kl_first", "kl_gold")
    named = {f"{where}/{name}": (where, name) for where in CONFIGS if where in cases[0] for name in cases[0][where]}
    out = {key: means([case[where][name] for case in cases], kls) for key, (where, name) in named.items()}
    return {**out, "full": means([case["full"] for case in cases])}


def show(summary: dict[str, Any]) -> None:
    """Print the table and the comparison with CacheBlend as published."""
    print(
        f"{'encoding/strategy':32} {'KL own':>16} {'KL first':>9} {'top-1':>6} {'KL gold':>16} {'loss':>6} {'F1':>6} {'rows':>6}"
    )
    for name, row in summary.items():
        if name == "full":
            print(f"{name:32} {'':16} {'':9} {'':6} {'':16} {row['gold_loss']:6.3f} {row['f1']:6.3f}")
            continue
        own, gold = (f"{row[k]:.4f} ±{(row[k + '_ci'][1] - row[k + '_ci'][0]) / 2:.4f}" for k in ("kl_own", "kl_gold"))
        print(
            f"{name:32} {own:>16} {row['kl_first']:9.4f} {row['top1_first']:6.2f} {gold:>16} {row['gold_loss']:6.3f} "
            f"{row['f1']:6.3f} {row['rows']:6.3f}"
        )


def measure(item: Item, wheres: Sequence[str]) -> dict[str, Any]:
    """Measure a question, in a process of its own engine."""
    start = time.perf_counter()
    with torch.inference_mode():
        case = Case(process_engine(), item)
        found = {where: case.measure(where) for where in wheres} | {"full": case.reference()}
    print(f"{time.perf_counter() - start:.0f} s: {item.question[:70]}", flush=True)
    return found


def main() -> None:
    """Measure, a process per thread, and write the JSON after each question."""
    options = parser(__doc__, count=30, processes=torch.get_num_threads())
    options.add_argument("--only", nargs="+", choices=list(CONFIGS), default=list(CONFIGS), help="encodings to measure")
    args = options.parse_args()
    todo, cases = items(process_engine().tokenizer, count=args.count), list[dict[str, Any]]()
    about = {"machine": machine(), "model": "SmolLM2-135M-Instruct", "chunk_tokens": 250, "seed": 0}
    for found in in_processes(partial(measure, wheres=args.only), todo, args.processes):
        cases.append(found)
        write_result("quality", {**about, "cases": cases, "summary": summarise(cases)}, args.out)
    show(summarise(cases))


if __name__ == "__main__":
    main()
