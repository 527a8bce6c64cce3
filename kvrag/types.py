"""Small, frozen classes for the values passed between stages.

Tensor letters: ``L`` layers, ``H_kv`` key/value heads, ``T`` tokens of a chunk, ``N`` tokens of a
prompt, ``D`` head dim.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType

from pydantic import Field

if TYPE_CHECKING:  # configs and errors are read by commands that need no torch
    import torch
    from torch import Tensor

# Key of a stored chunk: 64 lower-case hex digits (SHA-256). See :mod:`kvrag.identity.fingerprint`.
ChunkKey = NewType("ChunkKey", str)

StrPath = str | os.PathLike[str]
# Ids of documents; ``None``: a text without a document.
DocIds = Sequence[str | None]
# Documents or chunks by id, each with the reason why it has no KV.
Reasons = list[tuple[str, str]]

Exactness = Literal["exact", "repaired", "full"]
Mode = Literal["auto", "full", "prefix", "stitch"]
# Origin of a row's KV. ``"exact"``: reused, and equal to a full prefill's; ``"reused"``: reused,
# and approximate; ``"repaired"``: stored, and recomputed; ``"computed"``: not stored, and computed.
Source = Literal["exact", "reused", "repaired", "computed"]

# Origins of the rows of a prompt, as runs ``(source, number of rows)``.
Sources = tuple[tuple[Source, int], ...]

FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]
MaxContext = Literal["raise", "slide"]
"""Behaviour where prompt and answer exceed the context window.

Raise an error, or evict the oldest rows (:mod:`kvrag.blend.slide`).
"""
Prove = Literal["auto", "off"]
"""Proof of reuse.

``"auto"``: prove reuse once per model and environment; ``"off"``: check only the model's structure.
"""

# Name, start and end of a stage: seconds on ``time.perf_counter``'s clock.
Stage = tuple[str, float, float]

# Reason why a stored chunk was not loaded.
HoleReason = Literal["late", "absent", "damaged", "unreadable"]

# Type of stored keys and values. ``"auto"``: as computed; else rounded to codes
# (:mod:`kvrag.kv.quantise`).
KVDtype = Literal["auto", "int8", "int4", "fp8"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a document, given explicitly as a segment of a prompt.

    White space at its ends belongs to the text around it.
    """

    text: str


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """Identity of a chunk's KV: two chunks with the same identity have the same KV.

    ``model`` is the fingerprint of the model, ``namespace`` a digest, ``prefix`` the digest of the
    token ids of the prefix that the chunk was encoded behind, ``context`` the digest of the context
    between prefix and chunk (empty: no context), and ``kv_dtype`` the type of the stored KV.
    """

    model: str
    namespace: str
    prefix: str
    token_ids: tuple[int, ...]
    kv_dtype: KVDtype = "auto"
    context: str = ""


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales that turn the codes of a layer back into keys and values, float16.

    See :mod:`kvrag.kv.quantise`.

    Parameters
    ----------
    dtype
        Original dtype of the keys and values.
    keys, zeros
        Scales of the keys' codes, and zeros added after scaling: ``(H_kv, G, D)`` for ``G`` groups
        of tokens; ``keys`` may be ``(H_kv, 1, 1)``.
    values
        Scales of the values' codes: ``(H_kv, T, C)`` for ``C`` groups of channels, or
        ``(H_kv, 1, 1)``.
    """

    dtype: torch.dtype
    keys: Tensor
    zeros: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of a layer; with ``scales``, their codes.

    Keys, ``(H_kv, T, D)``, are position-free (after the key norm, before RoPE). Values are
    ``(H_kv, T, D_v)``.
    """

    keys: Tensor
    values: Tensor
    scales: Scales | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the keys and values; the original dtype of codes."""
        if self.scales is None:
            return self.keys.dtype
        return self.scales.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in storage order."""
        s = self.scales
        if s is None:
            return self.keys, self.values
        return self.keys, self.values, s.keys, s.zeros, s.values

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([tensor.nbytes for tensor in self.tensors])


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """KV of a chunk in all layers, layer 0 first.

    The tensors are on the accelerator if they come from its tier, else on the host.
    """

    layers: tuple[LayerKV, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens ``T`` of the chunk."""
        return int(self.layers[0].keys.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([layer.num_bytes for layer in self.layers])


@dataclass(frozen=True, slots=True)
class Hole:
    """A stored chunk that a request could not load completely and computed instead.

    ``reason``: not loaded in time, no longer in the store, wrong bytes, or a failed read.
    ``layer``: the first layer that was not read; ``None`` if the header was not read either.
    """

    key: ChunkKey
    reason: HoleReason
    layer: int | None

    def __str__(self) -> str:
        where = "" if self.layer is None else f" at layer {self.layer}"
        return f"{self.key[:12]} {self.reason}{where}"


class TextEntry(NamedTuple):
    """Hashes with which the span scanner finds a chunk's text in a prompt.

    The text itself is not stored. ``digest``: SHA-256 of the stripped text, hex; ``head``,
    ``tail``: rolling hashes (uint64) of its first and last
    :data:`kvrag.prompt.spans.ANCHOR_CHARS` characters; ``num_chars``: its length in characters
    (code points). The catalog keeps it as a row, and refuses a row beyond these ranges.
    """

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    head: Annotated[int, Field(ge=0, lt=2**64)]
    tail: Annotated[int, Field(ge=0, lt=2**64)]
    num_chars: Annotated[int, Field(ge=0, lt=2**48)]


@dataclass(frozen=True, slots=True)
class Span:
    """Place of a known chunk in a rendered prompt, in characters: ``text[start:stop]``."""

    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class MissedChunk:
    """A chunk of a prompt that has no KV.

    ``is_given``: whether it is an explicit :class:`Chunk`; else it is the text of a document.
    """

    text: str
    is_given: bool


@dataclass(frozen=True, slots=True)
class Missed:
    """Chunks of a prompt that had no KV, for :mod:`kvrag.precompute.on_miss`.

    ``prefix`` is the text to encode them behind, ``namespace`` a digest, and ``erasures`` the
    number of erasures in the namespace before the prompt.
    """

    chunks: tuple[MissedChunk, ...]
    prefix: str
    namespace: str
    erasures: int


@dataclass(frozen=True, slots=True)
class PrecomputeReport:
    """Report of :meth:`KVRagEngine.precompute`.

    Parameters
    ----------
    stored, skipped
        Number of chunks computed and written; number of chunks stored already.
    failed, short
        ``(id, reason)`` of every document whose chunk could not be stored, or is too short to be
        stored. Both are computed at query time.
    stored_bytes, seconds
        Bytes of KV written; wall time.
    """

    stored: int
    skipped: int
    failed: Reasons
    stored_bytes: int
    seconds: float
    short: Reasons = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Report of :func:`kvrag.sync_kv`: chunks added, documents removed, the precompute report."""

    added: int
    removed: int
    precompute: PrecomputeReport


@dataclass(frozen=True, slots=True)
class Accounting:
    """Origin of a prompt's KV, in rows (tokens).

    ``cached_tokens + repaired_tokens + computed_tokens == prompt_tokens``.

    Parameters
    ----------
    prompt_ids, prompt_tokens
        Token ids of the prompt, and their number ``N``.
    cached_tokens
        Rows with reused KV, possibly with the residual shift.
    repaired_tokens
        Rows with stored KV that were recomputed.
    computed_tokens
        Rows without stored KV: prefix, glue, missing chunks, the question.
    history_tokens
        Cached rows that come from an earlier request (``StoreConfig.history_bytes``).
    exactness
        ``"exact"``: reuse that equals a full prefill up to the dtype's rounding; ``"repaired"``:
        approximate reuse, or rows left the context window; ``"full"``: no reuse.
    timings_ms
        Milliseconds per stage.
    stages
        Start and end of every stage (:data:`Stage`).
    loaded_bytes
        Bytes of KV loaded from the store.
    fallback_reason
        Reason for less reuse than requested, for a model whose KV is never reused, or for rows that
        left the context window; else ``None``.
    has_other_prefix
        Whether the prompt used chunks encoded behind a prefix that differs from its own; they are
        not exact.
    holes
        Stored chunks that could not be loaded and were recomputed.
    kv_dtype
        Type of the reused KV. Unless ``"auto"``, it was rounded, and the answer is not exact.
    sources
        Origin of every row's KV, as runs ``(source, rows)`` from the prompt's first row to its
        last. ``exact`` and ``reused`` rows together are the cached rows.
    evicted_tokens
        Rows of prompt and answer that left the context window (``max_context="slide"``). Later rows
        did not attend to them.
    """

    prompt_ids: list[int] = field(repr=False)
    prompt_tokens: int
    cached_tokens: int
    repaired_tokens: int
    computed_tokens: int
    exactness: Exactness
    timings_ms: Mapping[str, float]
    history_tokens: int = 0
    loaded_bytes: int = 0
    fallback_reason: str | None = None
    has_other_prefix: bool = False
    holes: tuple[Hole, ...] = ()
    kv_dtype: KVDtype = "auto"
    stages: tuple[Stage, ...] = field(default=(), repr=False, compare=False)
    sources: Sources = field(default=(), repr=False)
    evicted_tokens: int = 0

    @property
    def kv_reuse_ratio(self) -> float:
        """Cached tokens divided by prompt tokens, in [0, 1]."""
        if self.prompt_tokens:
            return self.cached_tokens / self.prompt_tokens
        return 0.0

    def __repr__(self) -> str:
        """Show the output, then the accounting, without token ids and fields at their defaults."""
        told = [
            each for each in fields(self) if each.repr and getattr(self, each.name) != each.default
        ]
        told.sort(key=lambda each: each.name not in ("text", "loss"))
        shown = {each.name: getattr(self, each.name) for each in told}
        shown["timings_ms"] = {name: round(ms, 1) for name, ms in self.timings_ms.items()}
        for name in {"ttft_ms", "total_ms", "tokens_per_s"} & shown.keys():
            shown[name] = round(shown[name], 1)
        return (
            f"{type(self).__name__}("
            f"{', '.join(f'{name}={value!r}' for name, value in shown.items())})"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrefillResult(Accounting):
    """A prefilled prompt; ``logits`` of its first answer token, float32 ``(vocab,)`` on the CPU."""

    logits: Tensor = field(repr=False)
    ttft_ms: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScoreResult(Accounting):
    """A scored continuation.

    Row ``t`` of ``logits`` (float32 CPU tensor ``(T, vocab)``) predicts token ``t`` of
    ``continuation_ids``; ``loss`` is their mean negative log-likelihood in nats per token.
    """

    logits: Tensor = field(repr=False)
    loss: float
    continuation_ids: list[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an answer.

    ``id`` is unique within a conversation; the tool's result refers to it.
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of an answer token, and of the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationResult(Accounting):
    """A generated answer.

    Parameters
    ----------
    text
        The answer without its thought, stop string and tool calls. A malformed tool call stays in
        the text.
    token_ids
        Token ids of the answer, including the stop string or end-of-sequence token.
    finish_reason
        ``"stop"`` (end-of-sequence, stop string, or the end of the requested format),
        ``"tool_calls"`` (the same, with tool calls), ``"length"`` or ``"cancelled"``.
    ttft_ms
        Wall time from the call to the first token, including planning, loading, stitching and
        repair.
    total_ms, tokens_per_s
        Wall time of the whole call; decoding speed after the first token.
    tool_calls
        Tool calls in the answer.
    logprobs
        Log-probabilities of ``token_ids``, if requested.
    prompt_logprobs
        Log-probabilities of ``prompt_ids``, if requested. The first is ``nan``: no row predicts it.
    reasoning_content, reasoning_tokens
        Thought before the answer to a chat, without its tags, if there is any; number of its
        tokens, with the opening tag.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    finish_reason: FinishReason
    ttft_ms: float
    total_ms: float
    tokens_per_s: float
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    reasoning_content: str | None = None
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ExplainedSpan:
    """A segment of a prompt as reported by :meth:`KVRagEngine.explain`.

    ``hit``: stored KV will be used; ``exact``: it needs no repair; ``reason``: why the span is not
    a hit or not exact, or ``None``.
    """

    kind: Literal["prefix", "chunk", "live"]
    start: int
    stop: int
    text: str
    hit: bool
    exact: bool
    reason: str | None

    @property
    def state(self) -> str:
        """``"exact"`` or ``"hit"`` with stored KV, else ``"computed"``."""
        if not self.hit:
            return "computed"
        if self.exact:
            return "exact"
        return "hit"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Spans of a prompt, with hits and the reasons of misses, and its repair; can be printed.

    ``repair`` describes the repair and where it comes from.
    """

    spans: list[ExplainedSpan]
    prompt_tokens: int
    mode: Mode
    notes: list[str]
    repair: str = ""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Explanation:
        """Return the explanation in a server's reply."""
        return cls(**{**told, "spans": [ExplainedSpan(**span) for span in told["spans"]]})

    @property
    def hits(self) -> int:
        """Number of chunks with stored KV."""
        return sum(span.hit for span in self.spans if span.kind == "chunk")

    def __str__(self) -> str:
        lines = [
            f"{self.prompt_tokens} tokens, {self.hits} chunk(s) with KV, would run in mode "
            f"{self.mode!r}"
        ]
        for span in self.spans:
            head = " ".join(span.text.split())[:48]
            line = f"{span.start:>6}-{span.stop:<6} {span.kind:<6} {span.state:<8} {head!r}"
            if span.reason:
                line += f"  ({span.reason})"
            lines.append(line)
        return "\n".join([*lines, *self.notes, f"repair: {self.repair}"])


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Comparison of reuse with full prefill for a prompt.

    ``kl`` is in nats at the first answer token; ``top1`` and ``greedy`` say whether the first
    tokens and the greedy answers are equal.
    """

    kl: float
    top1: bool
    greedy: bool
    exactness: Exactness
    kv_reuse_ratio: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Agreement of reuse with full prefill over several prompts.

    ``mean_kl`` is KL(full ‖ reuse) at the first answer token in nats. ``top1_agreement`` and
    ``greedy_agreement`` are the shares of prompts with the same first token and the same greedy
    answer. ``passed`` compares the first two figures with their thresholds, as described in
    ``passed_by``; it ignores the greedy answers, and is false without any reuse. Both runs use the
    ids of the prompt's segments, joined.
    """

    passed: bool
    mean_kl: float
    top1_agreement: float
    greedy_agreement: float
    rows: list[VerifyRow]
    repair: str = ""
    passed_by: str = ""
