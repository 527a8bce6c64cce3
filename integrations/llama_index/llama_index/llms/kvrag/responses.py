"""Converts the engine's results and streams to LlamaIndex's responses."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Generator
from typing import Any, Protocol, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from kvrag import AsyncTokenStream, GenerationResult, TokenStream
from llama_index.llms.kvrag.accounting import Account, open_accounts

logger = logging.getLogger(__name__)

_TOLD = (
    "exactness",
    "cached_tokens",
    "history_tokens",
    "repaired_tokens",
    "computed_tokens",
    "kv_reuse_ratio",
    "ttft_ms",
    "timings_ms",
    "fallback_reason",
    "has_other_prefix",
    "evicted_tokens",
    "kv_dtype",
    "finish_reason",
)
"""Fields of a result that its record shows."""

ResponseT = TypeVar("ResponseT", bound=CompletionResponse | ChatResponse, covariant=True)


class Shape(Protocol[ResponseT]):
    """Makes a response from text and thought so far, the newest piece, and any result."""

    def __call__(
        self, text: str, delta: str | None, result: GenerationResult | None, thought: str = ""
    ) -> ResponseT:
        """Make the response."""
        ...


def as_completion(
    text: str, delta: str | None, result: GenerationResult | None, thought: str = ""
) -> CompletionResponse:
    """Make a completion response; usage and accounting come with the result."""
    return CompletionResponse(
        text=text,
        delta=delta,
        raw=_raw(result),
        additional_kwargs=_usage(result) | _beside(thought),
    )


def as_chat(
    text: str,
    delta: str | None,
    result: GenerationResult | None,
    thought: str = "",
    one_call: bool = False,
) -> ChatResponse:
    """Make a chat response; with ``one_call``, other calls than the first are left out.

    The message carries no extras except calls and the thought, of which the model's chat template
    knows whether later turns see it: chat memories would show other extras to the model later.
    """
    thoughts = [ThinkingBlock(content=thought)] if thought else []
    called = result.tool_calls if result else ()
    if one_call and called[1:]:
        logger.warning(
            "the answer calls %d tools; parallel calls are not allowed, so the first is kept",
            len(called),
        )
        called = called[:1]
    calls = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
        for call in called
    ]
    message = ChatMessage(
        role=MessageRole.ASSISTANT,
        blocks=[*thoughts, TextBlock(text=text), *calls],
        additional_kwargs=_beside(thought),
    )
    more = _usage(result)
    if newest := getattr(delta, "reasoning_content", ""):
        more["thinking_delta"] = newest
    return ChatResponse(message=message, delta=delta, raw=_raw(result), additional_kwargs=more)


def _beside(thought: str) -> dict[str, Any]:
    return {"reasoning_content": thought} if thought else {}


def whole(result: GenerationResult, shape: Shape[ResponseT]) -> ResponseT:
    """Make the response of a whole answer, and account for it."""
    return _accounted(
        shape(result.text, None, result, result.reasoning_content or ""), open_accounts()
    )


class ResponseStream(Generator[ResponseT, None, None]):
    """Stream of responses: a response per piece of text, and a last response with the accounting.

    Leaving the stream early stops the decoding. LlamaIndex's callbacks keep a method's return value
    for as long as a handler keeps the event of the reader's leaving. So this object gives its
    generator away when it is iterated over: then only the loop holds it, and leaving the loop
    closes it.
    """

    def __init__(self, stream: TokenStream, shape: Shape[ResponseT]) -> None:
        self._steps: Generator[ResponseT, None, None] = _steps(stream, shape, open_accounts())

    def __iter__(self) -> Generator[ResponseT, None, None]:
        steps = self._steps
        self._steps = _nothing()
        return steps

    def send(self, value: None) -> ResponseT:
        """Return the next response."""
        return self._steps.send(value)

    def throw(self, *error: Any) -> ResponseT:
        """Raise inside the stream, which ends it."""
        return self._steps.throw(*error)


class AsyncResponseStream(AsyncGenerator[ResponseT, None]):
    """Stream of responses for an event loop (see :class:`ResponseStream`)."""

    def __init__(self, stream: AsyncTokenStream, shape: Shape[ResponseT]) -> None:
        self._steps: AsyncGenerator[ResponseT, None] = _asteps(stream, shape, open_accounts())

    def __aiter__(self) -> AsyncGenerator[ResponseT, None]:
        steps = self._steps
        self._steps = _anothing()
        return steps

    async def asend(self, value: None) -> ResponseT:
        """Return the next response."""
        return await self._steps.asend(value)

    async def athrow(self, *error: Any) -> ResponseT:
        """Raise inside the stream, which ends it."""
        return await self._steps.athrow(*error)


def _steps(
    stream: TokenStream, shape: Shape[ResponseT], accounts: tuple[Account, ...]
) -> Generator[ResponseT, None, None]:
    text = thought = ""
    try:
        for delta in stream:
            text += delta
            thought += getattr(delta, "reasoning_content", "")
            yield shape(text, delta, None, thought)
        yield _accounted(shape(text, "", stream.result, thought), accounts)
    finally:
        stream.close()


async def _asteps(
    stream: AsyncTokenStream, shape: Shape[ResponseT], accounts: tuple[Account, ...]
) -> AsyncGenerator[ResponseT, None]:
    text = thought = ""
    try:
        async for delta in stream:
            text += delta
            thought += getattr(delta, "reasoning_content", "")
            yield shape(text, delta, None, thought)
        yield _accounted(shape(text, "", stream.result, thought), accounts)
    finally:
        await stream.aclose()


# The response is returned unchanged, so its type may be covariant.
def _accounted(
    response: ResponseT,  # type: ignore[misc]
    accounts: tuple[Account, ...],
) -> ResponseT:
    for account in accounts:
        account.enter(response.raw["kvrag"])  # type: ignore[index]  # a last response has it
    return response


def _nothing() -> Generator[Any, None, None]:
    yield from ()


async def _anothing() -> AsyncGenerator[Any, None]:
    empty: tuple[Any, ...] = ()
    for response in empty:
        yield response


def _usage(result: GenerationResult | None) -> dict[str, Any]:
    if result is None:
        return {}
    answer = len(result.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": answer,
        "total_tokens": result.prompt_tokens + answer,
    }


def _raw(result: GenerationResult | None) -> dict[str, Any] | None:
    """Return a small dict of usage and accounting.

    Token counters read ``usage``, and observability tools record all of it.
    """
    if result is None:
        return None
    accounting = {name: getattr(result, name) for name in _TOLD}
    return {
        "usage": _usage(result),
        "kvrag": accounting | {"timings_ms": dict(result.timings_ms)},
    }
