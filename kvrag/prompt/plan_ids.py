"""Plan a prompt of token ids: find stored chunks in ids that were tokenised as a whole.

A chunk is stored with the ids of its own text. A prompt that was tokenised as a whole may have
merged the chunk's first and last characters with the text around it. So the ids are decoded, chunks
are found in the text, and a chunk's ids are compared with the prompt's, token by token. Rows with
the same id at the same character are reused; a seam costs its own rows, never the chunk.

Only ids decide: a chunk's text may hold the text of a control token, which has other ids there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple

from kvrag.identity.fingerprint import ids_digest
from kvrag.prompt.partial import MAX_LOOKS, common, stored_like
from kvrag.prompt.plan import NO_IDS, Lookup, Plan, PlannedPiece
from kvrag.prompt.spans import ANCHOR_CHARS
from kvrag.prompt.template import PromptEncoder
from kvrag.prompt.tokenizer import UNKNOWN, Piece, TokenIds
from kvrag.types import MissedChunk

SEAM_TOKENS = 2  # tokens at the end of a prefix that the text after it may change


class Overlap(NamedTuple):
    """Rows ``start:stop`` of the prompt with the ids of a chunk from its row ``offset`` on."""

    start: int
    stop: int
    offset: int = 0


class Place(NamedTuple):
    """Characters ``start:stop`` of the prompt with a chunk's text, and the chunk's token ids.

    Where only the first part of a stored chunk stands, ``stop`` is ``start``.
    """

    start: int
    stop: int
    ids: TokenIds


class DecodedIds:
    """Token ids, their text, and the index of every token's first character in it."""

    def __init__(self, ids: Sequence[int], encoder: PromptEncoder) -> None:
        self.ids = tuple(ids)
        self._texts = encoder.token_texts(ids)
        self.text = "".join(self._texts)
        bos = tuple(encoder.bos_ids)
        self._num_bos = len(bos) * (self.ids[: len(bos)] == bos)
        self.starts = [0, *accumulate(map(len, self._texts))]
        self._decoded = cache(lambda chunk: DecodedIds(chunk, encoder))

    def shared(self, place: Place) -> Iterator[Overlap]:
        """Yield the rows that a chunk at a place shares."""
        row = bisect_left(self.starts, place.start)
        # Most chunks have the prompt's ids from their first to one of their last.
        same = self._num_same(row, place)
        first = (row, 0) if same else None
        row += same
        at = self.starts[row] if same else place.start
        rest = self._decoded(place.ids[same:])
        own = 0
        while row < len(self.ids) and own < len(rest.ids):
            gap = self.starts[row] - at - rest.starts[own]
            if gap == 0 and self.ids[row] == rest.ids[own]:
                first = first or (row, same + own)
            elif first:
                yield Overlap(first[0], row, first[1])
                first = None
            row += gap <= 0
            own += gap >= 0
        if first:
            yield Overlap(first[0], row, first[1])

    def _num_same(self, row: int, place: Place) -> int:
        """Return how many of a chunk's first tokens are the prompt's from a row on.

        The last of them ends a character, in the prompt and so in the chunk.
        """
        if self.starts[row] != place.start:
            return 0
        same = common(place.ids, self.ids[row : row + len(place.ids)])
        while same and not self._ends_character(row + same - 1):
            same -= 1
        return same

    def _ends_character(self, row: int) -> bool:
        """Whether a token ends a character; one that shares it with others counts as inside."""
        text = self._texts[row]
        return bool(text) and UNKNOWN not in text and all(self._texts[row + 1 : row + 2])

    def num_shared(self, place: Place) -> int:
        """Return the number of rows that a chunk at a place shares."""
        return sum([rows.stop - rows.start for rows in self.shared(place)])

    def begins_with(self, prefix: DecodedIds) -> bool:
        """Whether the text begins with a prefix, the last tokens of which may be merged."""
        missing = len(prefix.ids) - common(prefix.ids, self.ids)
        return missing <= SEAM_TOKENS and self.text.startswith(prefix.text)

    def rows(self, start: int, stop: int) -> Overlap:
        """Return the rows of the tokens that begin in the characters ``start:stop``."""
        return Overlap(bisect_left(self.starts, start), bisect_left(self.starts, stop))

    def piece(self, start: int, stop: int, kind: Literal["live", "chunk"] = "live") -> Piece:
        """Return the text of rows, without BOS."""
        return Piece("".join(self._texts[max(start, self._num_bos) : stop]), kind)

    def live(self, start: int, stop: int) -> PlannedPiece:
        """Plan rows as live text."""
        return PlannedPiece(self.piece(start, stop), self.ids[start:stop])


def plan_ids(ids: Sequence[int], lookup: Lookup, prefixes: Iterable[TokenIds]) -> Plan:
    """Plan a prompt of token ids, which are used unchanged.

    Parameters
    ----------
    ids
        The prompt.
    lookup
        As for :func:`kvrag.prompt.plan.plan_prompt`.
    prefixes
        Token ids that chunks were encoded behind. The prompt's prefix is the one that it begins
        with, but for a seam's tokens; else all rows before its first chunk.
    """
    encoder = lookup.encoder
    prompt = DecodedIds(ids, encoder)
    bos = tuple(encoder.bos_ids)
    named = max([bos, *prefixes], key=lambda each: common(each, prompt.ids))
    places = _places(prompt, lookup)
    prefix = named
    if named == bos or not prompt.begins_with(DecodedIds(named, encoder)):
        first = places[0].start if places else len(prompt.text)
        prefix = prompt.ids[: prompt.rows(0, first).stop]
    lookup.prefix = ids_digest(prefix)
    heads = [prefix]
    if common(named, prompt.ids) >= lookup.min_tokens:
        heads.append(named)
    identities = [lookup.identity(each, NO_IDS) for each in heads]
    known = lookup.look_up([place.ids for place in places], *identities)
    head = next((each for each in identities if each in known), None)
    stop = common(prefix if head is None else head.token_ids, prompt.ids)
    begun = lookup.head(prompt.piece(0, stop), prompt.ids[:stop], head)
    return lookup.plan([begun, *_planned(prompt, places, lookup, stop, prefix)])


def _places(prompt: DecodedIds, lookup: Lookup) -> list[Place]:
    """Return the places of known chunks, and of first parts of stored chunks outside of these."""
    text = prompt.text
    whole = [
        Place(span.start, span.stop, lookup.encoder.chunk_ids(text[span.start : span.stop]))
        for span in lookup.scanner.scan(text)
    ]
    outside = [
        at
        for at in lookup.scanner.head_places(text)
        if not any(place.start <= at < place.stop for place in whole)
    ]
    heads = {at: text[at : at + ANCHOR_CHARS] for at in outside[:MAX_LOOKS]}
    stored = stored_like(heads.values(), lookup)
    parts = [[Place(at, at, ids) for _, ids in stored.get(heads[at], ())] for at in heads]
    best = [max(each, key=prompt.num_shared) for each in parts if each]
    return sorted([*whole, *best], key=lambda place: place.start)


def _planned(
    prompt: DecodedIds, places: Iterable[Place], lookup: Lookup, row: int, prefix: TokenIds
) -> Iterator[PlannedPiece]:
    """Plan the rows from ``row`` on: those of chunks, and live text between them.

    A chunk without KV has all its rows; of a chunk with KV, the shared rows are reused.
    """
    for place in places:
        has_kv = lookup.usable(place.ids) is not None
        rows = prompt.shared(place) if has_kv else [prompt.rows(place.start, place.stop)]
        for first, stop, offset in rows:
            start = max(row, first)
            if stop - start < lookup.min_tokens:
                continue
            offset += start - first
            yield prompt.live(row, start)
            yield lookup.chunk(
                prompt.piece(start, stop, "chunk"),
                prompt.ids[start:stop],
                place.ids,
                MissedChunk(prompt.text[place.start : place.stop], is_given=False),
                is_next=not offset and prompt.ids[:start] == prefix,
                offset=offset,
            )
            row = stop
    yield prompt.live(row, len(prompt.ids))
