"""Options that ``ChatKVRag`` and ``KVRagLLM`` share, and their way to the process-wide engine."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_core.caches import BaseCache
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import ModelProfile
from langchain_core.messages import BaseMessage
from langchain_core.runnables.config import run_in_executor
from pydantic import Field, model_validator

import kvrag
from kvrag import (
    ConfigError,
    Explanation,
    GenerationResult,
    InputError,
    KVRagEngine,
    KVRagError,
    RepairConfig,
)
from kvrag.adapters import EngineFields
from langchain_kvrag._cache import LEFT_OUT, KeyedCache, hidden, key_of
from langchain_kvrag._convert import PROVIDER, chat_messages, engine_prefix, short_name
from langchain_kvrag._profile import profile_of
from langchain_kvrag._spellings import ALIASES, Options, named, understood
from langchain_kvrag._timed import atimed, timed
from langchain_kvrag._tools import Tool, tool_dicts

_ELSEWHERE = ("model", "stream", "timeout", "parallel_tool_calls")
"""Options of a call that are not the engine's."""

_PLAIN = (bool, dict, float, int, list, str, type(None))
"""Types that traces show as they are."""


class KVRagModel(EngineFields):
    """Options and methods of both model classes.

    LangChain re-creates models from their fields, so all state that must survive a copy is a field.
    The engine is not a field: all instances of this process with the same model, store, prefix,
    namespace and repair share it.
    """

    _shows_messages: ClassVar[bool] = False
    """Whether a string prompt becomes a human message."""
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    call_options: ClassVar[tuple[str, ...]] = _ELSEWHERE

    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """Tokenizer, or its id or directory; default: the model's tokenizer."""

    revision: str | None = None
    """Hub revision."""

    max_tokens: int | None = None
    """Upper bound of answer tokens.

    Default: the rest of the context window, up to the model's own limit or 1,024.
    """

    stop: list[str] | None = None
    """Strings that end the answer."""

    streaming: bool = False
    """Whether ``invoke`` streams to callbacks; an LLM does so only for a single prompt."""

    timeout: float | None = None
    """Seconds that an answer may take, the wait in the queue included, before ``TimeoutError``.

    A running prefill is not interrupted.
    """

    if not TYPE_CHECKING:  # editors would show **data in place of the fields

        def __init__(self, **data: Any) -> None:
            data = understood(data, of=type(self).__name__)
            self._warn_of_unknown(data)
            if isinstance(data.get("stop"), str):
                data["stop"] = [data["stop"]]
            super().__init__(**data)
            self.check_call(self.request_options())

    @classmethod
    def _warn_of_unknown(cls, data: Options) -> None:
        """Warn of options that are ignored.

        They raise no error, as applications pass the same options to models of all vendors.

        Raises
        ------
        ConfigError
            If an option of the store or of the model was meant: ignoring it would leave KV
            unencrypted, without a budget, or in memory.
        """
        for fault in cls.unknown_options(data):
            warnings.warn(
                f"{fault}. It is ignored; model_kwargs takes options of from_pretrained.",
                UserWarning,
                stacklevel=4,
            )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        # The object itself would print every layer into every trace.
        yield "model", self.model_name
        yield from super().__repr_args__()

    # -- the engine --------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """Short name for traces and results."""
        return short_name(self.source.name)

    @property
    def engine(self) -> KVRagEngine:
        """Process-wide engine of these options; its weights load at first use."""
        return self._engine()

    def _engine(self, model: Any = None) -> KVRagEngine:
        """Return the engine, or the engine of another model that a single call names."""
        self.check_model_kwargs()  # again: the dict may have been changed since
        own: dict[str, Any] = {}
        if model is not None and model != self.model:
            own = {"model": model, "tokenizer": None, "revision": None}
        # String prompts have no head of a chat template.
        is_plain = self.prefix is None and not self._shows_messages
        return self.open_engine(prefix="" if is_plain else self.own_prefix(self.prefix), **own)

    def own_prefix(self, prefix: Any) -> Any:
        """Return a prefix as the engine takes it; ``None``: the engine's own."""
        return engine_prefix(prefix, is_chat=self._shows_messages)

    async def _aengine(self, model: Any = None) -> KVRagEngine:
        """Return the engine without blocking the event loop.

        Making an engine reads the model's config and opens the store.
        """
        return await run_in_executor(None, self._engine, model)

    def _response_cache(self) -> BaseCache | None:
        """Return LangChain's cache of answers: the model's, or the process's."""
        given = getattr(self, "cache", None)
        if given is False:
            return None
        return given if isinstance(given, BaseCache) else get_llm_cache()

    def _keyed(self, options: Options) -> Self:
        """Return this model, with a response cache whose key holds all that changes an answer.

        If such a key can't be told, the copy has no cache.
        """
        cache = self._response_cache()
        if cache is None:
            return self
        kept: KeyedCache | bool = False
        try:
            engine = self._engine(named(options, "model"))
            kept = KeyedCache(cache, key_of(self, engine, options))
        except InputError as error:
            of = type(self).__name__
            warnings.warn(f"an answer of {of} is not cached: {error}", UserWarning, stacklevel=5)
        except KVRagError:
            pass  # the answer raises it, where callbacks are told
        return self.model_copy(update={"cache": kept})

    async def _akeyed(self, options: Options) -> Self:
        """Return the model of :meth:`_keyed` without blocking the event loop."""
        if self._response_cache() is None:
            return self
        return await run_in_executor(None, self._keyed, options)

    def _time_limit(self, options: Options) -> float | None:
        """Return the seconds that a call may take; ``timeout=None`` lifts the model's limit."""
        limit: float | None = options.get("timeout", named(options, "timeout") or self.timeout)
        return limit

    def request_options(self) -> dict[str, Any]:
        """Return the options of a request that are no options of the engine."""
        return {"max_new_tokens": self.max_tokens, **super().request_options()}

    def _options(self, stop: Sequence[str] | None, options: Options) -> dict[str, Any]:
        """Merge the options of a call over the fields; ``None`` means as configured."""
        given = understood(options, of="a call")
        for elsewhere in _ELSEWHERE:
            given.pop(elsewhere, None)
        if "max_tokens" in given:
            given["max_new_tokens"] = given.pop("max_tokens")
        if stop is not None:
            given["stop"] = stop
        self.check_call(merged := {**self.request_options(), **given})
        return merged

    def _answer(
        self,
        engine: KVRagEngine,
        prompt: Any,
        options: Options,
        timeout_s: float | None,
        emit: Callable[[str], object] | None = None,
    ) -> GenerationResult:
        """Answer a prompt; ``emit`` is called with each piece.

        Without a time limit the answer is made in the caller's thread, where Ctrl-C ends it.
        """
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
        options: Options,
        timeout_s: float | None,
        emit: Callable[[str], Awaitable[object]] | None = None,
    ) -> GenerationResult:
        """Answer a prompt without blocking the event loop (see :meth:`_answer`)."""
        stream = engine.astream(prompt, **options)
        async for text in atimed(stream, timeout_s):
            if emit is not None:
                await emit(text)
        return stream.result

    @classmethod
    def from_model_id(cls, model_id: Any, task: str = "text-generation", **options: Any) -> Self:
        """Make a model as langchain-huggingface's method of this name does.

        Options are the fields, or that method's ``pipeline_kwargs`` and so on.
        """
        return cls(**{"model": model_id, "task": task, **options})

    @model_validator(mode="after")
    def _set_kvrag_version(self) -> Self:
        # A method of LangChain's base classes.
        self._add_version("kvrag", kvrag.__version__)  # type: ignore[attr-defined]
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the options; a loaded model and its tokenizer are shared, as is the engine."""
        shared = {id(each): each for each in (self.model, self.tokenizer)}
        copied: Self = super().__deepcopy__({**(memo or {}), **shared})
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to be pickled with a loaded model, because its weights would be written, too."""
        if not isinstance(self.model, (str, os.PathLike)):
            of = type(self).__name__
            raise ConfigError(
                f"a {of} that was given a loaded model can't be pickled; name it by its path or "
                "hub id"
            )
        state: dict[Any, Any] = super().__getstate__()
        return state

    # -- methods that LangChain calls on every model ---------------------------------------------

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)  # type: ignore[misc]
        params |= {
            "ls_provider": PROVIDER,
            "ls_model_name": short_name(params.get("ls_model_name") or self.model_name),
        }
        return params

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Options that change answers, for traces; objects by their names, no passwords."""
        config = self.store_config
        told = {name: getattr(self, name) for name in type(self).model_fields.keys() - LEFT_OUT}
        told |= {
            "model": _named_object(self.model, self.model_name),
            "tokenizer": _named_object(self.tokenizer, type(self.tokenizer).__name__),
            "kv_dir": self.kv_dir,
            "repair": asdict(self.repair or RepairConfig()),
            # The repr does not show the store's key.
            "store_config": config and replace(config, on_event=None),
            # They may hold a token of the hub.
            "model_kwargs": {name: hidden(value) for name, value in self.model_kwargs.items()},
            # LangChain writes a call's "stop" over the model's.
            "stop_sequences": self.stop,
        }
        return {
            name: value if isinstance(value, _PLAIN) else repr(value)
            for name, value in sorted(told.items())
        }

    def _resolve_model_profile(self) -> ModelProfile:
        return profile_of(self)

    def _combine_llm_outputs(self, _llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        # A cached answer has no output.
        usage = Counter[str]()
        told = [output for output in _llm_outputs if output]
        for output in told:
            usage.update(output["token_usage"])
        if told:
            return {**told[-1], "token_usage": dict(usage)}
        return {}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text by the model's tokenizer, without special tokens."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        return list(self.engine.encoder.text_ids(text))

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Tool] | None = None
    ) -> int:
        """Count the tokens of messages and tools as the model sees them.

        Uses the model's chat template where it accepts the messages and tools.
        """
        encoder = self.engine.encoder
        if getattr(self, "custom_get_token_ids", None) is None:
            with suppress(kvrag.InputError):
                text = encoder.render(chat_messages(messages), tools=tuple(tool_dicts(tools or ())))
                return len(encoder.live_ids(text, at_start=True))
        return int(super().get_num_tokens_from_messages(messages))  # type: ignore[misc]

    def _explained(self, prompt: Any, options: dict[str, Any]) -> Explanation:
        given = {name: value for name, value in options.items() if value is not None}
        own = {"mode": self.mode, "max_context": self.max_context}
        return self.engine.explain(prompt, **(own | given))


def _named_object(given: Any, name: str) -> str | None:
    """Return a path or an id as text, and an object by its name and its place in this process."""
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        return os.fspath(given)
    return f"{name}@{id(given):x}"
