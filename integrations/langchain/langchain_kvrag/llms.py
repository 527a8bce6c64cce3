"""Text-in, text-out model that reuses the KV of known chunks in its prompts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, patch_config, run_in_executor

from kvrag import Explanation, GenerationResult, KVRagEngine, TokenStream
from langchain_kvrag._convert import chat_messages, llm_output, metadata_of, usage_of
from langchain_kvrag._engine import KVRagModel
from langchain_kvrag._spellings import Options, named
from langchain_kvrag._timed import atimed, timed


class KVRagLLM(KVRagModel, BaseLLM):
    """LLM over :class:`kvrag.KVRagEngine` that does not prefill known chunks again.

    Strings go to the model unchanged. Chat prompts go through its chat template; pass such a prompt
    as ``prefix``. The record of how an answer was made is in its ``generation_info``. Takes the
    options of :class:`~langchain_kvrag.ChatKVRag`.

    Examples
    --------
    >>> llm = KVRagLLM(model="./SmolLM2-135M.gguf", kv_dir="./kv", prefix=prompt)  # doctest: +SKIP
    >>> info = llm.generate(["..."]).generations[0][0].generation_info  # doctest: +SKIP
    >>> info["kvrag"]["kv_reuse_ratio"]  # doctest: +SKIP
    """

    def _explained(self, prompt: Any, options: dict[str, Any]) -> Explanation:
        rendered = self._rendered(self._convert_input(prompt), options)
        return super()._explained(rendered.to_string(), {**options, "chat_template_kwargs": None})

    @property
    def _llm_type(self) -> str:
        return "kvrag"

    # -- chat prompts: rendering needs the loaded tokenizer, so never in the event loop ----------

    def _rendered(self, prompt: PromptValue, options: Options) -> PromptValue:
        """Render a chat prompt with the model's chat template.

        Without a template it stays the plain "Human: ..." lines of any ``BaseLLM``.
        """
        if not isinstance(prompt, ChatPromptValue):
            return prompt
        variables = options.get("chat_template_kwargs")
        self.check_call({"chat_template_kwargs": variables})
        encoder = self._engine(named(options, "model")).encoder.with_variables(variables)
        if not encoder.has_chat_template:
            return prompt
        return StringPromptValue(text=encoder.render(chat_messages(prompt.to_messages())))

    def _all_rendered(self, prompts: Sequence[PromptValue], options: Options) -> list[PromptValue]:
        return [self._rendered(prompt, options) for prompt in prompts]

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer prompts; see ``BaseLLM.generate``."""
        model = self._keyed({"stop": stop} | kwargs)
        return super(KVRagLLM, model).generate(prompts, stop, callbacks, **kwargs)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer prompts; see ``BaseLLM.agenerate``."""
        model = await self._akeyed({"stop": stop} | kwargs)
        return await super(KVRagLLM, model).agenerate(prompts, stop, callbacks, **kwargs)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Answer prompts at the same time; see ``BaseLLM.batch``."""
        if not return_exceptions:
            return super().batch(inputs, config, **kwargs)
        # Each prompt's own exception; ``BaseLLM`` returns the first for all prompts.
        configs = [
            patch_config(each, max_concurrency=each.get("max_concurrency") or self.max_running)
            for each in get_config_list(config, len(inputs))
        ]
        return Runnable.batch(self, inputs, configs, return_exceptions=True, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Answer prompts at the same time; see ``BaseLLM.abatch``."""
        if not return_exceptions:
            return await super().abatch(inputs, config, **kwargs)
        return await Runnable.abatch(self, inputs, config, return_exceptions=True, **kwargs)

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer prompts; see ``BaseLLM.generate_prompt``."""
        return super().generate_prompt(self._all_rendered(prompts, kwargs), *args, **kwargs)

    async def agenerate_prompt(
        self, prompts: list[PromptValue], *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Answer prompts; see ``BaseLLM.agenerate_prompt``."""
        rendered = await run_in_executor(None, self._all_rendered, prompts, kwargs)
        return await super().agenerate_prompt(rendered, *args, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        """Answer a prompt piece by piece."""
        prompt = self._rendered(self._convert_input(input), kwargs)
        yield from super().stream(prompt, config, stop=stop, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        """Answer a prompt piece by piece."""
        prompt = await run_in_executor(None, self._rendered, self._convert_input(input), kwargs)
        async for text in super().astream(prompt, config, stop=stop, **kwargs):
            yield text

    # -- answers -----------------------------------------------------------------------------------

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        engine = self._engine(named(kwargs, "model"))
        options = self._options(stop, kwargs)
        timeout_s = self._time_limit(kwargs)
        if len(prompts) > 1:
            return _llm_result(engine, _answers(engine, prompts, options, timeout_s))
        emit = run_manager.on_llm_new_token if run_manager and self.streaming else None
        result = self._answer(engine, prompts[0], options, timeout_s, emit)
        return _llm_result(engine, [result])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        engine = await self._aengine(named(kwargs, "model"))
        options = self._options(stop, kwargs)
        timeout_s = self._time_limit(kwargs)
        is_streamed = self.streaming and len(prompts) == 1
        emit = run_manager.on_llm_new_token if run_manager and is_streamed else None
        slots = asyncio.Semaphore(self.max_running)

        async def answer(prompt: str) -> GenerationResult:
            async with slots:
                return await self._aanswer(engine, prompt, options, timeout_s, emit)

        running = [asyncio.create_task(answer(prompt)) for prompt in prompts]
        try:
            return _llm_result(engine, [await each for each in running])
        finally:
            for each in running:
                each.cancel()

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        engine = self._engine(named(kwargs, "model"))
        with engine.stream(prompt, **self._options(stop, kwargs)) as stream:
            for text in timed(stream, self._time_limit(kwargs)):
                chunk = GenerationChunk(text=text)
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            yield GenerationChunk(text="", generation_info=_info(engine, stream.result))

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        engine = await self._aengine(named(kwargs, "model"))
        stream = engine.astream(prompt, **self._options(stop, kwargs))
        try:
            async for text in atimed(stream, self._time_limit(kwargs)):
                chunk = GenerationChunk(text=text)
                if run_manager:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            yield GenerationChunk(text="", generation_info=_info(engine, stream.result))
        finally:
            stream.cancel()  # the caller may have left early


def _answers(
    engine: KVRagEngine, prompts: Sequence[str], options: Options, timeout_s: float | None
) -> list[GenerationResult]:
    """Answer prompts at the same time, so that they share decode steps; results are in order.

    An error, or Ctrl-C, stops the answers that are not done.
    """
    running = deque[tuple[TokenStream, Iterator[str]]]()
    results: list[GenerationResult] = []

    def end_first() -> None:
        stream, texts = running.popleft()
        deque(texts, maxlen=0)
        results.append(stream.result)

    with ExitStack() as streams:
        for prompt in prompts:
            if len(running) == KVRagLLM.max_running:
                end_first()
            stream = streams.enter_context(engine.stream(prompt, **options))
            running.append((stream, timed(stream, timeout_s)))
        while running:
            end_first()
    return results


def _info(engine: KVRagEngine, result: GenerationResult) -> dict[str, Any]:
    return {**metadata_of(result, engine.source.name), "usage_metadata": dict(usage_of(result))}


def _llm_result(engine: KVRagEngine, results: Sequence[GenerationResult]) -> LLMResult:
    return LLMResult(
        generations=[[Generation(text=r.text, generation_info=_info(engine, r))] for r in results],
        llm_output=llm_output(results, engine.source.name),
    )
