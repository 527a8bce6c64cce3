"""Which rows to repair. A strategy is a small frozen dataclass with one pure method: signals in, rows out.

Strategies differ in nothing else: the same forward repairs the rows whoever chose them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from kvrag.blend.layout import Layout, Segment, rows_of
from kvrag.config import RepairConfig

Signal = Literal["mass", "deviation"]


@dataclass(frozen=True, slots=True)
class Signals:
    """What a strategy may look at.

    Parameters
    ----------
    stale
        Reused chunks that are not exact, in order.
    candidates
        Their rows, int64 ``(C,)``, ascending, without the heads that are repaired anyway.
    budget
        Rows to choose.
    ratio
        Recompute ratio that the budget was made from.
    mass
        Attention that the question pays to each row of the prompt, float32 ``(N,)``; ``None`` unless the strategy needs it.
    deviation
        Squared change of each row's values at the check layer, float32 ``(N,)``; ``None`` unless the strategy needs it.
    seed
        For strategies that draw.
    """

    stale: tuple[Segment, ...]
    candidates: torch.Tensor
    budget: int
    ratio: float
    mass: torch.Tensor | None = None
    deviation: torch.Tensor | None = None
    seed: int = 0


class Strategy(Protocol):
    """Chooses rows to repair.

    Attributes
    ----------
    needs
        Signals that must be measured first; each costs a forward.
    """

    needs: ClassVar[frozenset[Signal]]

    def select(self, signals: Signals) -> torch.Tensor:
        """Return rows to repair, int64, any order, without repetition."""
        ...


@dataclass(frozen=True, slots=True)
class NoRows:
    """Repair nothing: position-corrected reuse as it is."""

    needs: ClassVar[frozenset[Signal]] = frozenset()

    def select(self, signals: Signals) -> torch.Tensor:
        """Return no rows."""
        return signals.candidates[:0]


@dataclass(frozen=True, slots=True)
class AllRows:
    """Repair everything: a full prefill by way of the buffer."""

    needs: ClassVar[frozenset[Signal]] = frozenset()

    def select(self, signals: Signals) -> torch.Tensor:
        """Return every row of every chunk that is not exact."""
        return rows_of(signals.stale)


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Repair rows drawn uniformly: the control that every other strategy must beat."""

    needs: ClassVar[frozenset[Signal]] = frozenset()

    def select(self, signals: Signals) -> torch.Tensor:
        """Return ``budget`` rows drawn with the seed."""
        generator = torch.Generator().manual_seed(signals.seed)
        order = torch.randperm(len(signals.candidates), generator=generator)
        return signals.candidates[order[: signals.budget]]


@dataclass(frozen=True, slots=True)
class FirstRows:
    """Repair the head of each chunk (EPIC / LegoLink, arXiv 2410.15332)."""

    first_k: int
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def select(self, signals: Signals) -> torch.Tensor:
        """Return the first ``max(first_k, ratio · T)`` rows of each chunk."""
        heads = [torch.arange(s.start, s.start + self._count(s, signals.ratio)) for s in signals.stale]
        return torch.cat(heads) if heads else signals.candidates[:0]

    def _count(self, segment: Segment, ratio: float) -> int:
        return min(segment.num_rows, max(self.first_k, math.ceil(ratio * segment.num_rows)))


@dataclass(frozen=True, slots=True)
class SeamRows:
    """Repair the last rows before each seam (KVBoost's "selective"); ``first_k`` rows of the budget go to the head."""

    first_k: int
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def select(self, signals: Signals) -> torch.Tensor:
        """Return the last ``ratio · T - first_k`` rows of each chunk."""
        counts = [max(0, math.ceil(signals.ratio * s.num_rows) - self.first_k) for s in signals.stale]
        tails = [torch.arange(s.stop - count, s.stop) for s, count in zip(signals.stale, counts, strict=True)]
        return torch.cat(tails) if tails else signals.candidates[:0]


@dataclass(frozen=True, slots=True)
class DeviatingRows:
    """Repair the rows of highest KV deviation (HKVD; CacheBlend, arXiv 2405.16444)."""

    needs: ClassVar[frozenset[Signal]] = frozenset({"deviation"})

    def select(self, signals: Signals) -> torch.Tensor:
        """Return the ``budget`` rows whose values changed most at the check layer."""
        assert signals.deviation is not None
        return top_rows(signals.deviation, signals)


@dataclass(frozen=True, slots=True)
class QueriedRows:
    """Repair the rows that the question attends to (the idea of ProphetKV, arXiv 2602.02579)."""

    needs: ClassVar[frozenset[Signal]] = frozenset({"mass"})

    def select(self, signals: Signals) -> torch.Tensor:
        """Return the ``budget`` rows with the most attention from the suffix."""
        assert signals.mass is not None
        return top_rows(signals.mass, signals)


@dataclass(frozen=True, slots=True)
class QueriedDeviatingRows:
    """Repair the rows where attention and deviation are both high: attention mass × deviation."""

    needs: ClassVar[frozenset[Signal]] = frozenset({"mass", "deviation"})

    def select(self, signals: Signals) -> torch.Tensor:
        """Return the ``budget`` rows with the highest product."""
        assert signals.mass is not None
        assert signals.deviation is not None
        return top_rows(signals.mass * signals.deviation, signals)


def top_rows(score: torch.Tensor, signals: Signals) -> torch.Tensor:
    """Return the ``budget`` candidates with the highest score; ties go to the lower row."""
    order = torch.argsort(score[signals.candidates], descending=True, stable=True)
    return signals.candidates[order[: signals.budget]]


def strategy_of(config: RepairConfig) -> Strategy:
    """Return the strategy that a config names."""
    strategies: dict[str, Strategy] = {
        "none": NoRows(),
        "all": AllRows(),
        "random": RandomRows(),
        "first_k": FirstRows(config.first_k),
        "boundary": SeamRows(config.first_k),
        "hkvd": DeviatingRows(),
        "query": QueriedRows(),
        "query_hkvd": QueriedDeviatingRows(),
    }
    return strategies[config.strategy]


def select_rows(
    layout: Layout,
    config: RepairConfig,
    *,
    mass: torch.Tensor | None = None,
    deviation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows to repair in this prompt, int64, ascending: the heads of stale chunks, and the strategy's choice up to the ratio.

    Parameters
    ----------
    layout
        The prompt.
    config
        Strategy, ratio and heads. A ratio of 1 selects every row, whatever the strategy.
    mass, deviation
        Signals that the strategy needs, on the host.
    """
    stale = tuple(layout.stale)
    if config.strategy == "none" or not stale:
        return torch.empty(0, dtype=torch.int64)
    ratio = effective_ratio(layout, config)
    if ratio == 1.0:
        return rows_of(stale)
    heads = rows_of([Segment(s.start, min(s.stop, s.start + config.first_k), "chunk") for s in stale])
    every = rows_of(stale)
    candidates = every[~torch.isin(every, heads)]
    budget = min(len(candidates), max(0, round(ratio * len(every)) - len(heads)))
    signals = Signals(stale, candidates, budget, ratio, mass, deviation, config.seed)
    rows: torch.Tensor = torch.unique(torch.cat([heads, strategy_of(config).select(signals)]))
    return rows


def effective_ratio(layout: Layout, config: RepairConfig) -> float:
    """Return the recompute ratio for this prompt: larger where chunks were encoded behind another prefix."""
    if any(segment.is_mismatched for segment in layout.stale) and config.recompute_ratio > 0:
        return max(config.recompute_ratio, config.mismatch_ratio)
    return config.recompute_ratio
