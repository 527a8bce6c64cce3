"""Hand text from a worker thread to the caller: synchronously or in an event loop, with cancellation and exceptions intact.

One thread per request owns every lock and the inference mode; nothing is held while the caller has the turn. Leaving a stream early
(``break``, ``close``, a cancelled task, garbage collection) sets the cancel event, and decoding stops before its next forward.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from kvrag.types import GenerationResult

Emit = Callable[[str], None]
Produce = Callable[[Emit, threading.Event], GenerationResult]
"""Work of one request: emits text, looks at the cancel event, returns the result."""


def _run(produce: Produce, put: Callable[[Any], None], cancel: threading.Event) -> None:
    try:
        put(produce(put, cancel))
    except StopIteration as error:  # raised in an iterator, it would pass for the stream's end
        put(RuntimeError(f"a StopIteration escaped from generation: {error}"))
    except BaseException as error:  # whatever it is, it belongs to the caller
        put(error)


def _start(produce: Produce, put: Callable[[Any], None], cancel: threading.Event) -> None:
    threading.Thread(target=_run, args=(produce, put, cancel), name="kvrag-generate", daemon=True).start()


class _Base:
    """Common state: the cancel event and the result."""

    def __init__(self) -> None:
        self._cancel = threading.Event()
        self._result: GenerationResult | None = None
        self._is_over = False

    @property
    def result(self) -> GenerationResult:
        """The finished :class:`~kvrag.types.GenerationResult`; available once the stream has ended."""
        if self._result is None:
            raise RuntimeError("the stream has not ended; read it to its end first")
        return self._result

    def cancel(self) -> None:
        """Stop decoding before its next forward."""
        self._cancel.set()

    def __del__(self) -> None:
        self._cancel.set()

    def _take(self, item: Any) -> str:
        """Return text, or end the stream by raising."""
        if isinstance(item, str):
            return item
        self._is_over = True
        if isinstance(item, GenerationResult):
            self._result = item
            raise StopIteration
        raise item


class TokenStream(_Base, Iterator[str]):
    """Text deltas of one answer; ``.result`` holds the accounting when it has ended."""

    def __init__(self, produce: Produce) -> None:
        super().__init__()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        _start(produce, self._queue.put, self._cancel)

    def __next__(self) -> str:
        if self._is_over:
            raise StopIteration
        return self._take(self._queue.get())

    def close(self) -> None:
        """Stop early."""
        self.cancel()
        self._is_over = True

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTokenStream(_Base, AsyncIterator[str]):
    """As :class:`TokenStream` for an event loop, which is never blocked."""

    def __init__(self, produce: Produce) -> None:
        super().__init__()
        self._produce = produce
        self._queue: asyncio.Queue[Any] | None = None

    def _begin(self) -> asyncio.Queue[Any]:
        loop, arrived, cancel = asyncio.get_running_loop(), asyncio.Queue[Any](), self._cancel

        def put(item: Any) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, item)
            except RuntimeError:  # the loop is closed: nobody waits for this answer
                cancel.set()

        _start(self._produce, put, cancel)  # the thread must not hold the stream: dropping it cancels
        return arrived

    async def __anext__(self) -> str:
        if self._is_over:
            raise StopAsyncIteration
        if self._queue is None:
            self._queue = self._begin()
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            self._cancel.set()
            raise
        try:
            return self._take(item)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Stop early."""
        self.cancel()
        self._is_over = True
