"""Which rows to repair, and what choosing them costs. A strategy is a small frozen dataclass: signals in, rows out.

Strategies differ in nothing else: the same forward repairs the rows whoever chose them. To add one, write its class and name it in
:func:`strategy_of` (and in :data:`kvrag.config.STRATEGIES`, which checks names).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kvrag.blend.layout import Layout, Segment, num_rows_of, rows_of
from kvrag.config import RepairConfig

Signal = Literal["mass", "deviation"]
"""``mass``: attention that the question pays to each row; ``deviation``: squared change of each row's values at the check layer."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What a strategy may look at.

    Parameters
    ----------
    stale
        Reused chunks that are not exact, in order.
    candidates
        Their rows, int64 ``(C,)``, ascending, without the heads, which are repaired anyway.
    budget
        Rows to choose.
    ratio
        Recompute ratio that the budget was made from.
    measured
        The signals that the strategy needs, float32 ``(N,)`` on the host.
    seed
        For strategies that draw.
    """

    stale: tuple[Segment, ...]
    candidates: torch.Tensor
    budget: int
    ratio: float
    measured: Mapping[Signal, torch.Tensor]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Strategy:
    """Chooses rows to repair; this one none: position-corrected reuse as it is.

    Parameters
    ----------
    needs
        Signals that must be measured first; each costs a forward.
    """

    needs: frozenset[Signal] = frozenset()

    def num_rows(self, num_stale: int, num_heads: int, ratio: float) -> int:
        """Return how many rows are repaired, heads included; where it is all, :meth:`select` is not asked."""
        return 0

    def select(self, signals: Signals) -> torch.Tensor:
        """Return rows to repair besides the heads, int64, any order, without repetition."""
        return signals.candidates[:0]


@dataclass(frozen=True, slots=True)
class AllRows(Strategy):
    """Repair everything: a full prefill by way of the buffer."""

    def num_rows(self, num_stale: int, num_heads: int, ratio: float) -> int:
        """Return the number of all rows."""
        return num_stale


@dataclass(frozen=True, slots=True)
class Budgeted(Strategy):
    """Repair the heads, and other rows up to the recompute ratio."""

    def num_rows(self, num_stale: int, num_heads: int, ratio: float) -> int:
        """Return the ratio's share of all rows, at least the heads."""
        return max(num_heads, round(ratio * num_stale))


@dataclass(frozen=True, slots=True)
class RandomRows(Budgeted):
    """Repair rows drawn uniformly: the control that every other strategy must beat."""

    def select(self, signals: Signals) -> torch.Tensor:
        """Return ``budget`` rows drawn with the seed."""
        generator = torch.Generator().manual_seed(signals.seed)
        order = torch.randperm(len(signals.candidates), generator=generator)
        return signals.candidates[order[: signals.budget]]


@dataclass(frozen=True, slots=True)
class FirstRows(Budgeted):
    """Repair the head of each chunk (EPIC / LegoLink, arXiv 2410.15332)."""

    first_k: int = 0

    def select(self, signals: Signals) -> torch.Tensor:
        """Return the first ``max(first_k, ratio · T)`` rows of each chunk."""
        counts = [max(self.first_k, math.ceil(signals.ratio * s.num_rows)) for s in signals.stale]
        return rows_of(
            [Segment(s.start, min(s.stop, s.start + n), "chunk") for s, n in zip(signals.stale, counts, strict=True)]
        )


@dataclass(frozen=True, slots=True)
class SeamRows(Budgeted):
    """Repair the last rows before each seam (KVBoost's "selective"); ``first_k`` rows of the budget go to the head."""

    first_k: int = 0

    def select(self, signals: Signals) -> torch.Tensor:
        """Return the last ``ratio · T - first_k`` rows of each chunk."""
        counts = [max(0, math.ceil(signals.ratio * s.num_rows) - self.first_k) for s in signals.stale]
        return rows_of([Segment(s.stop - n, s.stop, "chunk") for s, n in zip(signals.stale, counts, strict=True)])


@dataclass(frozen=True, slots=True)
class TopRows(Budgeted):
    """Repair the rows with the highest product of the signals."""

    def select(self, signals: Signals) -> torch.Tensor:
        """Return the ``budget`` candidates with the highest score; ties go to the lower row."""
        score = torch.stack([signals.measured[need][signals.candidates] for need in sorted(self.needs)]).prod(dim=0)
        order = torch.argsort(score, descending=True, stable=True)
        return signals.candidates[order[: signals.budget]]


def strategy_of(config: RepairConfig) -> Strategy:
    """Return the strategy that a config names."""
    strategies: dict[str, Strategy] = {
        "none": Strategy(),
        "all": AllRows(),
        "random": RandomRows(),
        "first_k": FirstRows(first_k=config.first_k),
        "boundary": SeamRows(first_k=config.first_k),
        "hkvd": TopRows(frozenset({"deviation"})),  # CacheBlend, arXiv 2405.16444
        "query": TopRows(frozenset({"mass"})),  # the idea of ProphetKV, arXiv 2602.02579
        "query_hkvd": TopRows(frozenset({"mass", "deviation"})),
    }
    return strategies[config.strategy]


def needs_of(layout: Layout, config: RepairConfig) -> frozenset[Signal]:
    """Return the signals to measure before the rows to repair are known."""
    return strategy_of(config).needs if layout.stale else frozenset()


def select_rows(
    layout: Layout,
    config: RepairConfig,
    *,
    mass: torch.Tensor | None = None,
    deviation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows to repair in this prompt: the heads of stale chunks, and the strategy's choice up to the ratio.

    Parameters
    ----------
    layout
        The prompt.
    config
        Strategy, ratio and heads. A ratio of 1 selects every row, whatever the strategy.
    mass, deviation
        Signals that the strategy needs, float32 ``(N,)``, on the host.

    Returns
    -------
    torch.Tensor
        Int64, ascending.
    """
    count = _num_selected(layout, config)
    every = rows_of(layout.stale)
    if count == len(every):
        return every
    heads = rows_of(_heads(layout, config) if count else [])
    candidates = every[~torch.isin(every, heads)]
    given: dict[Signal, torch.Tensor | None] = {"mass": mass, "deviation": deviation}
    measured = {name: signal for name, signal in given.items() if signal is not None}
    ratio = effective_ratio(layout, config)
    budget = min(len(candidates), count - len(heads))
    signals = Signals(tuple(layout.stale), candidates, budget, ratio, measured, config.seed)
    rows: torch.Tensor = torch.unique(torch.cat([heads, strategy_of(config).select(signals)]))
    return rows


def estimated_rows(layout: Layout, config: RepairConfig, *, num_layers: int) -> int:
    """Estimate the rows that are computed, counting passes that measure signals by their share of the layers."""
    rows, needs = layout.num_live + _num_selected(layout, config), needs_of(layout, config)
    if "mass" in needs:
        rows += round(layout.num_live * config.probe_span[1])
    if "deviation" in needs:
        rows += layout.num_tokens * (config.check_layer + 1) // num_layers
    return rows


def _num_selected(layout: Layout, config: RepairConfig) -> int:
    heads, ratio = num_rows_of(_heads(layout, config)), effective_ratio(layout, config)
    return strategy_of(config).num_rows(num_rows_of(layout.stale), heads, ratio)


def _heads(layout: Layout, config: RepairConfig) -> list[Segment]:
    """Return the first rows of stale chunks, which every strategy repairs that repairs any."""
    return [Segment(s.start, min(s.stop, s.start + config.first_k), "chunk") for s in layout.stale]


def effective_ratio(layout: Layout, config: RepairConfig) -> float:
    """Return the recompute ratio for this prompt: larger where chunks were encoded behind another prefix."""
    if config.recompute_ratio > 0 and any(segment.is_mismatched for segment in layout.stale):
        return max(config.recompute_ratio, config.mismatch_ratio)
    return config.recompute_ratio
