"""The first part of a stored chunk, where a prompt holds only that.

Frameworks cut a retrieved document to a number of characters or tokens, so a prompt may hold its beginning only. Attention is causal: the
KV of the first rows does not depend on the rest, and is valid for the part.

Where a registered text begins in the prompt and was not found as a whole, the prompt's text from there on is tokenised and compared with
the token ids of the stored chunks that begin so. The part ends where the ids part ways, and counts only if its text, tokenised alone, has
just these ids: so it is a chunk like any other, and a prompt's ids stay those of its segments, joined.

What is missed is computed live, so every bound in here costs time and never correctness.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrag.prompt.spans import ANCHOR_CHARS
from kvrag.prompt.template import Piece, PromptEncoder
from kvrag.types import TextEntry

MAX_TEXTS = 8
"""Stored texts that are compared at one place; more begin alike only where they share a header."""

MAX_LOOKS = 64
"""Places of one prompt where a text may begin and nothing was found, after which no more are looked at."""

FIRST_LOOK = 1024
"""Characters that are tokenised first at a place; four times as many each time that they all belong to a stored chunk."""

SETTLE_TOKENS = 4
"""Tokens before the end of a piece of text that may be others for want of what follows."""

MAX_BACK_OFF = 8
"""Tokens that are given up to end a part where its text, tokenised alone, has the same ids."""

TokenIds = tuple[int, ...]


class HeadScanner(Protocol):
    """Finds where known chunk texts may begin: :class:`kvrag.prompt.spans.SpanIndex`."""

    def head_places(self, text: str) -> list[int]:
        """Return the places where a known text may begin, ascending."""
        ...

    def texts_like(self, text: str, *, limit: int) -> list[TextEntry]:
        """Return known texts that may begin like this one, at most ``limit``."""
        ...


@dataclass(slots=True)
class PartFinder:
    """Finds first parts of stored chunks in the pieces of one prompt.

    Parameters
    ----------
    scanner
        Known chunk texts.
    encoder
        Tokenises.
    stored_ids
        Texts → the token ids of those that have KV of this model.
    min_tokens
        Shorter parts stay live text.
    """

    scanner: HeadScanner
    encoder: PromptEncoder
    stored_ids: Callable[[Sequence[TextEntry]], list[TokenIds]]
    min_tokens: int
    _looks: int = MAX_LOOKS

    def cut_live(self, piece: Piece) -> list[Piece]:
        """Cut live text at the first parts of stored chunks in it; the piece itself where there are none."""
        text, at = piece.text, 0
        out: list[Piece] = []
        places = self.scanner.head_places(text)
        index = 0
        while index < len(places) and self._looks > 0:
            start = places[index]
            # What follows a document may be the template's own control tokens, whatever the document says there.
            part = self._first_part(text, start, self.encoder.control_text_after(text, start), is_live=True)
            if part is None:
                self._looks -= 1
                index += 1
                continue
            out += [Piece(text[at:start]), part]
            at = start + len(part.text)
            index = bisect_left(places, at)
        return [piece for piece in (*out, Piece(text[at:])) if piece.text] if out else [piece]

    def cut_chunk(self, piece: Piece) -> list[Piece]:
        """Cut the text of a chunk that has no KV into the first part of a stored one and the rest; the piece itself if it is none."""
        part = self._first_part(piece.text, 0, len(piece.text), is_live=False)
        return [piece] if part is None else [part, Piece(piece.text[len(part.text) :], "chunk")]

    def _first_part(self, text: str, start: int, stop: int, *, is_live: bool) -> Piece | None:
        """Return the longest first part of a stored chunk that ``text[start:stop]`` begins with."""
        entries = self.scanner.texts_like(text[start : start + ANCHOR_CHARS], limit=MAX_TEXTS)
        stored = self.stored_ids(entries) if entries else []
        if not stored:
            return None
        text = text[start : min(stop, start + max(entry.num_chars for entry in entries))]
        chunk, count = self._longest(text, stored)
        for end in range(count, max(count - MAX_BACK_OFF, self.min_tokens) - 1, -1):
            ids, body = chunk[:end], self.encoder.decode(chunk[:end])
            # Tokenised as live text it has the same ids: so it holds no control token in a spelling that only the tokenizer knows.
            tokenise = self.encoder.live_ids if is_live else self.encoder.document_ids
            if text.startswith(body) and tuple(tokenise(body)) == ids:
                return Piece(body, "chunk", part_of=chunk, num_ids=end)
        return None

    def _longest(self, text: str, stored: Sequence[TokenIds]) -> tuple[TokenIds, int]:
        """Return the stored ids that agree longest with the text's, the shortest of several, and how many do."""
        width = FIRST_LOOK
        while True:
            ids = self.encoder.document_ids(text[:width])
            counts = [_common(ids, chunk) for chunk in stored]
            count, _, chunk = max((n, -len(c), c) for n, c in zip(counts, stored, strict=True))
            if width >= len(text) or count < len(ids) - SETTLE_TOKENS:
                return chunk, count
            width *= 4


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of equal ids at the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
