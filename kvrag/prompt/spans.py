"""Find the known chunks in a rendered prompt.

A chunk is registered by the hashes of its first and last :data:`ANCHOR_CHARS` characters, its
length and its digest; its text is not kept. The scanner hashes all windows of that width in the
prompt at once. Where a window equals a known head, and the window at the chunk's end equals its
tail, the whole text from head to tail is hashed. That digest decides. A missed chunk is computed
live, so the bounds here cost time and never correctness.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrag.identity.fingerprint import text_digest
from kvrag.prompt.tokenizer import check_encodable
from kvrag.types import Span, TextEntry

ANCHOR_CHARS = 32  # width of the hashed windows; shorter texts can't be found, so are computed live

# Pairs of (place in the prompt, registered text) that a scan compares, besides a pair per window.
# Only repetitive texts, such as a long run of a single character, have so many; then the shortest
# registered texts are left out.
MAX_PAIRS = 1 << 20

# Characters that a scan hashes at places where head and tail match and the middle differs.
MAX_WASTED_CHARS = 1 << 24

SIEVE_BITS = 18  # first bits of a hash that are looked up before all

MIN_OVERFLOW = 1024  # entries that the small table may hold, at least, before the two are merged

_BASE = 0x9E3779B97F4A7C15
_POWERS = np.array(
    [pow(_BASE, ANCHOR_CHARS - 1 - i, 1 << 64) for i in range(ANCHOR_CHARS)], dtype=np.uint64
)

Hashes = NDArray[np.uint64]
Integers = NDArray[np.int64]


def text_entry(text: str) -> TextEntry | None:
    """Return the scanner's entry of a chunk's text, stripped of white space at its ends.

    ``None`` if the stripped text is shorter than :data:`ANCHOR_CHARS`.

    Raises
    ------
    InputError
        If the text can't be encoded as UTF-8.
    """
    check_encodable(text)
    text = text.strip()
    if len(text) < ANCHOR_CHARS:
        return None
    ends = _code_points(text[:ANCHOR_CHARS] + text[-ANCHOR_CHARS:]).reshape(2, ANCHOR_CHARS)
    head, tail = (ends * _POWERS).sum(axis=1, dtype=np.uint64).tolist()
    return TextEntry(digest=text_digest(text), head=head, tail=tail, num_chars=len(text))


class SpanIndex:
    """Index of the registered chunk texts, and scanner that finds them in a prompt.

    An entry takes 56 bytes. Threads may add and scan at the same time: a scan works on arrays that
    never change once built. New entries go to a small table until it is worth sorting the large
    table again. Texts are never removed: a chunk without KV is computed live.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tables = _NOTHING, _NOTHING  # the large and the small table

    def __len__(self) -> int:
        return sum(len(table.heads) for table in self._tables)

    def add(self, entries: Iterable[TextEntry]) -> None:
        """Register texts; skip texts that are registered already."""
        offered = list(entries)  # outside the lock: a generator may be slow
        with self._lock:
            base, fresh = self._tables
            limit = max(MIN_OVERFLOW, len(base.heads) // 32)
            is_few = len(offered) <= limit
            if is_few:
                offered = [e for e in offered if not base.holds(e.head, e.num_chars, e.digest)]
            fresh = fresh.joined(_Table.build(offered))
            if not is_few or len(fresh.heads) > limit:
                base = base.joined(fresh)
                fresh = _NOTHING
            self._tables = base, fresh

    def scan(self, text: str) -> list[Span]:
        """Find the registered texts in a prompt.

        Returns
        -------
        list of Span
            Spans without overlap, sorted by start. Of overlapping candidates the longest wins, then
            the leftmost. A span's digest was computed from ``text[start:stop]``.
        """
        if len(text) < ANCHOR_CHARS:
            return []
        tables = self._tables
        windows = _window_hashes(text)
        starts, lengths = np.concatenate([table.candidates(windows) for table in tables], axis=1)

        def known_digest(start: int, stop: int) -> str | None:
            try:
                digest = text_digest(text[start:stop])
            except UnicodeEncodeError:  # a prompt may hold surrogates; a registered text can't
                return None
            is_known = any(t.holds(windows[start], stop - start, digest) for t in tables)
            return digest if is_known else None

        return _verified(starts, lengths, len(text), known_digest)

    def head_places(self, text: str) -> list[int]:
        """Return the places, ascending, where the head of a registered text stands.

        The rest of the text need not follow.
        """
        if len(text) < ANCHOR_CHARS:
            return []
        windows = _window_hashes(text)
        found = [_places(table.heads, windows) for table in self._tables]
        places: list[int] = np.unique(np.concatenate(found)).tolist()
        return places

    def tail_places(self, text: str) -> list[int]:
        """Return the places, ascending, where the tail of a registered text stands.

        The rest of the text need not precede it.
        """
        tails = np.concatenate([table.tails for table in self._tables])
        return np.flatnonzero(np.isin(_window_hashes(text), tails)).tolist()

    def some(self, count: int) -> list[TextEntry]:
        """Return at most ``count`` registered texts, recently added texts first."""
        base, fresh = self._tables
        return [*fresh.entries(slice(0, count)), *base.entries(slice(0, count))][:count]

    def texts_like(self, text: str, *, limit: int) -> list[TextEntry]:
        """Return at most ``limit`` registered texts that may begin like ``text``, longest first.

        Only the hashes of the first :data:`ANCHOR_CHARS` characters are compared.
        """
        found = [
            entry
            for head in _window_hashes(text[:ANCHOR_CHARS])
            for table in self._tables
            for entry in table.entries_of(head, limit)
        ]
        return sorted(found, key=lambda entry: -entry.num_chars)[:limit]


class _Table(NamedTuple):
    """Columns of distinct entries, sorted by head; entries with equal heads, longest first."""

    heads: Hashes
    tails: Hashes
    lengths: Integers
    digests: Hashes  # (N, 4): 32 bytes per digest, a third of a hex string

    @classmethod
    def build(cls, entries: Collection[TextEntry]) -> _Table:
        heads = np.fromiter((entry.head for entry in entries), np.uint64, len(entries))
        tails = np.fromiter((entry.tail for entry in entries), np.uint64, len(entries))
        lengths = np.fromiter((entry.num_chars for entry in entries), np.int64, len(entries))
        digests = np.frombuffer(
            bytes.fromhex("".join(entry.digest for entry in entries)), np.uint64
        ).reshape(-1, 4)
        return cls(heads, tails, lengths, digests)._sorted()

    def joined(self, other: _Table) -> _Table:
        """Return a table with the entries of both."""
        columns = zip(self, other, strict=True)
        return _Table(*[np.concatenate(both) for both in columns])._sorted()

    def _sorted(self) -> _Table:
        table = self.take(np.lexsort((*self.digests.T, -self.lengths, self.heads)))
        is_new = np.ones(len(table.heads), np.bool_)
        is_new[1:] = (table.digests[1:] != table.digests[:-1]).any(axis=1)
        return table.take(np.flatnonzero(is_new))

    def take(self, rows: Integers) -> _Table:
        """Return the given rows."""
        columns: list[Any] = [column[rows] for column in self]
        return _Table(*columns)

    def holds(self, head: np.uint64 | int, length: int, digest: str) -> bool:
        """Whether the table has an entry with this head, length and digest."""
        rows = self._with_head(head)
        words = np.frombuffer(bytes.fromhex(digest), np.uint64)
        return bool((self.digests[rows][self.lengths[rows] == length] == words).all(axis=1).any())

    def _with_head(self, head: np.uint64 | int) -> slice:
        first, count = self.rows_of(np.uint64(head))
        return slice(first, first + count)

    def rows_of(self, heads: Hashes | np.uint64) -> tuple[Integers, Integers]:
        """Return the first row and the number of rows, per head."""
        first = np.searchsorted(self.heads, heads, "left")
        return first, np.searchsorted(self.heads, heads, "right") - first

    def entries_of(self, head: np.uint64, limit: int) -> list[TextEntry]:
        """Return the longest entries with this head."""
        rows = self._with_head(head)
        return self.entries(slice(rows.start, min(rows.stop, rows.start + limit)))

    def entries(self, rows: slice) -> list[TextEntry]:
        """Return the given rows as entries."""
        table = self.take(np.arange(*rows.indices(len(self.heads))))
        columns = zip(
            table.digests,
            table.heads.tolist(),
            table.tails.tolist(),
            table.lengths.tolist(),
            strict=True,
        )
        return [TextEntry(digest.tobytes().hex(), *numbers) for digest, *numbers in columns]

    def candidates(self, windows: Hashes) -> Integers:
        """Return starts and lengths ``(2, P)`` of places where an entry's head and tail match."""
        places = _places(self.heads, windows)
        # A header shared by ten thousand chunks brings them all in; few of their tails are in the
        # prompt.
        rows = _ranges(*self.rows_of(np.unique(windows[places])))
        tails = self.tails[rows]
        seen = windows[_places(np.unique(tails), windows)]
        fits = self.lengths[rows] < len(windows) + ANCHOR_CHARS
        table = self.take(rows[fits & np.isin(tails, seen)])
        first, counts = table.rows_of(windows[places])
        while counts.sum() > MAX_PAIRS + len(windows):
            counts = np.minimum(counts, max(int(counts.max()) // 2, 1))
        rows = _ranges(first, counts)
        starts = np.repeat(places, counts)
        ends = starts + table.lengths[rows] - ANCHOR_CHARS
        inside = np.flatnonzero(ends < len(windows))
        found = inside[windows[ends[inside]] == table.tails[rows[inside]]]
        return np.stack([starts[found], table.lengths[rows[found]]])


def _places(hashes: Hashes, windows: Hashes) -> Integers:
    """Return the places where a window has one of these hashes, which are sorted; ascending."""
    if not len(hashes):
        return np.empty(0, np.int64)
    places = np.arange(len(windows))
    if len(hashes) < len(windows):
        # The first bits of most windows are those of no hash: ten times sooner than a search.
        others = np.uint64(64 - SIEVE_BITS)
        sieve = np.zeros(1 << SIEVE_BITS, np.bool_)
        sieve[hashes >> others] = True
        places = np.flatnonzero(sieve[windows >> others])
    first = np.minimum(np.searchsorted(hashes, windows[places]), len(hashes) - 1)
    return places[np.flatnonzero(hashes[first] == windows[places])]


_NOTHING = _Table.build(())


def _verified(
    starts: Integers,
    lengths: Integers,
    num_chars: int,
    known_digest: Callable[[int, int], str | None],
) -> list[Span]:
    """Keep candidates without overlap, the longest and then the leftmost first.

    Candidates that overlap a kept span are not hashed.
    """
    order = np.lexsort((starts, -lengths))
    starts = starts[order]
    lengths = lengths[order]
    taken = np.zeros(num_chars, dtype=np.bool_)
    spans: list[Span] = []
    wasted = 0
    for low, high in pairwise(np.flatnonzero(np.diff(lengths, prepend=0, append=0)).tolist()):
        size = int(lengths[low])
        places = starts[low:high]
        # Kept spans are at least as long as this candidate, so can't lie strictly inside it:
        # checking its two ends is enough.
        places = places[~(taken[places] | taken[places + size - 1])]
        i = 0
        while i < len(places) and wasted <= MAX_WASTED_CHARS:
            start = int(places[i])
            stop = start + size
            digest = known_digest(start, stop)
            if digest is None:
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
    """Return the polynomial hash, modulo 2**64, of every window; five doublings reach its width.

    A shorter text has no window.
    """
    hashes = _code_points(text)
    width = 1
    while width < ANCHOR_CHARS:
        hashes = hashes[:-width] * np.uint64(pow(_BASE, width, 1 << 64)) + hashes[width:]
        width *= 2
    return hashes


def _ranges(first: Integers, counts: Integers) -> Integers:
    """Concatenate ``arange(f, f + c)`` over all pairs of ``first`` and ``counts``."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
