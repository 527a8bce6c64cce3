"""Which parts of a rendered prompt are known chunks.

A chunk is registered by the hashes of its first and its last :data:`ANCHOR_CHARS` characters, its length and its digest; its text is not
kept. A prompt is scanned by hashing all its windows of that width at once: where a window is a known head, and the one at the chunk's end
is its tail, the text between them is hashed in full. That digest decides. What is missed is computed live, so every bound here costs time
and never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvrag.identity.fingerprint import text_digest
from kvrag.prompt.tokenizer import check_encodable
from kvrag.threads import fork_lock
from kvrag.types import Span, TextEntry

ANCHOR_CHARS = 32  # characters of the windows that are hashed; shorter texts can't be found and are computed live

MAX_PAIRS = 1 << 20
"""Pairs of (place in the prompt, registered text) that one scan compares. Only texts that repeat themselves, such as a
long run of one character, have so many; then the shortest registered texts are left out."""

MAX_WASTED_CHARS = 1 << 24
"""Characters that one scan hashes for places that look right at both ends and turn out different in the middle."""

MIN_OVERFLOW = 1024  # new entries that are kept beside the sorted table, at least, before it is sorted again

_BASE = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_BASE, ANCHOR_CHARS - 1 - i, 1 << 64) for i in range(ANCHOR_CHARS)], dtype=np.uint64)

Hashes = NDArray[np.uint64]
Integers = NDArray[np.int64]


def text_entry(text: str) -> TextEntry | None:
    """Describe a chunk's text for the scanner, without white space at its ends; ``None`` where it is shorter than :data:`ANCHOR_CHARS`.

    Raises
    ------
    InputError
        If the text can't be encoded as UTF-8.
    """
    text = text.strip()
    check_encodable(text)
    if len(text) < ANCHOR_CHARS:
        return None
    ends = _code_points(text[:ANCHOR_CHARS] + text[-ANCHOR_CHARS:]).reshape(2, ANCHOR_CHARS)
    head, tail = (ends * _POWERS).sum(axis=1, dtype=np.uint64).tolist()
    return TextEntry(digest=text_digest(text), head=head, tail=tail, num_chars=len(text))


class SpanIndex:
    """The registered chunk texts, and the scanner that finds them in a prompt.

    Threads may add and scan at the same time: a scan works on arrays that never change once built. New entries are in a small table of
    their own until there are enough of them to sort the large one again. Texts are never removed: what has no KV is computed live.
    ``digest_of`` gives the digest of a text as the entries have it.
    """

    def __init__(self, digest_of: Callable[[str], str] = text_digest) -> None:
        self._digest_of = digest_of
        self._lock = fork_lock()
        self._entries: dict[str, TextEntry] = {}
        self._base = _Table.build(())
        self._overflow, self._is_current = _Table.build(()), True
        self._fresh: dict[str, TextEntry] = {}  # entries that are not in the base table

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Iterable[TextEntry]) -> None:
        """Register texts; those already registered are skipped."""
        offered = list(entries)  # a generator may take its time: not under the lock
        with self._lock:
            new = {entry.digest: entry for entry in offered if entry.digest not in self._entries}
            self._entries.update(new)
            self._fresh.update(new)
            self._is_current &= not new

    def scan(self, text: str, *, without: Collection[str] = ()) -> list[Span]:
        """Find the registered texts in a prompt, but for those with the digests ``without``, so that what they cover can be found.

        Returns
        -------
        list of Span
            Spans that don't overlap, sorted by start: of those that would, the longest, of equally long ones the leftmost. The digest
            of each was computed from ``text[start:stop]``.
        """
        if len(text) < ANCHOR_CHARS or not self._entries:
            return []
        windows = _window_hashes(text)
        starts, lengths = np.concatenate([table.candidates(windows) for table in self._tables()], axis=1)
        return _verified(text, starts, lengths, self._known_digest, without)

    def _known_digest(self, text: str) -> str | None:
        try:
            digest = self._digest_of(text)
        except UnicodeEncodeError:  # a prompt may hold what no registered text can
            return None
        return digest if digest in self._entries else None

    def head_places(self, text: str) -> list[int]:
        """Return the places where a registered text may begin, ascending, whether or not the rest of it follows."""
        if len(text) < ANCHOR_CHARS or not self._entries:
            return []
        windows = _window_hashes(text)
        return np.unique(np.concatenate([table.places(windows) for table in self._tables()])).tolist()  # type: ignore[no-any-return]

    def texts_like(self, text: str, *, limit: int) -> list[TextEntry]:
        """Return the longest registered texts that may begin like a text, by the hash of their first :data:`ANCHOR_CHARS` characters."""
        head = _window_hashes(text[:ANCHOR_CHARS]) if len(text) >= ANCHOR_CHARS else ()
        digests = [d for window in head for table in self._tables() for d in table.digests_of(window, limit)]
        found = [entry for digest in digests if (entry := self._entries.get(digest))]
        return sorted(found, key=lambda entry: -entry.num_chars)[:limit]

    def _tables(self) -> tuple[_Table, _Table]:
        """Return tables that hold every entry, sorting only what has changed."""
        with self._lock:
            if len(self._fresh) > max(MIN_OVERFLOW, len(self._base.heads) // 32):
                self._base, self._fresh = _Table.build(self._entries.values()), {}
                self._overflow = _Table.build(())
            elif not self._is_current:
                self._overflow = _Table.build(self._fresh.values())
            self._is_current = True
            return self._base, self._overflow


@dataclass(frozen=True, slots=True)
class _Table:
    """Entries as columns, sorted by head and, within one head, the longest first."""

    heads: Hashes
    tails: Hashes
    lengths: Integers
    digests: NDArray[np.object_]

    @classmethod
    def build(cls, entries: Collection[TextEntry]) -> _Table:
        heads = np.fromiter((entry.head for entry in entries), np.uint64, len(entries))
        tails = np.fromiter((entry.tail for entry in entries), np.uint64, len(entries))
        lengths = np.fromiter((entry.num_chars for entry in entries), np.int64, len(entries))
        digests = np.fromiter((entry.digest for entry in entries), np.object_, len(entries))
        return cls(heads, tails, lengths, digests).take(np.lexsort((-lengths, heads)))

    def take(self, rows: Integers) -> _Table:
        """Return the given rows."""
        return _Table(self.heads[rows], self.tails[rows], self.lengths[rows], self.digests[rows])

    def rows_of(self, heads: Hashes) -> tuple[Integers, Integers]:
        """Return the first row of each head, and the number of its rows."""
        first = np.searchsorted(self.heads, heads, "left")
        return first, np.searchsorted(self.heads, heads, "right") - first

    def places(self, windows: Hashes) -> Integers:
        """Return the places where an entry's head stands, ascending."""
        if not len(self.heads):
            return np.empty(0, np.int64)
        first = np.minimum(np.searchsorted(self.heads, windows, "left"), len(self.heads) - 1)
        return np.flatnonzero(self.heads[first] == windows)

    def digests_of(self, head: np.uint64, limit: int) -> list[str]:
        """Return the digests of the longest entries with this head."""
        first = int(np.searchsorted(self.heads, head, "left"))
        stop = int(np.searchsorted(self.heads, head, "right"))
        return self.digests[first : min(stop, first + limit)].tolist()  # type: ignore[no-any-return]

    def candidates(self, windows: Hashes) -> Integers:
        """Return starts and lengths ``(2, P)`` of the places where head, tail and length of an entry fit."""
        places = self.places(windows)
        # A header shared by ten thousand chunks brings them all in; few of them have a tail that is in the prompt too.
        rows = _ranges(*self.rows_of(np.unique(windows[places])))
        fits = self.lengths[rows] < len(windows) + ANCHOR_CHARS
        table = self.take(rows[fits & np.isin(self.tails[rows], windows)])
        first, counts = table.rows_of(windows[places])
        while counts.sum() > MAX_PAIRS + len(windows):
            counts = np.minimum(counts, max(int(counts.max()) // 2, 1))
        rows, starts = _ranges(first, counts), np.repeat(places, counts)
        ends = starts + table.lengths[rows] - ANCHOR_CHARS
        inside = ends < len(windows)
        rows, starts, ends = rows[inside], starts[inside], ends[inside]
        fits = windows[ends] == table.tails[rows]
        return np.stack([starts[fits], table.lengths[rows[fits]]])


def _verified(
    text: str, starts: Integers, lengths: Integers, known_digest: Callable[[str], str | None], without: Collection[str]
) -> list[Span]:
    """Keep the longest candidates, then the leftmost, that don't overlap, hashing only those that would be kept."""
    order = np.lexsort((starts, -lengths))
    starts, lengths = starts[order], lengths[order]
    taken = np.zeros(len(text), dtype=np.bool_)
    spans: list[Span] = []
    wasted = 0
    for low, high in pairwise(np.flatnonzero(np.diff(lengths, prepend=0, append=0)).tolist()):
        size, places = int(lengths[low]), starts[low:high]
        # What is taken is at least as long as this, so it can't lie strictly inside: looking at the two ends is enough.
        places = places[~(taken[places] | taken[places + size - 1])]
        i = 0
        while i < len(places) and wasted <= MAX_WASTED_CHARS:
            start = int(places[i])
            stop = start + size
            digest = known_digest(text[start:stop])
            if digest is None or digest in without:
                wasted += size
                i += 1
                continue
            spans.append(Span(start, stop, digest))
            taken[start:stop] = True
            i = int(np.searchsorted(places, stop))
    return sorted(spans, key=lambda span: span.start)


def _code_points(text: str) -> Hashes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)


def _window_hashes(text: str) -> Hashes:
    """Polynomial hash, modulo 2**64, of the window at each character; doubling the width takes five steps."""
    hashes, width = _code_points(text), 1
    while width < ANCHOR_CHARS:
        hashes = hashes[:-width] * np.uint64(pow(_BASE, width, 1 << 64)) + hashes[width:]
        width *= 2
    return hashes


def _ranges(first: Integers, counts: Integers) -> Integers:
    """Concatenate ``arange(f, f + c)`` for each pair."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
