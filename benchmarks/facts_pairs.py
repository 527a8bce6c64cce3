"""Differences between two methods over the same questions: McNemar's exact test, and a paired bootstrap. No model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Any

import torch

from kvrag.evaluate.questions import IS_RIGHT

Record = dict[str, Any]
Pair = tuple[Record, Record]
"""A question's records: by full prefill, and by a method."""


def is_right(record: Record) -> bool:
    """Whether an answer counts as right."""
    return bool(record["score"] >= IS_RIGHT)


def key(record: Record) -> tuple[Any, ...]:
    """Name a question: task, number, and shapes of needles."""
    return record["task"], record["number"], *record["shapes"]


def common(found: Mapping[str, Sequence[Pair]]) -> dict[str, list[Pair]]:
    """Keep the questions that all methods answered, in one order."""
    by_question = {name: {key(f): (f, r) for f, r in pairs} for name, pairs in found.items()}
    asked = sorted(set[Any].intersection(*map(set, by_question.values()))) if found else []
    return {name: [pairs[q] for q in asked] for name, pairs in by_question.items()}


def mcnemar(one: int, other: int) -> float:
    """Two-sided exact p of McNemar's test: of the questions that a single method has right, as many are the one's as the other's."""
    total = one + other
    tail = sum(comb(total, k) for k in range(min(one, other) + 1))
    return min(1.0, 2 * tail / 2**total)


def difference(
    one: Iterable[float], other: Iterable[float], repeats: int = 4000
) -> tuple[float, float, float]:
    """Mean of the differences, question by question, with its 95% interval by resampling questions with a fixed seed."""
    pairs = torch.tensor(list(zip(one, other, strict=True)), dtype=torch.float64)
    beyond = pairs[:, 0] - pairs[:, 1]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(beyond), (repeats, len(beyond)), generator=generator)
    ends = beyond[picks].mean(dim=1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(beyond.mean()), *map(float, ends)


def against(pairs: Sequence[Pair], base: Sequence[Pair]) -> dict[str, Any]:
    """Set a method beside another; both answered these questions, in this order.

    ``lost_alone``: right by full prefill and by the other, wrong by this one; ``kept_alone``: the reverse. ``p`` is of these two,
    ``p_all`` of all questions, whatever full prefill says.
    """
    if [key(f) for f, _ in pairs] != [key(f) for f, _ in base]:
        raise ValueError("the methods answered other questions; keep the common ones")
    verdicts = [
        (is_right(f), is_right(r), is_right(b)) for (f, r), (_, b) in zip(pairs, base, strict=True)
    ]
    lost = sum(f and b and not r for f, r, b in verdicts)
    kept = sum(f and r and not b for f, r, b in verdicts)
    mean, *interval = difference([r["kl"] for _, r in pairs], [b["kl"] for _, b in base])
    return {
        "lost_alone": lost,
        "kept_alone": kept,
        "p": mcnemar(lost, kept),
        "p_all": mcnemar(
            sum(b and not r for _, r, b in verdicts), sum(r and not b for _, r, b in verdicts)
        ),
        "kl_beyond": mean,
        "kl_beyond_ci": interval,
    }
