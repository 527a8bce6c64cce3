"""kvrag as a driver of KVShareArena (arXiv 2609.10266, github.com/xishi404/KVShareArena), and its score on what is here: HotpotQA.

Where that package is installed, importing this file registers ``kvrag`` with it (``kva run kvrag``); elsewhere the same contract stands
below. A source is encoded without the question; F1 is that of words, as SQuAD and LongBench have it, and PGR the share of the gap
between no source and a full prefill that reuse recovers. The board's own sets and model (Qwen3-8B) are not here, so its rows and this
figure are of other questions.

    KVRAG_EVAL_MODELS=... KVRAG_EVAL_DATA=... python benchmarks/arena.py --model qwen2.5-coder-0.5b --count 60
"""

from __future__ import annotations

import json
import random
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import machine, model_path, parser, write_result
from facts_pairs import difference
from facts_tasks import data
from transformers import AutoConfig

from kvrag import KVRagEngine
from kvrag.evaluate.questions import normalised

try:
    from kvsharearena.contract import AnswerResult, BaseRepairMethod, register
except ImportError:

    @dataclass
    class AnswerResult:
        """An answer, and what it cost: rows recomputed and rows of a full prefill, both of sources and times layers."""

        text: str
        recomputed_layer_tokens: int = 0
        dense_payload_layer_tokens: int = 0
        kv_bytes: int = 0
        ttft_ms: float | None = None
        aux: dict[str, Any] = field(default_factory=dict)

    class BaseRepairMethod(ABC):
        """A method: set up once, then sources without the question, then the question with what was made of them."""

        name = "base"
        track = frozenset({"re"})
        mechanism_class = 0
        provenance = "port"

        @abstractmethod
        def setup(self, model_id: str, config: dict[str, Any]) -> None:
            """Load the model; ``config["exam"]`` has the texts around sources and question."""

        @abstractmethod
        def build_cache(self, source_text: str) -> object:
            """Encode a source by itself."""

        @abstractmethod
        def answer(self, question: str, caches: list[Any], config: dict[str, Any]) -> AnswerResult:
            """Answer with these sources."""

        @abstractmethod
        def teardown(self) -> None:
            """Let go of the model."""

    METHODS: dict[str, type[BaseRepairMethod]] = {}

    def register(name: str) -> Callable[[type[Any]], type[Any]]:
        """Name a method."""

        def named(method: type[Any]) -> type[Any]:
            METHODS[name], method.name = method, name
            return method

        return named


EXAM = {
    "system_prompt": "You answer questions about passages, briefly and correctly.",
    "pre_ctx": "These are passages.\n\n",
    "mid_q": "\n\nAnswer the question from the passages, with the answer alone.\nQuestion: ",
    "tail": "\nAnswer:",
    "max_new_tokens": 32,
}
"""Texts of our own for the run here; the arena gives its frozen ones."""


@dataclass(frozen=True)
class Source:
    """A source that was encoded."""

    text: str
    num_bytes: int


@register("kvrag")
class KVRag(BaseRepairMethod):
    """kvrag with its default repair, or ``config["repair"]``."""

    track = frozenset({"re"})
    mechanism_class = 0
    provenance = "official"
    backend = "kvrag"
    training_data = None
    cost_notes = (
        "recomputed_layer_tokens: repaired rows and rows of sources without stored KV, times layers; the probe reads the question's "
        "rows alone. kv_bytes: stored KV of the sources. ttft_ms: from the call to the first token, planning and loading included."
    )

    def setup(self, model_id: str, config: dict[str, Any]) -> None:
        """Open an engine whose chunks stand behind the exam's head."""
        self._folder = tempfile.TemporaryDirectory()
        self.engine = KVRagEngine.from_pretrained(
            model_id,
            kv_dir=self._folder.name,
            prefix=self._messages(config["exam"], "{context}"),
            repair=config.get("repair"),
            context=config.get("context", "default"),
            dtype=config.get("dtype", "auto"),
        )
        about = AutoConfig.from_pretrained(model_id)
        self.layers = int(getattr(about, "text_config", about).num_hidden_layers)
        self._bytes: dict[str, int] = {}

    @staticmethod
    def _messages(exam: dict[str, Any], text: str) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": exam["system_prompt"]},
            {"role": "user", "content": exam["pre_ctx"] + text},
        ]

    def build_cache(self, source_text: str) -> Source:
        """Precompute the source's KV."""
        report = self.engine.precompute([source_text], show_progress=False)
        self._bytes.setdefault(source_text, report.stored_bytes)
        return Source(source_text, self._bytes[source_text])

    def answer(self, question: str, caches: list[Source], config: dict[str, Any]) -> AnswerResult:
        """Answer with reuse, or as ``config["mode"]`` says."""
        exam, mode = config["exam"], config.get("mode", "stitch" if caches else "full")
        text = "".join(c.text for c in caches) + exam["mid_q"] + question + exam["tail"]
        prompt = self._messages(exam, text)
        spans = self.engine.explain(prompt).spans if mode != "full" else ()
        found = self.engine.generate(prompt, mode=mode, max_new_tokens=exam["max_new_tokens"])
        payload = sum(
            len(self.engine.tokenizer.encode(c.text.strip(), add_special_tokens=False))
            for c in caches
        )
        stored = sum(span.stop - span.start for span in spans if span.kind == "chunk" and span.hit)
        recomputed = payload - stored + found.repaired_tokens
        if found.exactness == "full":
            recomputed = payload
        return AnswerResult(
            text=found.text,
            recomputed_layer_tokens=max(0, recomputed) * self.layers,
            dense_payload_layer_tokens=payload * self.layers,
            kv_bytes=sum(c.num_bytes for c in caches),
            ttft_ms=found.ttft_ms,
            aux={"exactness": found.exactness, "prompt_tokens": found.prompt_tokens},
        )

    def teardown(self) -> None:
        """Close the engine and drop its KV."""
        self.engine.close()
        self._folder.cleanup()


def word_f1(text: str, golds: Sequence[str]) -> float:
    """F1 of the words of an answer and of the gold one that it is next to."""
    words = Counter(normalised(text))
    best = 0.0
    for gold in golds:
        right = Counter(normalised(gold))
        same = (words & right).total()
        best = max(best, 2 * same / (words.total() + right.total()) if same else 0.0)
    return best


def recovered(method: float, floor: float, full: float) -> float | None:
    """PGR; ``None`` where full prefill gains nothing over no source, as the arena has it."""
    return (method - floor) / (full - floor) if full - floor > 1e-3 else None


def questions(count: int) -> Iterator[tuple[str, list[str], list[str]]]:
    """Question, gold answers and sources of HotpotQA, in random order; white space belongs to a source, as in the arena."""
    for number, row in enumerate(data("hotpotqa")[:count]):
        sources = [f"{p['title']}\n{p['text']}\n\n" for p in row["passages"]]
        random.Random(number).shuffle(sources)
        yield row["question"], row["answers"], sources


def measure(method: KVRag, count: int, path: Path) -> list[dict[str, Any]]:
    """Answer each question without a source, by full prefill and with reuse; a file keeps what is done."""
    config = {"exam": EXAM}
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    with path.open("a") as file:
        for number, (question, golds, sources) in enumerate(questions(count)):
            if number < len(done):
                continue
            caches = [method.build_cache(text) for text in sources]
            record: dict[str, Any] = {"number": number, "golds": golds}
            for name, given, mode in (
                ("blind", [], "full"),
                ("full", caches, "full"),
                ("kvrag", caches, "stitch"),
            ):
                found = method.answer(question, given, config | {"mode": mode})
                record[name] = {**vars(found), "f1": word_f1(found.text, golds)}
            done.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(number, *(f"{n} {record[n]['f1']:.2f}" for n in ("blind", "full", "kvrag")))
    return done[:count]


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """F1, PGR, what is recomputed and how much sooner the first token comes."""
    scores = {name: [r[name]["f1"] for r in records] for name in ("blind", "full", "kvrag")}
    means = {name: sum(of) / len(records) for name, of in scores.items()}
    beyond, *interval = difference(scores["kvrag"], scores["full"])
    sooner = sorted(r["full"]["ttft_ms"] / r["kvrag"]["ttft_ms"] for r in records)
    rows = [
        sum(r["kvrag"][f"{kind}_layer_tokens"] for r in records)
        for kind in ("recomputed", "dense_payload")
    ]
    return {
        "questions": len(records),
        "f1": means,
        "pgr": recovered(means["kvrag"], means["blind"], means["full"]),
        "beyond_full": beyond,
        "beyond_full_ci": interval,
        "recompute_fraction": rows[0] / rows[1],
        "sooner": sooner[len(sooner) // 2],
    }


def main() -> None:
    """Measure and write a summary."""
    options = parser(__doc__, count=60, threads=1)
    options.add_argument("--model", default="qwen2.5-coder-0.5b")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    method = KVRag()
    method.setup(model_path(args.model), {"exam": EXAM, "dtype": "float32"})
    path = args.out / "arena" / f"{args.model}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    records = measure(method, args.count, path)
    method.teardown()
    found = {"machine": machine(), "model": args.model, "hotpotqa": summary(records)}
    print(json.dumps(found["hotpotqa"], indent=1))
    write_result(f"arena/{args.model}", found, args.out)


if __name__ == "__main__":
    main()
