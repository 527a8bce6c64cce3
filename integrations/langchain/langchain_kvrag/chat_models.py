"""A chat model that reuses the KV of known chunks in its prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from kvrag import Explanation, GenerationResult, KVRagEngine
from langchain_kvrag._convert import chat_messages, metadata_of, usage_of
from langchain_kvrag._engine import KVRagModel, atimed, timed


class ChatKVRag(KVRagModel, BaseChatModel):
    """Chat model over :class:`kvrag.KVRagEngine`: known chunks in the prompt are not prefilled again.

    Nothing in a chain has to change. Options are the fields; per call, ``invoke(..., max_tokens=, temperature=,
    stop=, mode=, repair=, ...)``, override them. Weights are loaded at first use, and shared by all instances.

    Examples
    --------
    >>> llm = ChatKVRag(model="Qwen/Qwen2.5-0.5B-Instruct", kv_dir="./kv", prefix=prompt)  # doctest: +SKIP
    >>> llm.precompute_kv(documents)  # doctest: +SKIP
    >>> message = (prompt | llm).invoke({"context": text, "question": "Who?"})  # doctest: +SKIP
    >>> message.response_metadata["kvrag"]["exactness"]  # doctest: +SKIP
    """

    _shows_messages: ClassVar[bool] = True

    def explain(self, input: LanguageModelInput, **options: Any) -> Explanation:
        """Explain which parts of a prompt are known chunks with KV; options of :meth:`kvrag.KVRagEngine.explain`."""
        messages = self._convert_input(input).to_messages()
        return self.engine.explain(chat_messages(messages), **{"mode": self.mode, **options})

    @property
    def _llm_type(self) -> str:
        return "kvrag-chat"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = self._engine(kwargs.get("model"))
        options, timeout_s = self._options(stop, kwargs), kwargs.get("timeout", self.timeout)
        return _chat_result(engine, self._answer(engine, chat_messages(messages), options, timeout_s))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = await self._aengine(kwargs.get("model"))
        options, timeout_s = self._options(stop, kwargs), kwargs.get("timeout", self.timeout)
        return _chat_result(engine, await self._aanswer(engine, chat_messages(messages), options, timeout_s))

    # LangChain calls the next two without a run manager, and calls on_llm_new_token itself.

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        engine = self._engine(kwargs.get("model"))
        with engine.stream(chat_messages(messages), **self._options(stop, kwargs)) as stream:
            for text in timed(stream, kwargs.get("timeout", self.timeout)):
                yield ChatGenerationChunk(message=AIMessageChunk(content=text))
            yield _last_chunk(engine, stream.result)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        engine = await self._aengine(kwargs.get("model"))
        stream = engine.astream(chat_messages(messages), **self._options(stop, kwargs))
        try:
            async for text in atimed(stream, kwargs.get("timeout", self.timeout)):
                yield ChatGenerationChunk(message=AIMessageChunk(content=text))
            yield _last_chunk(engine, stream.result)
        finally:
            stream.cancel()  # the caller may have left early


def _chat_result(engine: KVRagEngine, result: GenerationResult) -> ChatResult:
    message = AIMessage(
        content=result.text, usage_metadata=usage_of(result), response_metadata=metadata_of(result, engine.source.name)
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _last_chunk(engine: KVRagEngine, result: GenerationResult) -> ChatGenerationChunk:
    """Carry the accounting; LangChain sums the usage of all chunks, so it is in this one only."""
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content="",
            usage_metadata=usage_of(result),
            response_metadata=metadata_of(result, engine.source.name),
            chunk_position="last",
        )
    )
