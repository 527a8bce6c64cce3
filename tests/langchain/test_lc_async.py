"""Async twins: the event loop lives, leaving early stops decoding, exceptions arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate

from kvrag import ConfigError
from langchain_kvrag import ChatKVRag, KVRagLLM

STALL_S = 0.6
"""Longest pause of the loop that busy cores excuse; a call that blocked it would pause it for longer."""


@asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """Record the pauses between turns of the event loop."""
    pauses: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            pauses.append(time.perf_counter() - before)

    task = asyncio.create_task(tick())
    try:
        yield pauses
    finally:
        task.cancel()


def slow(model: Any, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1) -> None:
    """Let every forward take so long that one of them in the event loop would show."""
    kind = type(model.engine.loaded.lm)
    original = kind.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
@pytest.mark.parametrize("call", ["ainvoke", "astream", "abatch"])
async def test_the_event_loop_is_not_blocked(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: Any, call: str
) -> None:
    model = kind(**options)
    slow(model, monkeypatch)
    value = ChatPromptTemplate.from_messages([("human", "{q}")]).invoke({"q": "Tell me."})
    async with ticking() as pauses:
        if call == "ainvoke":
            await model.ainvoke(value)
        elif call == "abatch":
            await model.abatch([value])
        else:
            async for _ in model.astream(value):
                pass
    assert len(pauses) > 20  # 8 forwards of 0.1 s and more
    assert max(pauses) < STALL_S


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
async def test_loading_does_not_block_the_event_loop(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    import kvrag.engine

    original = kvrag.engine.load

    def load(source: Any) -> Any:
        time.sleep(1)
        return original(source)

    monkeypatch.setattr(kvrag.engine, "load", load)
    value = ChatPromptTemplate.from_messages([("human", "{q}")]).invoke({"q": "Tell me."})
    async with ticking() as pauses:
        async for _ in kind(**options).astream(value):
            pass
    assert len(pauses) > 20
    assert max(pauses) < STALL_S


async def test_async_answers_equal_sync_ones(chat: ChatKVRag, chunks: list[str]) -> None:
    await asyncio.to_thread(chat.precompute_kv, chunks)
    prompt = "\n\n".join(chunks) + "\n\nWho?"
    expected = chat.invoke(prompt)
    message = await chat.ainvoke(prompt)
    pieces = [piece async for piece in chat.astream(prompt)]
    whole = sum(pieces[1:], pieces[0])
    assert message.content == whole.content == expected.content
    assert message.usage_metadata == whole.usage_metadata == expected.usage_metadata
    assert pieces[-1].chunk_position == "last"
    both = await chat.abatch([prompt, "Tell me."])
    assert both[0].content == expected.content


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
async def test_leaving_a_stream_stops_decoding(
    options: dict[str, Any], forwards: Callable[[Any], int], kind: Any
) -> None:
    model = kind(**options)
    forwards(model)
    stream = model.astream("Tell me everything.", max_tokens=3000)
    async for _ in stream:
        break
    await stream.aclose()
    assert await asyncio.to_thread(forwards, model) < 300


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
@pytest.mark.parametrize("call", ["ainvoke", "astream"])
async def test_cancelling_stops_decoding(
    options: dict[str, Any], forwards: Callable[[Any], int], kind: Any, call: str
) -> None:
    model = kind(**options)
    forwards(model)

    async def read() -> None:
        async for _ in model.astream("Tell me everything.", max_tokens=3000):
            pass

    work: Awaitable[Any] = model.ainvoke("Tell me everything.", max_tokens=3000) if call == "ainvoke" else read()
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.2)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert await asyncio.to_thread(forwards, model) < 1500


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
async def test_exceptions_reach_the_caller(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    model = kind(**options)
    with pytest.raises(ConfigError, match="'foo'"):
        await model.ainvoke("hi", foo=1)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(type(model.engine.loaded.lm), "forward", broken)
    with pytest.raises(RuntimeError, match="on fire"):
        await asyncio.wait_for(model.ainvoke("hi"), 20)
    with pytest.raises(RuntimeError, match="on fire"):
        async for _ in model.astream("hi"):
            pass
