"""Say in words what a plan found: spans, hits, and the reason of each miss."""

from __future__ import annotations

from kvrag.blend.decide import because, decide
from kvrag.config import RepairConfig
from kvrag.prompt.plan import Plan, lay_out, why_inexact
from kvrag.types import ChunkKV, ExplainedSpan, Explanation, Mode


def explain_plan(plan: Plan, mode: Mode, config: RepairConfig, *, num_layers: int) -> Explanation:
    """Describe a plan without loading anything.

    Parameters
    ----------
    plan
        The prompt's pieces.
    mode
        The mode asked for; the explanation holds the one that it comes to.
    config, num_layers
        Decide whether reuse pays.
    """
    inexact = why_inexact(plan, mode)
    possible = lay_out(plan, dict.fromkeys(plan.identities, ChunkKV(())))[0]
    layout, reason = decide(possible, "full" if inexact else mode, config, num_layers=num_layers)
    reason = inexact or because(None if mode == "full" else plan.fault, reason)
    spans = _spans(plan)
    notes = [reason] if reason else []
    if plan.fault is None and not any(span.kind == "chunk" for span in spans):
        notes.append(
            "no known chunk text stands in this prompt; if documents were precomputed, check that the prompt holds their text verbatim "
            "(not escaped by repr() or JSON) and that the namespace is the same"
        )
    if plan.has_mismatch:
        notes.append("pass prefix= what stands before the first chunk when precomputing, to make the first chunk exact")
    is_rounded = plan.kv_dtype != "auto"
    if is_rounded and layout.reused:
        notes.append(f"stored KV is rounded to {plan.kv_dtype}: no answer that uses it is exact")
    outcome: Mode = "full" if not layout.reused else "stitch" if layout.stale or is_rounded else "prefix"
    return Explanation(spans=spans, prompt_tokens=layout.num_tokens, mode=outcome, notes=notes)


def explain_refusal(plan: Plan, reason: str) -> Explanation:
    """Describe the plan of a prompt for a model whose KV is not reused, and why it is not."""
    return Explanation(spans=_spans(plan), prompt_tokens=len(plan.token_ids), mode="full", notes=[reason])


def _spans(plan: Plan) -> list[ExplainedSpan]:
    spans: list[ExplainedSpan] = []
    start = 0
    for index, piece in enumerate(plan.pieces):
        stop = start + len(piece.ids)
        is_head = index == 0 and piece.piece.kind == "live"
        kind = "prefix" if is_head else piece.piece.kind
        spans.append(
            ExplainedSpan(
                kind=kind,
                start=start,
                stop=stop,
                text=piece.piece.text,
                hit=piece.identity is not None,
                exact=piece.is_exact and plan.kv_dtype == "auto",
                reason=piece.reason,
            )
        )
        start = stop
    return spans
