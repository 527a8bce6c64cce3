"""``/v1/chat/completions`` and ``/v1/completions``: answers, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect

from kvrag import Chunk, GenerationResult
from kvrag.adapters import Delta, Prompt
from kvrag_server.errors import APIError, as_api_error
from kvrag_server.fields import JsonObject
from kvrag_server.metrics import Timer
from kvrag_server.record import RequestRecord
from kvrag_server.schema import ChatRequest, Message, Reuse, TextRequest
from kvrag_server.service import Answer, Service, service_of
from kvrag_server.shapes import CHAT, TEXT, LogprobStream, LogprobWriter, Shape, calls_of, usage_of

# After this wait a stream begins without a first token, so that its client sees a sign of life.
PATIENCE_S = 10.0
PING_S = 15
SEND_TIMEOUT_S = 60.0  # a client that reads nothing for this long is dropped

Piece = tuple[int, str | GenerationResult]
"""Index of a choice with more of its text or, at its end, its result."""

Arrivals = asyncio.Queue[tuple[int, str | GenerationResult | Exception]]
"""Pieces as they come; an error is the last."""

Body = ChatRequest | TextRequest

# At lower levels it logs the text of every event.
logging.getLogger("sse_starlette.sse").setLevel(logging.INFO)

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer chat messages."""
    return await _complete(CHAT, body, request, [chat_prompt(body.messages, body.kvrag)])


@router.post("/v1/completions")
async def completions(body: TextRequest, request: Request) -> Response:
    """Continue text."""
    return await _complete(
        TEXT, body, request, [text_prompt(prompt, body.kvrag) for prompt in body.prompts]
    )


def chat_prompt(messages: Sequence[Message], reuse: Reuse) -> Prompt:
    """Return messages for the engine, with the documents before the last user message's text."""
    dicts: list[JsonObject] = [
        message.model_dump(exclude_unset=True) | {"content": message.content}
        for message in messages
    ]
    if reuse.documents:
        users = [message for message in dicts if message["role"] in ("user", "human")]
        if not users:
            raise APIError(
                400,
                "kvrag.documents go before the last user message, and there is none; send one, or "
                "leave them out",
                "invalid_value",
                param="kvrag.documents",
            )
        content = users[-1]["content"] or ""
        users[-1]["content"] = [
            *_chunks(reuse),
            *([content] if isinstance(content, str) else content),
        ]
    return dicts


def text_prompt(prompt: str | list[int], reuse: Reuse) -> Prompt:
    """Return a prompt for the engine, with the documents before it."""
    if not reuse.documents:
        return prompt
    if not isinstance(prompt, str):
        raise APIError(
            400,
            "kvrag.documents go before text, and this prompt is token ids; send it as text, or "
            "leave the documents out",
            "unsupported_parameter",
            param="kvrag.documents",
        )
    return [*_chunks(reuse), prompt]


def _chunks(reuse: Reuse) -> list[str | Chunk]:
    return [
        part
        for document in reuse.documents
        if document.text.strip()
        for part in (Chunk(document.text), "\n\n")
    ]


async def _complete(
    shape: Shape, body: Body, request: Request, prompts: Sequence[Prompt]
) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    record: RequestRecord = request.state.record
    record.model = service.name
    record.is_stream = body.stream
    echo = _echo(service, body, prompts)
    pieces = _pieces(service, body, request, prompts, echo)
    head = {
        "id": f"{shape.prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": service.name,
    }
    if not body.stream:
        async with aclosing(pieces):
            results = await unless_gone(request, asyncio.create_task(_results(pieces)), None)
        tokenizer = service.engine.tokenizer
        choices = [
            shape.whole(index, result, tokenizer, echo[index] if echo else "")
            for index, result in enumerate(results)
        ]
        return JSONResponse(
            {
                **head,
                "object": shape.object,
                "choices": choices,
                **usage_of(results, body.n, tokenizer, is_traced=body.kvrag.trace),
            }
        )
    first: asyncio.Task[Piece] = asyncio.create_task(pieces.asend(None))
    # Raises an error before the first byte, which has a status of its own.
    await unless_gone(request, first, PATIENCE_S)
    logprobs = LogprobStream(service.engine.tokenizer, is_chat=shape.is_chat, echo=echo)
    return EventSourceResponse(
        _events(shape, body, head, first, pieces, logprobs, record),
        ping=PING_S,
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        send_timeout=SEND_TIMEOUT_S,
        shutdown_grace_period=service.config.drain_s,
    )


async def _results(pieces: AsyncIterator[Piece]) -> list[GenerationResult]:
    """Return the results of the choices, in order."""
    found = {index: piece async for index, piece in pieces if isinstance(piece, GenerationResult)}
    return [found[index] for index in sorted(found)]


async def unless_gone(request: Request, task: asyncio.Task[Any], timeout_s: float | None) -> Any:
    """Wait for a task, at most ``timeout_s`` seconds.

    The task is cancelled when the client leaves or the waiting coroutine is cancelled.
    """
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and leaving.done():
            task.cancel()
            await asyncio.wait({task})
            raise ClientDisconnect
        return task.result() if task.done() else None
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})  # the generator that it reads must not be closed earlier
        raise
    finally:
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _pieces(
    service: Service, body: Body, request: Request, prompts: Sequence[Prompt], echo: Sequence[str]
) -> AsyncGenerator[Piece, None]:
    """Yield the text of the choices as it comes.

    With ``echo``, a choice comes in a single piece behind its prompt's text. Leaving the generator
    ends all choices.
    """
    loop = asyncio.get_running_loop()
    record: RequestRecord = request.state.record
    deadline = loop.time() + service.config.timeout_s
    timer = service.metrics.timer(record)
    arrived = Arrivals()
    streams = [
        service.stream(prompt, body, index, tenant=request.state.tenant)
        for prompt in prompts
        for index in range(body.n)
    ]
    left = len(streams)
    work = asyncio.create_task(_work(service, request, streams, arrived, timer))
    try:
        while left:
            # wait_for of Python 3.11 loses a cancellation that arrives together with a piece.
            async with asyncio.timeout_at(deadline):
                index, piece = await arrived.get()
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, GenerationResult):
                left -= 1
                record.results.append(piece)
                piece = _as_asked(body, piece, echo[index] if echo else None)
                if echo:
                    yield index, _in_one(piece)
            elif echo:
                continue
            yield index, piece
    except TimeoutError:
        record.ended = "timeout"
        raise
    except (asyncio.CancelledError, GeneratorExit):
        record.ended = "client_left"
        raise
    finally:
        for stream in streams:
            stream.cancel()
        work.cancel()


def _echo(service: Service, body: Body, prompts: Sequence[Prompt]) -> list[str]:
    """Return the prompt's text for every choice if answers begin with it, else an empty list."""
    if not isinstance(body, TextRequest) or not body.echo:
        return []
    writer = LogprobWriter(service.engine.tokenizer, is_chat=False)
    return [text for prompt in prompts for text in [_text_of(prompt, writer)] * body.n]


def _text_of(prompt: Any, writer: LogprobWriter) -> str:
    """Return the text of a prompt that is a string, a list of segments or a list of token ids."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], int):
        return b"".join([writer.bytes_of(token) for token in prompt]).decode("utf-8", "replace")
    return "".join([part.text if isinstance(part, Chunk) else part for part in prompt])


def _as_asked(body: Body, result: GenerationResult, echo: str | None) -> GenerationResult:
    """Return an answer in the form that the request asks for.

    With ``echo``, the prompt's text precedes the answer, or replaces it if the limit is 0 tokens.
    Without ``parallel_tool_calls``, only the first call of a tool is kept.
    """
    if isinstance(body, ChatRequest) and not body.parallel_tool_calls:
        return replace(result, tool_calls=result.tool_calls[:1])
    if echo is None:
        return result
    if body.limit == 0:
        result = replace(
            result, text="", token_ids=[], logprobs=None if result.logprobs is None else ()
        )
    logprobs = result.logprobs
    if logprobs is not None:
        logprobs = (result.prompt_logprobs or ()) + logprobs
    return replace(result, text=echo + result.text, logprobs=logprobs)


def _in_one(result: GenerationResult) -> Delta:
    piece = Delta(result.text)
    piece.logprobs = result.logprobs or ()
    return piece


async def _work(
    service: Service,
    request: Request,
    streams: Sequence[Answer],
    arrived: Arrivals,
    timer: Timer,
) -> None:
    """Read the streams as soon as a slot is free.

    The slot is released when the streams end, even if the client reads slowly.
    """

    async def read(index: int, stream: Answer) -> None:
        try:
            async for text in stream:
                timer.note_piece(index)
                arrived.put_nowait((index, text))
            arrived.put_nowait((index, stream.result))
        except Exception as error:
            arrived.put_nowait((index, error))

    try:
        async with service.admission.slot(request.state.tenant):
            timer.note_slot()
            await asyncio.gather(*[read(index, stream) for index, stream in enumerate(streams)])
    except Exception as error:
        arrived.put_nowait((0, error))


async def _events(
    shape: Shape,
    body: Body,
    head: JsonObject,
    first: asyncio.Task[Piece],
    pieces: AsyncGenerator[Piece, None],
    logprobs: LogprobStream,
    record: RequestRecord,
) -> AsyncIterator[ServerSentEvent]:
    """Yield a completion as OpenAI's events; an error after the first byte is an event, too."""
    is_traced = body.kvrag.trace
    wants_usage = is_traced or getattr(body.stream_options, "include_usage", False)
    results: dict[int, GenerationResult] = {}

    frame = {**head, "object": shape.object + ".chunk" * shape.is_chat}
    if wants_usage:
        frame["usage"] = None

    def event(choices: list[JsonObject], **more: Any) -> ServerSentEvent:
        return ServerSentEvent(json.dumps({**frame, "choices": choices, **more}))

    begun = set()
    try:
        async with aclosing(_chained(first, pieces)) as all_pieces:
            async for index, piece in all_pieces:
                if shape.is_chat and index not in begun:
                    yield event([shape.delta(index, None)])
                begun.add(index)
                if isinstance(piece, str):
                    yield event([shape.delta(index, piece, logprobs=logprobs.of(index, piece))])
                else:
                    results[index] = piece
                    calls = [{"index": at, **call} for at, call in enumerate(calls_of(piece))]
                    if calls:
                        yield event([{**shape.delta(index, ""), "delta": {"tool_calls": calls}}])
                    yield event(
                        [shape.delta(index, "", piece.finish_reason, logprobs.of(index, piece))]
                    )
        if wants_usage:
            made = [results[index] for index in sorted(results)]
            yield event([], **usage_of(made, body.n, logprobs.tokenizer, is_traced=is_traced))
    except Exception as error:
        fault = as_api_error(error)
        record.code = fault.code
        record.status = fault.status
        yield ServerSentEvent(json.dumps(fault.body))
    yield ServerSentEvent("[DONE]")


async def _chained(
    first: asyncio.Task[Piece], pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[Piece]:
    try:
        yield await first
        async for piece in pieces:
            yield piece
    finally:
        first.cancel()
        await pieces.aclose()
