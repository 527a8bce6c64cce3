"""Async twins: the event loop lives, leaving early stops decoding, exceptions arrive."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from typing import Any

import pytest
from kit import Forwards, raising, working_threads
from langchain_core.prompts import ChatPromptTemplate

from kvrag import ConfigError
from langchain_kvrag import ChatKVRag, KVRagLLM

BOTH = pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])


@BOTH
@pytest.mark.parametrize("call", ["ainvoke", "astream", "abatch"])
async def test_the_event_loop_neither_loads_nor_computes(options, monkeypatch, kind, call):
    seen, model = working_threads(monkeypatch), kind(**options)
    value = ChatPromptTemplate.from_messages([("human", "{q}")]).invoke({"q": "Tell me."})
    if call == "astream":
        assert [piece async for piece in model.astream(value)]
    else:
        assert await (model.ainvoke(value) if call == "ainvoke" else model.abatch([value]))
    assert seen
    assert threading.get_ident() not in seen


async def test_async_answers_equal_sync_ones(chat, chunks):
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


@BOTH
def test_an_abandoned_stream_stops_decoding(options, monkeypatch, kind):
    model, forwards = kind(**options), Forwards(monkeypatch)
    for _ in model.stream("Tell me everything.", max_tokens=3000):
        break
    assert forwards.settled() < 300


@BOTH
async def test_leaving_a_stream_stops_decoding(options, monkeypatch, kind):
    model, forwards = kind(**options), Forwards(monkeypatch)
    stream = model.astream("Tell me everything.", max_tokens=3000)
    async for _ in stream:
        break
    await stream.aclose()
    assert await asyncio.to_thread(forwards.settled) < 300


@BOTH
@pytest.mark.parametrize("call", ["ainvoke", "astream"])
async def test_cancelling_stops_decoding(options, monkeypatch, kind, call):
    model, forwards = kind(**options), Forwards(monkeypatch)

    async def read():
        async for _ in model.astream("Tell me everything.", max_tokens=3000):
            pass

    work: Awaitable[Any] = (
        model.ainvoke("Tell me everything.", max_tokens=3000) if call == "ainvoke" else read()
    )
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.2)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert await asyncio.to_thread(forwards.settled) < 1500


@BOTH
async def test_exceptions_reach_the_caller(options, monkeypatch, kind):
    model = kind(**options)
    with pytest.raises(ConfigError, match="'foo'"):
        await model.ainvoke("hi", foo=1)

    monkeypatch.setattr(
        type(model.engine.loaded.lm), "forward", raising(RuntimeError, "the device is on fire")
    )
    with pytest.raises(RuntimeError, match="on fire"):
        await asyncio.wait_for(model.ainvoke("hi"), 20)
    with pytest.raises(RuntimeError, match="on fire"):
        async for _ in model.astream("hi"):
            pass
