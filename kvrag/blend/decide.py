"""Decide how much of the possible reuse to use: what is exact, what pays. No tensors, no model."""

from __future__ import annotations

from kvrag.blend.layout import Layout, place
from kvrag.blend.select import effective_ratio, strategy_of
from kvrag.config import RepairConfig
from kvrag.types import Mode

OVERHEAD_TOKENS = 160
"""Fixed cost of a stitched request (load, stitch, small forwards), in tokens of full prefill; see docs/benchmarks.md."""

NOT_STORED = frozenset({"no stored KV for this prompt", "no stored KV for the head of this prompt"})
"""Reasons that are untrue of what is stored and could not be loaded, or asked for."""


def because(cause: str | None, reason: str | None) -> str | None:
    """Say first what befell the store, if something did, and then why less is used than was asked for, where that is still true."""
    return "; ".join(filter(None, (cause, None if cause and reason in NOT_STORED else reason))) or None


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
        Why ``auto`` or ``stitch`` uses less than asked for.
    """
    nothing = place([(layout.num_tokens, "live", False, -1, False)])
    if mode == "full":
        return nothing, None
    if not layout.reused:
        return nothing, "no stored KV for this prompt"
    head = layout.only_exact_head()
    if mode == "prefix":
        return (head, None) if head.reused else (nothing, "no stored KV for the head of this prompt")
    if mode == "stitch" or layout.is_exact:
        return layout, None
    cost = estimated_rows(layout, config, num_layers=num_layers) + OVERHEAD_TOKENS
    if cost < head.num_live:
        return layout, None
    reason = f"reuse would cost as much as {cost} tokens of {head.num_live} to prefill"
    return (head, reason) if head.reused else (nothing, reason)


def estimated_rows(layout: Layout, config: RepairConfig, *, num_layers: int) -> int:
    """Estimate the rows that repair computes, counting rows of the probe, and of the pass to the check layer, by their share of layers."""
    num_stale = sum(s.num_rows for s in layout.stale)
    strategy = strategy_of(config)
    rows = layout.num_live
    if config.strategy == "all":
        rows += num_stale
    elif config.strategy != "none":
        heads = sum(min(config.first_k, s.num_rows) for s in layout.stale)
        rows += max(heads, round(effective_ratio(layout, config) * num_stale))
    if "mass" in strategy.needs:
        rows += round(layout.num_live * config.probe_span[1])
    if "deviation" in strategy.needs:
        rows += layout.num_tokens * (config.check_layer + 1) // num_layers
    return rows
