"""What chunks should be encoded behind: KL to the full prefill of the same token ids, by context and by share of repaired rows.

MuSiQue questions on SmolLM2-135M-Instruct, float32, ten chunks of 250 tokens in random order. ``prefix`` is no context, ``shipped:N`` the
first N tokens of the text that ships with kvrag, ``corpus:N`` passages of other questions, ``repeated:N`` one short text over and over,
``gap:N`` positions without text, ``mean:N`` the mean of the KV behind two halves of the shipped text, each N tokens long. ``--chunks``
and ``--chunk-tokens`` make shorter prompts. Every figure is the mean over the questions; all repeats are in the JSON.

    KVRAG_EVAL_DATA=... python tests/benchmarks/bench_context.py [--count 30] [--contexts prefix shipped:1000 ...] [--name context]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench_quality import Case
from common import Item, eval_data, in_processes, items, machine, means, parser, process_engine, write_result

from kvrag import RepairConfig
from kvrag.blend.layout import Layout
from kvrag.blend.stitch import stitch
from kvrag.model.rows import Rows
from kvrag.precompute.encode import _behind, _encode, encode_chunks, encode_prefix, shipped
from kvrag.types import ChunkKV, LayerKV

CONTEXTS = (
    "prefix",
    "gap:1000",
    "shipped:125",
    "shipped:250",
    "shipped:500",
    "shipped:1000",
    "shipped:1800",
    "corpus:1000",
    "mean:900",
)
RATIOS = (0.0, 0.02, 0.05, 0.10)
SENTENCE = "This is a passage of an ordinary document. "


def others(item: Item) -> str:
    """Passages of questions that share no text with this one, each cut to about 250 tokens."""
    texts = [c["text"][:1000] for row in eval_data() for c in row["ctxs"][::3]]
    return "\n\n".join(text for text in texts if not any(text[:100] in chunk for chunk in item.chunks))


def mean_kv(kvs: Sequence[ChunkKV]) -> ChunkKV:
    """Mean of several KVs of one chunk."""
    layers = zip(*(kv.layers for kv in kvs), strict=True)
    pairs = (([layer.keys for layer in each], [layer.values for layer in each]) for each in layers)
    return ChunkKV(tuple(LayerKV(torch.stack(k).mean(0), torch.stack(v).mean(0)) for k, v in pairs))


class ContextCase(Case):
    """A question whose chunks are encoded behind contexts."""

    def behind(self, name: str) -> list[ChunkKV]:
        """KV of the chunks, encoded behind a context of this name."""
        kind, _, length = name.partition(":")
        if kind == "gap":
            return self.behind_gap(int(length))
        if kind == "mean":
            ids, count = list(self.encoder.chunk_ids(shipped())), int(length)
            halves = (self.encoded(ids[i * count : (i + 1) * count]) for i in (0, 1))
            return [mean_kv(kvs) for kvs in zip(*halves, strict=True)]
        texts = {"prefix": "", "shipped": shipped(), "corpus": others(self.item), "repeated": SENTENCE * 400}
        return self.encoded(list(self.encoder.chunk_ids(texts[kind]))[: int(length)] if length else [])

    def encoded(self, context: list[int]) -> list[ChunkKV]:
        """KV of the chunks behind the prefix and a context."""
        return encode_chunks(self.lm, encode_prefix(self.lm, self.prefix, context)[0], self.chunks)

    def behind_gap(self, gap: int) -> list[ChunkKV]:
        """KV of the chunks behind the prefix, with so many positions between that nothing is at."""
        prefix, found = encode_prefix(self.lm, self.prefix)[0], []
        for chunk in self.chunks:
            start, stop = prefix.capacity, prefix.capacity + len(chunk)
            rows = Rows(slice(start, stop), stop, torch.arange(start, stop) + gap)
            found += _encode(self.lm, [chunk], rows, _behind(self.lm, prefix, stop, 1), [(0, start, stop)])
        return found

    def encode(self, where: str) -> tuple[list[ChunkKV], Layout]:
        """Encode the chunks behind the prefix and a context."""
        (prefix_kv, *_), layout = super().encode("prefix") if not hasattr(self, "_laid") else self._laid
        self._laid = [prefix_kv], layout
        return [prefix_kv, *self.behind(where)], layout

    def measure_at(self, where: str, ratios: Sequence[float], shift: float) -> dict[str, dict[str, float]]:
        """Measure a context at several ratios; only without one the first chunk is exact."""
        kvs, layout = self.encode(where)
        if where != "prefix":
            layout = Layout(tuple(replace(s, exact=s.exact and s.kind == "prefix") for s in layout.segments))
        rotary = self.lm.rotary(layout.num_tokens)
        stitched = self.lm.buffer(layout.num_tokens)
        stitch(stitched, layout, kvs, rotary)
        out, masses = {}, dict[object, torch.Tensor]()
        for ratio in ratios:
            config = RepairConfig(recompute_ratio=ratio, shift=shift) if ratio else RepairConfig(strategy="none")
            first, rows = self.repaired(stitched, layout, config, rotary, masses)
            out[f"{ratio:.2f}"] = self.compare(self.scratch, first, rows, layout)
        return out


def measure(item: Item, contexts: Sequence[str], ratios: Sequence[float], shift: float) -> dict[str, Any]:
    """Measure a question in every context."""
    start = time.perf_counter()
    with torch.inference_mode():
        case = ContextCase(process_engine(), item)
        found = {where: case.measure_at(where, ratios, shift) for where in contexts}
    print(f"{time.perf_counter() - start:.0f} s: {item.question[:70]}", flush=True)
    return found


def main() -> None:
    """Measure, a process per thread, print a table and write the JSON after each question."""
    options = parser(__doc__, count=30, processes=torch.get_num_threads(), chunks=10, chunk_tokens=250)
    options.add_argument("--contexts", nargs="+", default=CONTEXTS)
    options.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    options.add_argument("--shift", type=float, default=RepairConfig().shift)
    options.add_argument("--name", default="context", help="of the JSON file")
    args = options.parse_args()
    todo = items(process_engine().tokenizer, count=args.count, num_chunks=args.chunks, chunk_tokens=args.chunk_tokens)
    cases: list[dict[str, Any]] = []
    about = {"model": "SmolLM2-135M-Instruct", "chunks": args.chunks, "chunk_tokens": args.chunk_tokens, "seed": 0}
    about = {"machine": machine(), **about, "shift": args.shift, "name": args.name}
    one = partial(measure, contexts=args.contexts, ratios=args.ratios, shift=args.shift)
    for found in in_processes(one, todo, args.processes):
        cases.append(found)
        summary = {f"{w}/{r}": means([c[w][r] for c in cases]) for w in cases[0] for r in cases[0][w]}
        write_result(args.name, {**about, "cases": cases, "summary": summary}, args.out)
    print(f"{'context/ratio':24} {'KL own':>8} {'first':>8} {'gold':>8} {'top-1':>6}")
    for name, row in summary.items():
        kls = "".join(f" {row[kl]:8.4f}" for kl in ("kl_own", "kl_first", "kl_gold"))
        print(f"{name:24}{kls} {row['top1_first']:6.2f}")


if __name__ == "__main__":
    main()
