"""The public configs: frozen pydantic dataclasses.

The command line and the adapters derive their options from the fields. A wrong value or an unknown
option raises a :class:`~kvrag.errors.ConfigError` that names the field, the value and the range.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    SkipValidation,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from kvrag.config.address import Address, address
from kvrag.config.declare import NAMED, as_config, config_class, names_of, options_class
from kvrag.config.spelling import NOTHING, PLACES, parse_bytes, unknown_option
from kvrag.errors import ConfigError
from kvrag.types import KVDtype, MaxContext, Mode, Prove

T = TypeVar("T")

Strategy = Literal[
    "none",
    "all",
    "random",
    "first_k",
    "boundary",
    "hkvd",
    "query",
    "query_gain",
    "query_runs",
]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
MODES = get_args(Mode)
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

# A function that returns the key, or "env:NAME"; never the key itself.
KeySource = Callable[[], bytes] | str

# -- checks of options ---------------------------------------------------------------------------


def refuse_misplaced(
    given: Iterable[str],
    own: Collection[str],
    *,
    of: str,
    misspelt: bool = True,
    aliases: Mapping[str, str] = NOTHING,
) -> None:
    """Raise :class:`ConfigError` on options of a :class:`StoreConfig` that were passed to ``of``.

    They would be dropped or fail late. A dropped ``encryption_key``, for instance, would leave KV
    unencrypted. With ``misspelt``, misspelt names of ``own`` and names of :class:`RepairConfig`
    options are refused too.
    """
    stored = set(names_of(StoreConfig))
    for name in given:
        near = difflib.get_close_matches(name, sorted(stored.union(own, aliases)), n=1, cutoff=0.8)
        if near and near[0] in stored:
            where = f"store_config=StoreConfig({near[0]}=...)"
            raise ConfigError(f"{of} has no option {name!r}; pass it to the store: {where}")
        if misspelt and (near or name in _REPAIRING):
            raise unknown_option(name, own, of=of, aliases=aliases)


def check_namespace(namespace: object) -> str:
    """Return the namespace; raise :class:`ConfigError` unless it is a non-empty string."""
    if not isinstance(namespace, str) or not namespace:
        raise ConfigError(f"namespace is {namespace!r}; it must be a non-empty string")
    return namespace


def check_mode(mode: str, max_context: str = "raise") -> None:
    """Raise :class:`ConfigError` for an unknown mode or ``max_context``.

    See :data:`MODES` and :data:`~kvrag.types.MaxContext`.
    """
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
    if max_context not in get_args(MaxContext):
        raise ConfigError(
            f"max_context is {max_context!r}; it must be 'raise' or 'slide' (the oldest tokens "
            "leave)"
        )


def check_prove(prove: object) -> None:
    """Raise :class:`ConfigError` unless ``prove`` is in :data:`~kvrag.types.Prove`."""
    if prove not in get_args(Prove):
        raise ConfigError(
            f"prove is {prove!r}; it must be 'auto' (prove reuse on this model, once) or 'off'"
        )


ENGINE_OPTIONS = (
    "kv_dir",
    "prefix",
    "context",
    "namespace",
    "tokenizer",
    "prove",
    "device",
    "revision",
)
_REPAIRING = (
    "strategy",
    "recompute_ratio",
    "first_k",
    "mismatch_ratio",
    "probe_span",
)

# -- the configs -----------------------------------------------------------------------------------

Count = Annotated[int, Field(strict=True, ge=0)]
Size = Annotated[Count, BeforeValidator(parse_bytes)]
"""Bytes, as a number or a string with a unit: ``"50MB"``, ``"2GiB"``."""
Positive = Annotated[int, Field(strict=True, ge=1)]
TopCount = Annotated[int, Field(strict=True, ge=0, le=20)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Bias = Annotated[float, Field(strict=True, ge=-100, le=100, allow_inf_nan=False)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
Switch = Annotated[bool, Field(strict=True)]


# Arguments of ``apply_chat_template`` that aren't template variables. ``documents`` is refused as
# well: kvrag takes documents as chunks.
RESERVED = (
    "messages",
    "conversation",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "documents",
    "chat_template",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
)


def check_template_kwargs(value: object) -> dict[str, Any]:
    """Return variables for the chat template as a dict.

    Raises :class:`ConfigError` if they are not a mapping, or if a name is in :data:`RESERVED`.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all([isinstance(name, str) for name in value]):
        raise ConfigError(
            f"chat_template_kwargs is {value!r}; pass a dict of variables for the chat template, "
            f"as {{'enable_thinking': False}}"
        )
    for name in value:
        if name in RESERVED:
            if name == "documents":
                where = "put documents into messages, as kvrag.Chunk"
            else:
                where = "it is kvrag's own to set"
            raise ConfigError(
                f"chat_template_kwargs holds {name!r}, which is no variable of a chat template: "
                f"{where}"
            )
    return dict(value)


def _span(pair: tuple[float, float]) -> tuple[float, float]:
    if not pair[0] < pair[1]:
        raise ValueError("it must be two numbers that ascend in [0, 1]")
    return pair


def _stop_strings(value: object) -> object:
    """Accept a string, an iterable of strings, or no value."""
    if value is None:
        return ()
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for item in items:
        if not isinstance(item, str) or not item:
            raise ConfigError(
                f"SamplingConfig.stop holds {item!r}; every stop must be a non-empty string"
            )
    return items


def _seed(value: object) -> object:
    """Accept the seeds of torch's generators, and -1, which draws a seed as in other libraries."""
    is_seed = isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 2**64
    if value is not None and not is_seed:
        raise ValueError(
            "it must be a whole number from 0 to 2**64 - 1, or None or -1 for one that is drawn"
        )
    if value == -1:
        return None
    return value


def _none_as_empty(value: object) -> object:
    if value is None:
        return ()
    return value


def _pairs(value: object) -> object:
    """Accept pairs, a dict, which becomes its items, or no value."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, str):
        raise ValueError("it must be a dict by token id, or pairs")
    return value or ()


def _address(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Turn an address into an :class:`Address`, which never shows its password."""
    if isinstance(value, Address):
        return value
    return address(check(value))


def _key_source(value: object) -> object:
    """Refuse a key source that is neither a function nor ``"env:NAME"``.

    The message doesn't repeat the value, which may be a key.
    """
    is_variable = isinstance(value, str) and value.startswith("env:") and len(value) > len("env:")
    if value is not None and not is_variable and not callable(value):
        kind = type(value).__name__
        raise ConfigError(
            f"StoreConfig.encryption_key is of type {kind}; it must be a function that returns the "
            "key, 'env:NAME', or None, never a key"
        )
    return value


@config_class
class RepairConfig:
    """Options for repairing stitched KV."""

    strategy: Strategy = "query_runs"
    """Strategy that chooses the rows to recompute: ``query_runs`` (runs of rows around those that
    the question attends to, so that words and numbers stay whole, and rows that predict the most
    of other rows' changes), ``query_gain`` (only the latter), ``query`` (rows that the question
    attends to), ``hkvd`` (high KV deviation, CacheBlend), ``first_k`` (heads of chunks, EPIC),
    ``boundary`` (around every seam), ``random``, ``none`` or ``all``."""
    recompute_ratio: Fraction | None = None
    """Rows to recompute, as a fraction in [0, 1] of the chunk rows that are not exact. ``None``: 4%
    plus 192 rows, at most a quarter, because a question reads about the same number of rows in a
    prompt of any length."""
    first_k: Count = 1
    """Rows at the head of every chunk that is not exact, recomputed even where the ratio is
    smaller; they count towards it."""
    shift: Fraction = 1.0
    """Strength in [0, 1] of the residual shift, which adds to the unrepaired rows the change that
    the repaired rows predict for them."""
    mismatch_ratio: Fraction = 0.20
    """Recompute ratio, where larger than the usual ratio, for prompts with chunks that were encoded
    behind a different prefix."""
    probe_span: Annotated[tuple[Fraction, Fraction], AfterValidator(_span)] = (1 / 3, 0.8)
    """Range of layers whose attention the ``query`` strategies use, as fractions of all layers."""
    seed: Count = 0
    """Seed of the ``random`` strategy."""

    @classmethod
    def fast(cls) -> RepairConfig:
        """Repair 3% of the rows: sooner than the default, but many facts are lost."""
        return cls(recompute_ratio=0.03)

    @classmethod
    def careful(cls) -> RepairConfig:
        """Repair 40% of the rows: fewer lost facts, and about half of a full prefill's time."""
        return cls(recompute_ratio=0.4)

    @classmethod
    def cacheblend(cls, recompute_ratio: float = 0.15) -> RepairConfig:
        """Repair like CacheBlend as published: HKVD rows, no chunk heads, no shift.

        See arXiv 2405.16444.
        """
        return cls(strategy="hkvd", recompute_ratio=recompute_ratio, first_k=0, shift=0.0)


# Names that ``repair`` may have instead of a config. ``auto``: the result of
# :meth:`kvrag.KVRagEngine.calibrate`, else the default.
NAMED[RepairConfig] = {
    "auto": None,
    "fast": RepairConfig.fast(),
    "careful": RepairConfig.careful(),
}
Repair = RepairConfig | Mapping[str, Any] | Literal["auto", "fast", "careful"] | None


@config_class
class StoreConfig:
    """Budgets, limits and the key of the KV store.

    Sizes are numbers of bytes, or strings with a unit: ``"50MB"``, ``"2GiB"``.
    """

    ram_bytes: Size = 2 * 2**30
    """Budget of the host memory tier, in bytes. Chunks with the lowest priority leave first, then
    chunks that save the least computing time per byte."""
    disk_bytes: Size | None = None
    """Budget of the disk tier, in bytes of KV; ``None``: no limit. Chunks with the lowest priority
    leave first, then chunks that save the least computing time per byte."""
    min_free_bytes: Size = 256 * 2**20
    """Bytes of the file system that the store leaves free. Chunks are evicted, or not stored, to
    keep them free. 0: no limit."""
    shared: Annotated[str | None, WrapValidator(_address)] = None
    """Address of a store that machines share, as ``redis://host:port/0`` or ``s3://bucket/prefix``;
    ``kv_dir`` then holds copies."""
    catalog: Annotated[str | None, WrapValidator(_address)] = None
    """Address of the Redis or Valkey server with the catalog of a store that machines share, as
    ``redis://host:port/0``; ``None``: the store's own Redis. A bucket without a catalog can only be
    read."""
    durability: Literal["durable", "cache"] = "durable"
    """Durability of stored chunks: ``durable`` chunks survive a power cut; with ``cache``, the
    latest may be lost, which saves waiting for the disk."""
    read_only: Switch = False
    """Change nothing in the directory."""
    event_log: str | None = None
    """File that events of stored chunks are appended to, as JSON lines; ``None``: no log."""
    on_event: Annotated[Callable[[Any], None] | None, WithJsonSchema({"type": "null"})] = None
    """Function called with every :class:`kvrag.store.StoreEvent`; it must return quickly and must
    not use the store."""
    history_bytes: Size | None = None
    """Budget of finished requests' KV, in bytes of the model's device: a prompt that begins like an
    earlier request, such as the next turn of a chat, computes only its new rows. All engines on a
    device share the largest budget. 0: keep no KV of requests. ``None``: 1 GiB, at most a sixteenth
    of the host's memory, for models of LangChain and LlamaIndex, else 0."""
    load_timeout_s: NonNegative = 10.0
    """Seconds that a request waits for the store in all. Chunks that are not loaded by then are
    computed."""
    min_chunk_tokens: Positive = 32
    """Minimum tokens of a stored chunk. Shorter chunks are always computed: rows that must be
    repaired anyway save nothing."""
    on_miss: Literal["compute", "store"] = "compute"
    """Treatment of a prompt's chunks that are not stored. ``compute``: compute them for this answer
    alone. ``store``: after the answer, precompute them in the background, without a document id.
    Live text, such as a user's message, is never stored."""
    gpu_bytes: Size | None = 0
    """Budget of the accelerator memory tier, in bytes; ``None``: no limit, 0: no such tier. The
    tier is emptied when memory runs out."""
    gpu_fraction: Fraction = 0.1
    """Budget of the accelerator memory tier as a fraction of that memory, on CUDA and ROCm; the
    lesser of this and ``gpu_bytes`` wins."""
    ram_fraction: Fraction = 0.5
    """Budget of the host memory tier as a fraction of the memory available to this process; the
    lesser of this and ``ram_bytes`` wins."""
    disk_fraction: Fraction = 1.0
    """Budget of the disk tier as a fraction of the file system's size (1: no limit); the lesser of
    this and ``disk_bytes`` wins."""
    kv_dtype: KVDtype = "auto"
    """Type of stored KV, on disk and in every memory tier: ``auto`` (as computed), or rounded to
    ``int8``, ``fp8`` or ``int4`` (docs/quantised.md). Rounded KV is never exact. A model whose
    answers the rounding harms is refused. An engine does not find KV of another type."""
    encryption_key: Annotated[
        KeySource | None,
        BeforeValidator(_key_source),
        WithJsonSchema({"anyOf": [{"type": "string", "pattern": "^env:."}, {"type": "null"}]}),
    ] = Field(default=None, repr=False)
    """Key of the store: a function that returns at least 32 bytes, or ``"env:NAME"``, an
    environment variable that holds them as hex digits or base64. Blobs are encrypted with
    AES-256-GCM, the catalog with AES-SIV, and names are HMACs (needs the extra ``crypto``). The key
    is read when the store is opened. A store written with another key gives no hits."""

    def __post_init__(self) -> None:
        if self.read_only and self.on_miss == "store":
            raise ConfigError(
                "StoreConfig.on_miss is 'store', and a read_only store takes nothing; drop one of "
                "them"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Refuse pickling if the key is a function.

        The function may hold the key, and without the function chunks would be written unencrypted.
        """
        if callable(self.encryption_key):
            raise ConfigError(
                "a StoreConfig whose encryption_key is a function can't be pickled; use 'env:NAME'"
            )
        return vars(self)

    def __copy__(self, _: dict[int, Any] | None = None) -> StoreConfig:
        return self

    __deepcopy__ = __copy__


DEFAULT_PRIORITY = 35
MOST = 1e15  # seconds, or milliseconds
Given = Annotated[float, Field(strict=True, ge=0, le=MOST)]


@config_class
class Retention:
    """Priority, duration and cost of a stored chunk, for eviction."""

    priority: Annotated[int, Field(strict=True, ge=0, le=100)] = DEFAULT_PRIORITY
    """Priority from 0 to 100; chunks with the lowest leave first. Typical: system prompts 80 to 90,
    documents 35 to 60, temporary texts 20 to 30."""
    duration_s: Given | None = None
    """Seconds until the priority returns to :data:`DEFAULT_PRIORITY`; ``None``: never."""
    cost_ms: Given | None = None
    """Milliseconds that computing the chunk took; ``None``: the time measured by precompute, else
    the mean cost per token of the store's other chunks."""


def _retention(value: object) -> object:
    """Accept a retention, or a dict of its options."""
    return as_config(Retention, value, option="IndexOptions.retention")


@options_class
class IndexOptions:
    """Options of storing KV at index time.

    Engines, hooks, adapters of frameworks, clients of servers and the command line have them.
    """

    prefix: Any = None
    """Text before the first chunk, as the engine's ``prefix``; ``None``: the engine's."""
    namespace: SkipValidation[str | None] = None
    """Namespace of the chunks, which are never found from another one; ``None``: the engine's."""
    collection: SkipValidation[str | None] = None
    """Collection of the documents: with ``"manuals"``, the id ``"install"`` means
    ``"manuals/install"``."""
    batch_size: Positive = 8
    """Chunks per forward."""
    show_progress: Switch | None = None
    """Display of progress. ``None``: for a long run, show a bar on a terminal and lines elsewhere;
    ``True``: show a bar; ``False``: show nothing."""
    retention: Annotated[Retention | None, BeforeValidator(_retention)] = None
    """Priority and duration, applied to stored chunks as well. ``None``: new chunks get priority
    35, and stored chunks keep their own retention."""

    def shared(self) -> dict[str, Any]:
        """Return these options by name, without those that a subclass adds."""
        return {name: getattr(self, name) for name in names_of(IndexOptions)}


# Maximum tokens of an answer if the request gives no number. It is not the whole context window,
# because the answer's KV is reserved in advance.
DEFAULT_MAX_NEW_TOKENS = 1024

# Temperatures below this are greedy: divided by them, logits exceed float32's precision.
GREEDY_BELOW = 1e-3


def _kept_as(kind: Any, read: Callable[[object], object]) -> GetPydanticSchema:
    """Have values of the types that editors show read, checked and kept as another type."""
    kept = Annotated[kind, BeforeValidator(read)]
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kept))


_BIASES = _kept_as(tuple[tuple[Count, Bias], ...], _pairs)
_STOPS = _kept_as(tuple[str, ...], _stop_strings)
_TOKENS = _kept_as(tuple[Count, ...], _none_as_empty)


@options_class
class SamplingConfig:
    """Options for choosing answer tokens, named as in ``transformers.GenerationConfig``."""

    max_new_tokens: Positive | None = None
    """Maximum number of answer tokens. ``None``: as in the model's generation config, else 1,024;
    in both cases no more than the context window leaves behind the prompt. A given number that does
    not fit is an error."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 and values below 0.001 decode greedily."""
    top_p: Fraction | None = None
    """Nucleus filter, used when sampling: keep the likeliest tokens up to this cumulative
    probability. 1 is off."""
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    """Top-k filter, used when sampling: keep this many of the likeliest tokens. 0 and -1 are
    off."""
    min_p: Fraction | None = None
    """Min-p filter, used when sampling: keep tokens with at least this share of the likeliest
    token's probability. 0 is off."""
    repetition_penalty: Annotated[float, Field(strict=True, ge=1e-6)] | None = None
    """Repetition penalty; ``None`` takes the model's own generation config."""
    min_new_tokens: Count | None = None
    """Minimum number of tokens before the model's own end tokens can end the answer."""
    seed: Annotated[int | None, BeforeValidator(_seed)] = None
    """Seed for sampling, below 2**64; ``None`` or -1 draws a seed."""
    frequency_penalty: Penalty = 0.0
    """Subtract this from a token's logit per occurrence in the answer; from -2 to 2, as in OpenAI's
    API."""
    presence_penalty: Penalty = 0.0
    """Subtract this from the logits of tokens that occur in the answer."""
    logit_bias: Annotated[Mapping[int, float] | Sequence[tuple[int, float]] | None, _BIASES] = ()
    """Values added to the logits of tokens: a dict by token id, or pairs; from -100 (never) to 100
    (always)."""
    logprobs: TopCount | None = None
    """Return the log-probability of every answer token, and of this many of the likeliest tokens in
    its place. They come from the model's own logits, float32, before temperature, filters,
    penalties and biases."""
    prompt_logprobs: TopCount | None = None
    """Return the log-probability of every prompt token, too, and of this many of the likeliest
    tokens in its place. The prompt is then prefilled in full, because reused rows have no
    logits; the context window does not slide (``max_context``), and ``on_miss="store"`` stores
    nothing."""
    stop: Annotated[str | Sequence[str] | None, _STOPS] = ()
    """Strings that end the answer; they are not part of it."""
    stop_token_ids: Annotated[Sequence[int] | None, _TOKENS] = ()
    """Tokens that end the answer, besides the model's own."""

    @property
    def is_greedy(self) -> bool:
        """Whether decoding always takes the likeliest token."""
        return self.temperature < GREEDY_BELOW


for _form, _options in {
    "retention=Retention({}=...)": names_of(Retention),
    "generate(..., {}=...)": names_of(SamplingConfig),
    "store_config=StoreConfig({}=...)": names_of(StoreConfig),
    "repair=RepairConfig({}=...)": names_of(RepairConfig),
    "{}=... to the engine": ENGINE_OPTIONS,
}.items():
    PLACES.update({name: _form.format(name) for name in _options})
