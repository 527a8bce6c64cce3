"""Measure how far reuse is from full prefill, on the user's own prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from kvrag.config import RepairConfig
from kvrag.errors import InputError
from kvrag.model.load import LoadedModel
from kvrag.prompt.template import Prompt
from kvrag.prompt.tokenizer import SeamCount, SegmentTokenizer, count_seams
from kvrag.types import ExplainedSpan, Explanation, GenerationResult, Mode, PrefillResult, VerifyReport, VerifyRow

logger = logging.getLogger(__name__)

MAX_MEAN_KL = 0.1
"""Most mean KL from the reference, in nats, that passes."""

MIN_TOP1 = 0.8
"""Least share of tokens at which both find the same one most likely, that passes."""


class Answers(Protocol):
    """The part of an engine that verification needs."""

    @property
    def loaded(self) -> LoadedModel:
        """The model and its tokenizer."""
        ...

    def prefill(
        self, prompt: Prompt, *, mode: Mode, repair: RepairConfig | None, namespace: str | None
    ) -> PrefillResult:
        """Prefill a prompt."""
        ...

    def generate(
        self, prompt: Prompt, *, mode: Mode, repair: RepairConfig | None, namespace: str | None, max_new_tokens: int
    ) -> GenerationResult:
        """Answer a prompt."""
        ...

    def explain(self, prompt: Prompt, *, namespace: str | None) -> Explanation:
        """Tell a prompt's spans."""
        ...


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference ‖ other) in nats between next-token distributions given as logits ``(..., vocab)``."""
    p, q = torch.log_softmax(reference.double(), -1), torch.log_softmax(other.double(), -1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)


def verify_prompts(
    engine: Answers,
    prompts: Sequence[Prompt],
    *,
    mode: Mode = "stitch",
    repair: RepairConfig | None = None,
    namespace: str | None = None,
    max_new_tokens: int = 16,
    max_mean_kl: float = MAX_MEAN_KL,
    min_top1: float = MIN_TOP1,
) -> VerifyReport:
    """Run each prompt with reuse and by full prefill of the same ids; where nothing is reused, it does not pass.

    Parameters
    ----------
    engine
        The engine.
    prompts
        At least one; their chunks should be precomputed, or there is nothing to verify.
    mode, repair, namespace
        Of the run with reuse.
    max_new_tokens
        Length of the greedy answers compared.
    max_mean_kl, min_top1
        Thresholds on the mean KL at the first token (nats) and on the agreement of the first token.
    """
    if isinstance(prompts, str) or not prompts:
        raise InputError("verify needs a list of at least one prompt")
    rows, seams = [], SeamCount()
    for prompt in prompts:
        reused = engine.prefill(prompt, mode=mode, repair=repair, namespace=namespace)
        full = engine.prefill(prompt, mode="full", repair=repair, namespace=namespace)
        answers = [
            engine.generate(prompt, mode=m, repair=repair, namespace=namespace, max_new_tokens=max_new_tokens).token_ids
            for m in (mode, "full")
        ]
        rows.append(
            VerifyRow(
                kl=float(kl_divergence(full.logits, reused.logits)),
                top1=bool(full.logits.argmax() == reused.logits.argmax()),
                greedy=answers[0] == answers[1],
                exactness=reused.exactness,
                kv_reuse_ratio=reused.kv_reuse_ratio,
            )
        )
        spans = engine.explain(prompt, namespace=namespace).spans
        seams += seams_of(spans, full.prompt_ids, engine.loaded.encoder)
    mean_kl = sum(row.kl for row in rows) / len(rows)
    top1 = sum(row.top1 for row in rows) / len(rows)
    greedy = sum(row.greedy for row in rows) / len(rows)
    is_reused = any(row.kv_reuse_ratio > 0 for row in rows)
    if not is_reused:
        logger.warning("nothing was reused in any prompt, so there was nothing to verify; see explain() for the reason")
    passed = is_reused and mean_kl <= max_mean_kl and top1 >= min_top1
    return VerifyReport(
        passed, mean_kl, top1, greedy, rows, seams.seams, seams.changed_seams, seams.tokens, seams.changed_tokens
    )


def seams_of(spans: Sequence[ExplainedSpan], token_ids: Sequence[int], tokenizer: SegmentTokenizer) -> SeamCount:
    """Count where a prompt's ids differ from those of its text, tokenised at once.

    Parameters
    ----------
    spans
        Of the prompt, with their texts.
    token_ids
        Of the prompt.
    tokenizer
        Tokenises the whole text.
    """
    whole = tokenizer.live_ids("".join(span.text for span in spans), at_start=True)
    return count_seams([token_ids[span.start : span.stop] for span in spans], whole)
