"""Time limit for streams of answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from kvrag import AsyncTokenStream, TokenStream


def timed(stream: TokenStream, seconds: float | None) -> Iterator[str]:
    """Return the text of a stream, with a time limit that begins now.

    If the stream has not ended after ``seconds``, decoding stops and the iterator raises
    ``TimeoutError``.
    """
    timer = threading.Timer(seconds or 0.0, stream.cancel)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    return _until(stream, seconds, timer)


def _until(stream: TokenStream, seconds: float | None, timer: threading.Timer) -> Iterator[str]:
    try:
        yield from stream
        _check_end(stream, seconds)
    finally:
        timer.cancel()


async def atimed(stream: AsyncTokenStream, seconds: float | None) -> AsyncIterator[str]:
    """Yield the text of a stream in an event loop, with a time limit (see :func:`timed`)."""
    timer = None
    if seconds is not None:
        timer = asyncio.get_running_loop().call_later(seconds, stream.cancel)
    try:
        async for text in stream:
            yield text
        _check_end(stream, seconds)
    finally:
        if timer is not None:
            timer.cancel()


def _check_end(stream: TokenStream | AsyncTokenStream, seconds: float | None) -> None:
    """Raise ``TimeoutError`` if the time limit, which alone cancels a stream, ended it.

    A stream that ended by itself at the last moment raises no error.
    """
    with suppress(RuntimeError):  # the stream was cancelled before its first token
        if seconds is None or stream.result.finish_reason != "cancelled":
            return
    raise TimeoutError(
        f"the answer took longer than timeout={seconds:g} s; raise it, retrieve less, or lower "
        "max_tokens"
    )
