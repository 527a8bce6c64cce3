"""Plan a prompt of token ids: find stored chunks in ids that were tokenised as a whole.

A chunk is stored with the ids of its own text. A prompt that was tokenised as a whole may have
merged the chunk's first and last characters with the text around it. So the ids are decoded, chunks
are found in the text, and a chunk's ids are compared with the prompt's, token by token. Rows with
the same id at the same character are reused; a seam costs its own rows, never the chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvrag.identity.fingerprint import ids_digest
from kvrag.kv.layers import GROUP
from kvrag.prompt.partial import MAX_LOOKS, MAX_TEXTS
from kvrag.prompt.plan import (
    OTHER_CONTEXT,
    OTHER_PREFIX,
    OTHER_TEXT,
    Lookup,
    Plan,
    PlannedPiece,
)
from kvrag.prompt.spans import ANCHOR_CHARS, SpanIndex
from kvrag.prompt.template import PromptEncoder
from kvrag.prompt.tokenizer import Piece, TokenIds
from kvrag.types import ChunkIdentity

SEAM_TOKENS = 2  # tokens at the end of a prefix that the text after it may change


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``start:stop`` of the prompt with the ids of a chunk from its row ``offset`` on."""

    start: int
    stop: int
    offset: int
    chunk: TokenIds

    def after(self, row: int, multiple: int) -> Run:
        """Return the part from a row on, with an offset that is a multiple of ``multiple``."""
        offset = self.offset + max(0, row - self.start)
        offset += -offset % multiple
        return replace(self, start=self.start + offset - self.offset, offset=offset)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Text of token ids, and the index of every token's first character in it."""

    ids: TokenIds
    text: str
    starts: list[int]

    @classmethod
    def of(cls, ids: Sequence[int], encoder: PromptEncoder) -> Decoded:
        """Decode token ids."""
        texts = encoder.token_texts(ids)
        return cls(tuple(ids), "".join(texts), [0, *accumulate(map(len, texts))][: len(texts)])

    def runs(self, chunk: TokenIds, at: int, encoder: PromptEncoder) -> Iterator[Run]:
        """Yield the runs of a chunk's ids, whose text begins at the character ``at``."""
        own = Decoded.of(chunk, encoder).starts
        row = bisect_left(self.starts, at)
        place = 0
        first: tuple[int, int] | None = None
        while row < len(self.ids) and place < len(chunk):
            gap = self.starts[row] - at - own[place]
            if gap == 0 and self.ids[row] == chunk[place]:
                first = first or (row, place)
            elif first:
                yield Run(first[0], row, first[1], chunk)
                first = None
            row += gap <= 0
            place += gap >= 0
        if first:
            yield Run(first[0], row, first[1], chunk)


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
        Token ids that chunks were encoded behind.
    """
    prompt = Decoded.of(ids, encoder)
    prefix = max([tuple(encoder.bos_ids), *prefixes], key=lambda each: _common(each, prompt.ids))
    num_head = _common(prefix, prompt.ids)
    is_same = len(prefix) - num_head <= SEAM_TOKENS
    finder = _Finder(prompt, encoder, scanner, lookup, ids_digest(prefix if is_same else ids[:0]))
    head = lookup.identity(prefix, ids_digest(()))
    is_stored = num_head > 0 and head in lookup.known([head])
    pieces = [_piece(prompt, 0, num_head, encoder, head if is_stored else None, is_exact=True)]
    row = num_head
    # Codes of 4 bits have a scale per group of rows, so they are read from a group's first row.
    multiple = GROUP if lookup.kv_dtype == "int4" else 1
    for found, identity in finder.found():
        run = found.after(row, multiple)
        if run.stop - run.start < min_chunk_tokens:
            continue
        is_next = (run.start, run.offset, num_head) == (len(prefix), 0, len(prefix))
        reason = None
        if not is_same or identity.prefix != finder.prefix:
            reason = OTHER_PREFIX
        elif not is_next:
            reason = OTHER_TEXT
        elif identity.context:
            reason = OTHER_CONTEXT
        pieces.append(_piece(prompt, row, run.start, encoder))
        piece = _piece(prompt, run.start, run.stop, encoder, identity, is_exact=reason is None)
        pieces.append(
            replace(
                piece,
                piece=replace(piece.piece, kind="chunk"),
                is_mismatched=reason == OTHER_PREFIX,
                reason=reason,
                offset=run.offset,
            )
        )
        row = run.stop
    pieces.append(_piece(prompt, row, len(prompt.ids), encoder))
    kept = tuple(piece for piece in pieces if piece.ids)
    return Plan(kept, encoder, lookup.kv_dtype, lookup.deadline.fault)


@dataclass(slots=True)
class _Finder:
    """Finder of stored chunks in a decoded prompt; ``prefix`` is the digest of its prefix."""

    prompt: Decoded
    encoder: PromptEncoder
    scanner: SpanIndex
    lookup: Lookup
    prefix: str

    def found(self) -> Iterator[tuple[Run, ChunkIdentity]]:
        """Yield the runs of stored chunks and their identities, by first row."""
        hidden = set[str]()
        while True:
            spans = self.scanner.scan(self.prompt.text, without=hidden)
            texts = {s.digest: self.prompt.text[s.start : s.stop] for s in spans}
            chunks = {digest: self.encoder.chunk_ids(text) for digest, text in texts.items()}
            stored = self._stored(chunks.values())
            new = {digest for digest, ids in chunks.items() if ids not in stored}
            if not new:
                break
            hidden |= new  # a text without KV must not hide shorter texts with KV
        places = [(span.start, span.stop, chunks[span.digest]) for span in spans]
        places += self._parts([(start, stop) for start, stop, _ in places])
        stored |= self._stored([ids for _, _, ids in places if ids not in stored])
        for start, _, ids in sorted(places):
            if ids in stored:
                for run in self.prompt.runs(ids, start, self.encoder):
                    yield run, stored[ids]

    def _parts(self, covered: Sequence[tuple[int, int]]) -> list[tuple[int, int, TokenIds]]:
        """Return the places where the first part of a stored chunk stands outside of ``covered``.

        Every place comes with the chunk's token ids.
        """
        text = self.prompt.text
        outside = [
            at
            for at in self.scanner.head_places(text)
            if not any(start <= at < stop for start, stop in covered)
        ]
        found = []
        for at in outside[:MAX_LOOKS]:
            entries = self.scanner.texts_like(text[at : at + ANCHOR_CHARS], limit=MAX_TEXTS)
            stored = [ids for runs in self.lookup.stored_ids(entries).values() for ids in runs]
            if stored:
                found.append((at, at, max(stored, key=lambda ids: self._covered(ids, at))))
        return found

    def _covered(self, ids: TokenIds, at: int) -> int:
        return sum(run.stop - run.start for run in self.prompt.runs(ids, at, self.encoder))

    def _stored(self, chunks: Iterable[TokenIds]) -> dict[TokenIds, ChunkIdentity]:
        """Map token ids to the identity of their KV, behind this prefix or else another."""
        distinct = list(dict.fromkeys(chunks))
        own = {i: self.lookup.identity(i, self.prefix, self.lookup.context) for i in distinct}
        known = self.lookup.known(own.values())
        found = {ids: identity for ids, identity in own.items() if identity in known}
        others = self.lookup.elsewhere([ids for ids in distinct if ids not in found])
        return found | {i: e for i, e in others.items() if e.kv_dtype == self.lookup.kv_dtype}


def _piece(
    prompt: Decoded,
    start: int,
    stop: int,
    encoder: PromptEncoder,
    identity: ChunkIdentity | None = None,
    *,
    is_exact: bool = False,
) -> PlannedPiece:
    """Return the planned piece of some rows of a prompt."""
    ids = prompt.ids[start:stop]
    text = "".join(encoder.token_texts(ids))
    return PlannedPiece(Piece(text), ids, identity, is_exact and identity is not None)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
