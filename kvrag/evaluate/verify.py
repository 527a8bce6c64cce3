"""Compare reuse with full prefill on given prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from difflib import SequenceMatcher
from itertools import accumulate
from typing import Any

from kvrag.config import Repair
from kvrag.errors import InputError
from kvrag.evaluate.engine import Engine
from kvrag.metrics import MAX_MEAN_KL, MIN_TOP1, kl_divergence
from kvrag.progress import Progress, check_show
from kvrag.prompt.template import Prompt
from kvrag.prompt.tokenizer import SegmentTokenizer
from kvrag.types import ExplainedSpan, Mode, VerifyReport, VerifyRow

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
    seams = SeamCount()
    kept = engine.history_bytes
    engine.history_bytes = 0  # an exact answer to the same prompt would hide the repair
    try:
        with Progress("verifying", len(prompts), unit="prompts", show=show_progress) as progress:
            for prompt in prompts:
                row, seam_count, repaired = _compare(engine, prompt, max_new_tokens, mode, options)
                rows.append(row)
                seams += seam_count
                progress.advance()
    finally:
        engine.history_bytes = kept
    is_reused = any(row.kv_reuse_ratio > 0 for row in rows)
    if not is_reused:
        logger.warning(
            "no prompt reused any KV, so there was nothing to verify; see explain() for the reason"
        )
    mean_kl, top1, greedy = (
        sum(float(getattr(row, name)) for row in rows) / len(rows)
        for name in ("kl", "top1", "greedy")
    )
    return VerifyReport(
        passed=is_reused and mean_kl <= max_mean_kl and top1 >= min_top1,
        mean_kl=mean_kl,
        top1_agreement=top1,
        greedy_agreement=greedy,
        rows=rows,
        seams=seams.seams,
        changed_seams=seams.changed_seams,
        prompt_tokens=seams.tokens,
        changed_tokens=seams.changed_tokens,
        repair=repaired,
        passed_by=f"mean_kl of at most {max_mean_kl:g} nats and top1_agreement of at least "
        f"{min_top1:g}, at the first token; not the greedy answers",
    )


def _compare(
    engine: Engine, prompt: Prompt, max_new_tokens: int, mode: Mode, options: Mapping[str, Any]
) -> tuple[VerifyRow, SeamCount, str]:
    reused, full = (engine.prefill(prompt, mode=m, **options) for m in (mode, "full"))
    answers = [
        engine.generate(prompt, mode=m, max_new_tokens=max_new_tokens, **options).token_ids
        for m in (mode, "full")
    ]
    row = VerifyRow(
        kl=float(kl_divergence(full.logits, reused.logits)),
        top1=bool(full.logits.argmax() == reused.logits.argmax()),
        greedy=answers[0] == answers[1],
        exactness=reused.exactness,
        kv_reuse_ratio=reused.kv_reuse_ratio,
    )
    explained = engine.explain(prompt, mode=mode, **options)
    return row, seams_of(explained.spans, full.prompt_ids, engine.loaded.encoder), explained.repair


def seams_of(
    spans: Sequence[ExplainedSpan], token_ids: Sequence[int], tokenizer: SegmentTokenizer
) -> SeamCount:
    """Count differences between a prompt's ids and the ids of its whole text tokenised at once."""
    whole = tokenizer.live_ids("".join(span.text for span in spans), at_start=True)
    return count_seams([token_ids[span.start : span.stop] for span in spans], whole)


@dataclass(frozen=True, slots=True)
class SeamCount:
    """Counts of differences between a prompt's segment-wise ids and the ids of its whole text.

    ``seams``: places where two segments meet; ``tokens``: segment-wise tokens; ``changed_tokens``:
    segment-wise tokens that the whole text's ids lack; ``changed_seams``: the seams next to them. A
    separator that becomes another token when alone counts both of its seams.
    """

    seams: int = 0
    changed_seams: int = 0
    tokens: int = 0
    changed_tokens: int = 0

    def __add__(self, other: SeamCount) -> SeamCount:
        return SeamCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def count_seams(segments: Sequence[Sequence[int]], whole: Sequence[int]) -> SeamCount:
    """Compare a prompt's segment-wise ids with the ids of its text tokenised at once.

    A difference that touches no seam, such as control-token text that stays text inside a chunk, is
    not counted.
    """
    segments = [ids for ids in segments if ids]
    ours = [i for ids in segments for i in ids]
    seams = list(accumulate(map(len, segments)))[:-1]
    changed: set[int] = set()
    changed_tokens = 0
    for kind, start, stop, *_ in SequenceMatcher(None, ours, whole, autojunk=False).get_opcodes():
        if kind != "equal":
            across = [s for s in seams if start < s < stop] or [
                s for s in seams if s in (start, stop)
            ]
            changed.update(across)
            changed_tokens += stop - start if across else 0
    return SeamCount(len(seams), len(changed), len(ours), changed_tokens)
