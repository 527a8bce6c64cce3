"""Plan a prompt: find the pieces with stored KV, and whether that KV is exact here.

Planning needs no tensors and no model, and reads no KV.

::

    prompt ─▶ pieces ─▶ cut at known chunks and first parts ─▶ token ids ─▶ one look-up ─▶ Plan
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from kvrag.config import KV_DTYPES
from kvrag.errors import InputError
from kvrag.identity.fingerprint import chunk_key, content_key, ids_digest
from kvrag.prompt.partial import PartFinder
from kvrag.prompt.spans import SpanIndex
from kvrag.prompt.template import PLAIN, Chat, Prompt, PromptEncoder, cut, merge_live
from kvrag.prompt.tokenizer import Piece, TokenIds
from kvrag.runtime import Deadline
from kvrag.store import TieredStore
from kvrag.types import ChunkIdentity, ChunkKey, KVDtype, MissedChunk, TextEntry

NO_PREFIX = "no stored KV for this prefix"
OTHER_TEXT = "other text stands between the prefix and this chunk: repaired"
OTHER_CONTEXT = "encoded behind a context, which this prompt does not have: repaired"
OTHER_PREFIX = "encoded behind another prefix than this prompt has: repaired with a larger ratio"
NEAR_SEAM = 64  # characters after a seam whose token ids may depend on the text before it
REST_OF_CHUNK = "the rest of a chunk whose first part is that of a stored chunk"


@dataclass(slots=True)
class Lookup:
    """Store look-ups of a prompt; if the store fails or is late, chunks count as absent.

    Look-ups run in another thread and share ``deadline``. ``model``, ``namespace``, ``kv_dtype``
    and ``context`` are fields of the identities. ``found`` maps token ids to the identity of their
    KV, behind the prompt's prefix or else another; KV of another type is among them, too.
    """

    store: TieredStore
    model: str
    namespace: str
    deadline: Deadline
    kv_dtype: KVDtype = "auto"
    context: str = ""
    found: dict[TokenIds, ChunkIdentity] = field(default_factory=dict)

    def identity(self, ids: TokenIds, prefix: str, context: str = "") -> ChunkIdentity:
        """Return the identity of a chunk behind a prefix and a context."""
        return ChunkIdentity(
            self.model,
            self.namespace,
            prefix,
            ids,
            self.kv_dtype,
            context,
        )

    def known(self, identities: Iterable[ChunkIdentity]) -> set[ChunkIdentity]:
        """Return the identities that have stored KV."""
        keys = {chunk_key(identity): identity for identity in identities}
        nothing = set[ChunkKey]()
        found = self.deadline.ask(lambda: self.store.known(keys), nothing, what="the KV store")
        return {keys[key] for key in found}

    def look_up(
        self, runs: Iterable[TokenIds], prefix: str, *others: ChunkIdentity
    ) -> set[ChunkIdentity]:
        """Find KV of runs of ids, behind a prefix or else behind another.

        Returns the stored identities among the runs behind this prefix and ``others``.
        """
        own = {ids: self.identity(ids, prefix, self.context) for ids in runs}
        known = self.known([*own.values(), *others])
        self.found |= {ids: identity for ids, identity in own.items() if identity in known}
        self.found |= self.elsewhere([ids for ids in own if ids not in self.found])
        return known

    def usable(self, ids: TokenIds) -> ChunkIdentity | None:
        """Return the KV that was found of these ids, if it is of the type that is asked for."""
        found = self.found.get(ids)
        if found is not None and found.kv_dtype == self.kv_dtype:
            return found
        return None

    def elsewhere(self, runs: Collection[TokenIds]) -> dict[TokenIds, ChunkIdentity]:
        """Map runs of ids to the newest stored variant behind any prefix and context.

        A variant with the own ``kv_dtype`` is preferred. Runs without any variant are left out.
        """
        dtypes = sorted(KV_DTYPES, key=lambda dtype: dtype != self.kv_dtype)
        nothing: dict[TokenIds, ChunkIdentity] = {}

        def find() -> dict[TokenIds, ChunkIdentity]:
            found: dict[TokenIds, ChunkIdentity] = {}
            for ids in runs:
                for dtype in dtypes:
                    identity = replace(self.identity(ids, ""), kv_dtype=dtype)
                    variants = self.store.catalog.variants(content_key(identity))
                    if variants:
                        found[ids] = replace(
                            identity, prefix=variants[-1].prefix, context=variants[-1].context
                        )
                        break
            return found

        if runs:
            return self.deadline.ask(find, nothing, what="the KV store's catalog")
        return nothing

    def stored_ids(self, entries: Sequence[TextEntry]) -> dict[str, list[TokenIds]]:
        """Map text digests to the token ids of their KV with this model, namespace and dtype."""
        own = self.identity((), "")
        nothing = dict[str, list[TokenIds]]()

        def find(digest: str) -> list[TokenIds]:
            found = self.store.identities(self.namespace, digest)
            own_ids = [
                i.token_ids for i in found if replace(i, prefix="", context="", token_ids=()) == own
            ]
            return list(dict.fromkeys(own_ids))

        return self.deadline.ask(
            lambda: {e.digest: find(e.digest) for e in entries}, nothing, what="the KV store"
        )


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """A tokenised piece of a prompt and its stored KV, if any.

    Parameters
    ----------
    piece, ids
        The text and its token ids.
    identity
        Stored KV to use, if any.
    is_exact, is_mismatched
        Whether that KV needs no repair here; whether it was encoded behind another prefix than
        this prompt's.
    reason
        Why there is no stored KV, or why it is not exact.
    missed
        The chunk to store, if it has no KV of its own.
    offset
        Row of the stored chunk that the piece begins with.
    """

    piece: Piece
    ids: TokenIds
    identity: ChunkIdentity | None = None
    is_exact: bool = False
    is_mismatched: bool = False
    reason: str | None = None
    missed: MissedChunk | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt's pieces in order.

    Parameters
    ----------
    pieces
        Pieces whose joined ids are the prompt.
    encoder
        Encoder of the prompt; it knows where sentences begin.
    kv_dtype
        Rounding of the stored KV that is read.
    fault
        Why the store did not answer, if it failed: it may hold more KV than was found.
    refusal
        Why nothing may be reused, if so.
    cause
        Why known chunks of the prompt were not found, where it is proven.
    """

    pieces: tuple[PlannedPiece, ...]
    encoder: PromptEncoder
    kv_dtype: KVDtype = "auto"
    fault: str | None = None
    refusal: str | None = None
    cause: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return [i for piece in self.pieces for i in piece.ids]

    @property
    def missed(self) -> list[MissedChunk]:
        """Chunks without KV of their own, without duplicates."""
        return list(
            dict.fromkeys([piece.missed for piece in self.pieces if piece.missed is not None])
        )

    @property
    def has_mismatch(self) -> bool:
        """Whether the plan uses a chunk that was encoded behind another prefix."""
        return any([piece.is_mismatched for piece in self.pieces])

    @property
    def identities(self) -> list[ChunkIdentity]:
        """Identities of the KV to load, in order of first use."""
        return list(dict.fromkeys([p.identity for p in self.pieces if p.identity is not None]))

    def without_reuse(self, reason: str) -> Plan:
        """Return the prompt's plan with no reuse, and give the reason at every chunk."""
        pieces = [
            PlannedPiece(p.piece, p.ids, reason=reason if p.piece.kind == "chunk" else None)
            for p in self.pieces
        ]
        return replace(self, pieces=tuple(pieces), refusal=reason)


def plan_prompt(
    prompt: Prompt,
    encoder: PromptEncoder,
    *,
    chat: Chat = PLAIN,
    scanner: SpanIndex,
    lookup: Lookup,
    prefixes: Sequence[str],
    min_chunk_tokens: int,
) -> Plan:
    """Cut a prompt into pieces and look up every chunk.

    ``chat``: how chat messages are rendered. ``prefixes``: texts that chunks were encoded behind;
    the longest that the prompt starts with becomes a piece of its own. Chunks of fewer than
    ``min_chunk_tokens`` tokens are computed with each prompt.

    Raises
    ------
    InputError
        If the prompt is empty or malformed.
    """
    finder = PartFinder(scanner, encoder, lookup.stored_ids, min_chunk_tokens)
    head, rest = _split_head(merge_live(encoder.pieces(prompt, chat)), prefixes, encoder)
    hidden = set[str]()
    while True:
        spans = {
            i: scanner.scan(p.text, without=hidden) for i, p in enumerate(rest) if p.kind == "live"
        }
        pieces = cut(rest, spans)
        if any([p.kind == "live" and scanner.head_places(p.text) for p in pieces]):
            pieces = finder.cut_live(pieces)
        draft = _Draft(head, pieces, encoder, lookup, min_chunk_tokens)
        new = {
            p.digest
            for p in draft.without_kv
            if p.digest and scanner.scan(p.text, without={*hidden, p.digest})
        }
        if not new:
            break
        hidden |= new  # a text without KV must not hide shorter texts with KV
    planned = [piece for piece in draft.planned(finder) if piece.ids]
    if not planned:
        raise InputError("the prompt has no tokens; pass some text")
    return Plan(tuple(planned), encoder, lookup.kv_dtype, lookup.deadline.fault)


def _split_head(
    pieces: list[Piece], prefixes: Sequence[str], encoder: PromptEncoder
) -> tuple[Piece | None, list[Piece]]:
    """Split a known prefix off the prompt before the scan: chunk text inside it belongs to it.

    With explicit chunks, the prompt's ids must not depend on the known prefixes: only the first
    prefix, the engine's own, may change the tokenisation of the text after it.
    """
    text = pieces[0].text if pieces and pieces[0].kind == "live" else ""
    known = [p for p in prefixes if p and text.startswith(p)]
    if any([piece.is_given for piece in pieces]):
        own = prefixes[0] if prefixes[0] in known else ""
        known = [p for p in known if p == own or _is_seamless(text, own, p, encoder)]
    if not known:
        return None, pieces
    head = max(known, key=len)
    return Piece(head), merge_live([Piece(text[len(head) :]), *pieces[1:]])


def _is_seamless(text: str, own: str, head: str, encoder: PromptEncoder) -> bool:
    """Whether a text has the same ids when cut behind ``head`` as when cut behind ``own`` alone."""
    text = text[: len(head) + NEAR_SEAM]

    def ids(first: str) -> list[int]:
        return [*encoder.head_ids(first), *encoder.live_ids(text[len(first) :])]

    return ids(head) == (ids(own) if own else encoder.live_ids(text, at_start=True))


class _Draft:
    """A prompt under a given cut: its pieces, their ids and their stored KV."""

    def __init__(
        self,
        head: Piece | None,
        rest: list[Piece],
        encoder: PromptEncoder,
        lookup: Lookup,
        min_tokens: int,
    ) -> None:
        self._encoder = encoder
        self._lookup = lookup
        self._min_tokens = min_tokens
        if head is None and rest and rest[0].kind == "live":
            head = rest[0]
            rest = rest[1:]
        elif head is not None and not (
            any([piece.kind == "chunk" for piece in rest]) or self._is_stored(head)
        ):
            head = Piece("".join([p.text for p in (head, *rest)]))
            rest = []
        self._head, self._head_ids = head or Piece(""), self._ids_of(head)
        # The same few characters stand between all chunks.
        encode: dict[str, Any] = {"live": cache(encoder.live_ids), "chunk": encoder.chunk_ids}
        self._rest: list[tuple[Piece, TokenIds]] = [
            (p, p.ids or tuple(encode[p.kind](p.text))) for p in rest
        ]
        self._prefix = ids_digest(self._head_ids)
        self._head_identity = lookup.identity(self._head_ids, ids_digest(()))
        runs = [
            p.part_of or ids
            for p, ids in self._rest
            if p.kind == "chunk" and len(ids) >= min_tokens
        ]
        known = lookup.look_up(runs, self._prefix, self._head_identity)
        self._has_head = self._head_identity in known

    def _ids_of(self, head: Piece | None) -> TokenIds:
        if head:
            return self._encoder.head_ids(head.text)
        return tuple(self._encoder.bos_ids)

    def _is_stored(self, head: Piece) -> bool:
        return bool(self._lookup.known([self._lookup.identity(self._ids_of(head), ids_digest(()))]))

    @property
    def without_kv(self) -> list[Piece]:
        """Chunks without usable KV behind any prefix."""
        return [
            p
            for p, ids in self._rest
            if p.kind == "chunk" and self._lookup.usable(p.part_of or ids) is None
        ]

    def planned(self, finder: PartFinder) -> list[PlannedPiece]:
        """Return the planned pieces; a chunk without KV may reuse the start of a stored chunk."""
        long = [
            (p, ids) for p, ids in self._rest if p.kind == "chunk" and len(ids) >= self._min_tokens
        ]
        pieces = [p for p, ids in long if not p.part_of and self._lookup.usable(ids) is None]
        parts = dict(zip(pieces, finder.cut_chunks(pieces), strict=True)) if pieces else {}
        runs = [part.part_of for part, *_ in parts.values() if part.part_of]
        if runs:
            self._lookup.look_up(runs, self._prefix)
        if self._has_head:
            missing = None
        else:
            missing = self._lookup.deadline.fault or NO_PREFIX
        identity = self._head_identity if self._has_head else None
        out = [PlannedPiece(self._head, self._head_ids, identity, self._has_head, reason=missing)]
        for index, (piece, ids) in enumerate(self._rest):
            out += self._planned(piece, ids, parts.get(piece, [piece]), is_next_to_head=index == 0)
        return out

    def _planned(
        self, piece: Piece, ids: TokenIds, parts: list[Piece], *, is_next_to_head: bool
    ) -> list[PlannedPiece]:
        """Plan a piece; a chunk without KV that begins like a stored chunk becomes two pieces."""
        if piece.kind == "live":
            return [PlannedPiece(piece, ids)]
        if len(ids) < self._min_tokens:
            reason = (
                f"{len(ids)} tokens, fewer than min_chunk_tokens={self._min_tokens}: "
                "computed with each prompt"
            )
            return [PlannedPiece(piece, ids, reason=reason)]
        planned = self._stored(piece, ids, is_next_to_head)
        if planned is not None:
            return [planned]
        missed = None if piece.part_of else MissedChunk(piece.text, piece.is_given)
        first, *others = parts
        if others and (planned := self._stored(first, first.ids, is_next_to_head)) is not None:
            rest = [
                PlannedPiece(p, self._encoder.chunk_ids(p.text), reason=REST_OF_CHUNK)
                for p in others
            ]
            pays = sum([len(other.ids) for other in rest]) >= self._min_tokens
            return [replace(planned, missed=missed if pays else None), *rest]
        why = why_missing(self._lookup, self._lookup.found.get(ids), is_given=piece.is_given)
        return [PlannedPiece(piece, ids, reason=why, missed=missed)]

    def _stored(self, piece: Piece, ids: TokenIds, is_next_to_head: bool) -> PlannedPiece | None:
        """Plan a chunk, or the first part of a chunk, with its stored KV, if any."""
        stored = piece.part_of or ids
        identity = self._lookup.usable(stored)
        if identity is None:
            return None
        part = None
        if len(stored) > len(ids):
            part = f"first {len(ids)} of {len(stored)} tokens of a stored chunk"
        is_mismatched = identity.prefix != self._prefix
        why = None
        if is_mismatched:
            why = OTHER_PREFIX
        elif not is_next_to_head:
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
        )


def why_missing(lookup: Lookup, other: ChunkIdentity | None, *, is_given: bool = False) -> str:
    """Say why a chunk has no KV to use; ``other`` is its KV of another type, if any."""
    if other is not None:
        asked = f"kept with kv_dtype={other.kv_dtype!r}, and {lookup.kv_dtype!r} is asked for"
        return f"{asked}: precompute it again, or set kv_dtype to the stored one"
    known = "the text is known, but there is no KV of this model for it"
    if is_given:
        known = "not precomputed"
    return lookup.deadline.fault or f"{known}: precompute it with this model"
