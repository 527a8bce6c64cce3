"""Hand text from a request's thread to the caller, synchronously or in an event loop.

Cancellation and exceptions pass between them. A request's thread takes all locks and the inference
mode; nothing is held while the caller's code runs. Leaving a stream early (``break``, ``close``,
Ctrl-C, a cancelled task, garbage collection) sets the cancel event, and decoding stops before its
next forward.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future
from functools import cached_property
from typing import Any

from kvrag.runtime import POOL
from kvrag.types import GenerationResult

Emit = Callable[[str], None]
# Work of a request: emits text, checks the cancel event, returns the result.
Produce = Callable[[Emit, threading.Event], GenerationResult]

# Text, or at the end the finished future.
Item = str | Future[GenerationResult]


def _start(produce: Produce, put: Callable[[Item], None], cancel: threading.Event) -> None:
    """Run a request; its thread must not hold the stream, as dropping the stream cancels it."""
    POOL.submit(lambda: produce(put, cancel), cancel=cancel).add_done_callback(put)


class _Stream:
    """Base of both kinds of streams: the cancel event and the result."""

    def __init__(self) -> None:
        self._cancel = threading.Event()
        self._done: Future[GenerationResult] | None = None
        self._is_over = False

    @property
    def result(self) -> GenerationResult:
        """Result of the request once the stream has ended; raises the request's exception."""
        if self._done is None:
            if self._is_over:
                raise RuntimeError("the stream was left or cancelled before its end")
            raise RuntimeError("the stream has not ended; read it to its end first")
        try:
            return self._done.result()
        except StopIteration as error:  # raised in an iterator, it would pass for the stream's end
            raise RuntimeError(f"a StopIteration escaped from generation: {error}") from error

    def cancel(self) -> None:
        """Stop decoding before its next forward."""
        self._cancel.set()

    __del__ = cancel

    def _take(self, item: Item) -> str | None:
        """Return text, or nothing at the end; raise the request's exception."""
        if isinstance(item, str):
            return item
        self._is_over = True
        self._done = item
        try:
            self.result  # noqa: B018 - raises the request's exception
        except CancelledError:
            self._done = None
            if not self._cancel.is_set():
                raise
        return None


class TokenStream(_Stream, Iterator[str]):
    """Stream of an answer's text deltas; ``.result`` holds the accounting when it has ended."""

    def __init__(self, produce: Produce) -> None:
        super().__init__()
        self._queue = queue.SimpleQueue[Item]()
        _start(produce, self._queue.put, self._cancel)

    def __next__(self) -> str:
        try:
            text = None if self._is_over else self._take(self._queue.get())
        except BaseException:  # Ctrl-C: a traceback that is kept keeps the stream alive
            self._cancel.set()
            raise
        if text is None:
            raise StopIteration
        return text

    def close(self) -> None:
        """Stop early."""
        self.cancel()
        self._is_over = True

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTokenStream(_Stream, AsyncIterator[str]):
    """Stream like :class:`TokenStream` for an event loop, which it never blocks."""

    def __init__(self, produce: Produce) -> None:
        super().__init__()
        self._produce = produce

    @cached_property
    def _queue(self) -> asyncio.Queue[Any]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Queue[Any]()
        cancel = self._cancel

        def put(item: Item) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, item)
            except RuntimeError:  # the loop is closed: the answer has no reader
                cancel.set()

        _start(self._produce, put, cancel)
        return arrived

    async def __anext__(self) -> str:
        if self._is_over:
            raise StopAsyncIteration
        try:
            text = self._take(await self._queue.get())
        except BaseException:  # a cancelled task, as a rule
            self._cancel.set()
            raise
        if text is None:
            raise StopAsyncIteration
        return text

    async def aclose(self) -> None:
        """Stop early."""
        self.cancel()
        self._is_over = True
