"""Answer questions about your documents by full prefill and with reuse, and compare the answers.

The comparison shows which facts survive and how much time reuse saves. The KV of the chunks is kept
in memory, apart from the engine's store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torch import Tensor

from kvrag.config import Repair
from kvrag.errors import InputError
from kvrag.evaluate.engine import Engine
from kvrag.evaluate.questions import IS_RIGHT, Question, planted, prompt_of, read_question, score
from kvrag.evaluate.verify import is_any_reused
from kvrag.metrics import kl_divergence
from kvrag.progress import Progress, check_show
from kvrag.types import Exactness, Mode


@dataclass(frozen=True, slots=True)
class Compared:
    """A question, answered by full prefill and with reuse.

    ``full_score`` and ``reuse_score`` are 1 where the answer contains a right answer, else its word
    F1. ``kl`` is KL(full ‖ reuse) in nats per token of the full prefill's answer; ``is_same``:
    whether both answers have the same tokens. Times are to the first token, including the load from
    memory.
    """

    question: str
    answers: tuple[str, ...]
    full: str
    reuse: str
    full_score: float
    reuse_score: float
    kl: float
    is_same: bool
    full_ttft_ms: float
    reuse_ttft_ms: float
    prompt_tokens: int
    repaired_tokens: int
    kv_reuse_ratio: float
    exactness: Exactness

    @property
    def is_lost(self) -> bool:
        """Whether full prefill answers right, and reuse wrong."""
        return self.full_score >= IS_RIGHT > self.reuse_score

    @property
    def is_won(self) -> bool:
        """Whether reuse answers right, and full prefill wrong."""
        return self.reuse_score >= IS_RIGHT > self.full_score


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of :func:`evaluate_reuse`.

    ``repair`` describes the repair used, and its origin. ``chunk_bytes`` is the size of the KV of
    ``num_chunks`` chunks, and ``chunk_seconds`` the time to compute it.
    """

    rows: list[Compared]
    repair: str
    num_chunks: int
    chunk_bytes: int
    chunk_seconds: float

    @property
    def full_score(self) -> float:
        """Mean score of full prefill."""
        return fmean(row.full_score for row in self.rows)

    @property
    def reuse_score(self) -> float:
        """Mean score of reuse."""
        return fmean(row.reuse_score for row in self.rows)

    @property
    def retention(self) -> float:
        """Score of reuse divided by the score of full prefill; NaN where the latter is 0."""
        if self.full_score:
            return self.reuse_score / self.full_score
        return math.nan

    @property
    def num_right(self) -> int:
        """Number of questions that full prefill answers right."""
        return sum(row.full_score >= IS_RIGHT for row in self.rows)

    @property
    def num_lost(self) -> int:
        """Number of questions that full prefill answers right and reuse answers wrong."""
        return sum(row.is_lost for row in self.rows)

    @property
    def lost(self) -> float:
        """Share of the questions right by full prefill that reuse answers wrong.

        NaN where full prefill answers no question right.
        """
        if self.num_right:
            return self.num_lost / self.num_right
        return math.nan

    @property
    def lost_interval(self) -> tuple[float, float]:
        """Wilson 95% interval of :attr:`lost`."""
        if self.num_right:
            return wilson(self.num_lost, self.num_right)
        return 0.0, 1.0

    @property
    def mean_kl(self) -> float:
        """Mean KL(full ‖ reuse) in nats per token of the full prefill's answers."""
        return fmean(row.kl for row in self.rows)

    @property
    def same(self) -> float:
        """Share of questions with the same tokens in both answers."""
        return fmean(row.is_same for row in self.rows)

    @property
    def speedup(self) -> float:
        """Median ratio of time to first token, full prefill ÷ reuse."""
        return median(row.full_ttft_ms / row.reuse_ttft_ms for row in self.rows)


def evaluate_reuse(
    engine: Engine,
    chunks: Sequence[str],
    questions: Sequence[Mapping[str, Any]] | None = None,
    *,
    count: int = 30,
    chunks_per_prompt: int = 6,
    repair: Repair = None,
    mode: Mode = "stitch",
    max_new_tokens: int = 32,
    seed: int = 0,
    show_progress: bool | None = None,
) -> Evaluation:
    """Answer questions about your chunks by full prefill and with reuse, and compare the answers.

    The two modes alternate question by question. Takes minutes. Warns if nothing was reused.

    Parameters
    ----------
    engine, chunks
        The engine, and chunk texts as your application splits them.
    questions
        Mappings with ``question`` and ``answers`` (or ``answer``), and optionally ``chunks``, the
        chunk texts of the prompt. Default of ``chunks``: the chunks that share most rare words with
        the question. ``None``: facts are planted in chunks, and the questions ask for them.
    count, chunks_per_prompt, seed
        Number of planted-fact questions, chunks per prompt (as many as your application retrieves),
        and the seed of the draw.
    repair, mode
        Options of the answers with reuse.
    max_new_tokens
        Maximum number of answer tokens.
    show_progress
        ``None``: for a long run, show a bar on a terminal and lines elsewhere; ``True``: show a
        bar; ``False``: show nothing.

    Raises
    ------
    InputError
        If there are too few chunks, or a question lacks a part; :class:`ContextLengthError` if a
        prompt exceeds the model's context window.
    UnsupportedModelError
        If this model's KV can't be reused.
    """
    check_show(show_progress)
    if questions is None:
        asked = planted(engine, chunks, count, chunks_per_prompt, seed)
    else:
        asked = [read_question(question, chunks, chunks_per_prompt) for question in questions]
    if not asked:
        raise InputError("there is nothing to ask; pass at least one question")
    with closing(engine.in_memory()) as own:
        report = own.precompute(
            list(dict.fromkeys(text for question in asked for text in question.chunks)),
            show_progress=show_progress,
        )
        found = answered(
            own, asked, max_new_tokens, what="comparing answers", show_progress=show_progress
        )
        # Lazily: full prefill and reuse alternate question by question.
        rows = [compare(own, reference, mode=mode, repair=repair) for reference in found]
        is_any_reused(rows)
        return Evaluation(
            rows,
            own.explain(prompt_of(own, asked[0]), mode=mode, repair=repair).repair,
            report.stored,
            report.stored_bytes,
            report.seconds,
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompt of a question, and its answer by full prefill.

    ``logits``, float32 ``(T, vocab)``, predict the answer's ``token_ids``.
    """

    question: Question
    prompt: Any
    token_ids: list[int]
    text: str
    logits: Tensor
    ttft_ms: float
    max_new_tokens: int

    @property
    def is_right(self) -> bool:
        """Whether full prefill answers right."""
        return score(self.text, self.question.answers) >= IS_RIGHT


def answered(
    engine: Engine,
    questions: Sequence[Question],
    max_new_tokens: int,
    *,
    what: str,
    show_progress: bool | None,
) -> Iterator[Reference]:
    """Answer questions by full prefill, lazily, as the caller iterates.

    ``what`` names the work in the progress display.
    """
    with Progress(what, len(questions), unit="prompts", show=show_progress) as progress:
        for question in questions:
            prompt = prompt_of(engine, question)
            found = engine.generate(prompt, mode="full", max_new_tokens=max_new_tokens)
            logits = engine.score(prompt, found.token_ids, mode="full").logits
            yield Reference(
                question, prompt, found.token_ids, found.text, logits, found.ttft_ms, max_new_tokens
            )
            progress.advance()


def compare(engine: Engine, reference: Reference, *, mode: Mode, repair: Repair) -> Compared:
    """Answer a question with reuse, and compare the answer with full prefill's."""
    prompt = reference.prompt
    found = engine.generate(
        prompt, max_new_tokens=reference.max_new_tokens, mode=mode, repair=repair
    )
    logits = engine.score(prompt, reference.token_ids, mode=mode, repair=repair).logits
    answers = reference.question.answers
    return Compared(
        reference.question.text,
        answers,
        reference.text.strip(),
        found.text.strip(),
        score(reference.text, answers),
        score(found.text, answers),
        float(kl_divergence(reference.logits, logits).mean()),
        found.token_ids == reference.token_ids,
        reference.ttft_ms,
        found.ttft_ms,
        found.prompt_tokens,
        found.repaired_tokens,
        found.kv_reuse_ratio,
        found.exactness,
    )


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Return the Wilson interval of the share ``hits / count``, at 95%."""
    z = 1.96
    share = hits / count
    spread = z * z / count
    middle = share + spread / 2
    width = z * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, (middle - width) / (1 + spread)), min(1.0, (middle + width) / (1 + spread))
