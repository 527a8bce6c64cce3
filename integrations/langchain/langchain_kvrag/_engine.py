"""What ``ChatKVRag`` and ``KVRagLLM`` share: the options, and the way to the process-wide engine."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Self

from langchain_core.runnables.config import run_in_executor
from pydantic import AliasChoices, Field, SecretStr, model_validator
from transformers import PreTrainedModel

import kvrag
from kvrag import ConfigError, GenerationResult, KVRagEngine, PrecomputeReport, RepairConfig, SamplingConfig, SyncReport
from kvrag.config import check_mode, refuse_misplaced, unknown_option
from kvrag.fields import EngineFields
from kvrag.generate.streams import AsyncTokenStream, TokenStream
from kvrag.model.source import ModelSource
from langchain_kvrag._convert import PROVIDER, engine_prefix

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")


def timed(stream: TokenStream, seconds: float | None) -> Iterator[str]:
    """Yield a stream's text; raise ``TimeoutError`` if it did not end after so many seconds. Its decoding is stopped then."""
    late = threading.Event()
    timer = threading.Timer(seconds or 0.0, _stop, (stream, late))
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        yield from stream
        _check_end(stream, seconds, is_late=late.is_set())
    finally:
        timer.cancel()


async def atimed(stream: AsyncTokenStream, seconds: float | None) -> AsyncIterator[str]:
    """As :func:`timed`, in an event loop."""
    late = threading.Event()
    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, _stop, stream, late)
    try:
        async for text in stream:
            yield text
        _check_end(stream, seconds, is_late=late.is_set())
    finally:
        if timer is not None:
            timer.cancel()


def _stop(stream: TokenStream | AsyncTokenStream, late: threading.Event) -> None:
    late.set()
    stream.cancel()


def _check_end(stream: TokenStream | AsyncTokenStream, seconds: float | None, *, is_late: bool) -> None:
    """Raise ``TimeoutError`` where a stream ended because its time was over, rather than by itself at the last moment."""
    try:
        is_late = is_late and stream.result.finish_reason == "cancelled"
    except RuntimeError:  # it was cancelled before its first token
        if not is_late:
            raise
    if is_late:
        raise TimeoutError(
            f"the answer took longer than timeout={seconds:g} s; raise it, retrieve less, or lower max_tokens"
        )


class KVRagModel(EngineFields):
    """Options and methods of both model classes.

    Everything that must survive a copy is a field: LangChain re-creates models from their fields. The engine is not: it
    is shared by all instances of this process with the same model, store, prefix, namespace and repair.
    """

    _shows_messages: ClassVar[bool] = False
    """Whether a string prompt becomes a human message."""

    model: Any = Field(validation_alias=AliasChoices("model", "model_id", "model_name"), repr=False)
    """Hub id, local directory, ``.gguf`` file, or a loaded ``PreTrainedModel`` (:meth:`from_pretrained_model`)."""

    tokenizer: Any = Field(default=None, exclude=True, repr=False)
    """A tokenizer, its id or directory; default: the model's."""

    revision: str | None = None
    """Hub revision."""

    max_tokens: int = Field(default=256, validation_alias=AliasChoices("max_tokens", "max_new_tokens"))
    """Upper bound of answer tokens."""

    stop: list[str] | None = None
    """Strings that end the answer."""

    streaming: bool = False
    """Whether ``invoke`` streams to callbacks."""

    timeout: float | None = None
    """Seconds that an answer may take before ``TimeoutError``, waiting for its turn included; a running prefill is waited for."""

    max_retries: int | None = None
    """Refused: nothing is sent that could be sent again."""

    api_key: SecretStr | None = None
    """Refused: no service is asked."""

    def __init__(self, **data: Any) -> None:
        self._warn_of_unknown(data)
        for name in ("max_retries", "api_key"):
            if data.get(name):
                raise ConfigError(
                    f"{type(self).__name__} takes no {name}: the model runs in this process, and no service is asked; leave it out"
                )
        if isinstance(data.get("stop"), str):
            data["stop"] = [data["stop"]]
        super().__init__(**data)
        check_mode(self.mode)
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
        for field in cls.model_fields.values():
            if isinstance(field.validation_alias, AliasChoices):
                known.update(name for name in field.validation_alias.choices if isinstance(name, str))
        unknown = data.keys() - known
        refuse_misplaced(unknown, known, of=cls.__name__)
        for name in unknown:
            fault = unknown_option(name, known, of=cls.__name__)
            warnings.warn(
                f"{fault}. It is ignored; model_kwargs takes options of from_pretrained.", UserWarning, stacklevel=4
            )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield "model", self.model_name  # the object itself would print every layer into every trace
        yield from super().__repr_args__()

    # -- the engine ----------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """A short name for traces and results."""
        return ModelSource(self.model).name

    @property
    def engine(self) -> KVRagEngine:
        """The process-wide engine of these options; weights are loaded at its first use."""
        return self._engine()

    def _engine(self, model: Any = None) -> KVRagEngine:
        """Return the engine, or the one of another model that was named for a single call."""
        self.check_model_kwargs()  # again: the dict may have been changed since
        is_other = model is not None and model != self.model
        tokenizer = os.fspath(self.tokenizer) if isinstance(self.tokenizer, os.PathLike) else self.tokenizer
        is_plain = self.prefix is None and not self._shows_messages  # string prompts have no head of a chat template
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

    def _sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _SAMPLING}
        return {"max_new_tokens": self.max_tokens, "stop": self.stop, **given}

    def _options(self, stop: Sequence[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Merge options of one call over the fields (``None``: as configured); the engine refuses unknown ones by name."""
        given = {k: v for k, v in options.items() if v is not None and k not in ("model", "stream", "timeout")}
        if "max_tokens" in given:
            given["max_new_tokens"] = given.pop("max_tokens")
        if stop is not None:
            given["stop"] = stop
        return {"mode": self.mode, **self._sampling(), **given}

    def _answer(
        self, engine: KVRagEngine, prompt: Any, options: Mapping[str, Any], timeout_s: float | None
    ) -> GenerationResult:
        """Answer a prompt, without a time limit in the caller's thread, where Ctrl-C ends it."""
        if timeout_s is None:
            return engine.generate(prompt, **options)
        with engine.stream(prompt, **options) as stream:
            for _ in timed(stream, timeout_s):
                pass
            return stream.result

    async def _aanswer(
        self, engine: KVRagEngine, prompt: Any, options: Mapping[str, Any], timeout_s: float | None
    ) -> GenerationResult:
        """As :meth:`_answer`; the event loop is not blocked."""
        stream = engine.astream(prompt, **options)
        async for _ in atimed(stream, timeout_s):
            pass
        return stream.result

    @classmethod
    def from_pretrained_model(cls, model: Any, tokenizer: Any, **options: Any) -> Self:
        """Use a model and a tokenizer that are loaded already; options are the fields."""
        return cls(model=model, tokenizer=tokenizer, **options)

    @model_validator(mode="after")
    def _set_kvrag_version(self) -> Self:
        self._add_version("kvrag", kvrag.__version__)
        return self

    # -- what LangChain asks of any model ------------------------------------------------------------------------------

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that changes answers: LangChain's response cache tells models apart by this."""
        repair, config = asdict(self.repair or RepairConfig()), self.store_config
        return {
            "model": self.model_name,
            # Two models in memory may bear one name.
            **({"model_object": id(self.model)} if isinstance(self.model, PreTrainedModel) else {}),
            "revision": self.revision,
            "dtype": str(self.dtype),
            "model_kwargs": {name: repr(value) for name, value in self.model_kwargs.items()},
            "prefix": None if self.prefix is None else repr(self.prefix),
            "context": self.context,
            "namespace": self.namespace,
            "kv_dir": None if self.kv_dir is None else os.path.abspath(self.kv_dir),
            "store_config": None if config is None else repr(replace(config, on_event=None)),  # its key is not shown
            "mode": self.mode,
            "repair": repair,
            **self._sampling(),
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own token ids of a text, without special tokens."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        return list(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    # -- KV ------------------------------------------------------------------------------------------------------------

    def precompute_kv(self, items: Any, **options: Any) -> PrecomputeReport:
        """Compute and store the KV of documents, texts or a store; options as for :func:`kvrag.precompute_kv`."""
        return kvrag.precompute_kv(items, llm=self, **options)

    def delete_kv(self, items: Any, **options: Any) -> int:
        """Delete the KV of documents, given themselves or by id; options as for :func:`kvrag.delete_kv`."""
        return kvrag.delete_kv(items, llm=self, **options)

    def sync_kv(self, live_items: Any, **options: Any) -> SyncReport:
        """Keep the KV of exactly these documents; options as for :func:`kvrag.sync_kv`."""
        return kvrag.sync_kv(live_items, llm=self, **options)
