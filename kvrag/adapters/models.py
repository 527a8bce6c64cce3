"""Options of an engine and of its requests as the fields of a framework's model class."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
)

from kvrag.config import (
    Repair,
    RepairConfig,
    StoreConfig,
    as_config,
    check_mode,
    check_prove,
    check_template_kwargs,
    fault_of,
    refuse_misplaced,
    unknown_option,
)
from kvrag.config.address import local, place
from kvrag.config.declare import checks_names, parameters_of
from kvrag.config.spelling import respelt
from kvrag.engine import KVRagEngine
from kvrag.errors import ConfigError
from kvrag.generate.request import RequestOptions
from kvrag.generate.scheduler import MAX_RUNNING
from kvrag.hooks import ItemRequest, SyncRequest, delete_kv, precompute_kv, sync_kv
from kvrag.model.source import ModelSource
from kvrag.runtime import host_memory
from kvrag.types import Explanation, MaxContext, Mode, PrecomputeReport, Prove, SyncReport

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    ModelLike: TypeAlias = str | os.PathLike[str] | PreTrainedModel
    Device = str | torch.device | None
    Dtype = str | torch.dtype
else:  # pydantic must neither check these nor put them into a schema
    ModelLike = Annotated[Any, AfterValidator(local)]
    Device = Dtype = Any

_OF_ENGINE = inspect.signature(KVRagEngine.get).parameters.keys()
_OF_CALL = RequestOptions.__pydantic_fields__.keys() - {  # type: ignore[attr-defined]
    "logprobs",
    "prompt_logprobs",
}
"""Options of a request, as the engine names them, but those whose results frameworks drop."""

HISTORY_BYTES = min(2**30, host_memory() // 16)
"""Budget for the KV of finished requests where ``StoreConfig.history_bytes`` names none."""


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

    aliases: ClassVar[Mapping[str, str]] = {}
    """The engine's names of options by their other names."""
    call_options: ClassVar[tuple[str, ...]] = ()
    """Options of a call that the engine does not have."""
    max_running: ClassVar[int] = MAX_RUNNING
    """Answers that are decoded at the same time."""

    model: ModelLike = Field(repr=False, kw_only=False)
    """Model: hub id, local directory, ``.gguf`` file, or a loaded ``PreTrainedModel`` (see
    ``from_pretrained_model``)."""
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

    @classmethod
    def from_pretrained_model(cls, model: PreTrainedModel, tokenizer: Any, **options: Any) -> Self:
        """Use a model and a tokenizer that are loaded already; options are the fields."""
        return cls(**{"model": model, "tokenizer": tokenizer, **options})

    @property
    def source(self) -> ModelSource:
        """Model with the options that locate its files."""
        return ModelSource(
            self.model,
            self.tokenizer,
            getattr(self, "revision", None),
            hf_kwargs=self.model_kwargs,
        )

    def open_engine(self, **options: Any) -> KVRagEngine:
        """Return the engine of :meth:`kvrag.KVRagEngine.get`, which continues earlier requests.

        Options replace those of the fields; a prefix is none of the latter.
        """
        engine = KVRagEngine.get(**{"model": self.model, **self.engine_options(), **options})
        if engine.store_config.history_bytes is None:
            engine.history_bytes = HISTORY_BYTES
        return engine

    @classmethod
    def unknown_options(
        cls, given: Iterable[str], *, more: Iterable[str] = (), misspelt: bool = True
    ) -> list[ConfigError]:
        """Return an error for every given option that is neither a field nor one of ``more``.

        Raises :class:`~kvrag.ConfigError` for options of the store and, with ``misspelt``, for
        misspelt ones: if they were ignored, KV would be unencrypted, without a budget, or in
        memory.
        """
        known = cls.model_fields.keys()
        unknown = [name for name in given if name not in known]
        refuse_misplaced(unknown, known, of=cls.__name__, misspelt=misspelt, aliases=cls.aliases)
        return [
            unknown_option(name, {*known, *more}, of=cls.__name__, aliases=cls.aliases)
            for name in unknown
        ]

    def check_call(self, options: Mapping[str, Any]) -> RequestOptions:
        """Return the options of a call, given under the engine's names, as a request has them.

        Raises :class:`~kvrag.ConfigError` if an option does not exist or has an invalid value.
        """
        of = type(self).__name__
        for name in options:
            if name in _OF_CALL:
                continue
            if name in type(self).model_fields:
                raise ConfigError(f"{name!r} is no option of a call; pass {of}({name}=...)")
            raise unknown_option(
                name,
                [*(self.aliases.get(each, each) for each in _OF_CALL), *self.call_options],
                of=of,
                aliases=self.aliases,
            )
        try:
            return RequestOptions(**options)
        except ConfigError as error:
            raise ConfigError(respelt(str(error), {"SamplingConfig": of, **self.aliases})) from None

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
        names = _OF_CALL & type(self).model_fields.keys() - _OF_ENGINE
        return {name: getattr(self, name) for name in names}

    def own_prefix(self, prefix: Any) -> Any:
        """Return a prefix as the engine takes it; ``None``: the engine's own."""
        return prefix

    def _explained(self, prompt: Any, options: dict[str, Any]) -> Explanation:
        """Explain a prompt of the framework; options that were not given are ``None``."""
        raise NotImplementedError

    @checks_names
    def explain(
        self,
        prompt: Any,
        *,
        formatted: bool = False,
        mode: Mode | None = None,
        repair: Repair = None,
        namespace: str | None = None,
        max_context: MaxContext | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Explanation:
        """Explain which spans of a prompt are known chunks with KV, and why other spans are not.

        Takes the prompts and the tools of the framework, and the options of
        :meth:`kvrag.KVRagEngine.explain`. ``formatted`` is as for LlamaIndex's ``complete``.
        """
        return self._explained(
            prompt,
            {
                "formatted": formatted or None,
                "mode": mode,
                "repair": repair,
                "namespace": namespace,
                "max_context": max_context,
                "tools": tools,
                "tool_choice": tool_choice,
                "chat_template_kwargs": chat_template_kwargs,
                "continue_final_message": continue_final_message or None,
            },
        )

    @parameters_of(ItemRequest)
    def precompute_kv(self, items: Any, **options: Any) -> PrecomputeReport:
        """Compute and store the KV of documents, of texts, or of a vector store or an index.

        Takes the options of :func:`kvrag.precompute_kv`.
        """
        return precompute_kv(items, llm=self, **options)

    @checks_names
    def delete_kv(
        self, items: Any, *, namespace: str | None = None, collection: str | None = None
    ) -> int:
        """Delete the KV of documents, given as objects or by id.

        Takes the options of :func:`kvrag.delete_kv`.
        """
        return delete_kv(items, llm=self, namespace=namespace, collection=collection)

    @parameters_of(SyncRequest)
    def sync_kv(self, live_items: Any, **options: Any) -> SyncReport:
        """Keep the KV of exactly these documents, or of an index's.

        Takes the options of :func:`kvrag.sync_kv`.
        """
        return sync_kv(live_items, llm=self, **options)
