"""Plan a prompt of token ids: find stored chunks in ids that were tokenised as a whole.

A chunk is stored with the ids of its own text. A prompt that was tokenised as a whole may have
merged the chunk's first and last characters with the text around it. So the ids are decoded, chunks
are found in the text, and a chunk's ids are compared with the prompt's, token by token. Rows with
the same id at the same character are reused; a seam costs its own rows, never the chunk.

Only ids decide: a chunk's text may hold the text of a control token, which has other ids there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

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
from kvrag.types import ChunkIdentity, MissedChunk

SEAM_TOKENS = 2  # tokens at the end of a prefix that the text after it may change


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``start:stop`` of the prompt with the ids of a chunk from its row ``offset`` on."""

    start: int
    stop: int
    offset: int = 0

    def after(self, row: int) -> Run:
        """Return the part from a row on."""
        skipped = max(0, row - self.start)
        return replace(self, start=self.start + skipped, offset=self.offset + skipped)


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk's text in a prompt, from the character ``start`` on.

    Parameters
    ----------
    start, stop
        Its characters; where only the first part of a stored chunk stands, ``stop`` is ``start``.
    ids
        The chunk's token ids.
    """

    start: int
    stop: int
    ids: TokenIds


class Decoded:
    """Token ids, their texts, and the index of every token's first character."""

    def __init__(self, ids: Sequence[int], encoder: PromptEncoder) -> None:
        self.ids = tuple(ids)
        self._texts = encoder.token_texts(ids)
        self.text = "".join(self._texts)
        self.starts = [0, *accumulate(map(len, self._texts))][: len(ids)]

    def runs(self, chunk: Decoded, at: int) -> Iterator[Run]:
        """Yield the runs of a chunk's ids, whose text begins at the character ``at``."""
        row = bisect_left(self.starts, at)
        place = 0
        first: tuple[int, int] | None = None
        while row < len(self.ids) and place < len(chunk.ids):
            gap = self.starts[row] - at - chunk.starts[place]
            if gap == 0 and self.ids[row] == chunk.ids[place]:
                first = first or (row, place)
            elif first:
                yield Run(first[0], row, first[1])
                first = None
            row += gap <= 0
            place += gap >= 0
        if first:
            yield Run(first[0], row, first[1])

    def rows(self, start: int, stop: int) -> Run:
        """Return the rows of the tokens that begin in ``start:stop``."""
        return Run(bisect_left(self.starts, start), bisect_left(self.starts, stop))

    def piece(self, start: int, stop: int, num_bos: int = 0) -> Piece:
        """Return the text of some rows as live text, without the first ``num_bos`` rows' own."""
        return Piece("".join(self._texts[max(start, num_bos) : stop]))


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
    prompt = Decoded(ids, encoder)
    bos = tuple(encoder.bos_ids)
    named = max([bos, *prefixes], key=lambda each: common(each, prompt.ids))
    num_named = common(named, prompt.ids)
    finder = _Finder(prompt, encoder, scanner, lookup, min_chunk_tokens)
    places, stored = finder.found(named)
    prefix = named
    is_begun = len(named) - num_named <= SEAM_TOKENS and prompt.text.startswith(
        Decoded(named, encoder).text
    )
    if named == bos or not is_begun:
        first = places[0].start if places else len(prompt.text)
        prefix = prompt.ids[: prompt.rows(0, first).stop]
        stored = finder.stored([place.ids for place in places], prefix)
    heads = [prefix, named] if num_named >= min_chunk_tokens else [prefix]
    identities = [lookup.identity(each, ids_digest(())) for each in heads]
    known = lookup.known(identities)
    head = next((identity for identity in identities if identity in known), None)
    row = common(head.token_ids if head else prefix, prompt.ids)
    missing = lookup.deadline.fault or NO_PREFIX
    pieces = [
        PlannedPiece(
            prompt.piece(0, row, len(bos) * (prompt.ids[: len(bos)] == bos)),
            prompt.ids[:row],
            head,
            head is not None,
            reason=None if head else missing,
        )
    ]
    for place, run in finder.runs(places, stored):
        run = run.after(row)
        if run.stop - run.start >= min_chunk_tokens:
            pieces.append(_live(prompt, row, run.start))
            pieces.append(finder.planned(place, run, stored, prefix))
            row = run.stop
    pieces.append(_live(prompt, row, len(prompt.ids)))
    kept = tuple(piece for piece in pieces if piece.ids)
    return Plan(kept, encoder, lookup.kv_dtype, lookup.deadline.fault)


@dataclass(slots=True)
class _Finder:
    """Finder of known chunks in a decoded prompt."""

    prompt: Decoded
    encoder: PromptEncoder
    scanner: SpanIndex
    lookup: Lookup
    min_tokens: int
    decoded: dict[TokenIds, Decoded] = field(default_factory=dict)

    def found(self, prefix: TokenIds) -> tuple[list[Place], dict[TokenIds, ChunkIdentity]]:
        """Return the places of known chunks in order, and :meth:`stored` of their ids."""
        text = self.prompt.text
        hidden = set[str]()
        while True:
            spans = self.scanner.scan(text, without=hidden)
            ids = {s.digest: self.encoder.chunk_ids(text[s.start : s.stop]) for s in spans}
            stored = self.stored(ids.values(), prefix)
            new = {
                s.digest
                for s in spans
                if not self._is_usable(stored.get(ids[s.digest]))
                and self.scanner.scan(text[s.start : s.stop], without={*hidden, s.digest})
            }
            if not new:
                break
            hidden |= new  # a text without KV must not hide shorter texts with KV
        places = [Place(s.start, s.stop, ids[s.digest]) for s in spans]
        parts = self._parts([p for p in places if self._is_usable(stored.get(p.ids))])
        stored |= self.stored([part.ids for part in parts], prefix)
        return sorted([*parts, *places], key=lambda place: place.start), stored

    def stored(self, chunks: Iterable[TokenIds], prefix: TokenIds) -> dict[TokenIds, ChunkIdentity]:
        """Map token ids to the identity of their KV, behind this prefix or else another.

        KV of another type is among them, too.
        """
        distinct = list(dict.fromkeys(chunks))
        digest = ids_digest(prefix)
        own = {i: self.lookup.identity(i, digest, self.lookup.context) for i in distinct}
        known = self.lookup.known(own.values())
        found = {ids: identity for ids, identity in own.items() if identity in known}
        return found | self.lookup.elsewhere([ids for ids in distinct if ids not in found])

    def _is_usable(self, identity: ChunkIdentity | None) -> bool:
        return identity is not None and identity.kv_dtype == self.lookup.kv_dtype

    def _parts(self, covered: Sequence[Place]) -> list[Place]:
        """Return the places where the first part of a stored chunk stands outside of ``covered``."""
        text = self.prompt.text
        outside = [
            at
            for at in self.scanner.head_places(text)
            if not any(place.start <= at < place.stop for place in covered)
        ]
        heads = {at: text[at : at + ANCHOR_CHARS] for at in outside[:MAX_LOOKS]}
        finder = PartFinder(self.scanner, self.encoder, self.lookup.stored_ids, self.min_tokens)
        stored = finder.stored(heads.values()) if heads else {}
        found = []
        for at, head in heads.items():
            places = [Place(at, at, ids) for _, ids in stored.get(head, ())]
            if places:
                found.append(max(places, key=self._num_rows))
        return found

    def _num_rows(self, place: Place) -> int:
        return sum([run.stop - run.start for run in self._runs(place)])

    def _runs(self, place: Place) -> Iterator[Run]:
        if place.ids not in self.decoded:
            self.decoded[place.ids] = Decoded(place.ids, self.encoder)
        return self.prompt.runs(self.decoded[place.ids], place.start)

    def runs(
        self, places: Iterable[Place], stored: Mapping[TokenIds, ChunkIdentity]
    ) -> Iterator[tuple[Place, Run]]:
        """Yield the rows of chunks: the rows to reuse, or all rows of a chunk without KV."""
        for place in places:
            if self._is_usable(stored.get(place.ids)):
                for run in self._runs(place):
                    yield place, run
            else:
                yield place, self.prompt.rows(place.start, place.stop)

    def planned(
        self,
        place: Place,
        run: Run,
        stored: Mapping[TokenIds, ChunkIdentity],
        prefix: TokenIds,
    ) -> PlannedPiece:
        """Plan the rows of a chunk."""
        identity = stored.get(place.ids)
        ids = self.prompt.ids[run.start : run.stop]
        piece = replace(self.prompt.piece(run.start, run.stop), kind="chunk")
        if identity is None or not self._is_usable(identity):
            missed = MissedChunk(self.prompt.text[place.start : place.stop], is_given=False)
            return PlannedPiece(
                piece, ids, reason=why_missing(self.lookup, identity), missed=missed
            )
        part = why = None
        if len(ids) < len(place.ids):
            last = run.offset + len(ids)
            part = f"tokens {run.offset + 1} to {last} of {len(place.ids)} of a stored chunk"
        is_mismatched = identity.prefix != ids_digest(prefix)
        if is_mismatched:
            why = OTHER_PREFIX
        elif run.offset or self.prompt.ids[: run.start] != prefix:
            why = OTHER_TEXT
        elif identity.context:
            why = OTHER_CONTEXT
        return PlannedPiece(
            piece,
            ids,
            identity,
            why is None,
            is_mismatched,
            "; ".join(filter(None, (part, why))) or None,
            offset=run.offset,
        )


def _live(prompt: Decoded, start: int, stop: int) -> PlannedPiece:
    return PlannedPiece(prompt.piece(start, stop), prompt.ids[start:stop])
