"""Describe a plan in words: spans, hits, and the reason of each miss."""

from __future__ import annotations

from kvrag.prompt.plan import Plan
from kvrag.types import ExplainedSpan, Explanation, Mode


def explain_plan(plan: Plan, mode: Mode, reason: str | None) -> Explanation:
    """Describe a plan without loading anything.

    ``mode`` is what it comes to: ``full`` (no reuse), ``prefix`` (all that is reused is exact) or ``stitch``; ``reason`` says why less is
    reused than was asked for.
    """
    spans = _spans(plan)
    notes = [reason] if reason else []
    has_asked = plan.fault is None and plan.refusal is None
    if has_asked and not any(span.kind == "chunk" for span in spans):
        notes.append(
            "no known chunk text stands in this prompt; if documents were precomputed, check that the prompt holds their text verbatim "
            "(not escaped by repr() or JSON) and that the namespace is the same"
        )
    if plan.has_mismatch:
        notes.append("pass prefix= what stands before the first chunk when precomputing, to make the first chunk exact")
    if plan.kv_dtype != "auto" and mode != "full":
        notes.append(f"stored KV is rounded to {plan.kv_dtype}: no answer that uses it is exact")
    return Explanation(spans=spans, prompt_tokens=len(plan.token_ids), mode=mode, notes=notes)


def _spans(plan: Plan) -> list[ExplainedSpan]:
    spans: list[ExplainedSpan] = []
    for piece in plan.pieces:
        start = spans[-1].stop if spans else 0
        spans.append(
            ExplainedSpan(
                kind="prefix" if not spans and piece.piece.kind == "live" else piece.piece.kind,
                start=start,
                stop=start + len(piece.ids),
                text=piece.piece.text,
                hit=piece.identity is not None,
                exact=piece.is_exact and plan.kv_dtype == "auto",
                reason=piece.reason,
            )
        )
    return spans
