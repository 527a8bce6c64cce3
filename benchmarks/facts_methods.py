"""Ways to reuse chunks that the facts benchmark compares: what chunks are encoded behind, and which rows are repaired.

The engine's own stages do the work; a method only chooses rows. Peers are as published: what their chunks stand behind, no shift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvrag.blend.covariance import RowCovariance
from kvrag.blend.layout import Layout, rows_of
from kvrag.blend.select import select_rows
from kvrag.blend.select import sentences as whole_sentences
from kvrag.config import RepairConfig
from kvrag.model import forward
from kvrag.model.rows import Limits, Reach
from kvrag.types import KVDtype


@dataclass
class Seen:
    """Measurements that a method may look at: ``mass`` and ``deviation`` are float32 ``(N,)``; ``starts``: whether a sentence
    begins at each row, bool ``(N,)``."""

    layout: Layout
    budget: int
    mass: torch.Tensor
    deviation: torch.Tensor | None
    covariance: RowCovariance
    starts: torch.Tensor

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
    """ProphetKV's signal: the rows that the question attends to."""
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
            seen.layout, given, mass=seen.mass, covariance=seen.covariance, starts=seen.starts
        )

    return choose


def sentences(
    share: float, score: Callable[[torch.Tensor], torch.Tensor], most: int = 64
) -> Choose:
    """A share of the budget for whole sentences, by a score of the attention paid to their rows; the rest by what tells most of others."""

    def choose(seen: Seen) -> torch.Tensor:
        _, sizes = whole_sentences(seen.stale, seen.starts)
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


APE_TEMPERATURE, APE_SCALE = 0.9, 0.9


@contextmanager
def ape_attention(layout: Layout) -> Iterator[None]:
    """Attend as APE (arXiv 2502.05431): scores of the chunks' keys over a temperature, their log-sum-exp times a scale.

    Chunks stand one behind the other, as everywhere here, and not at the same positions as in the paper.
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
        share = torch.sigmoid(APE_SCALE * inner.logsumexp(-1) - outer.logsumexp(-1))[..., None]
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
    ape: bool = False
    sees: float = 1.0


PEERS = {
    "none": Method(none),
    "prophetkv": Method(by_mass, "alone", shift=0.0, layers=(0.0, 1.0), mass="sum"),
    "cacheblend": Method(by_deviation, "alone", shift=0.0),
    "epic": Method(by_head, "alone", shift=0.0),
    "ape": Method(none, "prefix", ape=True),
}
OURS = {
    "sentences": Method(by_engine(RepairConfig("query_sentences"))),
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
    "sentonce": Method(by_engine(RepairConfig("query_sentences")), mass="once"),
    "sentsum": Method(sentences(2 / 3, peak), mass="sum"),
    "sentnoshift": Method(by_engine(RepairConfig("query_sentences")), shift=0.0),
    "senthalf": Method(by_engine(RepairConfig("query_sentences")), shift=0.5),
    "sentall": Method(by_engine(RepairConfig("query_sentences")), layers=(0.0, 1.0)),
    "sentsee50": Method(by_engine(RepairConfig("query_sentences")), sees=0.5),
    "sentsee20": Method(by_engine(RepairConfig("query_sentences")), sees=0.2),
    "sentmid": Method(by_engine(RepairConfig("query_sentences")), layers=(0.25, 0.6)),
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
    for name, method in {"none": PEERS["none"], "sentences": OURS["sentences"]}.items()
}
METHODS = PEERS | OURS | BEHIND | ROUNDED
