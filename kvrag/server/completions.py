"""``/v1/chat/completions`` and ``/v1/completions``: answers, whole or as events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from kvrag.generate.streams import AsyncTokenStream
from kvrag.prompt.template import Prompt
from kvrag.server.errors import as_api_error
from kvrag.server.schema import ChatRequest, Completion, Message, Reuse, TextRequest
from kvrag.server.service import Service, service_of
from kvrag.types import Chunk, GenerationResult

PATIENCE_S = 10.0  # after which a stream without a first token begins, so that its client sees a sign of life
PING_S = 15
SEND_TIMEOUT_S = 60.0  # after which a client that reads nothing is left

Piece = tuple[int, str | GenerationResult]
"""Index of a choice, and more of its text, or, at its end, its result."""

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kind of completion looks: its name, the prefix of its ids, and whether its text is in messages."""

    object: str
    prefix: str
    is_chat: bool

    def whole(self, index: int, result: GenerationResult) -> dict[str, Any]:
        """Return a finished choice."""
        own: dict[str, Any] = {"text": result.text}
        if self.is_chat:
            calls = {"tool_calls": _calls(result)} if result.tool_calls else {}
            content = None if calls and not result.text else result.text
            own = {"message": {"role": "assistant", "content": content, "refusal": None, **calls}}
        return {"index": index, **own, "logprobs": None, "finish_reason": result.finish_reason}

    def delta(self, index: int, text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
        """Return a piece of a choice; ``None``: its beginning."""
        own: dict[str, Any] = {"text": text or ""}
        if self.is_chat:
            own = {"delta": {"role": "assistant", "content": ""} if text is None else {"content": text} if text else {}}
        return {"index": index, **own, "logprobs": None, "finish_reason": finish_reason}


def _calls(result: GenerationResult) -> list[dict[str, Any]]:
    """Return an answer's calls of tools as OpenAI writes them."""
    made = []
    for call in result.tool_calls:
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        made.append({"id": call.id, "type": "function", "function": function})
    return made


CHAT, TEXT = Shape("chat.completion", "chatcmpl", True), Shape("text_completion", "cmpl", False)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer chat messages."""
    return await _complete(CHAT, body, request, [chat_prompt(body.messages, body.kvrag)])


@router.post("/v1/completions")
async def completions(body: TextRequest, request: Request) -> Response:
    """Continue text."""
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return await _complete(TEXT, body, request, [text_prompt(prompt, body.kvrag) for prompt in prompts])


def chat_prompt(messages: Sequence[Message], reuse: Reuse) -> Prompt:
    """Return the messages as the engine takes them, with the documents before the last user message's text."""
    dicts: list[dict[str, Any]] = [
        message.model_dump(exclude_unset=True) | {"content": message.content} for message in messages
    ]
    users = [message for message in dicts if message["role"] == "user"]
    if reuse.documents and users:
        content = users[-1]["content"] or ""
        users[-1]["content"] = [*_chunks(reuse), *([content] if isinstance(content, str) else content)]
    return dicts


def text_prompt(prompt: str, reuse: Reuse) -> Prompt:
    """Return a prompt with the documents before it."""
    return [*_chunks(reuse), prompt] if reuse.documents else prompt


def _chunks(reuse: Reuse) -> list[str | Chunk]:
    return [part for document in reuse.documents for part in (Chunk(document.text), "\n\n")]


async def _complete(shape: Shape, body: Completion, request: Request, prompts: Sequence[Prompt]) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    pieces = _pieces(service, body, request, prompts)
    head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}
    if not body.stream:
        async with aclosing(pieces):
            results = await _unless_gone(request, asyncio.create_task(_results(pieces)), None)
            assert results is not None
        choices = [shape.whole(index, result) for index, result in sorted(results.items())]
        made = [results[index] for index in sorted(results)]
        return JSONResponse({**head, "object": shape.object, "choices": choices, **_usage(made, body.n)})
    first: asyncio.Task[Piece] = asyncio.create_task(pieces.asend(None))
    await _unless_gone(request, first, PATIENCE_S)
    if first.done():
        first.result()  # an error before the first byte has a status of its own
    events = _events(shape, body, head, first, pieces)
    return EventSourceResponse(
        events,
        ping=PING_S,
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        send_timeout=SEND_TIMEOUT_S,
        shutdown_grace_period=service.config.drain_s,
    )


async def _results(pieces: AsyncIterator[Piece]) -> dict[int, GenerationResult]:
    return {index: piece async for index, piece in pieces if isinstance(piece, GenerationResult)}


async def _unless_gone(request: Request, task: asyncio.Task[Any], timeout_s: float | None) -> Any:
    """Wait for a task, so many seconds at most; cancel it when the client leaves, or who waits for it is cancelled."""
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and leaving.done():
            task.cancel()
            await asyncio.wait({task})
        return task.result() if task.done() else None
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _pieces(
    service: Service, body: Completion, request: Request, prompts: Sequence[Prompt]
) -> AsyncGenerator[Piece, None]:
    """Yield the choices' text as it comes, ``n`` choices for each prompt; leaving ends all of them."""
    deadline, timer = asyncio.get_running_loop().time() + service.config.timeout_s, service.metrics.timer()
    arrived: asyncio.Queue[tuple[int, str | GenerationResult | Exception]] = asyncio.Queue()
    async with service.admission.turn():
        timer.began()
        streams = [
            service.engine.astream(prompt, **service.options(body, index, tenant=request.state.tenant))
            for prompt in prompts
            for index in range(body.n)
        ]
        readers = [asyncio.create_task(_read(index, stream, arrived)) for index, stream in enumerate(streams)]
        left = len(streams)
        try:
            while left:
                seconds = deadline - asyncio.get_running_loop().time()
                index, piece = await asyncio.wait_for(arrived.get(), seconds)
                if isinstance(piece, Exception):
                    raise piece
                if isinstance(piece, GenerationResult):
                    left -= 1
                    service.metrics.count(piece)
                else:
                    timer.took(index)
                yield index, piece
        finally:
            timer.ended()
            for stream, reader in zip(streams, readers, strict=True):
                stream.cancel()
                reader.cancel()


async def _read(index: int, stream: AsyncTokenStream, arrived: asyncio.Queue[Any]) -> None:
    try:
        async for text in stream:
            arrived.put_nowait((index, text))
        arrived.put_nowait((index, stream.result))
    except Exception as error:
        arrived.put_nowait((index, error))


async def _events(
    shape: Shape,
    body: Completion,
    head: dict[str, Any],
    first: asyncio.Task[Piece],
    pieces: AsyncGenerator[Piece, None],
) -> AsyncIterator[ServerSentEvent]:
    """Yield a completion as OpenAI's events; an error after the first byte is an event too."""
    kind = shape.object + ".chunk" if shape.is_chat else shape.object
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    results: dict[int, GenerationResult] = {}

    def event(choices: list[dict[str, Any]], **more: Any) -> ServerSentEvent:
        usage = {"usage": None} if wants_usage else {}
        return ServerSentEvent(json.dumps({**head, "object": kind, "choices": choices, **usage, **more}))

    begun = set()
    try:
        async with aclosing(_chained(first, pieces)) as all_pieces:
            async for index, piece in all_pieces:
                if shape.is_chat and index not in begun:
                    yield event([shape.delta(index, None)])
                begun.add(index)
                if isinstance(piece, str):
                    yield event([shape.delta(index, piece)])
                else:
                    results[index] = piece
                    if calls := [{"index": at, **call} for at, call in enumerate(_calls(piece))]:
                        yield event([{**shape.delta(index, ""), "delta": {"tool_calls": calls}}])
                    yield event([shape.delta(index, "", piece.finish_reason)])
        if wants_usage:
            yield event([], **_usage([results[index] for index in sorted(results)], body.n))
    except Exception as error:
        yield ServerSentEvent(json.dumps(as_api_error(error).body))
    yield ServerSentEvent("[DONE]")


async def _chained(first: asyncio.Task[Piece], pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece]:
    try:
        yield await first
        async for piece in pieces:
            yield piece
    finally:
        first.cancel()
        await pieces.aclose()


def _usage(results: Sequence[GenerationResult], n: int) -> dict[str, Any]:
    """Return tokens as OpenAI counts them (a prompt once for its ``n`` choices), and how each answer was made."""
    prompts = results[::n]
    num_in, num_out = sum(r.prompt_tokens for r in prompts), sum(len(r.token_ids) for r in results)
    details = {"cached_tokens": sum(r.cached_tokens for r in prompts)}
    usage = {
        "prompt_tokens": num_in,
        "completion_tokens": num_out,
        "total_tokens": num_in + num_out,
        "prompt_tokens_details": details,
    }
    return {"usage": usage, "kvrag": [_made(result) for result in results]}


def _made(result: GenerationResult) -> dict[str, Any]:
    """Return how an answer was made, as plain JSON values."""
    names = ("exactness", "cached_tokens", "repaired_tokens", "computed_tokens", "fallback_reason", "kv_dtype")
    made = {name: getattr(result, name) for name in (*names, "evicted_tokens")}
    return made | {"ttft_ms": result.ttft_ms, "timings_ms": dict(result.timings_ms)}
