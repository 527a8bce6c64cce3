"""The segments of a prompt: integers only, decided before any tensor moves.

::

    0        p            a        b     c          d      e          N
    | prefix | chunk      | glue   | chunk          | glue | suffix   |
    |  kept  | exact      |computed| stale: repaired| ...  | computed |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvrag.kv.buffers import pinned
from kvrag.prompt.plan import Plan
from kvrag.types import Source, Sources

Kind = Literal["history", "prefix", "chunk", "live", "filled"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``start:stop`` of a prompt, with a single source of KV.

    Parameters
    ----------
    kind
        ``prefix`` and ``chunk``: loaded from the store; ``history``: from an earlier request;
        ``live``: computed; ``filled``: live, computed before the probe.
    exact
        Whether the KV equals a full prefill's without repair; always false for live rows.
    source
        Index into :attr:`~kvrag.prompt.plan.Plan.identities`; -1 for rows not from the store.
    is_mismatched
        Whether the chunk was encoded behind another prefix than this prompt's.
    offset
        Row of the chunk that the segment begins with.
    """

    start: int
    stop: int
    kind: Kind
    exact: bool = False
    source: int = -1
    is_mismatched: bool = False
    offset: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def head(self, num_rows: int) -> Segment:
        """Return the segment of its first rows, at most ``num_rows``."""
        return replace(self, stop=min(self.stop, self.start + num_rows))


@dataclass(frozen=True)  # without slots, because cached properties need a __dict__
class Layout:
    """The ordered segments of a prompt.

    They cover ``0:num_tokens`` without gaps or overlaps, and the last row is live.
    """

    segments: tuple[Segment, ...]

    @cached_property
    def num_tokens(self) -> int:
        """Number of rows of the prompt, ``N``."""
        return self.segments[-1].stop

    @cached_property
    def reused(self) -> list[Segment]:
        """Segments whose KV is loaded from the store."""
        return [s for s in self.segments if s.kind in ("prefix", "chunk")]

    @cached_property
    def history(self) -> Segment | None:
        """The first segment, if its KV is from an earlier request."""
        if self.segments[0].kind == "history":
            return self.segments[0]
        return None

    @cached_property
    def stale(self) -> list[Segment]:
        """Reused chunks that are not exact, because they were encoded without the text before them.

        They are the candidates for repair.
        """
        return [s for s in self.segments if s.kind == "chunk" and not s.exact]

    @cached_property
    def live(self) -> list[Segment]:
        """Segments to compute: glue, prefix and chunks without stored KV, suffix."""
        return [s for s in self.segments if s.kind == "live"]

    @cached_property
    def ahead(self) -> list[Segment]:
        """Segments to compute before the probe; see :meth:`filled`."""
        return [s for s in self.segments if s.kind == "filled"]

    @cached_property
    def num_live(self) -> int:
        """Number of rows to compute in any case."""
        return num_rows_of(self.live)

    @cached_property
    def num_reused(self) -> int:
        """Number of rows that are loaded from the store."""
        return num_rows_of(self.reused)

    @cached_property
    def num_stale(self) -> int:
        """Number of rows that are candidates for repair."""
        return num_rows_of(self.stale)

    @cached_property
    def live_rows(self) -> Tensor:
        """Rows to compute in any case, int64, ascending."""
        return rows_of(self.live)

    @property
    def num_suffix(self) -> int:
        """Number of rows behind all that is not live: the question and the template's tail."""
        return self.num_tokens - max([s.stop for s in self.segments if s.kind != "live"], default=0)

    @property
    def is_exact(self) -> bool:
        """Whether all reused KV equals a full prefill's, including the history."""
        return not self.stale and (self.history is None or self.history.exact)

    def only_exact_head(self) -> Layout:
        """Return the layout that reuses only the leading exact segments."""
        # One is inexact, because the last segment is live.
        head = self.segments[: [segment.exact for segment in self.segments].index(False)]
        return Layout((*head, Segment(head[-1].stop if head else 0, self.num_tokens, "live")))

    def behind(self, num_rows: int, num_exact: int) -> Layout:
        """Return the layout that takes its first rows from an earlier request.

        Takes at most ``num_rows`` rows (less than :attr:`num_tokens`), and never a part of a stored
        chunk. The first ``num_exact`` equal a full prefill's. Returns the same layout if the
        store's exact segments already cover these rows.
        """
        cut = next(s for s in self.segments if s.stop > num_rows)
        if cut.kind != "live":
            num_rows = cut.start
        if all(s.exact for s in self.segments if s.start < num_rows):
            return self
        rest = [
            replace(s, start=max(s.start, num_rows)) for s in self.segments if s.stop > num_rows
        ]
        return Layout((Segment(0, num_rows, "history", num_rows <= num_exact), *rest))

    def filled(self) -> Layout:
        """Return the layout whose live rows are computed, but those of the last segment."""
        *before, question = self.segments
        segments = [replace(s, kind="filled") if s.kind == "live" else s for s in before]
        return Layout((*segments, question))

    def only_live(self) -> Layout:
        """Return the layout that computes every row."""
        return Layout((Segment(0, self.num_tokens, "live"),))

    def without(self, sources: Collection[int]) -> Layout:
        """Return the layout that computes the segments of these sources.

        An exact chunk stays exact even if its prefix is not loaded, because the prefix is then
        computed as in a full prefill.
        """
        return Layout(
            tuple(
                [
                    Segment(s.start, s.stop, "live") if s.source in sources else s
                    for s in self.segments
                ]
            )
        )


# A segment as ``(length, kind, exact, source, is_mismatched)``; its offset may follow.
Entry = tuple[int, Kind, bool, int, bool] | tuple[int, Kind, bool, int, bool, int]


def place(segments: Iterable[Entry]) -> Layout:
    """Lay out segments in order.

    Empty segments are dropped. The last row becomes live: its logits choose the first answer token,
    so it is computed even if its KV is stored.
    """
    placed: list[Segment] = []
    start = 0
    for length, kind, exact, source, is_mismatched, *offset in segments:
        if length:
            stop = start + length
            placed.append(Segment(start, stop, kind, exact, source, is_mismatched, *offset))
            start = stop
    last = placed.pop()
    if last.kind != "live":
        if last.num_rows > 1:
            placed.append(replace(last, stop=last.stop - 1))
        last = Segment(last.stop - 1, last.stop, "live")
    return Layout((*placed, last))


def lay_out(plan: Plan) -> Layout:
    """Return the layout of a plan with all possible reuse."""
    sources = {identity: index for index, identity in enumerate(plan.identities)}
    entries: list[Entry] = []
    for piece in plan.pieces:
        kind: Kind = "live"
        source = -1
        if piece.identity is not None:
            kind = "prefix" if piece.piece.kind == "live" else "chunk"
            source = sources[piece.identity]
        entries.append(
            (len(piece.ids), kind, piece.is_exact, source, piece.is_mismatched, piece.offset)
        )
    return place(entries)


def num_rows_of(segments: Iterable[Segment]) -> int:
    """Return the total number of rows of segments."""
    return sum([s.stop - s.start for s in segments])


def rows_of(segments: Sequence[Segment]) -> Tensor:
    """Return the rows of segments, int64, ascending."""
    return torch.cat([torch.arange(0), *[torch.arange(s.start, s.stop) for s in segments]])


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, without a wait for what the device has to do."""
    if device.type != "cuda":
        return x.to(device)
    return pinned(x, device).to(device, non_blocking=True)


_SOURCES: tuple[Source, ...] = "computed", "reused", "exact", "repaired"


def sources_of(
    layout: Layout, repaired: Tensor, *, is_rounded: bool = False, num_exact: int = 0
) -> Sources:
    """Return the origin of every row's KV, as runs ``(source, number of rows)``.

    Parameters
    ----------
    repaired
        Recomputed rows of stale chunks, int64 on the host.
    is_rounded
        Whether the stored KV is quantised.
    num_exact
        Number of first rows, taken from an earlier request, that equal a full prefill's.
    """
    codes = torch.zeros(layout.num_tokens, dtype=torch.uint8)
    for segment in layout.segments:
        if segment.kind != "live":
            codes[segment.start : segment.stop] = 2 if segment.exact and not is_rounded else 1
    # A history may be exact in its first rows only. Each mark overwrites those before it.
    if layout.history:
        codes[: min(num_exact, layout.history.stop)] = 2
    codes[repaired] = 3
    values, counts = torch.unique_consecutive(codes, return_counts=True)
    return tuple(
        [
            (_SOURCES[code], rows)
            for code, rows in zip(values.tolist(), counts.tolist(), strict=True)
        ]
    )


def mask_of(rows: Tensor, num_rows: int) -> Tensor:
    """Return a bool mask ``(num_rows,)`` that is true at ``rows``, on their device."""
    mask = torch.zeros(num_rows, dtype=torch.bool, device=rows.device)
    mask[rows] = True
    return mask
