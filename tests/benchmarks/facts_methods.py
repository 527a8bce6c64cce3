"""Ways to reuse chunks that the facts benchmark compares: what chunks are encoded behind, and which rows are repaired.

The engine's own stages do the work; a method only chooses rows. Peers are as published: what their chunks stand behind, no shift.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvrag.blend.layout import Layout, rows_of
from kvrag.blend.likeness import Likeness


@dataclass
class Seen:
    """What a method may look at: ``mass``, ``deviation`` and ``norm`` are float32 ``(N,)``; ``texts`` are the prompt's tokens, decoded."""

    layout: Layout
    budget: int
    mass: torch.Tensor
    deviation: torch.Tensor | None
    likeness: Likeness
    norm: torch.Tensor
    texts: list[str]
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def stale(self) -> torch.Tensor:
        """Rows that may be repaired, int64."""
        return rows_of(self.layout.stale)


Choose = Callable[[Seen], torch.Tensor]


def top(scores: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """The rows with the highest scores."""
    order = torch.argsort(scores[rows], descending=True, stable=True)
    return rows[order[:count]]


def heads(seen: Seen, count: int = 1) -> torch.Tensor:
    """The first rows of each stale chunk."""
    return rows_of([s.head(count) for s in seen.layout.stale])


def filled(seen: Seen, first: torch.Tensor, budget: int, ranked: torch.Tensor) -> torch.Tensor:
    """``first``, and then of ``ranked`` what is not in it, up to the budget."""
    rest = ranked[~torch.isin(ranked, first)]
    return torch.unique(torch.cat([first, rest[: max(0, budget - len(first))]]))


def pooled(seen: Seen, mass: torch.Tensor, width: int = 9, how: str = "max") -> torch.Tensor:
    """Signal of each row's neighbourhood, within its chunk."""
    out, pool = torch.zeros_like(mass), torch.nn.functional.max_pool1d
    for s in seen.layout.stale:
        run = mass[s.start : s.stop][None, None]
        if how == "mean":
            count = torch.nn.functional.avg_pool1d(torch.ones_like(run), width, 1, width // 2)
            found = torch.nn.functional.avg_pool1d(run, width, 1, width // 2) / count
        else:
            found = pool(run, width, 1, width // 2)
        out[s.start : s.stop] = found[0, 0]
    return out


def none(seen: Seen) -> torch.Tensor:
    """Repair nothing."""
    return seen.stale[:0]


def by_mass(seen: Seen) -> torch.Tensor:
    """ProphetKV's idea: the rows that the question attends to."""
    return torch.unique(top(seen.mass, seen.stale, seen.budget))


def by_deviation(seen: Seen) -> torch.Tensor:
    """CacheBlend: rows whose values change most at layer 1."""
    assert seen.deviation is not None
    return torch.unique(top(seen.deviation, seen.stale, seen.budget))


def by_head(seen: Seen) -> torch.Tensor:
    """EPIC: the heads of chunks."""
    share = seen.budget / max(1, len(seen.stale))
    return rows_of([s.head(max(1, round(share * s.num_rows))) for s in seen.layout.stale])


def gain(seen: Seen, rows: torch.Tensor, budget: int) -> torch.Tensor:
    """Of these rows, those that tell most of the changes in what the question attends to, the best first, as ``query_gain`` has them."""
    by = top(seen.mass, rows, len(rows))
    pool = by[:512]
    chosen = seen.likeness.most_telling(pool, seen.mass[pool], min(budget, 256, len(pool)))
    return torch.cat([chosen, by[~torch.isin(by, chosen)]])[:budget]


def ours(seen: Seen) -> torch.Tensor:
    """Today's default choice: heads, and ``query_gain``."""
    first = heads(seen)
    rest = seen.stale[~torch.isin(seen.stale, first)]
    return torch.unique(torch.cat([first, gain(seen, rest, max(0, seen.budget - len(first)))]))


def runs(width: int = 9, how: str = "max", weigh: bool = False) -> Choose:
    """Rows by the attention paid to their neighbourhood."""

    def choose(seen: Seen) -> torch.Tensor:
        mass = seen.mass * seen.norm if weigh else seen.mass
        score = pooled(seen, mass, width, how) + 1e-6 * mass
        return filled(seen, heads(seen), seen.budget, top(score, seen.stale, len(seen.stale)))

    return choose


def mixed(share: float, width: int = 9, weigh: bool = False) -> Choose:
    """A share of the budget by neighbourhood, the rest by what tells most of others."""

    def choose(seen: Seen) -> torch.Tensor:
        mass = seen.mass * seen.norm if weigh else seen.mass
        score = pooled(seen, mass, width) + 1e-6 * mass
        first = filled(seen, heads(seen), round(share * seen.budget), top(score, seen.stale, len(seen.stale)))
        rest = seen.stale[~torch.isin(seen.stale, first)]
        return torch.unique(torch.cat([first, gain(seen, rest, seen.budget - len(first))]))

    return choose


def spans_of(seen: Seen, pattern: str = r"[.!?\n]\s*$") -> list[torch.Tensor]:
    """The stale chunks' sentences, as rows."""
    key = f"spans {pattern}"
    if key not in seen.cache:
        found = []
        for s in seen.layout.stale:
            start = s.start
            for row in range(s.start, s.stop):
                if row + 1 == s.stop or re.search(pattern, seen.texts[row]):
                    found.append(torch.arange(start, row + 1))
                    start = row + 1
        seen.cache[key] = found
    return list(seen.cache[key])


def sentences(power: float = 0.5, weigh: bool = False, most: int = 64) -> Choose:
    """Whole sentences, by the attention paid to them over a power of their length; the rest by neighbourhood."""

    def choose(seen: Seen) -> torch.Tensor:
        mass = seen.mass * seen.norm if weigh else seen.mass
        spans = sorted(spans_of(seen), key=lambda r: -float(mass[r].sum()) / len(r) ** power)
        taken, left = [heads(seen)], seen.budget - len(seen.layout.stale)
        for rows in spans:
            if len(rows) <= min(left, most):
                taken.append(rows)
                left -= len(rows)
        first = torch.unique(torch.cat(taken))
        score = pooled(seen, mass) + 1e-6 * mass
        return filled(seen, first, seen.budget, top(score, seen.stale, len(seen.stale)))

    return choose


@dataclass(frozen=True)
class Method:
    """How a prompt is reused."""

    choose: Choose
    encoded: str = "context"
    shift: float = 1.0
    layers: tuple[float, float] = (1 / 3, 0.8)


PEERS = {
    "none": Method(none),
    "prophetkv": Method(by_mass, "alone", 0.0, (0.0, 1.0)),
    "cacheblend": Method(by_deviation, "alone", 0.0),
    "epic": Method(by_head, "alone", 0.0),
}
IDEAS = {
    "gain": Method(ours),
    "runs9": Method(runs()),
    "runs9mean": Method(runs(how="mean")),
    "runs5": Method(runs(5)),
    "runs17": Method(runs(17)),
    "runs9norm": Method(runs(weigh=True)),
    "mix50": Method(mixed(0.5)),
    "mix75": Method(mixed(0.75)),
    "sent": Method(sentences()),
    "sentmean": Method(sentences(1.0)),
    "runs9noshift": Method(runs(), shift=0.0),
    "runs9half": Method(runs(), shift=0.5),
    "runs9all": Method(runs(), layers=(0.0, 1.0)),
}
BEHIND_PREFIX = {f"p.{name}": replace(method, encoded="prefix") for name, method in IDEAS.items()}
METHODS = PEERS | IDEAS | BEHIND_PREFIX
