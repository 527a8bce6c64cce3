"""Ways to reuse chunks that the facts benchmark compares: what chunks are encoded behind, and which rows are repaired.

The engine's own stages do the work; a method only chooses rows. Peers are as published: what their chunks stand behind, no shift.
Of each there are two forms, the rows at a budget of ours, and what the authors do:

* ``prophetkv`` (arXiv 2602.02579): stage one reads the question over the stale chunks in all layers; stage two fuses the layers to one
  set of rows and computes them and the question once. Its attention is a sum over rows and heads of the whole softmax; of
  ``prophetkv2`` the softmax is over the chunks' keys alone, as in a public port for vLLM. No code of the authors is public.
* ``cacheblend`` (arXiv 2405.16444): rows whose values change most at layer 1, the same in all layers, as the authors' code has it.
  ``cacheblendpaper`` filters gradually, as the paper has it: each layer drops rows whose values change least.
* ``epic`` (arXiv 2410.15332): heads of chunks, at a budget; ``epic16`` and ``epic32``: so many rows of each, as published.
* ``ape`` (arXiv 2502.05431): temperature and scale, chunks one behind the other. ``apecode``: all chunks at the same positions behind
  the prefix, the question behind the longest, and the log-sum-exp as in the authors' code, ``T · lse(scores / T) + log S``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from kvrag.blend.covariance import RowCovariance
from kvrag.blend.layout import Layout, rows_of
from kvrag.blend.select import select_rows
from kvrag.config import RepairConfig
from kvrag.model import forward
from kvrag.model.rows import Limits, Reach
from kvrag.types import KVDtype


@dataclass
class Seen:
    """Measurements that a method may look at: ``mass`` and ``deviation`` are float32 ``(N,)``; ``breaks``: the break
    before each row, int64 ``(N,)``, as :func:`kvrag.blend.select.breaks_of` has it."""

    layout: Layout
    budget: int
    mass: torch.Tensor
    deviation: torch.Tensor | None
    covariance: RowCovariance | None
    breaks: torch.Tensor

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


def pooled(seen: Seen, width: int) -> torch.Tensor:
    """Attention to the most attended row of each row's neighbourhood, within its chunk."""
    out = torch.zeros_like(seen.mass)
    for s in seen.layout.stale:
        run = seen.mass[s.start : s.stop][None, None]
        out[s.start : s.stop] = torch.nn.functional.max_pool1d(run, width, 1, width // 2)[0, 0]
    return out


def none(seen: Seen) -> torch.Tensor:
    """Repair nothing."""
    return seen.stale[:0]


def by_mass(seen: Seen) -> torch.Tensor:
    """Take the rows that the question attends to."""
    return torch.unique(top(seen.mass, seen.stale, seen.budget))


def by_deviation(seen: Seen) -> torch.Tensor:
    """CacheBlend: rows whose values change most at layer 1."""
    assert seen.deviation is not None
    return torch.unique(top(seen.deviation, seen.stale, seen.budget))


def first_rows(count: int) -> Choose:
    """EPIC: so many first rows of each chunk."""

    def choose(seen: Seen) -> torch.Tensor:
        return heads(seen, count)

    return choose


def by_head(seen: Seen) -> torch.Tensor:
    """EPIC at a budget: the heads of chunks."""
    share = seen.budget / max(1, len(seen.stale))
    return rows_of([s.head(max(1, round(share * s.num_rows))) for s in seen.layout.stale])


def gain(seen: Seen, rows: torch.Tensor, budget: int) -> torch.Tensor:
    """Of these rows, those that tell most of the changes in what the question attends to, the best first, as ``query_gain`` has them."""
    by = top(seen.mass, rows, len(rows))
    pool = by[:512]
    assert seen.covariance is not None
    chosen = seen.covariance.most_informative(pool, seen.mass[pool], min(budget, 256, len(pool)))
    return torch.cat([chosen, by[~torch.isin(by, chosen)]])[:budget]


def runs(width: int = 9) -> Choose:
    """Rows by the attention paid to their neighbourhood."""

    def choose(seen: Seen) -> torch.Tensor:
        score = pooled(seen, width) + 1e-6 * seen.mass
        return filled(seen, heads(seen), seen.budget, top(score, seen.stale, len(seen.stale)))

    return choose


def mixed(share: float, width: int = 9) -> Choose:
    """A share of the budget by neighbourhood, the rest by what tells most of others."""

    def choose(seen: Seen) -> torch.Tensor:
        score = pooled(seen, width) + 1e-6 * seen.mass
        first = filled(
            seen, heads(seen), round(share * seen.budget), top(score, seen.stale, len(seen.stale))
        )
        rest = seen.stale[~torch.isin(seen.stale, first)]
        return torch.unique(torch.cat([first, gain(seen, rest, seen.budget - len(first))]))

    return choose


def by_engine(config: RepairConfig) -> Choose:
    """A strategy of the engine, at the method's budget."""

    def choose(seen: Seen) -> torch.Tensor:
        given = replace(config, recompute_ratio=seen.budget / len(seen.stale))
        return select_rows(
            seen.layout, given, mass=seen.mass, covariance=seen.covariance, breaks=seen.breaks
        )

    return choose


LONGEST = 64
"""Most rows of a sentence; longer sentences are split."""


def whole_sentences(rows: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows, int64 ascending, at sentence starts, at gaps, and after :data:`LONGEST` rows.

    Returns the index of every sentence's first row, and the number of its rows, int64.
    """
    is_cut = starts[rows] | (rows.diff(prepend=rows[:1] - 2) != 1)
    cuts = [*torch.nonzero(is_cut)[:, 0].tolist(), len(rows)]
    first = torch.tensor([i for ends in pairwise(cuts) for i in range(*ends, LONGEST)])
    return first, first.diff(append=torch.tensor(cuts[-1:]))


def sentences(
    share: float, score: Callable[[torch.Tensor], torch.Tensor], most: int = 64
) -> Choose:
    """A share of the budget for whole sentences, by a score of the attention paid to their rows; the rest by what tells most of others."""

    def choose(seen: Seen) -> torch.Tensor:
        _, sizes = whole_sentences(seen.stale, seen.breaks > 1)
        spans, first = seen.stale.split(sizes.tolist()), [heads(seen)]
        left = round(share * seen.budget)
        for rows in sorted(spans, key=lambda r: -float(score(seen.mass[r]))):
            if len(rows) <= min(left, most):
                first.append(rows)
                left -= len(rows)
        taken = torch.unique(torch.cat(first))
        rest = seen.stale[~torch.isin(seen.stale, taken)]
        return torch.unique(torch.cat([taken, gain(seen, rest, seen.budget - len(taken))]))

    return choose


def peak(mass: torch.Tensor) -> torch.Tensor:
    """Mean of the four rows with most attention."""
    return mass.topk(min(4, len(mass))).values.mean()


@contextmanager
def attending(attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Attend by another function in kvrag's forwards."""
    kept = forward.ragged_attention
    forward.ragged_attention = attend
    try:
        yield
    finally:
        forward.ragged_attention = kept


@dataclass
class Gradual:
    """CacheBlend's gradual filter: a hook of the forward over ``rows``, which repairs fewer of the ``chosen`` rows in each layer.

    The rows that a layer drops keep their stored KV from the next layer on. They are computed all the same, so its time is an upper
    bound; that of ``cacheblend`` at the same budget is that of as many rows in the mean. The paper gives no figures of its schedule but
    that each share is slightly less than the one before, and that their mean is the budget: here from 5/4 of it down to 3/4.
    """

    rows: torch.Tensor
    chosen: torch.Tensor
    num_layers: int
    budget: int

    def __post_init__(self) -> None:
        self._left = torch.nonzero(torch.isin(self.rows, self.chosen))[:, 0]
        self._dropped = self._left[:0]

    @staticmethod
    def first(budget: int) -> int:
        """How many rows the first layers repair."""
        return round(1.25 * budget)

    def wanted(self, layer: int) -> int:
        """How many rows the layers after this one repair."""
        last = max(1, self.num_layers - 2)
        return round(self.budget * (1.25 - 0.5 * min(1.0, max(0, layer - 1) / last)))

    def __call__(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        fresh_keys: torch.Tensor,
        fresh_values: torch.Tensor,
    ) -> None:
        """Give dropped rows their stored KV, and drop the rows that change least."""
        at = self.rows[self._dropped]
        fresh_keys[:, :, self._dropped] = keys[:, :, at]
        fresh_values[:, :, self._dropped] = values[:, :, at]
        if layer < 2:  # chosen by their changes in layer 1
            return
        left = self._left
        change = (fresh_values[:, :, left] - values[:, :, self.rows[left]]).float().square()
        order = torch.argsort(change.sum(dim=(0, 1, 3)), descending=True, stable=True)
        count = min(len(left), self.wanted(layer))
        self._left = left[order[:count]].sort().values
        self._dropped = torch.cat([self._dropped, left[order[count:]]])


def side_by_side(layout: Layout, prefix: int) -> torch.Tensor:
    """By how many positions each row moves towards the question if all chunks begin at the same place, int64 ``(N,)``.

    Separators and the question stay where they are, as seen from the question.
    """
    chunks = [s for s in layout.segments if s.kind == "chunk"]
    question = layout.num_tokens - layout.num_suffix
    nearer = question - prefix - max(s.num_rows for s in chunks)
    moved = torch.zeros(layout.num_tokens, dtype=torch.int64)
    moved[:prefix] = nearer
    for s in chunks:
        moved[s.start : s.stop] = nearer - (s.start - prefix)
    return moved


APE_TEMPERATURE, APE_SCALE = 0.9, 0.9


@contextmanager
def ape_attention(layout: Layout, how: str = "scaled") -> Iterator[None]:
    """Attend as APE (arXiv 2502.05431): scores of the chunks' keys over a temperature, their log-sum-exp with a scale.

    ``scaled``: the log-sum-exp times the scale; ``code``: times the temperature, plus the scale's logarithm.
    """
    chunks, kept = (
        rows_of([s for s in layout.segments if s.kind == "chunk"]),
        forward.ragged_attention,
    )

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        limits: Limits,
        *,
        scale: float,
        reach: Reach,
        **rest: Any,
    ) -> torch.Tensor:
        if rest.get("mass") is not None or len(limits.hi) == layout.num_tokens:
            return kept(q, k, v, limits, scale=scale, reach=reach, **rest)
        k, v = (
            x.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[:, :, : limits.num_keys]
            for x in (k, v)
        )
        scores = (q * scale @ k.transpose(-1, -2)).float()
        keys, is_chunk = (
            torch.arange(limits.num_keys),
            torch.zeros(limits.num_keys, dtype=torch.bool),
        )
        is_chunk[chunks] = True
        lo = limits.lo(reach)
        seen = (keys <= limits.hi[:, None]) & (keys >= (0 if lo is None else lo[:, None]))
        inner = (scores / APE_TEMPERATURE).masked_fill(~(seen & is_chunk), -torch.inf)
        outer = scores.masked_fill(~(seen & ~is_chunk), -torch.inf)
        total = inner.logsumexp(-1)
        weight = (
            APE_TEMPERATURE * total + math.log(APE_SCALE) if how == "code" else APE_SCALE * total
        )
        share = torch.sigmoid(weight - outer.logsumexp(-1))[..., None]
        found = share * (inner.softmax(-1).nan_to_num() @ v) + (1 - share) * (
            outer.softmax(-1).nan_to_num() @ v
        )
        return found.to(q.dtype)

    with attending(attend):
        yield


@contextmanager
def sparse_attention(layout: Layout, mass: torch.Tensor, share: float) -> Iterator[None]:
    """Let repaired rows of chunks see a share of the other chunks' keys alone: those that the question attends to most.

    The idea of RelaxKV (arXiv 2609.33503). They see their own chunk and all live rows as ever. Scores are masked here, so no time is saved.
    """
    chunks = [s for s in layout.segments if s.kind == "chunk"]
    of_chunk = torch.full((layout.num_tokens,), -1)
    for index, s in enumerate(chunks):
        of_chunk[s.start : s.stop] = index
    kept = forward.ragged_attention
    is_seen = of_chunk < 0
    is_seen[top(mass, rows_of(chunks), round(share * len(rows_of(chunks))))] = True

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        limits: Limits,
        *,
        scale: float,
        reach: Reach,
        **rest: Any,
    ) -> torch.Tensor:
        found = kept(q, k, v, limits, scale=scale, reach=reach, **rest)
        is_sparse = (limits.hi < layout.num_tokens) & (
            of_chunk[limits.hi.clamp(max=layout.num_tokens - 1)] >= 0
        )
        at = limits.hi[is_sparse]
        if not len(at):
            return found
        k, v = (
            x.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[:, :, : limits.num_keys]
            for x in (k, v)
        )
        keys = torch.arange(min(limits.num_keys, layout.num_tokens))
        may = (keys <= at[:, None]) & (is_seen[keys] | (of_chunk[keys] == of_chunk[at][:, None]))
        k, v = k[:, :, : len(keys)], v[:, :, : len(keys)]
        scores = (q[:, :, is_sparse] * scale @ k.transpose(-1, -2)).float()
        weights = scores.masked_fill(~may, -torch.inf).softmax(-1).to(q.dtype)
        found[:, :, is_sparse] = weights @ v
        return found

    with attending(attend):
        yield


@dataclass(frozen=True)
class Method:
    """How a prompt is reused: which rows are repaired, what chunks stand behind, and what their KV is rounded to."""

    choose: Choose
    encoded: str = "default"
    kv_dtype: KVDtype = "auto"
    shift: float = 1.0
    layers: tuple[float, float] = (1 / 3, 0.8)
    mass: str = "peak"
    ape: str = ""
    sees: float = 1.0
    filters: bool = False
    probes: bool = True
    covaries: bool = True
    takes_budget: bool = True
    stored: float = 1.0
    """Share of the chunks that are not exact that have stored KV; the others are computed."""
    fills: bool = True
    """Whether these are computed once, if the engine would."""
    timed_as: str = ""
    """The method whose time at the same budget is this one's, if this one is slower here than by its authors."""


peer = partial(Method, encoded="alone", shift=0.0, covaries=False)
attended = partial(peer, layers=(0.0, 1.0))
unprobed = partial(peer, probes=False)
fixed = partial(unprobed, takes_budget=False)
PEERS = {
    "none": Method(none, probes=False, covaries=False, takes_budget=False),
    "prophetkv": attended(by_mass, mass="sum"),
    "prophetkv2": attended(by_mass, mass="chunks"),
    "cacheblend": unprobed(by_deviation),
    "cacheblendpaper": unprobed(by_deviation, filters=True, timed_as="cacheblend"),
    "epic": unprobed(by_head),
    "epic16": fixed(first_rows(16)),
    "epic32": fixed(first_rows(32)),
    "ape": fixed(none, encoded="prefix", ape="scaled"),
    "apecode": fixed(none, encoded="prefix", ape="code"),
}
OURS = {
    "runs": Method(by_engine(RepairConfig("query_runs"))),
    "runs17": Method(runs(17)),
    "sentences": Method(sentences(2 / 3, peak)),
    "gain": Method(by_engine(RepairConfig("query_gain"))),
    "mass": Method(by_engine(RepairConfig("query"))),
    "gainsum": Method(by_engine(RepairConfig("query_gain")), mass="sum"),
    "sum": Method(by_engine(RepairConfig("query")), mass="sum"),
    "runs9": Method(runs()),
    "mix50": Method(mixed(0.5)),
    "mix50sum": Method(mixed(0.5), mass="sum"),
    "mix50w17": Method(mixed(0.5, 17)),
    "sent50": Method(sentences(0.5, peak)),
    "sent80": Method(sentences(0.8, peak)),
    "sent100": Method(sentences(1.0, peak)),
    "sentmean": Method(sentences(2 / 3, torch.mean)),
    "sentroot": Method(sentences(2 / 3, lambda mass: mass.sum() / len(mass) ** 0.5)),
    "sentonce": Method(sentences(2 / 3, peak), mass="once"),
    "sentsum": Method(sentences(2 / 3, peak), mass="sum"),
    "sentnoshift": Method(sentences(2 / 3, peak), shift=0.0),
    "senthalf": Method(sentences(2 / 3, peak), shift=0.5),
    "sentall": Method(sentences(2 / 3, peak), layers=(0.0, 1.0)),
    "sentsee50": Method(sentences(2 / 3, peak), sees=0.5),
    "sentsee20": Method(sentences(2 / 3, peak), sees=0.2),
    "sentmid": Method(sentences(2 / 3, peak), layers=(0.25, 0.6)),
}
CONTEXTS = {"p.": "prefix", "c1000.": "default:1000"}
BEHIND = {
    mark + name: replace(method, encoded=text)
    for mark, text in CONTEXTS.items()
    for name, method in OURS.items()
}
DTYPES: tuple[KVDtype, ...] = "int8", "fp8", "int4"
ROUNDED = {
    f"{dtype}.{name}": replace(method, kv_dtype=dtype)
    for dtype in DTYPES
    for name, method in {
        "none": PEERS["none"],
        **{n: OURS[n] for n in ("runs", "sentences")},
    }.items()
}
half = partial(Method, OURS["runs"].choose, stored=0.5)
STORED = {
    "halfruns": half(),
    "halftwice": half(fills=False),
    "halfnone": replace(PEERS["none"], stored=0.5),
}
METHODS = PEERS | OURS | BEHIND | ROUNDED | STORED
