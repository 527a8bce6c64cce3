"""Plan a prompt: find the pieces with stored KV, and whether that KV is exact here.

Planning needs no tensors and no model, and reads no KV.

::

    text ─▶ pieces ─▶ cut at known chunks and first parts ─▶ token ids ─┐
    token ids ─▶ plan_ids: chunks in their text ────────────────────────┴▶ one look-up ─▶ Plan

The two find the rows of a chunk in ways of their own, once per prompt; what follows from these rows
is the same, and in :class:`Lookup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from kvrag.config import KV_DTYPES
from kvrag.errors import InputError
from kvrag.identity.fingerprint import chunk_key, content_key, ids_digest
from kvrag.prompt.partial import cut_live
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
NO_IDS = ids_digest(())  # the prefix that prefixes stand behind

Identities = dict[TokenIds, ChunkIdentity]  # of stored chunks, by their tokens


@dataclass(slots=True)
class Lookup:
    """Store look-ups of a prompt, and what they say of its chunks.

    If the store fails or is late, chunks count as absent. Look-ups run in another thread and share
    ``deadline``. ``model``, ``namespace``, ``kv_dtype`` and ``context`` are fields of the
    identities. ``scanner`` finds the namespace's texts, and ``encoder`` tokenises. Chunks of fewer
    than ``min_tokens`` tokens are computed with each prompt. ``prefix`` is the digest of the
    prompt's prefix. ``found`` maps token ids to the identity of their KV, behind the prompt's
    prefix or else another; KV of another type is among them, too.
    """

    store: TieredStore
    scanner: SpanIndex
    encoder: PromptEncoder
    model: str
    namespace: str
    deadline: Deadline
    kv_dtype: KVDtype
    context: str
    min_tokens: int
    prefix: str = ""
    found: Identities = field(default_factory=dict)

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
        if not keys:
            return set()
        found = self.deadline.ask(
            lambda: self.store.known(keys),
            set[ChunkKey](),
            what="the KV store",
        )
        return {keys[key] for key in found}

    def look_up(self, runs: Iterable[TokenIds], *others: ChunkIdentity) -> set[ChunkIdentity]:
        """Find KV of runs of ids, behind the prompt's prefix or else behind another.

        Returns the stored identities among the runs behind the prefix and ``others``.
        """
        own = {ids: self.identity(ids, self.prefix, self.context) for ids in runs}
        known = self.known([*own.values(), *others])
        self.found = {ids: identity for ids, identity in own.items() if identity in known}
        left = [ids for ids in own if ids not in self.found]
        if left:
            self.found |= self.deadline.ask(
                lambda: self._elsewhere(left),
                Identities(),
                what="the KV store's catalog",
            )
        return known

    def usable(self, ids: TokenIds) -> ChunkIdentity | None:
        """Return the KV that was found of these ids, if it is of the type that is asked for."""
        found = self.found.get(ids)
        if found is not None and found.kv_dtype == self.kv_dtype:
            return found
        return None

    def _elsewhere(self, runs: Iterable[TokenIds]) -> Identities:
        """Map runs of ids to the newest stored variant behind any prefix and context.

        A variant with the own ``kv_dtype`` is preferred. Runs without any variant are left out.
        """
        dtypes = sorted(KV_DTYPES, key=lambda dtype: dtype != self.kv_dtype)
        found = Identities()
        for ids in runs:
            for dtype in dtypes:
                identity = replace(self.identity(ids, ""), kv_dtype=dtype)
                variants = self.store.catalog.variants(content_key(identity))
                if variants:
                    newest = variants[-1]
                    found[ids] = replace(identity, prefix=newest.prefix, context=newest.context)
                    break
        return found

    def stored_ids(self, entries: Sequence[TextEntry]) -> dict[str, list[TokenIds]]:
        """Map text digests to the token ids of their KV; see :meth:`ids_of`."""
        return self.deadline.ask(
            lambda: {e.digest: self.ids_of(e.digest) for e in entries},
            dict[str, list[TokenIds]](),
            what="the KV store",
        )

    def ids_of(self, digest: str) -> list[TokenIds]:
        """Return the token ids of a text's KV with this model, namespace and dtype.

        It reads from the store in this thread.
        """
        own = self.model, self.namespace, self.kv_dtype
        found = self.store.identities(self.namespace, digest)
        own_ids = [i.token_ids for i in found if (i.model, i.namespace, i.kv_dtype) == own]
        return list(dict.fromkeys(own_ids))

    def head(self, piece: Piece, ids: TokenIds, identity: ChunkIdentity | None) -> PlannedPiece:
        """Plan the prefix, with its stored KV, if any."""
        if identity is None:
            return PlannedPiece(piece, ids, reason=self.deadline.fault or NO_PREFIX)
        return PlannedPiece(piece, ids, identity, is_exact=True)

    def chunk(
        self,
        piece: Piece,
        ids: TokenIds,
        whole: TokenIds,
        missed: MissedChunk | None,
        *,
        is_next: bool,
        offset: int = 0,
    ) -> PlannedPiece:
        """Plan rows of a chunk, with its stored KV, or else with the reason why there is none.

        ``whole`` holds the chunk's own ids, of which the rows begin at ``offset``. ``is_next``:
        nothing stands between the prefix and the chunk. ``missed``: the chunk to store.
        """
        identity = self.usable(whole)
        if identity is None:
            return PlannedPiece(
                piece,
                ids,
                reason=self._reason_of_miss(whole, is_given=piece.is_given),
                missed=missed,
            )
        is_mismatched = identity.prefix != self.prefix
        part = reason = None
        if len(ids) < len(whole):
            last = offset + len(ids)
            part = f"tokens {offset + 1} to {last} of {len(whole)} of a stored chunk"
            if not offset:
                part = f"first {last} of {len(whole)} tokens of a stored chunk"
        if is_mismatched:
            reason = OTHER_PREFIX
        elif not is_next:
            reason = OTHER_TEXT
        elif identity.context:
            reason = OTHER_CONTEXT
        return PlannedPiece(
            piece,
            ids,
            identity,
            is_exact=reason is None,
            is_mismatched=is_mismatched,
            reason="; ".join(filter(None, (part, reason))) or None,
            offset=offset,
        )

    def _reason_of_miss(self, ids: TokenIds, *, is_given: bool) -> str:
        """Say why a chunk has no KV to use."""
        other = self.found.get(ids)
        if other is not None:
            asked = f"kept with kv_dtype={other.kv_dtype!r}, and {self.kv_dtype!r} is asked for"
            return f"{asked}: precompute it again, or set kv_dtype to the stored one"
        known = "the text is known, but there is no KV of this model for it"
        if is_given:
            known = "not precomputed"
        return self.deadline.fault or f"{known}: precompute it with this model"

    def plan(self, pieces: Iterable[PlannedPiece]) -> Plan:
        """Return the plan of these pieces, without empty pieces."""
        return Plan(
            tuple([piece for piece in pieces if piece.ids]),
            self.encoder,
            self.kv_dtype,
            self.deadline.fault,
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
    reason
        Why nothing may be reused, if so.
    miss_reason
        Why known chunks of the prompt were not found, where it is proven.
    """

    pieces: tuple[PlannedPiece, ...]
    encoder: PromptEncoder
    kv_dtype: KVDtype = "auto"
    fault: str | None = None
    reason: str | None = None
    miss_reason: str | None = None

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
        return replace(self, pieces=tuple(pieces), reason=reason, miss_reason=None)


def plan_prompt(
    prompt: Prompt, lookup: Lookup, prefixes: Sequence[str], chat: Chat = PLAIN
) -> Plan:
    """Cut a prompt into pieces and look up every chunk.

    ``chat``: how chat messages are rendered. ``prefixes``: texts that chunks were encoded behind;
    the longest that the prompt starts with becomes a piece of its own.

    Raises
    ------
    InputError
        If the prompt is empty or malformed.
    """
    encoder = lookup.encoder
    head, given = _split_head(merge_live(encoder.pieces(prompt, chat)), prefixes, encoder)
    scanner = lookup.scanner
    rest = cut(given, scanner.scan)
    if any([piece.kind == "live" and scanner.head_places(piece.text) for piece in rest]):
        rest = cut_live(rest, lookup)
    if not any([piece.kind == "chunk" for piece in rest]):
        alone = lookup.identity(encoder.head_ids(head.text), NO_IDS)
        if not (head.text and lookup.known([alone])):
            rest = merge_live([head, *rest])
            head = Piece("")
    if not head.text and rest and rest[0].kind == "live":
        head = rest.pop(0)
    plan = _looked_up(head, rest, lookup)
    if not plan.pieces:
        raise InputError("the prompt has no tokens; pass some text")
    return plan


def _split_head(
    pieces: list[Piece], prefixes: Sequence[str], encoder: PromptEncoder
) -> tuple[Piece, list[Piece]]:
    """Split a known prefix off the prompt before the scan: chunk text inside it belongs to it.

    With explicit chunks, the prompt's ids must not depend on the known prefixes: only the first
    prefix, the engine's own, may change the tokenisation of the text after it.
    """
    text = pieces[0].text if pieces and pieces[0].kind == "live" else ""
    known = [p for p in prefixes if p and text.startswith(p)]
    if any([piece.is_given for piece in pieces]):
        own = prefixes[0] if prefixes[0] in known else ""
        known = [p for p in known if p == own or encoder.is_seamless(text, own, p)]
    if not known:
        return Piece(""), pieces
    head = max(known, key=len)
    return Piece(head), merge_live([Piece(text[len(head) :]), *pieces[1:]])


def _looked_up(head: Piece, rest: list[Piece], lookup: Lookup) -> Plan:
    """Look up all chunks of a prompt at once; the ids of its pieces are the prompt's."""
    encoder = lookup.encoder
    live_ids = cache(encoder.live_ids)  # the same few characters stand between all chunks

    def ids_of(piece: Piece) -> TokenIds:
        if piece.kind == "live" or piece.part_of:
            return tuple(live_ids(piece.text))
        return encoder.chunk_ids(piece.text)

    head_ids = encoder.head_ids(head.text)
    lookup.prefix = ids_digest(head_ids)
    identity = lookup.identity(head_ids, NO_IDS)
    pieces = [(piece, ids_of(piece)) for piece in rest]
    least = lookup.min_tokens
    long = [
        piece.part_of or ids for piece, ids in pieces if piece.kind == "chunk" and len(ids) >= least
    ]
    known = lookup.look_up(long, identity)
    out = [lookup.head(head, head_ids, identity if identity in known else None)]
    for index, (piece, ids) in enumerate(pieces):
        if piece.kind == "live":
            out.append(PlannedPiece(piece, ids))
            continue
        if len(ids) < least:
            reason = f"{len(ids)} tokens, fewer than min_chunk_tokens={least}"
            out.append(PlannedPiece(piece, ids, reason=f"{reason}: computed with each prompt"))
            continue
        missed = None if piece.part_of else MissedChunk(piece.text, piece.is_given)
        whole = piece.part_of or ids
        out.append(lookup.chunk(piece, ids, whole, missed, is_next=index == 0))
    return lookup.plan(out)
