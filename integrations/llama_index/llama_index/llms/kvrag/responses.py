"""From the engine's results and streams to LlamaIndex's responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, Protocol, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from kvrag import GenerationResult
from kvrag.streams import AsyncTokenStream, TokenStream

ResponseT = TypeVar("ResponseT", covariant=True)


class Shape(Protocol[ResponseT]):
    """Makes a response of the text so far, the newest piece, and, once there is one, the result."""

    def __call__(self, text: str, delta: str | None, result: GenerationResult | None) -> ResponseT:
        """Make the response."""
        ...


def as_completion(text: str, delta: str | None, result: GenerationResult | None) -> CompletionResponse:
    """Make a completion response; usage and accounting come with the result."""
    return CompletionResponse(text=text, delta=delta, raw=_raw(result), additional_kwargs=_usage(result))


def as_chat(text: str, delta: str | None, result: GenerationResult | None) -> ChatResponse:
    """Make a chat response. The message itself carries no extras: chat memories would show them to the model later."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, raw=_raw(result), additional_kwargs=_usage(result))


def responses(stream: TokenStream, shape: Shape[ResponseT]) -> Generator[ResponseT, None, None]:
    """Yield a response per piece of text, and a last one with the accounting; leaving early stops the decoding."""
    text = ""
    try:
        for delta in stream:
            text += delta
            yield shape(text, delta, None)
        yield shape(text, "", stream.result)
    finally:
        stream.close()


async def aresponses(stream: AsyncTokenStream, shape: Shape[ResponseT]) -> AsyncGenerator[ResponseT, None]:
    """As :func:`responses`, for an event loop."""
    text = ""
    try:
        async for delta in stream:
            text += delta
            yield shape(text, delta, None)
        yield shape(text, "", stream.result)
    finally:
        await stream.aclose()


def _usage(result: GenerationResult | None) -> dict[str, int]:
    if result is None:
        return {}
    answer = len(result.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": answer,
        "total_tokens": result.prompt_tokens + answer,
    }


def _raw(result: GenerationResult | None) -> dict[str, Any] | None:
    """Return a small dict: token counters read ``usage``, and observability tools write all of it down."""
    if result is None:
        return None
    accounting = {
        "exactness": result.exactness,
        "cached_tokens": result.cached_tokens,
        "repaired_tokens": result.repaired_tokens,
        "computed_tokens": result.computed_tokens,
        "kv_reuse_ratio": result.kv_reuse_ratio,
        "ttft_ms": result.ttft_ms,
        "timings_ms": dict(result.timings_ms),
        "fallback_reason": result.fallback_reason,
        "finish_reason": result.finish_reason,
    }
    return {"usage": _usage(result), "kvrag": accounting}
