"""What ``ChatKVRag`` and ``KVRagLLM`` share: the options, and the way to the process-wide engine."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_core.language_models import ModelProfile
from langchain_core.messages import BaseMessage
from langchain_core.runnables.config import run_in_executor
from pydantic import Field, model_validator
from transformers import PreTrainedModel

import kvrag
from kvrag import (
    ConfigError,
    GenerationResult,
    KVRagEngine,
    PrecomputeReport,
    RepairConfig,
    Retention,
    SamplingConfig,
    SyncReport,
)
from kvrag.config import refuse_misplaced, unknown_option
from kvrag.fields import EngineFields, ModelLike
from kvrag.hooks import Content, OnError
from kvrag.model.source import ModelSource
from kvrag.precompute.documents import check_kv_dir
from langchain_kvrag._convert import PROVIDER, chat_messages, engine_prefix, short_name
from langchain_kvrag._profile import profile_of
from langchain_kvrag._spellings import named, understood
from langchain_kvrag._timed import atimed, timed
from langchain_kvrag._tools import Tool, tool_dicts

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens", "seed"),
    *("frequency_penalty", "presence_penalty", "logit_bias"),
)


class KVRagModel(EngineFields):
    """Options and methods of both model classes.

    Everything that must survive a copy is a field: LangChain re-creates models from their fields. The engine is not: it
    is shared by all instances of this process with the same model, store, prefix, namespace and repair.
    """

    _shows_messages: ClassVar[bool] = False
    """Whether a string prompt becomes a human message."""

    model: ModelLike = Field(repr=False)
    """Hub id, local directory, ``.gguf`` file, or a loaded ``PreTrainedModel`` (:meth:`from_pretrained_model`)."""

    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """A tokenizer, its id or directory; default: the model's."""

    revision: str | None = None
    """Hub revision."""

    max_tokens: int | None = None
    """Upper bound of answer tokens; default: what the context window leaves, up to the model's own limit or 1,024."""

    stop: list[str] | None = None
    """Strings that end the answer."""

    streaming: bool = False
    """Whether ``invoke`` streams to callbacks; of an LLM, one prompt at a time."""

    timeout: float | None = None
    """Seconds that an answer may take before ``TimeoutError``, waiting for its turn included; a running prefill is waited for."""

    if not TYPE_CHECKING:  # editors would show **data in place of the fields

        def __init__(self, **data: Any) -> None:
            data = understood(data, of=type(self).__name__)
            self._warn_of_unknown(data)
            if isinstance(data.get("stop"), str):
                data["stop"] = [data["stop"]]
            super().__init__(**data)
            SamplingConfig(**self._sampling())

    @classmethod
    def _warn_of_unknown(cls, data: Mapping[str, Any]) -> None:
        """Warn of options that are ignored; no error, as applications pass one set of options to models of all vendors.

        Raises
        ------
        ConfigError
            If an option of the store, or one of the model's, was meant: KV would be left plain, without a budget, or in memory.
        """
        known = set(cls.model_fields)
        unknown = data.keys() - known
        refuse_misplaced(unknown, known, of=cls.__name__)
        for name in unknown:
            fault = unknown_option(name, known, of=cls.__name__)
            warnings.warn(
                f"{fault}. It is ignored; model_kwargs takes options of from_pretrained.",
                UserWarning,
                stacklevel=4,
            )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield "model", self.model_name  # the object itself would print every layer into every trace
        yield from super().__repr_args__()

    # -- the engine ----------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """A short name for traces and results."""
        return short_name(ModelSource(self.model).name)

    @property
    def engine(self) -> KVRagEngine:
        """The process-wide engine of these options; weights are loaded at its first use."""
        return self._engine()

    def _engine(self, model: Any = None) -> KVRagEngine:
        """Return the engine, or the one of another model that was named for a single call."""
        self.check_model_kwargs()  # again: the dict may have been changed since
        is_other = model is not None and model != self.model
        tokenizer = (
            os.fspath(self.tokenizer) if isinstance(self.tokenizer, os.PathLike) else self.tokenizer
        )
        is_plain = (
            self.prefix is None and not self._shows_messages
        )  # string prompts have no head of a chat template
        options = {
            **self.engine_options(),
            "tokenizer": None if is_other else tokenizer,
            "revision": None if is_other else self.revision,
            "prefix": "" if is_plain else engine_prefix(self.prefix, is_chat=self._shows_messages),
        }
        return KVRagEngine.get(model if is_other else self.model, **options)

    async def _aengine(self, model: Any = None) -> KVRagEngine:
        """As :meth:`_engine`; it reads the model's config and opens the store, so not in the event loop."""
        return await run_in_executor(None, self._engine, model)

    def _time_limit(self, options: Mapping[str, Any]) -> float | None:
        """Seconds that one call may take; ``timeout=None`` in the call lifts the model's limit."""
        limit: float | None = options.get("timeout", named(options, "timeout") or self.timeout)
        return limit

    def _sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _SAMPLING}
        return {"max_new_tokens": self.max_tokens, "stop": self.stop, **given}

    def _options(self, stop: Sequence[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Merge options of one call over the fields (``None``: as configured); the engine refuses unknown ones by name."""
        given = understood(options, of="a call")
        for elsewhere in ("model", "stream", "timeout", "parallel_tool_calls"):
            given.pop(elsewhere, None)
        if "max_tokens" in given:
            given["max_new_tokens"] = given.pop("max_tokens")
        if stop is not None:
            given["stop"] = stop
        return {"mode": self.mode, "max_context": self.max_context, **self._sampling(), **given}

    def _answer(
        self,
        engine: KVRagEngine,
        prompt: Any,
        options: Mapping[str, Any],
        timeout_s: float | None,
        emit: Callable[[str], object] | None = None,
    ) -> GenerationResult:
        """Answer a prompt, without a time limit in the caller's thread, where Ctrl-C ends it; ``emit`` is told of each piece."""
        if timeout_s is None and emit is None:
            return engine.generate(prompt, **options)
        with engine.stream(prompt, **options) as stream:
            for text in timed(stream, timeout_s):
                if emit is not None:
                    emit(text)
            return stream.result

    async def _aanswer(
        self,
        engine: KVRagEngine,
        prompt: Any,
        options: Mapping[str, Any],
        timeout_s: float | None,
        emit: Callable[[str], Awaitable[object]] | None = None,
    ) -> GenerationResult:
        """As :meth:`_answer`; the event loop is not blocked."""
        stream = engine.astream(prompt, **options)
        async for text in atimed(stream, timeout_s):
            if emit is not None:
                await emit(text)
        return stream.result

    @classmethod
    def from_model_id(cls, model_id: Any, task: str = "text-generation", **options: Any) -> Self:
        """As langchain-huggingface's method of this name; options are the fields, or its ``pipeline_kwargs`` and so on."""
        return cls(**{"model": model_id, "task": task, **options})

    @classmethod
    def from_pretrained_model(cls, model: Any, tokenizer: Any, **options: Any) -> Self:
        """Use a model and a tokenizer that are loaded already; options are the fields."""
        return cls(**{"model": model, "tokenizer": tokenizer, **options})

    @model_validator(mode="after")
    def _set_kvrag_version(self) -> Self:
        self._add_version("kvrag", kvrag.__version__)  # type: ignore[attr-defined]  # of LangChain's base classes
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the options; a loaded model and its tokenizer are shared, as the engine is."""
        shared = {id(each): each for each in (self.model, self.tokenizer)}
        copied: Self = super().__deepcopy__({**(memo or {}), **shared})
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to be pickled with a loaded model, whose weights would be written too."""
        if not isinstance(self.model, (str, os.PathLike)):
            of = type(self).__name__
            raise ConfigError(
                f"a {of} that was given a loaded model can't be pickled; name it by its path or hub id"
            )
        state: dict[Any, Any] = super().__getstate__()
        return state

    # -- what LangChain asks of any model ------------------------------------------------------------------------------

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)  # type: ignore[misc]
        params |= {
            "ls_provider": PROVIDER,
            "ls_model_name": short_name(params.get("ls_model_name") or self.model_name),
        }
        return params

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that changes answers: LangChain's response cache tells models apart by this."""
        repair, config = asdict(self.repair or RepairConfig()), self.store_config
        return {
            "model": ModelSource(self.model).name,
            # Two models in memory may bear one name.
            **({"model_object": id(self.model)} if isinstance(self.model, PreTrainedModel) else {}),
            "revision": self.revision,
            "dtype": str(self.dtype),
            "model_kwargs": {name: repr(value) for name, value in self.model_kwargs.items()},
            "prefix": None if self.prefix is None else repr(self.prefix),
            "context": self.context,
            "namespace": self.namespace,
            "kv_dir": check_kv_dir(self.kv_dir),
            "store_config": None
            if config is None
            else repr(replace(config, on_event=None)),  # its key is not shown
            "mode": self.mode,
            "max_context": self.max_context,
            "chat_template_kwargs": self.chat_template_kwargs,
            "repair": repair,
            **self._sampling(),
        }

    def _resolve_model_profile(self) -> ModelProfile:
        return profile_of(
            ModelSource(self.model, self.tokenizer, self.revision, hf_kwargs=self.model_kwargs),
            type(self),
        )

    def _combine_llm_outputs(self, _llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        usage, told = (
            Counter[str](),
            [output for output in _llm_outputs if output],
        )  # answers of a cache tell nothing
        for output in told:
            usage.update(output["token_usage"])
        return {**told[-1], "token_usage": dict(usage)} if told else {}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own token ids of a text, without special tokens."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        return list(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Tool] | None = None
    ) -> int:
        """Count the tokens that the model is shown for messages and tools: with its chat template, where that takes them."""
        encoder = self.engine.encoder
        if getattr(self, "custom_get_token_ids", None) is None:
            with suppress(kvrag.InputError):
                text = encoder.render(chat_messages(messages), tools=tuple(tool_dicts(tools or ())))
                return len(encoder.live_ids(text, at_start=True))
        return int(super().get_num_tokens_from_messages(messages))  # type: ignore[misc]

    def _explained(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of :meth:`kvrag.KVRagEngine.explain` that were given, behind the model's own."""
        given = {name: value for name, value in options.items() if value is not None}
        return {"mode": self.mode, "max_context": self.max_context, **given}

    # -- KV ------------------------------------------------------------------------------------------------------------

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
        """Compute and store the KV of documents, texts or a store; options as for :func:`kvrag.precompute_kv`."""
        return kvrag.precompute_kv(
            items,
            llm=self,
            ids=ids,
            prefix=prefix,
            namespace=namespace,
            content=content,
            batch_size=batch_size,
            show_progress=show_progress,
            on_error=on_error,
            retention=retention,
            collection=collection,
        )

    def delete_kv(
        self, items: Any, *, namespace: str | None = None, collection: str | None = None
    ) -> int:
        """Delete the KV of documents, given themselves or by id; options as for :func:`kvrag.delete_kv`."""
        return kvrag.delete_kv(items, llm=self, namespace=namespace, collection=collection)

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
        """Keep the KV of exactly these documents; options as for :func:`kvrag.sync_kv`."""
        return kvrag.sync_kv(
            live_items,
            llm=self,
            ids=ids,
            prefix=prefix,
            namespace=namespace,
            content=content,
            batch_size=batch_size,
            show_progress=show_progress,
            retention=retention,
            collection=collection,
        )
