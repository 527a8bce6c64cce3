"""Decide how much of the possible reuse to use: what is exact, what pays. No tensors, no model."""

from __future__ import annotations

from collections.abc import Sequence

from kvrag.blend.layout import Layout, Segment, lay_out
from kvrag.blend.select import estimated_rows
from kvrag.config import RepairConfig
from kvrag.prompt.plan import Plan
from kvrag.types import Hole, Mode

OVERHEAD_TOKENS = 160
"""Fixed cost of a stitched request (load, stitch, small forwards), in tokens of full prefill; see docs/benchmarks.md."""

_NOT_STORED = frozenset({"no stored KV for this prompt", "no stored KV for the head of this prompt"})
"""Reasons that do not hold where KV is stored and could not be looked up or loaded."""


def because(cause: str | None, reason: str | None) -> str | None:
    """Join what went wrong in the store, if anything did, with why less is reused than was asked for."""
    return "; ".join(filter(None, (cause, None if cause and reason in _NOT_STORED else reason))) or None


def in_words(holes: Sequence[Hole]) -> str | None:
    """Say which chunks could not be loaded, and why; ``None`` if there are none."""
    if not holes:
        return None
    return f"{len(holes)} stored chunk(s) could not be loaded in time or intact, and were computed: {'; '.join(map(str, holes))}"


def decide_plan(plan: Plan, mode: Mode, config: RepairConfig, *, num_layers: int) -> tuple[Layout, str | None]:
    """Lay a planned prompt out, and decide: as :func:`decide`, with the reasons that the plan itself gives."""
    layout = lay_out(plan)
    refusal = plan.refusal
    if mode == "prefix" and plan.kv_dtype != "auto":
        refusal = refusal or f"mode 'prefix' reuses exact KV only, and this store's is rounded to {plan.kv_dtype}"
    if refusal is not None:
        return _nothing(layout), refusal
    layout, reason = decide(layout, mode, config, num_layers=num_layers)
    return layout, reason if mode == "full" else because(plan.fault, reason)


def decide(layout: Layout, mode: Mode, config: RepairConfig, *, num_layers: int) -> tuple[Layout, str | None]:
    """Choose how much of the possible reuse to use.

    Parameters
    ----------
    layout
        All reuse that is possible.
    mode
        ``stitch``: all of it. ``prefix``: leading exact segments. ``auto``: all of it if that costs less than a full prefill, else the
        leading exact segments. ``full``: none.
    config
        Decides the cost of repair.
    num_layers
        Layers of the model, for the cost of a truncated pass.

    Returns
    -------
    layout : Layout
        What to do.
    reason : str or None
        Why less is reused than the mode asks for.
    """
    if mode == "full":
        return _nothing(layout), None
    if not layout.reused:
        return _nothing(layout), "no stored KV for this prompt"
    head = layout.only_exact_head()
    if mode == "prefix":
        return (head, None) if head.reused else (_nothing(layout), "no stored KV for the head of this prompt")
    if mode == "stitch" or layout.is_exact:
        return layout, None
    cost = estimated_rows(layout, config, num_layers=num_layers) + OVERHEAD_TOKENS
    if cost < head.num_live:
        return layout, None
    return head, f"reuse would cost as much as {cost} tokens of {head.num_live} to prefill"


def _nothing(layout: Layout) -> Layout:
    return Layout((Segment(0, layout.num_tokens, "live"),))
