"""Time limit for streams of answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

from kvrag import AsyncTokenStream, TokenStream


def timed(stream: TokenStream, seconds: float | None) -> Iterator[str]:
    """Return the text of a stream, with a time limit that begins now.

    If the stream has not ended after ``seconds``, decoding stops and the iterator raises
    ``TimeoutError``.
    """
    late = threading.Event()
    timer = threading.Timer(seconds or 0.0, _stop, (stream, late))
    timer.daemon = True
    if seconds is not None:
        timer.start()
    return _until(stream, seconds, timer, late)


def _until(
    stream: TokenStream, seconds: float | None, timer: threading.Timer, late: threading.Event
) -> Iterator[str]:
    try:
        yield from stream
        _check_end(stream, seconds, is_late=late.is_set())
    finally:
        timer.cancel()


async def atimed(stream: AsyncTokenStream, seconds: float | None) -> AsyncIterator[str]:
    """Yield the text of a stream in an event loop, with a time limit (see :func:`timed`)."""
    late = threading.Event()
    if seconds is None:
        timer = None
    else:
        timer = asyncio.get_running_loop().call_later(seconds, _stop, stream, late)
    try:
        async for text in stream:
            yield text
        _check_end(stream, seconds, is_late=late.is_set())
    finally:
        if timer is not None:
            timer.cancel()


def _stop(stream: TokenStream | AsyncTokenStream, late: threading.Event) -> None:
    late.set()
    stream.cancel()


def _check_end(
    stream: TokenStream | AsyncTokenStream, seconds: float | None, *, is_late: bool
) -> None:
    """Raise ``TimeoutError`` if the time limit ended a stream.

    A stream that ended by itself at the last moment raises no error.
    """
    try:
        is_late = is_late and stream.result.finish_reason == "cancelled"
    except RuntimeError:  # the stream was cancelled before its first token
        if not is_late:
            raise
    if is_late:
        raise TimeoutError(
            f"the answer took longer than timeout={seconds:g} s; raise it, retrieve less, or lower "
            "max_tokens"
        )
