"""Run the demo: index, warm up, then answer each question twice, with reuse and by full prefill, in turns."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.markup import escape

from demo.baseline import FullPrefill, full_prefill
from demo.pipeline import Answer, Pipeline, prompt_ids, whole_words
from demo.progress import Progress
from demo.questions import Question
from kvrag.cli.documents import split_documents
from kvrag.generate.defaults import end_ids
from kvrag.types import PrecomputeReport

MIN_TOKENS = 32
"""Shorter chunks aren't stored: a row that must be repaired anyway saves nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question, answered by kvrag and by a full prefill of the same token ids."""

    question: Question
    answer: Answer
    full: FullPrefill
    full_text: str

    @property
    def speedup(self) -> float:
        """Time to the first token of the full prefill divided by kvrag's."""
        return self.full.ttft_ms / self.answer.ttft_ms

    @property
    def is_same(self) -> bool:
        """Whether both answers are the same, word for word."""
        return self.answer.text == self.full_text


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the demo ran: the load before it, by other programs, on how many cores, and how many threads it computed with."""

    load: float
    cores: int
    threads: int

    def doubt(self, rows: Sequence[Row]) -> str | None:
        """Say that the times are rough, if other programs kept the machine busy; else ``None``."""
        busy = median(row.full.num_busy for row in rows)
        if self.load <= self.cores / 2 and busy >= 0.8 * self.threads:
            return None
        load = f"a load of {self.load:.1f} on {self.cores} cores before the run"
        return f"Times and ratios are rough: {load}, and full prefills got {busy:.1f} of {self.threads} threads."


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All that the demo found out.

    Parameters
    ----------
    rows
        One per question.
    num_chunks, num_tokens
        Of the corpus.
    indexed, again
        What precompute did, and after a first run what it does when it is run once more.
    bytes_per_token
        KV of one token.
    machine
        What it ran on.
    """

    rows: list[Row]
    num_chunks: int
    num_tokens: int
    indexed: PrecomputeReport
    again: PrecomputeReport | None
    bytes_per_token: int
    machine: Machine


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run: tokens of chunks and answers, and how often each prompt is timed; the best counts."""

    chunk_tokens: int
    max_new_tokens: int
    repeats: int


def run_demo(
    make_pipeline: Callable[[], Pipeline],
    documents: dict[str, str],
    questions: Sequence[Question],
    *,
    kv_dir: Path,
    sizes: Sizes,
    progress: Progress,
) -> DemoReport:
    """Run all of it, and report progress.

    Parameters
    ----------
    make_pipeline
        Builds the application; called once.
    documents, questions
        Path → text, and what to ask about them: at least one.
    kv_dir, sizes, progress
        The pipeline's store, how much of everything, and where to report progress.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    machine = Machine(load, os.cpu_count() or 1, torch.get_num_threads())
    # Reading a GGUF file draws a progress bar of its own, which nothing but this turns off.
    with progress.stage("loading the model"), redirect_stderr(StringIO()):
        pipeline = make_pipeline()
        engine = pipeline.engine
        loaded = pipeline.engine.loaded
    progress.say(f"{pipeline.name}: loaded {Path(engine.source.name).name} on {loaded.lm.device}")
    split = split_documents(
        documents, lambda text: len(loaded.encoder.chunk_ids(text)), chunk_tokens=sizes.chunk_tokens
    )
    chunks = [chunk for chunk in split if chunk.num_tokens >= MIN_TOKENS]
    ids = [chunk.id for chunk in chunks]
    tokens = sum(chunk.num_tokens for chunk in chunks)
    progress.say(
        f"{len(documents)} documents, {len(chunks)} chunks, {tokens} tokens; precomputing what has no KV yet"
    )
    with progress.stage(
        "indexing", lambda: f"{len({*ids} & {*engine.document_ids()})} of {len(ids)} chunks have KV"
    ):
        indexed = pipeline.index(chunks)
    how = f"{indexed.skipped} chunks found on disk, {indexed.stored} computed ({indexed.seconds:.1f} s)"
    progress.say(f"{how}, all indexed")
    rows = _answer_all(pipeline, questions, kv_dir, sizes, progress)
    again = (
        None if indexed.skipped else engine.precompute([chunk.text for chunk in chunks], ids=ids)
    )
    per_token = loaded.reusable.kv_bytes_per_token
    return DemoReport(rows, len(chunks), tokens, indexed, again, per_token, machine)


def _answer_all(
    pipeline: Pipeline,
    questions: Sequence[Question],
    kv_dir: Path,
    sizes: Sizes,
    progress: Progress,
) -> list[Row]:
    with progress.stage("warming up: one question both ways, not counted"):
        _ask_both(pipeline, questions[0], kv_dir, max_new_tokens=1)
    progress.say(
        f"asking {len(questions)} questions, by kvrag and by full prefill in turns, best of {sizes.repeats}"
    )
    rows = []
    for number, question in enumerate(questions, start=1):
        with progress.stage(f"question {number} of {len(questions)}: {escape(question.text)}"):
            row = _ask_both(pipeline, question, kv_dir, max_new_tokens=sizes.max_new_tokens)
            for _ in range(
                sizes.repeats - 1
            ):  # further runs are for the clock alone: the answers are greedy
                row = _faster(row, _ask_both(pipeline, question, kv_dir, max_new_tokens=1))
        rows.append(row)
        times = f"full {row.full.ttft_ms:.0f} ms, kvrag {row.answer.ttft_ms:.0f} ms"
        progress.say(f"{number}  first token: {times}  [dim]{escape(question.text)}[/dim]")
    return rows


def quiet() -> None:
    """Silence the libraries' own progress bars and warnings: the demo reports its progress itself."""
    import transformers

    library: Any = transformers.logging
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    library.set_verbosity_error()
    library.disable_progress_bar()
    for name in ("transformers", "sentence_transformers", "faiss"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)


def _ask_both(pipeline: Pipeline, question: Question, kv_dir: Path, *, max_new_tokens: int) -> Row:
    _forget_pages(kv_dir)
    answer = pipeline.ask(question.text, max_new_tokens=max_new_tokens)
    loaded = pipeline.engine.loaded
    ids = prompt_ids(pipeline.engine, answer.prompt)
    assert len(ids) == answer.prompt_tokens, "both runs must answer the same prompt"
    eos_ids = end_ids(loaded)
    full = full_prefill(loaded.lm.model, ids, max_new_tokens=max_new_tokens, eos_ids=eos_ids)
    return Row(
        question,
        answer,
        full,
        whole_words(loaded.encoder.decode(full.token_ids), is_cut=full.is_cut),
    )


def _faster(row: Row, other: Row) -> Row:
    """Keep a row's answers and the better of two times on either side."""
    answer = row.answer
    full = row.full
    if other.answer.ttft_ms < answer.ttft_ms:
        answer = replace(answer, ttft_ms=other.answer.ttft_ms, load_ms=other.answer.load_ms)
    best = min(full, other.full, key=lambda run: run.ttft_ms)
    return replace(
        row, answer=answer, full=replace(full, ttft_ms=best.ttft_ms, num_busy=best.num_busy)
    )


def _forget_pages(kv_dir: Path) -> None:
    """Drop the store's files from the page cache, so that loading means the disk and not memory."""
    for file in kv_dir.rglob("*.safetensors") if hasattr(os, "posix_fadvise") else ():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
