"""Compare reuse with full prefill on given prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvrag.config import Repair
from kvrag.errors import InputError
from kvrag.evaluate.engine import Engine
from kvrag.generate.pipeline import WITHOUT_HISTORIES
from kvrag.metrics import MAX_MEAN_KL, MIN_TOP1, kl_divergence
from kvrag.progress import Progress, check_show
from kvrag.prompt.template import Prompt
from kvrag.types import Mode, VerifyReport, VerifyRow

logger = logging.getLogger(__name__)


def verify_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    mode: Mode = "stitch",
    repair: Repair = None,
    namespace: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int = 16,
    max_mean_kl: float = MAX_MEAN_KL,
    min_top1: float = MIN_TOP1,
    show_progress: bool | None = None,
) -> VerifyReport:
    """Run prompts with reuse and by full prefill of the same ids, and compare the results.

    Without any reuse, the report does not pass.

    Parameters
    ----------
    engine, prompts
        The engine, and a non-empty list of prompts; their chunks should be precomputed.
    mode, repair, namespace, chat_template_kwargs
        Options of the run with reuse.
    max_new_tokens
        Maximum length of the greedy answers compared.
    max_mean_kl, min_top1
        Thresholds on the mean KL at the first token (nats) and on the agreement of the first token.
    show_progress
        ``None``: for a long run, show a bar on a terminal and lines elsewhere; ``True``: show a
        bar; ``False``: show nothing.

    Raises
    ------
    InputError
        If there is no prompt.
    """
    if isinstance(prompts, str) or not prompts:
        raise InputError("verify needs a list of at least one prompt")
    check_show(show_progress)
    engine.loaded  # noqa: B018 - loading shows its own progress
    options = {
        "repair": repair,
        "namespace": namespace,
        "chat_template_kwargs": chat_template_kwargs,
    }
    rows = []
    # An exact answer to the same prompt would hide the repair.
    hidden = WITHOUT_HISTORIES.set(True)
    try:
        with Progress("verifying", len(prompts), unit="prompts", show=show_progress) as progress:
            for prompt in prompts:
                rows.append(_compare(engine, prompt, max_new_tokens, mode, options))
                progress.advance()
        repaired = engine.explain(prompts[-1], mode=mode, **options).repair
    finally:
        WITHOUT_HISTORIES.reset(hidden)
    is_reused = is_any_reused(rows)
    mean_kl, top1, greedy = (
        fmean(getattr(row, name) for row in rows) for name in ("kl", "top1", "greedy")
    )
    return VerifyReport(
        passed=is_reused and mean_kl <= max_mean_kl and top1 >= min_top1,
        mean_kl=mean_kl,
        top1_agreement=top1,
        greedy_agreement=greedy,
        rows=rows,
        repair=repaired,
        passed_by=f"mean_kl of at most {max_mean_kl:g} nats and top1_agreement of at least "
        f"{min_top1:g}, at the first token; not the greedy answers",
    )


def is_any_reused(rows: Sequence[Any]) -> bool:
    """Whether any row of a comparison is of reused KV; warn if there is none."""
    if any(row.kv_reuse_ratio > 0 for row in rows):
        return True
    logger.warning(
        "no prompt reused any KV, so there was nothing to compare; see explain() for the reason"
    )
    return False


def _compare(
    engine: Engine, prompt: Prompt, max_new_tokens: int, mode: Mode, options: Mapping[str, Any]
) -> VerifyRow:
    reused, full = (engine.prefill(prompt, mode=m, **options) for m in (mode, "full"))
    answers = [
        engine.generate(prompt, mode=m, max_new_tokens=max_new_tokens, **options).token_ids
        for m in (mode, "full")
    ]
    return VerifyRow(
        kl=float(kl_divergence(full.logits, reused.logits)),
        top1=bool(full.logits.argmax() == reused.logits.argmax()),
        greedy=answers[0] == answers[1],
        exactness=reused.exactness,
        kv_reuse_ratio=reused.kv_reuse_ratio,
    )
