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
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from kvrag.identity.fingerprint import ids_digest
from kvrag.prompt.partial import MAX_LOOKS, PartFinder, common
from kvrag.prompt.plan import (
    NO_PREFIX,
    OTHER_CONTEXT,
    OTHER_PREFIX,
    OTHER_TEXT,
    Lookup,
    Plan,
    PlannedPiece,
    why_missing,
)
from kvrag.prompt.spans import ANCHOR_CHARS, SpanIndex
from kvrag.prompt.template import PromptEncoder
from kvrag.prompt.tokenizer import Piece, TokenIds
from kvrag.types import MissedChunk

SEAM_TOKENS = 2  # tokens at the end of a prefix that the text after it may change


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows ``start:stop`` of the prompt with the ids of a chunk from its row ``offset`` on."""

    start: int
    stop: int
    offset: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows; negative if nothing is left."""
        return self.stop - self.start

    def after(self, row: int) -> Overlap:
        """Return the part from a row on."""
        skipped = max(0, row - self.start)
        return replace(self, start=self.start + skipped, offset=self.offset + skipped)


@dataclass(frozen=True, slots=True)
class Place:
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
        self.starts = [0, *accumulate(map(len, self._texts))][: len(ids)]

    def overlaps(self, chunk: DecodedIds, at: int) -> Iterator[Overlap]:
        """Yield the rows that a chunk shares, if its text begins at the character ``at``."""
        row = bisect_left(self.starts, at)
        own = 0
        first: tuple[int, int] | None = None
        while row < len(self.ids) and own < len(chunk.ids):
            gap = self.starts[row] - at - chunk.starts[own]
            if gap == 0 and self.ids[row] == chunk.ids[own]:
                first = first or (row, own)
            elif first:
                yield Overlap(first[0], row, first[1])
                first = None
            row += gap <= 0
            own += gap >= 0
        if first:
            yield Overlap(first[0], row, first[1])

    def rows(self, start: int, stop: int) -> Overlap:
        """Return the rows of the tokens that begin in the characters ``start:stop``."""
        return Overlap(bisect_left(self.starts, start), bisect_left(self.starts, stop))

    def planned(self, start: int, stop: int, **how: Any) -> PlannedPiece:
        """Plan rows as live text, without BOS, unless ``how`` says more."""
        text = "".join(self._texts[max(start, self._num_bos) : stop])
        return PlannedPiece(Piece(text), self.ids[start:stop], **how)


def plan_ids(
    ids: Sequence[int],
    encoder: PromptEncoder,
    *,
    scanner: SpanIndex,
    lookup: Lookup,
    prefixes: Iterable[TokenIds],
    min_chunk_tokens: int,
) -> Plan:
    """Plan a prompt of token ids, which are used unchanged.

    Parameters
    ----------
    ids
        The prompt.
    encoder, scanner, lookup, min_chunk_tokens
        As for :func:`kvrag.prompt.plan.plan_prompt`.
    prefixes
        Token ids that chunks were encoded behind. The prompt's prefix is the one that it begins
        with, but for a seam's tokens; else all rows before its first chunk.
    """
    prompt = DecodedIds(ids, encoder)
    bos = tuple(encoder.bos_ids)
    named = max([bos, *prefixes], key=lambda each: common(each, prompt.ids))
    finder = _Finder(
        prompt,
        encoder,
        scanner,
        lookup,
        min_chunk_tokens,
        named,
    )
    places = finder.places()
    if named == bos or not finder.begins_with(named):
        first = places[0].start if places else len(prompt.text)
        finder.prefix = prompt.ids[: prompt.rows(0, first).stop]
        finder.look_up(places)
    pieces = [finder.head(named)]
    row = len(pieces[0].ids)
    for place in places:
        for found in finder.overlaps(place):
            rows = found.after(row)
            if rows.num_rows >= min_chunk_tokens:
                pieces += [prompt.planned(row, rows.start), finder.planned(place, rows)]
                row = rows.stop
    pieces.append(prompt.planned(row, len(ids)))
    kept = tuple(piece for piece in pieces if piece.ids)
    return Plan(kept, encoder, lookup.kv_dtype, lookup.deadline.fault)


@dataclass(slots=True)
class _Finder:
    """Finder of known chunks in a decoded prompt.

    ``prefix`` holds the ids of the prompt's prefix.
    """

    prompt: DecodedIds
    encoder: PromptEncoder
    scanner: SpanIndex
    lookup: Lookup
    min_tokens: int
    prefix: TokenIds
    decoded: dict[TokenIds, DecodedIds] = field(default_factory=dict)

    def begins_with(self, prefix: TokenIds) -> bool:
        """Whether the prompt begins with a prefix, the last tokens of which may be merged."""
        missing = len(prefix) - common(prefix, self.prompt.ids)
        text = DecodedIds(prefix, self.encoder).text
        return missing <= SEAM_TOKENS and self.prompt.text.startswith(text)

    def places(self) -> list[Place]:
        """Return the places of known chunks, in order."""
        text = self.prompt.text
        hidden = set[str]()
        while True:
            spans = self.scanner.scan(text, without=hidden)
            ids = {s.digest: self.encoder.chunk_ids(text[s.start : s.stop]) for s in spans}
            self.lookup.look_up(ids.values(), ids_digest(self.prefix))
            new = {
                s.digest
                for s in spans
                if self.lookup.usable(ids[s.digest]) is None
                and self.scanner.scan(text[s.start : s.stop], without={*hidden, s.digest})
            }
            if not new:
                break
            hidden |= new  # a text without KV must not hide shorter texts with KV
        whole = [Place(s.start, s.stop, ids[s.digest]) for s in spans]
        parts = self._parts([place for place in whole if self.lookup.usable(place.ids)])
        self.look_up(parts)
        return sorted([*parts, *whole], key=lambda place: place.start)

    def look_up(self, places: Iterable[Place]) -> None:
        """Find KV of these places behind the prompt's prefix."""
        self.lookup.look_up([place.ids for place in places], ids_digest(self.prefix))

    def _parts(self, covered: Sequence[Place]) -> list[Place]:
        """Return the places of first parts of stored chunks outside of ``covered``."""
        text = self.prompt.text
        outside = [
            at
            for at in self.scanner.head_places(text)
            if not any(place.start <= at < place.stop for place in covered)
        ]
        heads = {at: text[at : at + ANCHOR_CHARS] for at in outside[:MAX_LOOKS]}
        finder = PartFinder(self.scanner, self.encoder, self.lookup.stored_ids, self.min_tokens)
        stored = finder.stored(heads.values()) if heads else {}
        parts = []
        for at, head in heads.items():
            places = [Place(at, at, ids) for _, ids in stored.get(head, ())]
            if places:
                parts.append(max(places, key=self._num_shared))
        return parts

    def _num_shared(self, place: Place) -> int:
        return sum([rows.num_rows for rows in self._shared(place)])

    def _shared(self, place: Place) -> Iterator[Overlap]:
        if place.ids not in self.decoded:
            self.decoded[place.ids] = DecodedIds(place.ids, self.encoder)
        return self.prompt.overlaps(self.decoded[place.ids], place.start)

    def overlaps(self, place: Place) -> Iterable[Overlap]:
        """Return the rows of a chunk to reuse, or all its rows if it has no KV."""
        if self.lookup.usable(place.ids) is None:
            return [self.prompt.rows(place.start, place.stop)]
        return self._shared(place)

    def head(self, named: TokenIds) -> PlannedPiece:
        """Plan the rows of the prefix, or the rows that a known prefix shares, if they are many."""
        heads = [self.prefix]
        if common(named, self.prompt.ids) >= self.min_tokens:
            heads.append(named)
        identities = [self.lookup.identity(ids, ids_digest(())) for ids in heads]
        known = self.lookup.known(identities)
        identity = next((each for each in identities if each in known), None)
        ids = self.prefix if identity is None else identity.token_ids
        reason = self.lookup.deadline.fault or NO_PREFIX
        return self.prompt.planned(
            0,
            common(ids, self.prompt.ids),
            identity=identity,
            is_exact=identity is not None,
            reason=reason if identity is None else None,
        )

    def planned(self, place: Place, rows: Overlap) -> PlannedPiece:
        """Plan rows of a chunk."""
        piece = self.prompt.planned(rows.start, rows.stop)
        piece = replace(piece, piece=replace(piece.piece, kind="chunk"))
        identity = self.lookup.usable(place.ids)
        if identity is None:
            missed = MissedChunk(self.prompt.text[place.start : place.stop], is_given=False)
            why = why_missing(self.lookup, self.lookup.found.get(place.ids))
            return replace(piece, reason=why, missed=missed)
        part = reason = None
        if rows.num_rows < len(place.ids):
            last = rows.offset + rows.num_rows
            part = f"tokens {rows.offset + 1} to {last} of {len(place.ids)} of a stored chunk"
        if identity.prefix != ids_digest(self.prefix):
            reason = OTHER_PREFIX
        elif rows.offset or self.prompt.ids[: rows.start] != self.prefix:
            reason = OTHER_TEXT
        elif identity.context:
            reason = OTHER_CONTEXT
        return replace(
            piece,
            identity=identity,
            is_exact=reason is None,
            is_mismatched=reason == OTHER_PREFIX,
            reason="; ".join(filter(None, (part, reason))) or None,
            offset=rows.offset,
        )
