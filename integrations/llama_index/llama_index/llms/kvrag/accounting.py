"""Adds the record of how an answer was made to responses of query engines and chat engines."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler

_STREAMS = (StreamingResponse, AsyncStreamingResponse)
_RESPONSES = (*_STREAMS, Response, PydanticResponse, AgentChatResponse, StreamingAgentChatResponse)
_TOKENS = ("cached_tokens", "repaired_tokens", "computed_tokens")
_LEAST_EXACT_FIRST = ("repaired", "exact", "full")


class Account:
    """Calls of LLMs inside a call of LlamaIndex, and the response that reports them."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []
        # Weak, because a stream that its reader drops must be closed at once.
        self._response: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()

    def enter(self, call: dict[str, Any]) -> None:
        """Add a finished call."""
        with self._lock:
            self._calls.append(call)
            self._write()

    def belongs_to(self, response: Any) -> None:
        """Write into this response, now and whenever a call is added."""
        with self._lock:
            self._response = weakref.ref(response)
            self._write()

    def _write(self) -> None:
        response = self._response()
        if response is None or not self._calls:
            return
        if getattr(response, "metadata", None) is None:  # streaming chats have no such field
            response.metadata = {}
        tokens = {name: sum(call[name] for call in self._calls) for name in _TOKENS}
        labels = {call["exactness"] for call in self._calls}
        response.metadata["kvrag"] = {
            "exactness": next(label for label in _LEAST_EXACT_FIRST if label in labels),
            **tokens,
            "kv_reuse_ratio": tokens["cached_tokens"] / sum(tokens.values()),
            "calls": list(self._calls),
        }


_reading: ContextVar[tuple[Account, ...]] = ContextVar("kvrag_accounts", default=())
"""Accounts of the streamed answer that is being read.

Synthesizers call the LLM when their stream is read, outside all spans.
"""


class AccountedSpan(BaseSpan):
    """A running call of LlamaIndex."""

    account: Account = Field(default_factory=Account)


class KVAccounting(BaseSpanHandler[AccountedSpan]):
    """Writes ``response.metadata["kvrag"]``; LlamaIndex's synthesizers pass on only the LLM's text.

    The first :class:`~llama_index.llms.kvrag.KVRagLLM` adds it to the dispatcher. Spans connect a
    call of the LLM to its query or chat, across threads and tasks.
    """

    def new_span(
        self, id_: str, *args: Any, parent_span_id: str | None = None, **kwargs: Any
    ) -> AccountedSpan:
        """Begin a call."""
        return AccountedSpan(id_=id_, parent_id=parent_span_id)

    def prepare_to_exit_span(
        self, id_: str, *args: Any, result: Any = None, **kwargs: Any
    ) -> AccountedSpan | None:
        """End a call; its response gets the account, at once or when its stream has been read."""
        span = self.open_spans.get(id_)
        if span is not None and isinstance(result, _RESPONSES):
            if isinstance(result, _STREAMS) and isinstance(
                result.response_gen, (Generator, AsyncGenerator)
            ):
                read: Any = _read if isinstance(result.response_gen, Generator) else _aread
                result.response_gen = read(result.response_gen, self.accounts(id_))
            span.account.belongs_to(result)
        return span

    def prepare_to_drop_span(self, id_: str, *args: Any, **kwargs: Any) -> AccountedSpan | None:
        """End a call that failed."""
        return self.open_spans.get(id_)

    def accounts(self, id_: str | None) -> tuple[Account, ...]:
        """Return the accounts of a call and of all calls around it."""
        found = dict.fromkeys(_reading.get())
        while id_ is not None and (span := self.open_spans.get(id_)) is not None:
            found[span.account] = None
            id_ = span.parent_id
        return tuple(found)


_handler = KVAccounting()


def account_for_responses() -> None:
    """Write accounts into responses from now on."""
    if _handler not in get_dispatcher().span_handlers:
        get_dispatcher().add_span_handler(_handler)


def open_accounts() -> tuple[Account, ...]:
    """Return the accounts that the current call must be entered into."""
    return _handler.accounts(active_span_id.get())


@contextmanager
def _within(accounts: tuple[Account, ...]) -> Iterator[None]:
    token = _reading.set(accounts)
    try:
        yield
    finally:
        _reading.reset(token)


def _read(
    stream: Generator[str, None, None], accounts: tuple[Account, ...]
) -> Generator[str, None, None]:
    with closing(stream):
        while True:
            with _within(accounts):
                piece = next(stream, None)
            if piece is None:
                return
            yield piece


async def _aread(
    stream: AsyncGenerator[str, None], accounts: tuple[Account, ...]
) -> AsyncGenerator[str, None]:
    async with aclosing(stream):
        while True:
            with _within(accounts):
                piece = await anext(stream, None)
            if piece is None:
                return
            yield piece
