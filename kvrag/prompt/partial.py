"""Find the first part of a stored chunk where a prompt does not hold the whole chunk.

Frameworks cut a retrieved document to a number of characters or tokens, so a prompt may hold only
its beginning. Attention is causal: the KV of the first rows does not depend on the rest, and is
valid for the part.

Where a registered text begins in the prompt and was not found as a whole, the prompt's text from
there on is tokenised and compared with the token ids of the stored chunks that begin like it. The
part ends where the ids differ, and counts only if its text, tokenised alone, has exactly these ids:
then it is a chunk like any other, and the prompt's ids stay the joined ids of its segments.

A missed part is computed live, so the bounds here cost time and never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, count
from operator import ne
from typing import TYPE_CHECKING

from kvrag.prompt.spans import ANCHOR_CHARS
from kvrag.prompt.tokenizer import Piece, TokenIds
from kvrag.types import TextEntry

if TYPE_CHECKING:
    from kvrag.prompt.plan import Lookup

MAX_TEXTS = 8  # stored texts compared at a place; more begin alike only where they share a header
MAX_LOOKS = 64  # places without a part after which the rest of a prompt is not searched
FIRST_LOOK = 1024  # characters tokenised first at a place; then four times as many while all match
SETTLE_TOKENS = 4  # tokens at the end of a text that may change with the text after it
MAX_BACK_OFF = 8  # tokens dropped, at most, until a part's text, tokenised alone, has the same ids


def cut_live(pieces: Sequence[Piece], lookup: Lookup) -> list[Piece]:
    """Cut live pieces at the first parts of stored chunks in them.

    ``lookup`` knows the texts of chunks, and the token ids of texts that have KV of this model.
    Parts of fewer than its ``min_tokens`` tokens are ignored.
    """
    places = [lookup.scanner.head_places(p.text) if p.kind == "live" else [] for p in pieces]
    stored = stored_like(
        [
            p.text[a : a + ANCHOR_CHARS]
            for p, starts in zip(pieces, places, strict=True)
            for a in starts
        ],
        lookup,
    )
    out: list[Piece] = []
    looks = MAX_LOOKS
    for piece, starts in zip(pieces, places, strict=True):
        text = piece.text
        at = 0
        for start in starts:
            if start < at or not looks:
                continue
            # Control-token text in a live piece may be the template's own, even where the
            # document holds the same text: a part ends before it.
            stop = lookup.encoder.control_text_after(text, start)
            part = _first_part(text, start, stop, stored, lookup)
            if part is None:
                looks -= 1
                continue
            out += [Piece(text[at:start]), part]
            at = start + len(part.text)
        out.append(Piece(text[at:]) if at else piece)
    return [piece for piece in out if piece.text]


def stored_like(
    heads: Iterable[str], lookup: Lookup
) -> dict[str, list[tuple[TextEntry, TokenIds]]]:
    """Map the first characters of texts to the stored chunks that may begin with them."""
    distinct = list(dict.fromkeys(heads))[:MAX_LOOKS]
    entries = {head: lookup.scanner.texts_like(head, limit=MAX_TEXTS) for head in distinct}
    every = {entry.digest: entry for found in entries.values() for entry in found}
    ids = lookup.stored_ids(list(every.values())) if every else {}
    return {
        head: [(e, run) for e in found for run in ids.get(e.digest, ())]
        for head, found in entries.items()
    }


def _first_part(
    text: str,
    start: int,
    stop: int,
    stored: Mapping[str, list[tuple[TextEntry, TokenIds]]],
    lookup: Lookup,
) -> Piece | None:
    """Return the longest first part of a stored chunk that ``text[start:stop]`` begins with."""
    chunks = stored.get(text[start : start + ANCHOR_CHARS])
    if not chunks:
        return None
    text = text[start : min(stop, start + max(entry.num_chars for entry, _ in chunks))]
    chunk, longest = _longest(text, [ids for _, ids in chunks], lookup)
    for end in range(longest, max(longest - MAX_BACK_OFF, lookup.min_tokens) - 1, -1):
        ids = chunk[:end]
        body = lookup.encoder.decode(ids)
        # As live text it must have the same ids: then it holds no control token in a spelling
        # that only the tokenizer knows.
        if text.startswith(body) and tuple(lookup.encoder.live_ids(body)) == ids:
            return Piece(body, "chunk", part_of=chunk)
    return None


def _longest(text: str, stored: Sequence[TokenIds], lookup: Lookup) -> tuple[TokenIds, int]:
    """Return the stored ids that share most first ids with the text, and how many they share.

    Ties go to the shortest stored ids.
    """
    width = FIRST_LOOK
    while True:
        ids = lookup.encoder.document_ids(text[:width])
        counts = [common(ids, chunk) for chunk in stored]
        most, _, chunk = max((n, -len(c), c) for n, c in zip(counts, stored, strict=True))
        if width >= len(text) or most < len(ids) - SETTLE_TOKENS:
            return chunk, most
        width *= 4


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))
