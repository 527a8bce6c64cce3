"""How much of the stored KV to reuse, and why not more. No model.

The mode sets the most; a refusal, a failure of the store or the costs of ``auto`` may leave less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrag.blend.layout import Layout, lay_out
from kvrag.prompt.plan import Plan
from kvrag.types import Hole, Mode

_NOT_STORED = frozenset(
    {"no stored KV for this prompt", "no stored KV for the head of this prompt"}
)
"""Reasons that don't apply when the store failed: the KV may be stored, but could not be read."""

Choice = Callable[[Layout], tuple[Layout, str | None]]
"""Maps the layout with all possible reuse to ``(layout to use, reason if it reuses less)``."""


def because(cause: str | None, reason: str | None) -> str | None:
    """Join a store failure, if any, with the reason why less is reused than requested."""
    return (
        "; ".join(filter(None, (cause, None if cause and reason in _NOT_STORED else reason)))
        or None
    )


def in_words(holes: Sequence[Hole]) -> str | None:
    """Describe the chunks that could not be loaded; ``None`` if all were."""
    if not holes:
        return None
    return (
        f"{len(holes)} stored chunk(s) could not be loaded in time or intact, and were computed: "
        f"{'; '.join(map(str, holes))}"
    )


def decide_plan(
    plan: Plan, mode: Mode, cheapest: Choice | None, history: tuple[int, int] | None = None
) -> tuple[Layout, str | None]:
    """Lay out a plan and call :func:`decide`; add the plan's own reasons to the result.

    ``history`` is ``(rows, exact rows)``: how many first rows of the prompt an earlier request
    has computed, and how many of them equal a full prefill's.
    """
    layout = lay_out(plan)
    refusal = plan.refusal
    if history is not None:
        layout = layout.behind(*history)
    if mode == "prefix" and plan.kv_dtype != "auto":
        refusal = (
            refusal
            or f"mode 'prefix' reuses exact KV only, and this store's is rounded to {plan.kv_dtype}"
        )
    if refusal is not None:
        return layout.only_live(), refusal
    layout, reason = decide(layout, mode, cheapest)
    return layout, reason if mode == "full" else because(plan.fault, reason)


def decide(layout: Layout, mode: Mode, cheapest: Choice | None = None) -> tuple[Layout, str | None]:
    """Choose how much of the possible reuse to use.

    Parameters
    ----------
    layout
        The layout with all possible reuse.
    mode
        ``stitch``: everything. ``prefix``: leading exact segments. ``auto``: the cheapest layout.
        ``full``: nothing.
    cheapest
        Cost model of ``auto``; see :meth:`kvrag.blend.cost.Price.cheapest`.

    Returns
    -------
    layout : Layout
        The layout to use.
    reason : str or None
        The reason if it reuses less than the mode allows.
    """
    if mode == "full":
        return layout.only_live(), None
    if not layout.reused:
        if layout.history:
            return layout, None
        return layout.only_live(), "no stored KV for this prompt"
    if mode == "prefix":
        head = layout.only_exact_head()
        if head.reused or head.history:
            return head, None
        return head, "no stored KV for the head of this prompt"
    if cheapest is None or mode == "stitch":
        return layout, None
    return cheapest(layout)
