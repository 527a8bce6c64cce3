"""Plan one prompt: which pieces have stored KV, and whether it is exact here. No tensors, no model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvrag.blend.layout import Layout, place
from kvrag.errors import InputError
from kvrag.identity.fingerprint import ids_digest
from kvrag.prompt.lookup import Lookup
from kvrag.prompt.partial import HeadScanner, PartFinder
from kvrag.prompt.template import Piece, Prompt, PromptEncoder, cut, merge_live
from kvrag.store import TieredStore
from kvrag.threads import Deadline
from kvrag.types import ChunkIdentity, ChunkKV, KVDtype, MissedChunk, Mode, Span


class Scanner(HeadScanner, Protocol):
    """Finds known chunk texts: :class:`kvrag.prompt.spans.SpanIndex`."""

    def scan(self, text: str, *, without: Collection[str] = ()) -> list[Span]:
        """Return verified spans, ascending, without overlap."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """One piece of a prompt, tokenised, and what the store has for it.

    Parameters
    ----------
    piece, ids
        The text and its token ids.
    identity
        Stored KV to use; ``None`` where there is none.
    is_exact, is_mismatched
        As in :class:`~kvrag.blend.layout.Segment`.
    reason
        Why there is no stored KV, or why it is not exact.
    missed
        The chunk to store, where it has no KV of its own.
    """

    piece: Piece
    ids: tuple[int, ...]
    identity: ChunkIdentity | None = None
    is_exact: bool = False
    is_mismatched: bool = False
    reason: str | None = None
    missed: MissedChunk | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt's pieces in order, and what the stored KV that is read for them has been rounded to.

    ``fault`` says why the store gave no answers, if it did not: then there may be more stored KV than was found.
    """

    pieces: tuple[PlannedPiece, ...]
    kv_dtype: KVDtype = "auto"
    fault: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return [i for piece in self.pieces for i in piece.ids]

    @property
    def missed(self) -> list[MissedChunk]:
        """Chunks without KV of their own, each once."""
        return list(dict.fromkeys(piece.missed for piece in self.pieces if piece.missed is not None))

    @property
    def has_mismatch(self) -> bool:
        """Whether a chunk will be used that was encoded behind another prefix."""
        return any(piece.is_mismatched for piece in self.pieces)

    def without_reuse(self, reason: str) -> Plan:
        """Return the same prompt with nothing to reuse, and why, at every chunk."""
        pieces = (PlannedPiece(p.piece, p.ids, reason=reason if p.piece.kind == "chunk" else None) for p in self.pieces)
        return replace(self, pieces=tuple(pieces))

    @property
    def identities(self) -> list[ChunkIdentity]:
        """What to load, in order of first use."""
        return list(dict.fromkeys(p.identity for p in self.pieces if p.identity is not None))


def plan_prompt(
    prompt: Prompt,
    encoder: PromptEncoder,
    *,
    scanner: Scanner,
    store: TieredStore,
    model: str,
    namespace: str,
    prefixes: Sequence[str],
    min_chunk_tokens: int,
    deadline: Deadline,
    kv_dtype: KVDtype = "auto",
    read_dtype: KVDtype = "auto",
) -> Plan:
    """Cut a prompt into pieces and look every chunk up.

    Parameters
    ----------
    prompt
        As given by the user.
    encoder
        Renders and tokenises.
    scanner
        Known chunk texts.
    store
        Asked for presence only; a fault of the store, or its being late, reads as "not there".
    model, namespace
        Fields of the identities.
    prefixes
        Texts that chunks were encoded behind; the longest one that the prompt starts with is kept apart from what follows it.
    min_chunk_tokens
        Shorter chunks are live text.
    deadline
        Time that the store has for all questions together.
    kv_dtype, read_dtype
        How the KV is kept, a field of the identities; and what it has been rounded to when it is read.

    Raises
    ------
    InputError
        If the prompt is empty or malformed.
    """
    lookup = Lookup(store, model, namespace, deadline, kv_dtype)
    head, rest = _split_head(merge_live(encoder.pieces(prompt)), prefixes)
    rest = _cut_at_chunks(rest, scanner, encoder, lookup)
    finder = PartFinder(scanner, encoder, lookup.stored_ids, min_chunk_tokens)
    rest = [part for piece in rest for part in (finder.cut_live(piece) if piece.kind == "live" else [piece])]
    if head is None and rest and rest[0].kind == "live":
        head, rest = rest[0], rest[1:]
    elif head is not None and not any(piece.kind == "chunk" for piece in rest):
        head, rest = Piece(head.text + "".join(piece.text for piece in rest)), []
    head_ids = tuple(encoder.live_ids(head.text, at_start=True)) if head else tuple(encoder.bos_ids)
    lookup.prefix = ids_digest(head_ids)
    planned = [_plan_head(head or Piece(""), head_ids, lookup)] if head_ids else []
    for index, piece in enumerate(rest):
        planned += _plan_piece(piece, encoder, lookup, finder, is_next_to_head=index == 0)
    planned = [p for p in planned if p.ids]
    if not planned:
        raise InputError("the prompt has no tokens; pass some text")
    return Plan(tuple(planned), read_dtype, deadline.fault)


def _split_head(pieces: list[Piece], prefixes: Sequence[str]) -> tuple[Piece | None, list[Piece]]:
    """Take a known prefix off the prompt before it is searched: a chunk's text inside the prefix is part of the prefix."""
    if not pieces or pieces[0].kind == "chunk":
        return None, pieces
    text = pieces[0].text
    known = max((p for p in prefixes if p and text.startswith(p)), key=len, default=None)
    if known is None:
        return None, pieces
    return Piece(known), merge_live([Piece(text[len(known) :]), *pieces[1:]])


def _cut_at_chunks(pieces: list[Piece], scanner: Scanner, encoder: PromptEncoder, lookup: Lookup) -> list[Piece]:
    """Cut pieces at known chunks; the longest wins, unless it has no KV and hides shorter ones."""
    without: set[str] = set()
    while True:
        spans = {i: scanner.scan(p.text, without=without) for i, p in enumerate(pieces) if p.kind == "live"}
        hiding = {
            span.digest
            for index, found in spans.items()
            for span in found
            if scanner.scan(text := pieces[index].text[span.start : span.stop], without={*without, span.digest})
            and not lookup.is_stored(encoder.chunk_ids(text))
        }
        if not hiding:
            return cut(pieces, spans)
        without |= hiding


def _plan_head(head: Piece, ids: tuple[int, ...], lookup: Lookup) -> PlannedPiece:
    identity = lookup.identity(ids, ids_digest(()))
    if lookup.has(identity):
        return PlannedPiece(head, ids, identity, is_exact=True)
    return PlannedPiece(head, ids, reason=lookup.why_not("no stored KV for this prefix"))


def _plan_piece(
    piece: Piece, encoder: PromptEncoder, lookup: Lookup, finder: PartFinder, *, is_next_to_head: bool
) -> list[PlannedPiece]:
    """Plan one piece; two come of a chunk without KV whose first part is that of a stored one."""
    if piece.kind == "live":
        return [PlannedPiece(piece, tuple(encoder.live_ids(piece.text)))]
    ids = piece.part_of[: piece.num_ids] or encoder.chunk_ids(piece.text)
    if len(ids) < finder.min_tokens:
        return [PlannedPiece(piece, ids, reason=f"{len(ids)} tokens, fewer than min_chunk_tokens={finder.min_tokens}")]
    planned = _plan_stored(piece, ids, lookup, is_next_to_head)
    if planned is not None:
        return [planned]
    missed = None if piece.part_of else MissedChunk(piece.text, piece.is_given)
    first, *others = finder.cut_chunk(piece)
    planned = _plan_stored(first, first.part_of[: first.num_ids], lookup, is_next_to_head) if first.part_of else None
    if planned is not None:
        reason = "the rest of a chunk of which another one that is stored has the first part"
        rest = [PlannedPiece(other, encoder.chunk_ids(other.text), reason=reason) for other in others]
        pays = sum(len(other.ids) for other in rest) >= finder.min_tokens
        return [replace(planned, missed=missed if pays else None), *rest]
    if dtypes := lookup.other_dtypes(ids):
        reason = f"kept with kv_dtype={dtypes[0]!r}, and {lookup.kv_dtype!r} is asked for: precompute it again, or ask for that"
        return [PlannedPiece(piece, ids, reason=reason, missed=missed)]
    known = "the text is known, but there is no KV of this model for it" if not piece.is_given else "not precomputed"
    reason = lookup.why_not(f"{known}: precompute it with this model")
    return [PlannedPiece(piece, ids, reason=reason, missed=missed)]


def _plan_stored(piece: Piece, ids: tuple[int, ...], lookup: Lookup, is_next_to_head: bool) -> PlannedPiece | None:
    """Plan a chunk, or the first part of one, by its stored KV; ``None`` where there is none."""
    stored = piece.part_of or ids
    reasons = [f"first {len(ids)} of {len(stored)} tokens of a stored chunk"] if len(stored) > len(ids) else []
    identity = lookup.identity(stored, lookup.prefix)
    if lookup.has(identity):
        if not is_next_to_head:
            reasons.append("other text stands between the prefix and this chunk: repaired")
        return PlannedPiece(piece, ids, identity, is_exact=is_next_to_head, reason="; ".join(reasons) or None)
    variant = lookup.other_prefix(stored)
    if variant is None:
        return None
    reasons.append("encoded behind another prefix than this prompt has: repaired with a larger ratio")
    return PlannedPiece(piece, ids, variant, is_mismatched=True, reason="; ".join(reasons))


def lay_out(plan: Plan, loaded: Mapping[ChunkIdentity, ChunkKV | None]) -> tuple[Layout, list[ChunkKV]]:
    """Lay a plan out with what could be loaded; what could not becomes live.

    An exact chunk stays exact without its prefix's KV: the prefix is then computed, and so is as in a full prefill.

    Returns
    -------
    layout : Layout
        The segments.
    kvs : list of ChunkKV
        Indexed by ``segment.source``.
    """
    kvs: list[ChunkKV] = []
    source: dict[ChunkIdentity, int] = {}
    entries: list[tuple[int, str, bool, int, bool]] = []
    for index, piece in enumerate(plan.pieces):
        kv = loaded.get(piece.identity) if piece.identity is not None else None
        if kv is None or piece.identity is None:
            entries.append((len(piece.ids), "live", False, -1, False))
            continue
        if piece.identity not in source:
            source[piece.identity] = len(kvs)
            kvs.append(kv)
        kind = "prefix" if index == 0 and piece.piece.kind == "live" else "chunk"
        entries.append((len(piece.ids), kind, piece.is_exact, source[piece.identity], piece.is_mismatched))
    return place(entries), kvs  # type: ignore[arg-type]


def why_inexact(plan: Plan, mode: Mode) -> str | None:
    """Return why ``mode`` can't be had from KV that was rounded, or ``None`` where it can."""
    if mode != "prefix" or plan.kv_dtype == "auto":
        return None
    return f"mode 'prefix' reuses exact KV only, and this store's is rounded to {plan.kv_dtype}"
