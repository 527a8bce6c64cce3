"""Which facts survive reuse: questions with known answers, by full prefill and by each method, on models that can answer.

Of each question and method a line of JSON is kept, so a run that ends goes on where it was. The reference is the full prefill of the same
ids. *lost*: right by full prefill, wrong by reuse, as a share of what full prefill has right. Times are of stitching, choosing and
repairing against that of a full prefill by the same forwards, wall and processor.

    KVRAG_EVAL_MODELS=... KVRAG_EVAL_DATA=... python benchmarks/facts.py --model qwen2.5-coder-0.5b --tasks needles --count 60

A method is named with its budget: ``gain@0.03`` repairs 3% of the rows, ``gain@200`` two hundred,
``gain@auto`` as many as the default; ``p.`` before it: chunks are encoded
behind the prefix alone; ``c1000.``: behind a context of 1,000 tokens; ``int8.``, ``fp8.``, ``int4.``: their KV is rounded.
``reordered`` is a full prefill of the same chunks in another order,
``bf16`` one of the same prompt in bfloat16: how much is rounding. Without any chunk each question is answered once (``blind``).

``--forms tables logs`` asks for facts in other forms (facts_forms.py); ``--sealed`` runs the set that nothing was tuned on, once for each
state of the code. The table sets methods beside another one (``--against``) over the questions that all answered, each task, form, length
and machine for itself.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import facts_forms as forms
import facts_tasks as tasks
import torch
from common import bootstrap, git, machine, model_path, parser, write_result
from facts_methods import (
    METHODS,
    Gradual,
    Method,
    Seen,
    ape_attention,
    by_deviation,
    side_by_side,
    sparse_attention,
)
from facts_pairs import against, common, is_right, key
from facts_tasks import Question
from transformers import AutoModelForCausalLM

from kvrag import KVRagEngine, RepairConfig
from kvrag.blend import repair as stages
from kvrag.blend.covariance import RowCovariance
from kvrag.blend.layout import Layout, place, rows_of
from kvrag.blend.repair import REREAD, deviation, fill, probe, repair
from kvrag.blend.select import breaks_of, effective_ratio, filled
from kvrag.blend.stitch import stitch
from kvrag.evaluate.answers import wilson
from kvrag.evaluate.questions import normalised
from kvrag.evaluate.questions import score as questions_score
from kvrag.generate.defaults import end_ids
from kvrag.kv.quantise import pack
from kvrag.metrics import kl_divergence
from kvrag.model import CausalLM, attention
from kvrag.model.rows import KVBuffer, Rows
from kvrag.precompute.encode import EncodedPrefix, context_ids, encode_chunks, encode_prefix

KL_TOKENS = 24


def engine_of(name: str, threads: int) -> KVRagEngine:
    """An evaluation model in float32 on so many threads; its KV is kept nowhere."""
    torch.set_num_threads(threads)
    return KVRagEngine.from_pretrained(model_path(name), dtype="float32")


class Clock:
    """Wall and processor seconds of a block."""

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = (time.perf_counter() - self._wall, time.process_time() - self._cpu)


@contextmanager
def collecting(how: str, layout: Layout) -> Iterator[None]:
    """Measure attention as kvrag does, or with one reading of the question (``once``), or as ProphetKV's signal.

    That is a ``sum`` over rows and heads; or, of each row, of its attention to ``chunks`` alone.
    """
    kept = attention.largest, torch.maximum, stages.REREAD

    is_chunk = torch.zeros(layout.num_tokens, dtype=torch.bool)
    is_chunk[rows_of([s for s in layout.segments if s.kind == "chunk"])] = True

    def summed(p: torch.Tensor, kv_heads: int, rows: int, skip: int) -> torch.Tensor:
        if how == "chunks":
            p = p * is_chunk[: p.shape[-1]]
            p = p / p.sum(dim=-1, keepdim=True).clamp(min=1e-12)
        return p.reshape(len(p), kv_heads, -1, rows, p.shape[-1])[:, :, :, skip:].sum(dim=(2, 3))

    if how != "peak":
        stages.REREAD = 0
    if how in ("sum", "chunks"):  # over blocks of rows, too
        attention.largest, torch.maximum = summed, torch.add
    try:
        yield
    finally:
        attention.largest, torch.maximum, stages.REREAD = kept


class Case:
    """One question, prefilled in full once."""

    def __init__(self, engine: KVRagEngine, question: Question) -> None:
        self.lm, self.encoder, self.question = (
            engine.loaded.reusable,
            engine.loaded.encoder,
            question,
        )
        mark = "\u2063CHUNKS\u2063"
        head, tail = self._rendered(f"{mark}\n\n{question.tail}").split(mark)
        self.prefix = self.encoder.live_ids(head, at_start=True)
        self.chunks = [list(self.encoder.chunk_ids(c)) for c in question.chunks]
        self.glue, self.tail = (
            self.encoder.live_ids(question.separator),
            self.encoder.live_ids(tail),
        )
        self.ids = self._joined(self.chunks)
        self.ends = end_ids(engine.loaded)
        self.scratch = self.lm.buffer(len(self.ids) + max(question.max_tokens + 1, REREAD))
        with Clock() as clock:
            first, _ = self.lm.forward(self.ids, Rows.span(0, len(self.ids)), self.scratch)
        self.full_s = clock.seconds
        self.own = self.greedy(self.scratch, first[0, -1])
        self.full = self.forced(self.scratch, first[0, -1])
        self._stitched: dict[Any, tuple[KVBuffer, Layout, Any, tuple[float, float]]] = {}
        self._encoded: dict[str, list[Any]] = {}
        self._masses: dict[Any, tuple[torch.Tensor, tuple[float, float]]] = {}
        self._deviation: dict[Any, tuple[torch.Tensor, tuple[float, float], KVBuffer]] = {}
        self.breaks = breaks_of(self.encoder.token_texts(self.ids.tolist()))

    def _joined(self, chunks: Sequence[list[int]]) -> torch.Tensor:
        """The prompt's ids with the chunks in this order."""
        ids = list(self.prefix)
        for index, chunk in enumerate(chunks):
            ids += (self.glue if index else []) + chunk
        return torch.tensor(ids + self.tail)

    def _rendered(self, text: str) -> str:
        if self.encoder.has_chat_template:
            return str(self.encoder.render([{"role": "user", "content": text}]))
        return f"{text}\nAnswer:"

    def text(self, ids: Sequence[int]) -> str:
        """An answer as text; of a model without a chat template, its first line."""
        kept = [i for i in ids if i not in self.ends]
        text = self.encoder.decode(kept).strip()
        return text if self.encoder.has_chat_template else text.partition("\n")[0]

    def forced(self, buffer: KVBuffer, first: torch.Tensor) -> torch.Tensor:
        """Logits of the own answer's tokens, ``(T, vocab)``."""
        answer = self.own[:KL_TOKENS]
        if len(answer) == 1:
            return first[None]
        start = len(self.ids)
        rest, _ = self.lm.forward(
            torch.tensor(answer[:-1]),
            Rows.span(start, start + len(answer) - 1),
            buffer,
            logits=len(answer) - 1,
        )
        return torch.cat([first[None], rest[0]])

    def greedy(
        self, buffer: KVBuffer, first: torch.Tensor, known: torch.Tensor | None = None
    ) -> list[int]:
        """The greedy answer; with ``known``, logits of the own answer's tokens, computed only from where it leaves that answer."""
        answer, most = [int(first.argmax())], self.question.max_tokens
        for row, token in zip(known[1:], self.own, strict=False) if known is not None else ():
            if answer[-1] != token:
                break
            answer.append(int(row.argmax()))
        while len(answer) < most and answer[-1] not in self.ends:
            at = len(self.ids) + len(answer) - 1
            step, _ = self.lm.forward(torch.tensor(answer[-1:]), Rows.span(at, at + 1), buffer)
            answer.append(int(step[0, -1].argmax()))
            if not self.encoder.has_chat_template and "\n" in self.encoder.decode(answer).strip(
                " "
            ):
                break
        return answer[:most]

    def stitched(self, method: Method) -> tuple[KVBuffer, Layout, Any, tuple[float, float]]:
        """The stitched prompt, its layout and rotations, and the seconds of stitching.

        Of chunks that a method has no KV of, the engine's choice are computed here.
        """
        encoded, kv_dtype = method.encoded, method.kv_dtype
        key = encoded, kv_dtype, method.stored, method.fills
        if key not in self._stitched:
            _, prefix_kv = self.behind("prefix")
            if encoded not in self._encoded:
                prefix = self.behind(encoded)[0]
                self._encoded[encoded] = [
                    encode_chunks(self.lm, prefix, [chunk])[0] for chunk in self.chunks
                ]
            kvs = [*self._encoded[encoded]]
            segments: list[Any] = (
                [(len(self.prefix), "prefix", True, 0, False)] if prefix_kv else []
            )
            if prefix_kv is not None:
                kvs.insert(0, prefix_kv)
            for index, chunk in enumerate(self.chunks):
                segments.append((len(self.glue) if index else 0, "live", False, -1, False))
                segments.append(
                    (
                        len(chunk),
                        "chunk",
                        index == 0 and encoded == "prefix",
                        index + (prefix_kv is not None),
                        False,
                    )
                )
            segments.append((len(self.tail), "live", False, -1, False))
            kvs = [pack(kv, kv_dtype) for kv in kvs]
            layout = place(segments)
            sources = [s.source for s in layout.stale]
            count = round((1 - method.stored) * len(sources))
            layout = layout.without(random.Random(len(self.ids)).sample(sources, count))
            rotary, buffer = self.lm.rotary(layout.num_tokens), self.lm.buffer(layout.num_tokens)
            with Clock() as clock:
                stitch(buffer, layout, kvs, rotary)
                whole = layout
                if method.fills and method.probes:
                    layout = filled(whole, RepairConfig(), 0)
                if layout is not whole:
                    fill(self.lm, buffer, layout, self.ids)
            self._stitched[key] = buffer, layout, rotary, clock.seconds
        return self._stitched[key]

    def behind(self, encoded: str) -> EncodedPrefix:
        """Prefix and context that chunks stand behind, computed once per process."""
        context = (
            ()
            if encoded in ("prefix", "alone")
            else context_ids(encoded, self.encoder, self.lm.reuse_window)
        )
        prefix = () if encoded == "alone" else tuple(self.prefix)
        if (prefix, context) not in _behind:
            _behind[prefix, context] = encode_prefix(self.lm, prefix, context)
        return _behind[prefix, context]

    def copy(self, source: KVBuffer) -> KVBuffer:
        """Copy a stitched prompt into the scratch buffer."""
        for layer in range(self.lm.num_layers):
            self.scratch.keys(layer)[:, :, : source.capacity] = source.keys(layer)
            self.scratch.values(layer)[:, :, : source.capacity] = source.values(layer)
        return self.scratch

    def measure(self, method: Method, budget: str) -> dict[str, Any]:
        """Answer by a method, and compare."""
        with self.repaired(method, budget) as (buffer, first, share, times):
            return self.compared(buffer, first, share, times)

    def seconds(self, method: Method, budget: str) -> float:
        """Processor seconds of stitching, choosing and repairing."""
        with self.repaired(method, budget) as (_, _, _, times):
            return sum(cpu for _, cpu in times)

    @contextmanager
    def repaired(
        self, method: Method, budget: str
    ) -> Iterator[tuple[KVBuffer, torch.Tensor, float, list[tuple[float, float]]]]:
        """Repair by a method, and let the model attend as it says.

        Yields the prompt's buffer, the logits of its first token, the share of repaired rows, and the times.
        """
        stored = method.encoded, method.kv_dtype, method.stored
        stitched, layout, rotary, spent = self.stitched(method)
        times = [spent]
        mass, probe_s = self.mass(method, stitched, layout)
        change, source = None, stitched
        if method.choose is by_deviation:
            change, seconds, source = self.deviation(stored, stitched, layout)
            times.append(seconds)
        if method.probes:
            times.append(probe_s)
        buffer = self.copy(source)
        if method.ape == "code":
            moved = side_by_side(layout, len(self.prefix))
            for layer in range(self.lm.num_layers):
                ahead = rotary[layer].rotation.at(-moved)
                keys = buffer.keys(layer)[0, :, : layout.num_tokens]
                keys.copy_(ahead.unit_unrotate(keys, slice(0, layout.num_tokens)))
        with ExitStack() as stack:
            if method.ape:
                stack.enter_context(ape_attention(layout, method.ape))
            if method.sees < 1:
                stack.enter_context(sparse_attention(layout, mass, method.sees))
            with Clock() as clock:
                first, share = self.repair(method, budget, buffer, layout, rotary, mass, change)
            times.append(clock.seconds)
            yield buffer, first, share, times

    def mass(
        self, method: Method, stitched: KVBuffer, layout: Layout
    ) -> tuple[torch.Tensor, tuple[float, float]]:
        """Attention of the question as the method measures it, and the seconds that takes."""
        key = (
            method.encoded,
            method.kv_dtype,
            method.stored,
            method.fills,
            method.layers,
            method.mass,
        )
        if key not in self._masses:
            buffer = self.copy(stitched)
            with collecting(method.mass, layout), Clock() as clock:
                mass = probe(self.lm, buffer, layout, self.ids, span=method.layers)
            self._masses[key] = mass, clock.seconds
        return self._masses[key]

    def deviation(
        self, stored: Any, stitched: KVBuffer, layout: Layout
    ) -> tuple[torch.Tensor, tuple[float, float], KVBuffer]:
        """CacheBlend's signal, the seconds it takes, and the prompt with layer 1 as computed for it."""
        if stored not in self._deviation:
            compared = self.lm.buffer(layout.num_tokens)
            for layer in range(self.lm.num_layers):
                compared.keys(layer).copy_(stitched.keys(layer))
                compared.values(layer).copy_(stitched.values(layer))
            with Clock() as clock:
                found = deviation(self.lm, compared, layout, self.ids)
            self._deviation[stored] = found, clock.seconds, compared
        return self._deviation[stored]

    def repair(
        self,
        method: Method,
        budget: str,
        buffer: KVBuffer,
        layout: Layout,
        rotary: Any,
        mass: torch.Tensor,
        change: torch.Tensor | None,
    ) -> tuple[torch.Tensor, float]:
        """Choose rows and repair them: logits of the first token, and the share of rows."""
        total = len(rows_of(layout.stale))
        covariance = RowCovariance.of(buffer, layout, mass) if method.covaries else None
        wanted = (
            effective_ratio(layout, RepairConfig(), total)
            if budget == "auto"
            else float(budget or 0)
        )
        num_rows = min(round(wanted if wanted > 1 else wanted * total), total)
        most = min(Gradual.first(num_rows), total) if method.filters else num_rows
        rows = method.choose(Seen(layout, most, mass, change, covariance, self.breaks))
        if method.filters:
            return self.filtered(buffer, layout, rows, num_rows), num_rows / max(1, total)
        first = repair(
            self.lm,
            buffer,
            layout,
            self.ids,
            rows,
            shift=method.shift,
            rotary=rotary,
            covariance=covariance,
        )
        return first, len(rows) / max(1, total)

    def filtered(
        self, buffer: KVBuffer, layout: Layout, chosen: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """Repair ever fewer of the chosen rows, as CacheBlend's paper has it."""
        rows = torch.sort(torch.cat([chosen, rows_of(layout.live)])).values
        hook = Gradual(rows, chosen, self.lm.num_layers, budget)
        found, _ = self.lm.forward(self.ids[rows], Rows.at(rows), buffer, before_write=hook)
        return found[0, -1]

    def compared(
        self,
        buffer: KVBuffer,
        first: torch.Tensor,
        share: float,
        times: list[tuple[float, float]],
    ) -> dict[str, Any]:
        """Answer from a prefilled prompt, and compare with the full prefill's answer."""
        known = self.forced(buffer, first).float()
        answer = self.greedy(buffer, first, known)
        text = self.text(answer)
        return {
            "answer": text,
            "score": score(self.question, text, self.text(self.own)),
            "same": answer == self.own,
            "kl": round(float(kl_divergence(self.full, known).mean()), 5),
            "kl_first": round(float(kl_divergence(self.full[0], known[0])), 5),
            "rows": round(share, 4),
            "ttft_s": [round(sum(t[i] for t in times), 4) for i in (0, 1)],
        }

    def reordered(self) -> dict[str, Any]:
        """Answer by a full prefill of the same chunks, the second half of them before the first.

        How much an answer depends on the order of chunks is the measure for what reuse changes.
        """
        middle = len(self.chunks) // 2
        ids = self._joined(self.chunks[middle:] + self.chunks[:middle])
        with Clock() as clock:
            first, _ = self.lm.forward(ids, Rows.span(0, len(ids)), self.scratch)
        return self.compared(self.scratch, first[0, -1], 1.0, [clock.seconds])

    def rounded(self, lm: Any) -> dict[str, Any]:
        """Answer by a full prefill of the same prompt, by a copy of the model of another dtype: how much is rounding."""
        kept, self.lm = self.lm, lm
        try:
            buffer = lm.buffer(self.scratch.capacity)
            with Clock() as clock:
                first, _ = lm.forward(self.ids, Rows.span(0, len(self.ids)), buffer)
            return self.compared(buffer, first[0, -1], 1.0, [clock.seconds])
        finally:
            self.lm = kept

    def reference(self) -> dict[str, Any]:
        """The full prefill's answer, and the score of an answer without any chunk."""
        text = self.text(self.own)
        ids = torch.tensor(self.prefix + self.tail)
        buffer = self.lm.buffer(len(ids) + self.question.max_tokens + 1)
        kept, self.ids = self.ids, ids
        first, _ = self.lm.forward(ids, Rows.span(0, len(ids)), buffer)
        blind = self.text(self.greedy(buffer, first[0, -1]))
        self.ids = kept
        return {
            "answer": text,
            "golds": list(self.question.golds),
            "tokens": len(self.ids),
            "score": score(self.question, text, text),
            "blind": score(self.question, blind, text),
            "ttft_s": [round(s, 4) for s in self.full_s],
            "multi": self.question.is_multi_hop,
        }


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words."""
    a, b = normalised(text), normalised(reference)
    row = [0] * (len(b) + 1)
    for word in a:
        last = 0
        for j, other in enumerate(b, 1):
            last, row[j] = row[j], last + 1 if word == other else max(row[j], row[j - 1])
    return 2 * row[-1] / max(1, len(a) + len(b))


def score(question: Question, text: str, reference: str) -> float:
    """Score of an answer in [0, 1]."""
    if question.metric == "rouge":
        return round(rouge_l(text, reference), 4)
    if question.metric == "line":
        first = text.strip().strip("`").removeprefix("python").strip().partition("\n")[0].strip()
        return float(first == question.golds[0])
    if question.metric in ("exact", "choice", "number"):
        return float(forms.is_right(question.metric, text, question.golds, question.options))
    if question.metric == "f1":
        return round(questions_score(text, question.golds), 4)
    found = [questions_score(text, [gold]) == 1 for gold in question.golds]
    return sum(found) / len(found) if question.needs_all else float(any(found))


def question_of(engine: KVRagEngine, task: str, shapes: Sequence[int], number: int) -> Question:
    """A question of a task."""
    encoder = engine.loaded.encoder
    if task.startswith("forms/"):
        return forms.of_task(task, number, lambda text: len(encoder.chunk_ids(text)))
    return next(islice(questions(engine, task, shapes), number, None))


def questions(engine: KVRagEngine, task: str, shapes: Sequence[int]) -> Iterator[Question]:
    """The questions of a task but those of forms."""
    tokenizer = engine.loaded.encoder

    def cut(text: str, tokens: int) -> str:
        ids = list(tokenizer.chunk_ids(text))
        return tokenizer.decode(ids[:tokens]).rpartition(" ")[0] if len(ids) > tokens else text

    if task == "needles":
        yield from tasks.needle_questions(cut, tuple(tasks.SHAPES[i] for i in shapes))
    elif task in ("hotpotqa", "musique"):
        yield from tasks.corpus(task)
    else:
        made = {
            "examples": tasks.examples,
            "code": partial(tasks.code, cut),
            "summary": tasks.summaries,
        }
        yield from made[task]()


def free_bytes() -> int:
    """Memory that the system can give, in bytes; where it doesn't say, none."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def halved(engine: KVRagEngine, name: str) -> Any:
    """A copy of the model in bfloat16, or ``None`` where memory lacks, which is said."""
    if name not in _halved:
        weights = sum(
            x.numel() * x.element_size() for x in engine.loaded.reusable.model.parameters()
        )
        needed = weights  # half for the copy, half for what loading it takes
        _halved[name] = None
        if free_bytes() < needed:
            print(
                f"bf16 is left out: a second copy of {name} needs {needed / 2**30:.1f} GiB, {free_bytes() / 2**30:.1f} are free",
                file=sys.stderr,
                flush=True,
            )
        else:
            path = model_path(name)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
            _halved[name] = CausalLM(model.eval())
    return _halved[name]


BUDGETED = {name for name, method in METHODS.items() if method.takes_budget}
_halved: dict[str, Any] = {}
_engine: KVRagEngine | None = None
_behind: dict[tuple[tuple[int, ...], tuple[int, ...]], EncodedPrefix] = {}


def work(item: tuple[str, int, list[str], str, int, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Measure the methods on a question, in a process of its own engine."""
    global _engine
    task, number, methods, model, threads, shapes = item
    _engine = _engine or engine_of(model, threads)
    question = question_of(_engine, task, shapes, number)
    out = []
    with torch.inference_mode():
        case = Case(_engine, question)
        about = {"task": task, "kind": question.task, "number": number, "shapes": shapes}
        if question.form:
            about |= {"form": question.form, "ask": question.task, "set": task.split("/")[1]}
            about |= {"tokens": len(case.ids), "chunks": len(case.chunks)}
        about["machine"] = here()
        out.append({**about, "method": "full", **case.reference()})
        for name in methods:
            kind, _, budget = name.partition("@")
            if kind == "reordered":
                found = case.reordered()
            elif kind == "bf16":
                lm = halved(_engine, model)
                if lm is None:
                    continue
                found = case.rounded(lm)
            else:
                found = case.measure(METHODS[kind], budget)
            out.append({**about, "method": name, **found})
    return out


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def paired(
    records: Iterable[dict[str, Any]], kinds: Sequence[str]
) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Return each method's answers, each with the full prefill's to the same question."""
    records = [r for r in records if not kinds or r["kind"] in kinds]
    full = {key(r): r for r in records if r["method"] == "full"}
    found = defaultdict(list)
    for r in records:
        if r["method"] != "full" and key(r) in full:
            found[r["method"]].append((full[key(r)], r))
    return found


def figures(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """What a method comes to: means over questions, with 95% intervals of what is lost (Wilson) and of the KL (bootstrap)."""
    count = len(pairs)
    full, reuse, blind = (
        sum(x) / count
        for x in zip(*[(f["score"], r["score"], f["blind"]) for f, r in pairs], strict=True)
    )
    lost = [float(not is_right(r)) for f, r in pairs if is_right(f)]
    sooner = [sorted(f["ttft_s"][i] / r["ttft_s"][i] for f, r in pairs)[count // 2] for i in (0, 1)]
    return {
        "questions": count,
        "full": full,
        "score": reuse,
        "retention": reuse / full if full else None,
        "retention_ci": _retention_interval(pairs) if full else None,
        "right": len(lost),
        "lost": sum(lost) / len(lost) if lost else None,
        "lost_ci": wilson(round(sum(lost)), len(lost)) if lost else None,
        "won": sum(is_right(r) for f, r in pairs if not is_right(f)),
        "pgr": (reuse - blind) / (full - blind) if full > blind else None,
        **{
            name: sum(r[name] for _, r in pairs) / count
            for name in ("kl", "kl_first", "same", "rows")
        },
        "kl_ci": bootstrap([r["kl"] for _, r in pairs]),
        "sooner": sooner[0],
        "sooner_cpu": sooner[1],
    }


def _retention_interval(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], repeats: int = 2000
) -> list[float]:
    """95% bootstrap interval of the reuse's score as a share of the full prefill's.

    A resample in which full prefill has nothing right has no share.
    """
    scores = torch.tensor([(f["score"], r["score"]) for f, r in pairs], dtype=torch.float64)
    picks = torch.randint(
        len(pairs), (repeats, len(pairs)), generator=torch.Generator().manual_seed(0)
    )
    full, reuse = scores[picks].sum(dim=1).unbind(dim=1)
    ratios = (reuse / full)[full > 0].sort().values
    return [float(ratios[int(share * len(ratios))]) for share in (0.025, 0.975)]


COLUMNS = (
    "questions",
    "full",
    "score",
    "retention",
    "right",
    "lost",
    "won",
    "pgr",
    "kl",
    "kl_first",
    "same",
    "rows",
    "sooner",
    "sooner_cpu",
)


def compared(
    records: Iterable[dict[str, Any]], kinds: Sequence[str], methods: Sequence[str], base: str
) -> dict[str, dict[str, Any]]:
    """Return the figures of methods over the questions that all of them answered, each beside another method.

    Without ``methods``: of all that are there.
    """
    found = paired(records, kinds)
    pairs = common({name: found[name] for name in methods or found if name in found})
    out = {}
    for name, of in pairs.items():
        out[name] = figures(of) if of else {"questions": 0}
        if of and base in pairs and name != base:
            out[name]["against"] = {"method": base, **against(of, pairs[base])}
    return out


def show(found: dict[str, dict[str, Any]], base: str) -> None:
    """Print a row per method, and how it differs from the other method."""
    print(f"{'method':16}", *(f"{name:>10}" for name in COLUMNS), f" KL and lost beyond {base}")
    for method, of in found.items():
        if not of["questions"]:
            print(f"{method:16} no question that all methods answered")
            continue
        beyond = ""
        if "against" in of:
            other = of["against"]
            low, high = other["kl_beyond_ci"]
            beyond = f" {other['kl_beyond']:+.4f} ({low:+.4f} to {high:+.4f}), "
            beyond += f"{other['lost_alone']}:{other['kept_alone']}, p {other['p']:.2g}"
        cells = (of[name] if of[name] is not None else float("nan") for name in COLUMNS)
        print(f"{method:16}", *(f"{cell:10.4g}" for cell in cells), beyond)


SIZES = {"hotpotqa": 60, "musique": 60, "examples": 40, "code": 32, "summary": 30}
METHODS_SHOWN = ["runs@0.03", "runs@0.25", "runs@auto"]
QUICK = ["--count", "6", "--methods", "none", "runs@0.03", "runs@auto"]


def arguments() -> Any:
    """Read the command line; tasks of forms are named as records name them."""
    options = parser(__doc__, count=60, start=0, processes=2, threads=1)
    options.add_argument("--model", default="qwen2.5-coder-0.5b")
    options.add_argument("--name", help="of the files of results (default: the model's)")
    options.add_argument("--tasks", nargs="+", choices=["needles", "forms", *SIZES])
    options.add_argument(
        "--methods",
        nargs="+",
        help="what to measure; the table has the questions that all of them answered",
    )
    options.add_argument(
        "--against", default="reordered", help="the method that the others are set beside"
    )
    options.add_argument(
        "--shapes",
        nargs="+",
        type=int,
        default=[0, 1],
        help="of needles: places in facts_tasks.SHAPES",
    )
    options.add_argument("--forms", nargs="+", choices=[*forms.FORMS], help="forms of facts")
    options.add_argument("--set", choices=forms.SETS, default="develop", help="of forms")
    options.add_argument(
        "--most-tokens", type=int, default=10**6, help="leave out longer questions of forms"
    )
    options.add_argument(
        "--sealed", action="store_true", help="run the sealed set, once for each state of the code"
    )
    options.add_argument(
        "--match-time",
        metavar="METHOD",
        help="give methods without a budget the one that takes as long as this method (processor time)",
    )
    options.add_argument("--kinds", nargs="*", default=[], help="kinds of questions in the table")
    options.add_argument(
        "--show", action="store_true", help="print the table of what is there, and measure nothing"
    )
    options.add_argument(
        "--quick", action="store_true", help="six questions, three methods: minutes"
    )
    args = options.parse_args()
    args = options.parse_args([*sys.argv[1:], *QUICK]) if args.quick else args
    args.methods = args.methods or (None if args.show else METHODS_SHOWN)
    args.set = "sealed" if args.sealed else args.set
    if args.set == "sealed" and not (args.sealed or args.show):
        options.error("the sealed set is run by --sealed, once, when all is decided")
    given = args.tasks or (["forms"] if args.forms or args.sealed else ["needles"])
    if args.sealed and given != ["forms"]:
        options.error("--sealed is about forms alone")
    named = [forms.task_of(form, args.set) for form in args.forms or forms.FORMS]
    args.tasks = [task for each in given for task in (named if each == "forms" else [each])]
    return args


def main() -> None:
    """Measure, keep a line per question and method, and write a summary."""
    args = arguments()
    name = f"sealed-{args.model}" if args.sealed else args.name or args.model
    path = args.out / "facts" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    code = code_state()
    methods = dict.fromkeys(args.tasks, args.methods)
    if args.match_time and args.methods:
        methods = matched(args, path)
    if not args.show:
        measure(args, path, code, methods)
    records = [r for r in read(path) if r.get("code", code) == code]
    tables = {
        task: compared(of, args.kinds, methods.get(of[0]["task"]) or [], args.against)
        for task, of in by_task(records).items()
    }
    for task, found in tables.items():
        if any(task.startswith(name) for name in args.tasks):
            print(task)
            show(found, args.against)
    if not args.show:
        before = args.out / "facts" / f"{name}.json"
        kept = json.loads(before.read_text()) if before.exists() else {"machine": None}
        if kept["machine"] == machine():  # tables of an earlier call, of methods of its own
            ours = {t for t in tables if any(t.startswith(task) for task in args.tasks)}
            tables |= {t: of for t, of in kept["tasks"].items() if t not in ours}
        result = {"machine": machine(), "model": args.model, "tasks": tables}
        write_result(f"facts/{name}", result, args.out)


def by_task(records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the records by task: each form and set, length of needles and machine for itself."""
    found = defaultdict(list)
    for r in records:
        length = (
            (" 1k", " 1k", " 1k", " 2.5k", " 2.5k", " 6k")[min(r["shapes"])]
            if r["task"] == "needles"
            else ""
        )
        found[f"{r['task']}{length}", r.get("machine", "another machine")].append(r)
    counts = Counter(task for task, _ in found)
    return {f"{t}, {where}" if counts[t] > 1 else t: of for (t, where), of in found.items()}


def here() -> str:
    """Name the machine: its GPU, or else its processor."""
    about = machine()
    return str(about["gpu"] or about["cpu"])


LADDER = 0.02, 0.05, 0.1, 0.2, 0.4
TIMED = 3


def budget_for(target: float, ladder: Sequence[tuple[float, float]]) -> float:
    """The budget that takes so many seconds, between the budgets and seconds of a ladder; at its ends, the end.

    Where a larger budget took less time than a smaller one, which is noise, it counts as taking as much.
    """
    shares, seconds = [share for share, _ in ladder], []
    for _, taken in ladder:
        seconds.append(max(taken, *seconds[-1:], 0.0))
    if target <= seconds[0]:
        return shares[0]
    for i in range(1, len(ladder)):
        if target <= seconds[i]:
            part = (target - seconds[i - 1]) / (seconds[i] - seconds[i - 1])
            return shares[i - 1] + part * (shares[i] - shares[i - 1])
    return shares[-1]


def clocked(item: tuple[str, int, list[str], str, int, tuple[int, ...]]) -> dict[str, float]:
    """Processor seconds of methods on a question, in a process of its own engine."""
    global _engine
    task, number, methods, model, threads, shapes = item
    _engine = _engine or engine_of(model, threads)
    with torch.inference_mode():
        case = Case(_engine, question_of(_engine, task, shapes, number))
        out = {}
        for name in methods:
            kind, _, budget = name.partition("@")
            method = METHODS[METHODS[kind].timed_as or kind]
            out[name] = case.seconds(method, budget)
        return out


def matched(args: Any, path: Path) -> dict[str, list[str]]:
    """Give methods without a budget the one that takes as long as ``--match-time``'s: task → methods.

    Of each task three prompts are timed, with the median budget. A file keeps them, so that a run that goes on has the same.
    """
    kept = path.with_suffix(".budgets.json")
    known = json.loads(kept.read_text()) if kept.exists() else {}
    open_ = [m for m in args.methods if m.partition("@")[0] in BUDGETED and "@" not in m]
    where, out = f"{args.match_time}, {here()}", {}
    for task in args.tasks:
        found = known.setdefault(where, {}).setdefault(task, {})
        missing = [m for m in open_ if m not in found]
        if missing:
            names = [args.match_time, *(f"{m}@{share}" for m in missing for share in LADDER)]
            shapes = shapes_of(args, task)
            numbers = [n for t, n in planned(args) if t == task][:TIMED]
            items = [(task, n, names, args.model, args.threads, shapes) for n in numbers]
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                times = list(pool.map(clocked, items))
            for m in missing:
                ladders = [[(share, t[f"{m}@{share}"]) for share in LADDER] for t in times]
                budgets = [
                    budget_for(t[args.match_time], ladder)
                    for t, ladder in zip(times, ladders, strict=True)
                ]
                found[m] = round(statistics.median(budgets), 3)
                if found[m] in (LADDER[0], LADDER[-1]):
                    print(f"{task}: {m} takes another time even at {found[m]:.0%} of the rows")
            kept.write_text(json.dumps(known, indent=1) + "\n")
        out[task] = [f"{m}@{found[m]}" if m in open_ else m for m in args.methods]
    return out


def code_state() -> str:
    """Name the code that asks and answers: trees of the package and of these files, and whether they have changes."""
    names = "facts", "facts_forms", "facts_methods", "facts_tasks", "facts_words"
    paths = ["kvrag", *(f"benchmarks/{name}.py" for name in names)]
    trees = [git("rev-parse", "--short=12", f"HEAD:{path}") for path in paths]
    return "-".join(trees) + ("+changes" if git("status", "--porcelain", "--", *paths) else "")


def planned(args: Any) -> list[tuple[str, int]]:
    """The task and number of every question."""
    return [
        (t, n)
        for t in args.tasks
        for n in range(args.start, min(args.start + args.count, SIZES.get(t, 10**6)))
        if not t.startswith("forms/") or forms.tokens_of(n) <= args.most_tokens
    ]


def shapes_of(args: Any, task: str) -> tuple[int, ...]:
    """Shapes of needles; the shape of a question in a form follows from its number."""
    return tuple(args.shapes) if not task.startswith("forms/") else ()


def measure(args: Any, path: Path, code: str, methods: dict[str, list[str]]) -> None:
    """Measure what the file lacks; of the sealed set, exit with a sentence where this code has answered all of it."""
    done = defaultdict(set)
    for r in read(path):
        if r.get("code", code) == code and r.get("machine") == here():
            done[key(r)].add(r["method"])
    todo = []
    for task, number in planned(args):
        shapes = shapes_of(args, task)
        names = [m for m in methods[task] if m not in done[task, number, *shapes]]
        if names:
            todo.append((task, number, names, args.model, args.threads, shapes))
    if args.sealed and code.endswith("+changes"):
        sys.exit("the sealed set is run on committed code: commit the changes first")
    if args.sealed and not todo:
        sys.exit(
            f"the sealed set is run once, and these methods at this state of the code ({code}) have answered it: see {path}"
        )
    about = {"code": code} if args.sealed else {}
    start = time.perf_counter()
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool, path.open("a") as file:
        for index, records in enumerate(pool.map(work, todo), 1):
            for r in records:
                if r["method"] not in done[key(r)]:
                    file.write(json.dumps(r | about) + "\n")
            file.flush()
            print(f"{index}/{len(todo)} {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
