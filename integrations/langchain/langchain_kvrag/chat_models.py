"""Chat model that reuses the KV of known chunks in its prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable

from kvrag import Explanation, GenerationResult, KVRagEngine
from langchain_kvrag._convert import chat_messages, llm_output, metadata_of, usage_of
from langchain_kvrag._engine import KVRagModel
from langchain_kvrag._spellings import Options, named
from langchain_kvrag._timed import atimed, timed
from langchain_kvrag._tools import (
    Method,
    Tool,
    broken_calls,
    call_chunks,
    calls_of,
    choice_of,
    structured,
    tool_dicts,
    with_allowed_calls,
)


class ChatKVRag(KVRagModel, BaseChatModel):
    """Chat model over :class:`kvrag.KVRagEngine` that does not prefill known chunks again.

    Chains need no change. Options are the fields; ``invoke(..., max_tokens=, temperature=, stop=,
    mode=, repair=, ...)`` overrides them per call. Weights load at first use, and all instances
    share them.

    Examples
    --------
    >>> model = "Qwen/Qwen2.5-0.5B-Instruct"
    >>> llm = ChatKVRag(model=model, kv_dir="./kv", prefix=prompt)  # doctest: +SKIP
    >>> llm.precompute_kv(documents)  # doctest: +SKIP
    >>> message = (prompt | llm).invoke({"context": text, "question": "Who?"})  # doctest: +SKIP
    >>> message.response_metadata["kvrag"]["exactness"]  # doctest: +SKIP
    """

    _shows_messages: ClassVar[bool] = True

    def _explained(self, prompt: Any, options: dict[str, Any]) -> Explanation:
        own = {
            "tools": tool_dicts(options["tools"] or ()),
            "tool_choice": choice_of(options["tool_choice"]),
        }
        messages = self._convert_input(prompt).to_messages()
        return super()._explained(chat_messages(messages), options | own)

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with tools that it may call.

        Parameters
        ----------
        tools
            Functions, pydantic classes, ``TypedDict`` classes, tools of LangChain, or dicts.
        tool_choice
            ``"auto"``, ``"none"``, ``"any"``, ``"required"`` or ``True`` (a single call), or the
            name of the tool to call. The choice is enforced token by token, which needs the extra
            ``structured``.
        strict
            Whether the tools' schemas allow no properties but their own.
        parallel_tool_calls
            ``False``: an answer with several calls keeps only the first, and a warning is logged.
        **kwargs
            Options of every call.
        """
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(
            tools=tool_dicts(tools, strict), tool_choice=choice_of(tool_choice), **kwargs
        )

    def with_structured_output(  # type: ignore[override]  # the base class takes these as **kwargs
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return this model with answers of a schema, parsed; needs the extra ``structured``.

        Parameters
        ----------
        schema
            A pydantic class (answers are its instances), a ``TypedDict`` class, a JSON schema, or
            OpenAI's dict of a function (answers are dicts).
        method
            ``"json_schema"``: the schema constrains every token. ``"function_calling"``: the same,
            as a call of a tool that the prompt shows. ``"json_mode"``: any JSON object, so the
            prompt must describe its content.
        include_raw
            Return a dict of ``raw`` (the message), ``parsed`` and ``parsing_error``, and raise no
            errors of parsing.
        strict
            Whether objects have only the properties that the schema names; by default, objects of
            classes do.
        """
        return structured(self, schema, method, include_raw=include_raw, strict=strict)

    @property
    def _llm_type(self) -> str:
        return "kvrag-chat"

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer conversations; see ``BaseChatModel.generate``."""
        model = self._keyed(_asked(messages, stop) | kwargs)
        return super(ChatKVRag, model).generate(messages, stop, callbacks, **kwargs)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer conversations; see ``BaseChatModel.agenerate``."""
        model = await self._akeyed(_asked(messages, stop) | kwargs)
        return await super(ChatKVRag, model).agenerate(messages, stop, callbacks, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = self._engine(named(kwargs, "model"))
        options = self._options(stop, kwargs)
        timeout_s = self._time_limit(kwargs)
        result = self._answer(engine, chat_messages(messages), options, timeout_s)
        return _chat_result(engine, with_allowed_calls(result, kwargs), options)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = await self._aengine(named(kwargs, "model"))
        options = self._options(stop, kwargs)
        timeout_s = self._time_limit(kwargs)
        result = await self._aanswer(engine, chat_messages(messages), options, timeout_s)
        return _chat_result(engine, with_allowed_calls(result, kwargs), options)

    # LangChain calls the next two without a run manager, and calls on_llm_new_token itself.

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        engine = self._engine(named(kwargs, "model"))
        with engine.stream(chat_messages(messages), **self._options(stop, kwargs)) as stream:
            for text in timed(stream, self._time_limit(kwargs)):
                yield _chunk(text)
            yield _last_chunk(engine, with_allowed_calls(stream.result, kwargs), kwargs)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        engine = await self._aengine(named(kwargs, "model"))
        stream = engine.astream(chat_messages(messages), **self._options(stop, kwargs))
        try:
            async for text in atimed(stream, self._time_limit(kwargs)):
                yield _chunk(text)
            yield _last_chunk(engine, with_allowed_calls(stream.result, kwargs), kwargs)
        finally:
            stream.cancel()  # the caller may have left early


def _asked(messages: list[list[BaseMessage]], stop: list[str] | None) -> dict[str, Any]:
    """Return the parts of a call that the key of its answer holds.

    LangChain's key has the messages as well, but objects in them by their addresses.
    """
    return {"stop": stop, "messages": [[each.content for each in asked] for asked in messages]}


def _chat_result(engine: KVRagEngine, result: GenerationResult, options: Options) -> ChatResult:
    message = AIMessage(
        content=result.text,
        additional_kwargs=_thought(result.reasoning_content),
        usage_metadata=usage_of(result),
        response_metadata=metadata_of(result, engine.source.name),
        **calls_of(result, broken_calls(result, options)),
    )
    output = llm_output([result], engine.source.name)
    return ChatResult(generations=[ChatGeneration(message=message)], llm_output=output)


def _thought(text: str | None) -> dict[str, Any]:
    """Return a thought as LangChain keeps it; messages show it as a block of reasoning."""
    return {"reasoning_content": text} if text else {}


def _chunk(text: str) -> ChatGenerationChunk:
    beside = _thought(getattr(text, "reasoning_content", None))
    return ChatGenerationChunk(message=AIMessageChunk(content=text, additional_kwargs=beside))


def _last_chunk(
    engine: KVRagEngine, result: GenerationResult, options: Options
) -> ChatGenerationChunk:
    """Return the chunk with the calls and the accounting.

    LangChain sums the usage of all chunks, so only this chunk has it.
    """
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content="",
            usage_metadata=usage_of(result),
            response_metadata=metadata_of(result, engine.source.name),
            chunk_position="last",
            **call_chunks(result, broken_calls(result, options)),
        )
    )
