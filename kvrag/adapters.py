"""Names that the adapters of frameworks and engines use, and their options as pydantic fields.

An adapter imports from ``kvrag`` and from here alone, so a change inside kvrag can't break it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
)

from kvrag.blend.cost import MARGIN, CostModel, Costs, Price
from kvrag.blend.layout import Layout, Segment, lay_out
from kvrag.blend.prefill import prefill
from kvrag.blend.reuse import read
from kvrag.blend.stitch import filling, stitch
from kvrag.config import (
    Repair,
    RepairConfig,
    Retention,
    StoreConfig,
    as_config,
    check_mode,
    check_namespace,
    check_prove,
    check_template_kwargs,
    fault_of,
    refuse_misplaced,
    unknown_option,
)
from kvrag.config.address import check_kv_dir, local, place
from kvrag.config.declare import checks_names
from kvrag.config.spelling import respelt
from kvrag.engine import KVRagEngine
from kvrag.errors import ConfigError, InputError, require
from kvrag.evaluate.calibrate import described
from kvrag.generate.request import RequestOptions
from kvrag.generate.scheduler import MAX_RUNNING
from kvrag.generate.streams import AsyncTokenStream, TokenStream
from kvrag.hooks import (
    Content,
    OnError,
    changed_ids,
    delete_kv,
    documents_in,
    precompute_kv,
    prefetch_kv,
    sync_kv,
)
from kvrag.hosts import RemoteHost, engine_of, host_of
from kvrag.identity.fingerprint import (
    context_digest,
    ids_digest,
    namespace_digest,
)
from kvrag.model.linear import linear
from kvrag.model.lm import CausalLM, LoadedModel
from kvrag.model.load import load as load_model
from kvrag.model.lock import Clock
from kvrag.model.plain import context_window
from kvrag.model.rows import KVBuffer, Rows
from kvrag.model.source import (
    ModelSource,
    base_directory,
    config_of,
    directory,
    hub_options,
    load_tokenizer,
)
from kvrag.precompute.library import below_collection, escaped, in_collection
from kvrag.progress import check_show
from kvrag.prompt.plan import Plan
from kvrag.prompt.plan_ids import plan_ids
from kvrag.prompt.planner import KnownTexts, PromptPlanner
from kvrag.prompt.prefix import Prefix, prefix_text
from kvrag.prompt.template import Chat, PromptEncoder
from kvrag.prompt.tools import Tools, answer_form
from kvrag.runtime import host_memory
from kvrag.store import TieredStore, open_store
from kvrag.types import (
    ChunkKey,
    MaxContext,
    Mode,
    PrecomputeReport,
    Prove,
    SyncReport,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    ModelLike = str | os.PathLike[str] | PreTrainedModel
    Device = str | torch.device | None
    Dtype = str | torch.dtype
else:  # pydantic must neither check these nor put them into a schema
    ModelLike = Annotated[Any, AfterValidator(local)]
    Device = Dtype = Any

_OF_ENGINE = inspect.signature(KVRagEngine.get).parameters.keys()
_OF_CALL = RequestOptions.__pydantic_fields__  # type: ignore[attr-defined]
"""Options of a request, as the engine names them."""

__all__ = [
    "MARGIN",
    "MAX_RUNNING",
    "AsyncTokenStream",
    "CausalLM",
    "Chat",
    "ChunkKey",
    "Clock",
    "Content",
    "CostModel",
    "Costs",
    "EngineFields",
    "KVBuffer",
    "KnownTexts",
    "Layout",
    "LoadedModel",
    "MaxContext",
    "Mode",
    "ModelLike",
    "ModelSource",
    "OnError",
    "Plan",
    "Prefix",
    "Price",
    "PromptEncoder",
    "PromptPlanner",
    "RemoteHost",
    "Repair",
    "Rows",
    "Segment",
    "TieredStore",
    "TokenStream",
    "Tools",
    "answer_form",
    "as_config",
    "base_directory",
    "below_collection",
    "changed_ids",
    "chat_engine",
    "check_call",
    "check_kv_dir",
    "check_mode",
    "check_namespace",
    "check_show",
    "check_template_kwargs",
    "checks_names",
    "config_of",
    "context_digest",
    "context_window",
    "described",
    "directory",
    "documents_in",
    "engine_of",
    "escaped",
    "filling",
    "host_of",
    "hub_options",
    "id_text",
    "ids_digest",
    "in_collection",
    "lay_out",
    "linear",
    "load_model",
    "load_tokenizer",
    "namespace_digest",
    "open_store",
    "plan_ids",
    "prefetch_kv",
    "prefill",
    "prefix_text",
    "read",
    "refuse_misplaced",
    "require",
    "respelt",
    "stitch",
    "unknown_option",
]


def id_text(name: object) -> str:
    """Return an id as a string: a whole number and a UUID become their text.

    Raises :class:`InputError` for other types.
    """
    if isinstance(name, str):
        return str.__str__(name)  # the value of a member of an enumeration, not its name
    if isinstance(name, bool) or not isinstance(name, (Integral, UUID)):
        raise InputError(
            f"the id {name!r} is of type {type(name).__name__}; pass a string, a whole number or "
            "a UUID"
        )
    return str(name)


class EngineFields(BaseModel):
    """Options shared by the model classes of LangChain and LlamaIndex.

    A wrong option raises :class:`~kvrag.ConfigError`. The fields of
    :class:`~kvrag.config.SamplingConfig` are repeated here, because editors and type checkers read
    them from here. ``__init__`` is hidden from these tools, here and in subclasses; they would show
    its ``**data`` instead.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    temperature: float = 0.0
    """Sampling temperature; 0 and values below 0.001 decode greedily."""
    top_p: float | None = None
    """Nucleus filter, used when sampling: keep the likeliest tokens up to this cumulative
    probability. 1 is off."""
    top_k: int | None = None
    """Top-k filter, used when sampling: keep this many of the likeliest tokens. 0 and -1 are
    off."""
    min_p: float | None = None
    """Min-p filter, used when sampling: keep tokens with at least this share of the likeliest
    token's probability. 0 is off."""
    repetition_penalty: float | None = None
    """Repetition penalty; ``None`` takes the model's own generation config."""
    min_new_tokens: int | None = None
    """Minimum number of tokens before the model's own end tokens can end the answer."""
    seed: int | None = None
    """Seed for sampling, below 2**64; ``None`` or -1 draws a seed."""
    frequency_penalty: float = 0.0
    """Subtract this from a token's logit per occurrence in the answer; from -2 to 2, as in OpenAI's
    API."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens that occur in the answer."""
    tokenizer: Annotated[Any, AfterValidator(local)] = Field(default=None, repr=False)
    """A tokenizer, its id or directory; default: the model's."""
    kv_dir: Annotated[str | os.PathLike[str] | None, SkipValidation, AfterValidator(place)] = None
    """Directory of the KV store; default: keep chunks in memory only."""
    prefix: Any = Field(default=None, repr=False)
    """Prompt's start, up to the first chunk: text, messages, the prompt template of your chain, a
    :class:`kvrag.TemplatePrefix` that also names the context variable."""
    context: str | None = Field(default="default", repr=False)
    """Text between the prefix and the chunk at index time: ``default`` (250 tokens of passages that
    ship with kvrag), ``default:1000`` (1,000 tokens of them), your own text, or ``None``: the first
    chunk of a prompt is then exact behind its own prefix."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Values added to the logits of tokens, by token id; from -100 (never) to 100 (always)."""
    namespace: str = "default"
    """Namespace of the chunks; they are never found from another namespace."""
    repair: RepairConfig | None = None
    """Repair of stitched KV: a config, ``auto`` (the default: as calibrated for the model, else the
    defaults of :class:`kvrag.RepairConfig`), ``fast`` or ``careful``."""
    store_config: StoreConfig | None = None
    """Budgets, limits and the key of the KV store."""
    mode: Annotated[Mode, SkipValidation] = "auto"
    """Mode of reuse: ``auto``, ``full`` (no reuse), ``prefix`` (exact reuse of the prompt's head
    only) or ``stitch``."""
    max_context: Annotated[MaxContext, SkipValidation] = "raise"
    """Behaviour where prompt and answer exceed the context window: ``raise`` raises an error;
    ``slide`` evicts the oldest tokens (``evicted_tokens``)."""
    chat_template_kwargs: Annotated[dict[str, Any], SkipValidation] = Field(default_factory=dict)
    """Variables for the model's chat template, for instance ``{"enable_thinking": False}``; also
    per call."""
    dtype: Dtype = "auto"
    """Dtype of the model; ``auto``: float32 on the CPU, else the checkpoint's."""
    device: Device = None
    """Device: ``cpu``, ``cuda``, ...; default: CUDA if available, else the CPU."""
    prove: Annotated[Prove, SkipValidation] = "auto"
    """Proof of reuse; ``auto``: prove once that reuse is exact for this model, else answer by full
    prefill; ``off``: check the model's structure only."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)  # may hold tokens
    """Arguments for ``AutoModelForCausalLM.from_pretrained``."""

    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            for name, kind in (("store_config", StoreConfig), ("repair", RepairConfig)):
                if name in data:  # not left to pydantic, which would repeat a key in its message
                    data[name] = as_config(kind, data[name], option=name)
            if "chat_template_kwargs" in data:
                data["chat_template_kwargs"] = check_template_kwargs(data["chat_template_kwargs"])
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise fault_of(type(self), error, data) from None
            self.check_model_kwargs()
            check_prove(self.prove)
            check_mode(self.mode, self.max_context)

    def check_model_kwargs(self) -> None:
        """Refuse ``model_kwargs`` with an option of this class or the store, by ``ConfigError``."""
        own = type(self).model_fields
        of = type(self).__name__
        for name in self.model_kwargs:
            if name in own:
                raise ConfigError(
                    f"model_kwargs of {of} holds {name!r}, an option of its own; pass "
                    f"{of}({name}=...)"
                )
        refuse_misplaced(self.model_kwargs, own, of=f"model_kwargs of {of}", misspelt=False)

    def engine_options(self) -> dict[str, Any]:
        """Return the options of :meth:`kvrag.KVRagEngine.get` except the prefix."""
        names = _OF_ENGINE & type(self).model_fields.keys() - {"model", "prefix"}
        return {**self.model_kwargs, **{name: getattr(self, name) for name in names}}

    def request_options(self) -> dict[str, Any]:
        """Return the options of a request that are no options of the engine."""
        names = _OF_CALL.keys() & type(self).model_fields.keys() - _OF_ENGINE
        return {name: getattr(self, name) for name in names}

    def _own_prefix(self, prefix: Any) -> Any:
        """Return a prefix as the engine takes it; ``None``: the engine's own."""
        return prefix

    @checks_names
    def precompute_kv(
        self,
        items: Any,
        *,
        ids: Sequence[str] | None = None,
        prefix: Any = None,
        namespace: str | None = None,
        content: Content = "text",
        batch_size: int = 8,
        show_progress: bool | None = None,
        on_error: OnError = "raise",
        retention: Retention | None = None,
        collection: str | None = None,
    ) -> PrecomputeReport:
        """Compute and store the KV of documents, of texts, or of a vector store or an index.

        Takes the options of :func:`kvrag.precompute_kv`.
        """
        return precompute_kv(
            items,
            llm=self,
            ids=ids,
            prefix=self._own_prefix(prefix),
            namespace=namespace,
            content=content,
            batch_size=batch_size,
            show_progress=show_progress,
            on_error=on_error,
            retention=retention,
            collection=collection,
        )

    @checks_names
    def delete_kv(
        self, items: Any, *, namespace: str | None = None, collection: str | None = None
    ) -> int:
        """Delete the KV of documents, given as objects or by id.

        Takes the options of :func:`kvrag.delete_kv`.
        """
        return delete_kv(items, llm=self, namespace=namespace, collection=collection)

    @checks_names
    def sync_kv(
        self,
        live_items: Any,
        *,
        ids: Sequence[str] | None = None,
        prefix: Any = None,
        namespace: str | None = None,
        content: Content | None = None,
        batch_size: int = 8,
        show_progress: bool | None = None,
        retention: Retention | None = None,
        collection: str | None = None,
    ) -> SyncReport:
        """Keep the KV of exactly these documents, or of an index's.

        Takes the options of :func:`kvrag.sync_kv`.
        """
        return sync_kv(
            live_items,
            llm=self,
            ids=ids,
            prefix=self._own_prefix(prefix),
            namespace=namespace,
            content=content,
            batch_size=batch_size,
            show_progress=show_progress,
            retention=retention,
            collection=collection,
        )


HISTORY_BYTES = min(2**30, host_memory() // 16)
"""Budget for the KV of finished requests where ``StoreConfig.history_bytes`` names none."""


def chat_engine(model: Any, **options: Any) -> KVRagEngine:
    """Return the engine of :meth:`kvrag.KVRagEngine.get`, which continues earlier requests."""
    engine = KVRagEngine.get(model, **options)
    engine.history_bytes = HISTORY_BYTES
    return engine


def check_call(
    cls: type[BaseModel],
    options: Mapping[str, Any],
    *,
    aliases: Mapping[str, str],
    more: Iterable[str] = (),
) -> None:
    """Check the options of a call of an LLM.

    Parameters
    ----------
    cls
        Class of the LLM, which errors name.
    options
        Options under the engine's names.
    aliases, more
        Names of the class's options by their other names, such as the engine's; options that the
        engine does not have.

    Raises
    ------
    ConfigError
        If an option does not exist or has an invalid value.
    """
    of = cls.__name__
    for name in options:
        if name in _OF_CALL:
            continue
        if name in cls.model_fields:
            raise ConfigError(f"{name!r} is no option of a call; pass {of}({name}=...)")
        known = [*(aliases.get(each, each) for each in _OF_CALL), *more]
        raise unknown_option(name, known, of=of, aliases=aliases)
    try:
        RequestOptions(**options)
    except ConfigError as error:
        raise ConfigError(respelt(str(error), {"SamplingConfig": of, **aliases})) from None
