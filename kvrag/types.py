"""The values that the stages pass to each other: small, frozen classes.

Tensor letters: ``L`` layers, ``H_kv`` key/value heads, ``T`` tokens of a chunk, ``N`` tokens of a prompt, ``D`` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NewType

if TYPE_CHECKING:  # configs and errors are read by commands that need no torch
    import torch

ChunkKey = NewType("ChunkKey", str)
"""Key of one stored chunk: 64 lower-case hex digits (SHA-256), see :mod:`kvrag.identity.fingerprint`."""

Exactness = Literal["exact", "repaired", "full"]
Mode = Literal["auto", "full", "prefix", "stitch"]
Source = Literal["exact", "reused", "repaired", "computed"]
"""Where a row's KV came from: a full prefill's own, kept; an approximation, kept; kept, and computed again; computed."""

FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]
MaxContext = Literal["raise", "slide"]
"""Where prompt and answer exceed the context window: raise an error, or let the oldest rows leave (:mod:`kvrag.blend.slide`)."""
Prove = Literal["auto", "off"]
"""``"auto"``: reuse is proven once per model and environment; ``"off"``: only the model's structure is checked."""

Stage = tuple[str, float, float]
"""Name of a stage, and when it began and ended: seconds on ``time.perf_counter``'s clock."""

HoleReason = Literal["late", "absent", "damaged", "unreadable"]
"""Why a stored chunk was not loaded."""

KVDtype = Literal["auto", "int8", "int4", "fp8"]
"""How keys and values are stored: ``"auto"`` as computed, else rounded to codes (:mod:`kvrag.blend.quantise`)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a document, given explicitly as one segment of a prompt. White space at its ends belongs to the text around it."""

    text: str


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """Everything that determines the KV of a chunk: two chunks with the same identity have the same KV.

    ``model`` is the fingerprint of the model, ``namespace`` a digest, ``prefix`` the digest of the token ids that the chunk was encoded
    behind, ``context`` that of what else it was encoded behind (empty: nothing), ``kv_dtype`` how the KV is stored.
    """

    model: str
    namespace: str
    prefix: str
    token_ids: tuple[int, ...]
    kv_dtype: KVDtype = "auto"
    context: str = ""


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales that turn the codes of one layer back into keys and values, float16. See :mod:`kvrag.blend.quantise`.

    Parameters
    ----------
    dtype
        Original dtype of the keys and values.
    keys, zeros
        Scale of the codes of keys and what is added then: ``(H_kv, G, D)`` for ``G`` groups of tokens; ``keys`` may be ``(H_kv, 1, 1)``.
    values
        ``(H_kv, T, C)`` for ``C`` groups of channels, or ``(H_kv, 1, 1)``.
    """

    dtype: torch.dtype
    keys: torch.Tensor
    zeros: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer; with ``scales``, their codes.

    Keys, ``(H_kv, T, D)``, are position-free (after the key norm, before RoPE); values are ``(H_kv, T, D_v)``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: Scales | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in the order in which they are stored."""
        s = self.scales
        return (
            (self.keys, self.values)
            if s is None
            else (self.keys, self.values, s.keys, s.zeros, s.values)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([tensor.nbytes for tensor in self.tensors])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LayerKV:
        """Return the layer with every tensor changed."""
        s = self.scales
        if s is not None:
            s = replace(s, keys=change(s.keys), zeros=change(s.zeros), values=change(s.values))
        return LayerKV(change(self.keys), change(self.values), s)


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """KV of one chunk in all layers, layer 0 first; on the accelerator if it comes from the tier there, else on the host.

    ``kv_dtype`` is what it was rounded to; unless ``"auto"``, the layers hold codes.
    """

    layers: tuple[LayerKV, ...]
    kv_dtype: KVDtype = "auto"

    @property
    def num_tokens(self) -> int:
        """Tokens ``T`` of the chunk."""
        return int(self.layers[0].keys.shape[1])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkKV:
        """Return the chunk with every tensor changed."""
        return ChunkKV(tuple(layer.map(change) for layer in self.layers), self.kv_dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([layer.num_bytes for layer in self.layers])


@dataclass(frozen=True, slots=True)
class Hole:
    """A stored chunk that a request could not load whole and computed instead.

    ``reason``: not loaded in time, not in the store any more, wrong bytes, or a failed read. ``layer``: the first layer that was not read;
    ``None`` if the header was not read either.
    """

    key: ChunkKey
    reason: HoleReason
    layer: int | None

    def __str__(self) -> str:
        where = "" if self.layer is None else f" at layer {self.layer}"
        return f"{self.key[:12]} {self.reason}{where}"


@dataclass(frozen=True, slots=True)
class TextEntry:
    """What the span scanner needs to find a chunk's text in a prompt; the text itself is not stored.

    ``digest``: SHA-256 of the stripped text, hex; ``head``, ``tail``: rolling hashes (uint64) of its first and last
    :data:`kvrag.prompt.spans.ANCHOR_CHARS` characters; ``num_chars``: its length in characters (code points).
    """

    digest: str
    head: int
    tail: int
    num_chars: int


@dataclass(frozen=True, slots=True)
class Span:
    """A known chunk's place in a rendered prompt, in characters: ``text[start:stop]``."""

    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class MissedChunk:
    """A chunk of a prompt that has no KV. ``is_given``: it is an explicit :class:`Chunk`; else the text of a document."""

    text: str
    is_given: bool


@dataclass(frozen=True, slots=True)
class Missed:
    """The chunks of one prompt that had no KV, for :mod:`kvrag.precompute.on_miss`.

    ``prefix`` is the text to encode them behind, ``namespace`` a digest, and ``erasures`` the number of erasures there before the prompt.
    ``is_again``: they may have KV behind other prefixes.
    """

    chunks: tuple[MissedChunk, ...]
    prefix: str
    namespace: str
    erasures: int
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class PrecomputeReport:
    """What :meth:`KVRagEngine.precompute` did.

    Parameters
    ----------
    stored, skipped
        Chunks computed and written; chunks that are stored already.
    failed, short
        ``(id, reason)`` of each chunk that has no KV and is computed at query time: what could not be stored, and what is too short to be.
    stored_bytes, seconds
        Bytes of KV written; wall time.
    """

    stored: int
    skipped: int
    failed: list[tuple[str, str]]
    stored_bytes: int
    seconds: float
    short: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What :func:`kvrag.sync_kv` did: chunks added, documents removed, and the precompute report."""

    added: int
    removed: int
    precompute: PrecomputeReport


@dataclass(frozen=True, slots=True)
class Accounting:
    """How the KV of a prompt was made. ``cached_tokens + repaired_tokens + computed_tokens == prompt_tokens``.

    Parameters
    ----------
    prompt_ids, prompt_tokens
        Token ids of the prompt, and their number ``N``.
    cached_tokens
        Rows whose stored KV was used, possibly with the residual shift.
    repaired_tokens
        Rows with stored KV that were recomputed.
    computed_tokens
        Rows without stored KV: prefix, glue, missing chunks, the question.
    history_tokens
        Of the cached rows, those of an earlier request (``StoreConfig.history_bytes``).
    exactness
        ``"exact"``: reuse that equals a full prefill, but for the dtype's rounding; ``"repaired"``: approximate reuse, or rows left the
        context window; ``"full"``: none.
    timings_ms
        Milliseconds per stage.
    stages
        When each began and ended, as the process' clock has it (:data:`Stage`).
    loaded_bytes
        Bytes of KV loaded from the store.
    fallback_reason
        Why there was less reuse than requested, why this model's KV is never reused, or that rows left the window; else ``None``.
    has_other_prefix
        Whether chunks were used that had been encoded behind another prefix than this prompt's; they are not exact.
    holes
        Stored chunks that could not be loaded and were recomputed.
    kv_dtype
        How the reused KV is stored. Unless ``"auto"``, it was rounded, and the answer is not exact.
    sources
        Where each row's KV came from, as runs: ``(source, rows)`` from the prompt's first row to its last. ``exact`` and ``reused`` rows
        together are the cached ones.
    evicted_tokens
        Rows of prompt and answer that left the context window (``max_context="slide"``): what followed didn't see them.
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
    sources: tuple[tuple[Source, int], ...] = field(default=(), repr=False)
    evicted_tokens: int = 0

    @property
    def kv_reuse_ratio(self) -> float:
        """Cached tokens divided by prompt tokens, in [0, 1]."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __repr__(self) -> str:
        """Say what came out, then how it was made, without token ids and what is as usual."""
        told = [
            each for each in fields(self) if each.repr and getattr(self, each.name) != each.default
        ]
        told.sort(key=lambda each: each.name not in ("text", "loss"))
        shown = {each.name: getattr(self, each.name) for each in told}
        shown["timings_ms"] = {name: round(ms, 1) for name, ms in self.timings_ms.items()}
        for name in {"ttft_ms", "total_ms", "tokens_per_s"} & shown.keys():
            shown[name] = round(shown[name], 1)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrefillResult(Accounting):
    """A prefilled prompt. ``logits``: float32 CPU tensor ``(vocab,)`` of the first answer token."""

    logits: torch.Tensor = field(repr=False)
    ttft_ms: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScoreResult(Accounting):
    """A scored continuation.

    Row ``t`` of ``logits`` (float32 CPU tensor ``(T, vocab)``) predicts token ``t`` of ``continuation_ids``; ``loss`` is their mean
    negative log-likelihood in nats per token.
    """

    logits: torch.Tensor = field(repr=False)
    loss: float
    continuation_ids: list[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that an answer holds. ``id`` tells the calls of a conversation apart; results refer to it."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the probability that the model gave to a token of an answer, and to the likeliest ones in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationResult(Accounting):
    """A generated answer.

    Parameters
    ----------
    text
        The answer, stop string and calls of tools removed. A call that can't be read stays in it.
    token_ids
        Its token ids, including those of a stop string or end-of-sequence token.
    finish_reason
        ``"stop"`` (end-of-sequence, stop string, or the end of the form that was asked for), ``"tool_calls"`` (the same, with calls),
        ``"length"`` or ``"cancelled"``.
    ttft_ms
        Wall time from the call to the first token, including planning, loading, stitching and repair.
    total_ms, tokens_per_s
        Wall time of the whole call; decoding speed after the first token.
    tool_calls
        The tools that the answer calls.
    logprobs
        One for each of ``token_ids``, if they were asked for.
    prompt_logprobs
        One for each of ``prompt_ids``, if they were asked for; the first has ``nan``, as nothing predicts it.
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


@dataclass(frozen=True, slots=True)
class ExplainedSpan:
    """One segment of a prompt as :meth:`KVRagEngine.explain` reports it.

    ``hit``: stored KV will be used; ``exact``: it needs no repair; ``reason``: why not, or ``None``.
    """

    kind: Literal["prefix", "chunk", "live"]
    start: int
    stop: int
    text: str
    hit: bool
    exact: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Spans, hits and reasons of misses for one prompt, and how it would be repaired and why so; can be printed."""

    spans: list[ExplainedSpan]
    prompt_tokens: int
    mode: Mode
    notes: list[str]
    repair: str = ""

    @property
    def hits(self) -> int:
        """Number of chunks with stored KV."""
        return sum(span.hit for span in self.spans if span.kind == "chunk")

    def __str__(self) -> str:
        lines = [
            f"{self.prompt_tokens} tokens, {self.hits} chunk(s) with KV, would run in mode {self.mode!r}"
        ]
        for span in self.spans:
            head = " ".join(span.text.split())[:48]
            state = ("exact" if span.exact else "hit") if span.hit else "computed"
            why = f"  ({span.reason})" if span.reason else ""
            lines.append(f"{span.start:>6}-{span.stop:<6} {span.kind:<6} {state:<8} {head!r}{why}")
        return "\n".join([*lines, *self.notes, f"repair: {self.repair}"])


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Reuse against full prefill for one prompt: KL in nats at the first token, and the two greedy answers."""

    kl: float
    top1: bool
    greedy: bool
    exactness: Exactness
    kv_reuse_ratio: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Agreement of reuse with full prefill over some prompts.

    ``mean_kl`` is KL(full ‖ reuse) at the first answer token in nats; ``top1_agreement`` and ``greedy_agreement`` are the shares of prompts
    with the same first token and the same greedy answer; ``passed`` compares the first two with their thresholds, as ``passed_by`` says.
    The greedy answers are for information, and so is this: both sides run the ids of the prompt's segments, joined. At ``changed_seams``
    of ``seams`` places where segments meet, the prompt's whole text has other ids; this concerns ``changed_tokens`` of ``prompt_tokens``.
    """

    passed: bool
    mean_kl: float
    top1_agreement: float
    greedy_agreement: float
    rows: list[VerifyRow]
    seams: int = 0
    changed_seams: int = 0
    prompt_tokens: int = 0
    changed_tokens: int = 0
    repair: str = ""
    passed_by: str = ""
