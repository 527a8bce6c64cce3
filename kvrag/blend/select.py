"""Which rows to repair. No model.

A strategy is a function in :data:`SELECT` that maps :class:`Signals` to the rows to repair;
:data:`NEEDS` lists the signals that are measured for it. Strategies differ in nothing else: the
same forward repairs the rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kvrag.blend.covariance import POOL, RowCovariance
from kvrag.blend.layout import Layout, Segment, mask_of, rows_of, uploaded
from kvrag.config import RepairConfig

# The default budget for S stale rows: min(BASE_SHARE * S + BASE_ROWS, MOST_SHARE * S).
BASE_SHARE = 0.04
BASE_ROWS = 192
MOST_SHARE = 0.25

# Largest share of a budget that ``query_runs`` spends on runs.
RUNS_SHARE = 2 / 3

# Distance of a row from the row before it, by the break between them: none, between words, between
# sentences or lines, a blank line. Over a distance of 1, attention counts e times less.
DISTANCES = torch.tensor([0, 1 / 16, 1, 4], dtype=torch.float64)
# Distance between chunks.
APART = 50.0

_SENTENCE = re.compile(r"(?:[.!?…؟۔।॥][\"'”’)\]*_]*(?=\s)|\n|[。！？][”’」』）]*)\s*")
JOINTS = [*map(ord, "-_./:,'’@")]  # they join letters and digits to a word, a number or a code
# Ranges of codes, each from and to. Ideographs are words by themselves. Marks count as letters:
# accents, Hebrew and Arabic vowels, the scripts from Devanagari to Sinhala, and joiners.
IDEOGRAPHS = [0x2E80, 0xAC00, 0x20000, 0x40000]
MARKED = [0x300, 0x370, 0x591, 0x5C8, 0x64B, 0x671, 0x900, 0x964, 0x966, 0xE00, 0x200C, 0x200E]
LONGEST_WORD = 64  # tokens; a longer run of letters is no word, and would fill a budget

# ``mass``: attention of the question to every row. ``deviation``: squared change of every row's
# values at the check layer. ``covariance``: covariance of the rows' changes. ``breaks``: breaks of
# words, sentences, lines and paragraphs.
Signal = Literal["mass", "deviation", "covariance", "breaks"]


@dataclass(frozen=True, slots=True)
class Signals:
    """Input of a strategy.

    Parameters
    ----------
    stale
        Reused chunks that are not exact, in order.
    candidates
        Their rows, int64 ``(C,)``, ascending, without the heads (which are repaired anyway).
    budget, ratio
        Number of rows to choose, and the recompute ratio that it was computed from.
    measured
        The signals that the strategy needs. Mass and deviation are float32 ``(N,)`` on the host,
        breaks are those of :func:`breaks_of`, and the covariance is a
        :class:`~kvrag.blend.covariance.RowCovariance`.
    config
        Source of ``first_k`` and ``seed``.
    """

    stale: Sequence[Segment]
    candidates: Tensor
    budget: int
    ratio: float
    measured: Mapping[str, Any]
    config: RepairConfig


def _random(signals: Signals) -> Tensor:
    """Choose rows uniformly at random: the control that every other strategy must beat."""
    order = torch.randperm(
        len(signals.candidates), generator=torch.Generator().manual_seed(signals.config.seed)
    )
    return signals.candidates[order[: signals.budget]]


def _first_rows(signals: Signals) -> Tensor:
    """Choose the first ``ratio · T`` rows of every chunk; all strategies add the heads.

    As EPIC / LegoLink do (arXiv 2410.15332).
    """
    return rows_of([s.head(math.ceil(signals.ratio * s.num_rows)) for s in signals.stale])


def _seam_rows(signals: Signals) -> Tensor:
    """Choose the last ``ratio · T - first_k`` rows of every chunk (KVBoost's "selective").

    The heads take the rest of the budget.
    """
    skip = signals.config.first_k
    counts = [max(0, math.ceil(signals.ratio * s.num_rows) - skip) for s in signals.stale]
    return rows_of(
        [
            Segment(s.stop - count, s.stop, "chunk")
            for s, count in zip(signals.stale, counts, strict=True)
        ]
    )


def _top_rows(signals: Signals, by: Signal) -> Tensor:
    """Choose the rows with the strongest signal; ties go to the lower row."""
    order = signals.measured[by][signals.candidates].argsort(descending=True, stable=True)
    return signals.candidates[order[: signals.budget]]


def _informative_rows(signals: Signals) -> Tensor:
    """Choose the rows whose repair best predicts the changes of the rows that the question reads.

    See :meth:`~kvrag.blend.covariance.RowCovariance.most_informative`.
    """
    covariance: RowCovariance = signals.measured["covariance"]
    by_mass = _top_rows(replace(signals, budget=len(signals.candidates)), "mass")
    mass = signals.measured["mass"]
    count = min(signals.budget, POOL // 2)
    pool = by_mass[:POOL]
    # Floats travel as their bits, so that a single copy brings both.
    sides = torch.stack([pool.int(), mass[pool].view(torch.int32)])
    at, weights = uploaded(sides, covariance.rows.device)
    chosen = covariance.most_informative(at, weights.view(torch.float32), count).cpu()
    rest = by_mass[~mask_of(chosen, len(mass))[by_mass]]
    return torch.cat([chosen, rest[: signals.budget - count]])


def _runs(signals: Signals) -> Tensor:
    """Choose runs around the rows that the question attends to, the rest as ``query_gain``.

    A number or a name spans several tokens. If only some of them are repaired, the model misreads
    it more often than if no token is. (SnapKV pools its votes for the same reason, arXiv
    2404.14469.) And the question attends to the name of what it asks for more than to the value
    that stands beside it, in the same sentence, line or record. So a row counts as much as the most
    attended row, less by its distance; a run is cut nowhere inside a word.
    """
    mass = signals.measured["mass"]
    rows = signals.candidates
    far = DISTANCES[signals.measured["breaks"][rows]]
    chunk = torch.bucketize(rows, torch.tensor([s.start for s in signals.stale]), right=True)
    # The first row begins a chunk, too.
    far[chunk.diff(prepend=chunk[:1] - 1) > 0] = APART
    at = far.cumsum(0)
    attention = mass[rows].double().clamp(min=1e-30).log()
    # The largest attention minus distance over all rows takes two sweeps. In logarithms, because
    # over a distance of 1 attention counts e times less.
    from_left = (attention + at).cummax(0).values - at
    from_right = (attention - at).flip(0).cummax(0).values.flip(0) + at
    order = torch.maximum(from_left, from_right).argsort(descending=True, stable=True)
    is_taken = torch.zeros(len(rows), dtype=torch.bool)
    is_taken[order[: int(RUNS_SHARE * signals.budget)]] = True
    word = (far > 0).cumsum(0)
    sizes = torch.bincount(word)
    # A word of which only a part was taken is left to the rest of the budget.
    is_taken &= (torch.bincount(word[is_taken], minlength=len(sizes)) == sizes)[word]
    taken, others = rows[is_taken], rows[~is_taken]
    rest = _informative_rows(
        replace(signals, candidates=others, budget=signals.budget - len(taken))
    )
    return torch.cat([taken, rest])


def breaks_of(texts: Sequence[str]) -> Tensor:
    """Return the break before every token of a prompt, int64 ``(N,)``, from the tokens' texts.

    It is 0 inside a word, a number or a code, 1 between words, 2 where a sentence or a line begins,
    and 3 behind a blank line. A full stop ends a sentence only before white space, so ``3.14``
    stays whole; line breaks and ideographic stops always end a sentence.
    """
    # Padded, so that every token has two characters before its first and one behind it.
    text = f"  {''.join(texts)}  "
    sizes = np.array([*map(len, texts), 1])
    starts = 2 + sizes.cumsum() - sizes  # of tokens, and of what follows the last
    # UTF-32 has a code for every character, and for a lone surrogate, too.
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    is_letter = np.char.isalnum(codes.view("<U1"))
    is_letter &= np.searchsorted(IDEOGRAPHS, codes, "right") % 2 == 0
    is_letter |= np.searchsorted(MARKED, codes, "right") % 2 == 1
    is_joint = np.isin(codes, JOINTS)
    before, here = is_letter[starts - 1], is_letter[starts]
    is_inside = before & (here | is_joint[starts] & is_letter[starts + 1])
    is_inside |= is_letter[starts - 2] & is_joint[starts - 1] & here
    found = np.where(is_inside | (sizes == 0), 0, 1)  # a token without text shares a character
    at = np.arange(len(found))
    # Tokens since the last break: a run of letters that is too long is cut.
    place = at - np.maximum.accumulate(at * found)
    found[place % LONGEST_WORD == 0] = 1
    ends = [(end.end(), 2 + (end[0].count("\n") > 1)) for end in _SENTENCE.finditer(text, 2)]
    places, kinds = np.array(ends, dtype=np.int64).reshape(-1, 2).T
    found[starts.searchsorted(places, "right") - 1] = kinds
    found[0] = 3
    return torch.from_numpy(found[:-1])


# Strategies by name. They return rows besides the heads: int64, any order, no duplicates. ``none``
# and ``all`` need no function.
SELECT: dict[str, Callable[[Signals], Tensor]] = {
    "random": _random,
    "first_k": _first_rows,
    "boundary": _seam_rows,
    "hkvd": partial(_top_rows, by="deviation"),  # CacheBlend, arXiv 2405.16444
    "query": partial(_top_rows, by="mass"),  # the idea of ProphetKV, arXiv 2602.02579
    "query_gain": _informative_rows,
    "query_runs": _runs,
}

# Signals to measure before selection. Mass and deviation cost a forward each.
NEEDS: dict[str, frozenset[Signal]] = {
    "hkvd": frozenset({"deviation"}),
    "query": frozenset({"mass"}),
    "query_gain": frozenset({"mass", "covariance"}),
    "query_runs": frozenset({"mass", "covariance", "breaks"}),
}


def needs_of(layout: Layout, config: RepairConfig) -> frozenset[Signal]:
    """Return the signals to measure before selection; empty if the budget leaves no choice."""
    if _num_heads(layout, config) < num_selected(layout, config) < layout.num_stale:
        return NEEDS.get(config.strategy, frozenset())
    return frozenset()


def filled(layout: Layout, config: RepairConfig, floor: float) -> Layout:
    """Return the layout to probe and to repair.

    Both compute the live rows. If those before the question, of chunks without stored KV, are more
    than the rows to repair, they are computed once, before the probe. They must also be more than
    the ``floor``, the rows that take as long as a forward takes for itself.
    """
    before = layout.num_live - layout.segments[-1].num_rows
    # Most prompts end with the first comparison.
    if before > floor and "mass" in needs_of(layout, config):
        return layout.filled() if before > num_selected(layout, config) else layout
    return layout


def select_rows(layout: Layout, config: RepairConfig, **measured: Any) -> Tensor:
    """Return the rows to repair: the heads of stale chunks plus the strategy's choice.

    Parameters
    ----------
    layout
        The prompt.
    config
        Strategy, ratio and heads. A ratio of 1 selects every row with any strategy.
    **measured
        Signals that the strategy needs, by name; see :class:`Signals`.

    Returns
    -------
    torch.Tensor
        Int64, ascending.
    """
    count = num_selected(layout, config)
    every = rows_of(layout.stale)
    if count in (0, len(every)):
        return every[:count]
    heads = rows_of([chunk.head(config.first_k) for chunk in layout.stale])
    candidates = every[~mask_of(heads, layout.num_tokens)[every]]
    budget = min(len(candidates), count - len(heads))
    ratio = effective_ratio(layout, config, layout.num_stale)
    signals = Signals(layout.stale, candidates, budget, ratio, measured, config)
    chosen = SELECT[config.strategy](signals) if budget else candidates[:0]
    rows: Tensor = torch.unique(torch.cat([heads, chosen]))
    return rows


def num_selected(layout: Layout, config: RepairConfig) -> int:
    """Return the number of rows to repair: the ratio of the stale rows, but at least the heads."""
    if config.strategy == "all":
        return layout.num_stale
    if config.strategy == "none":
        return 0
    return max(
        _num_heads(layout, config),
        round(effective_ratio(layout, config, layout.num_stale) * layout.num_stale),
    )


def _num_heads(layout: Layout, config: RepairConfig) -> int:
    """Return the number of heads of stale chunks: every strategy but ``none`` repairs them."""
    return sum([min(s.num_rows, config.first_k) for s in layout.stale])


def effective_ratio(layout: Layout, config: RepairConfig, num_stale: int) -> float:
    """Return the recompute ratio: at least ``mismatch_ratio`` if a chunk has another prefix."""
    ratio = config.recompute_ratio
    if ratio is None:
        ratio = min(MOST_SHARE, BASE_SHARE + BASE_ROWS / max(1, num_stale))
    if ratio > 0 and any([segment.is_mismatched for segment in layout.stale]):
        return max(ratio, config.mismatch_ratio)
    return ratio
