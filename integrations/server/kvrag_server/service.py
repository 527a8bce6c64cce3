"""State that the routes share: the engine, its options, and its tenants' namespaces."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from fastapi import Request

from kvrag import (
    AsyncTokenStream,
    ContextLengthError,
    GenerationResult,
    KVRagEngine,
    Library,
)
from kvrag.adapters import Prompt
from kvrag_server.admission import Admission
from kvrag_server.config import ServerConfig
from kvrag_server.errors import APIError
from kvrag_server.metrics import Metrics
from kvrag_server.schema import ChatRequest, Reuse, TextRequest

_OWN = ("max_new_tokens", "seed", "logprobs", "prompt_logprobs", "chat_template_kwargs")
"""Options of the engine whose values are made from several fields of the API."""
_OPTIONS = inspect.signature(KVRagEngine.generate).parameters.keys() - {"self", "prompt", *_OWN}

PRECOMPUTES = 4
"""Requests that precompute at a time, beside those that are answered, which never wait for them."""


@dataclass(frozen=True, slots=True)
class Desk:
    """State that routes share which need no model; ``name`` is the model's for clients."""

    library: Library
    name: str
    config: ServerConfig
    admission: Admission
    metrics: Metrics

    def namespace(self, tenant: str | None) -> str:
        """Return the namespace of a tenant's chunks; without API keys, the library's."""
        if tenant is None:
            return self.library.namespace
        return f"{self.library.namespace}/{tenant}"


@dataclass(frozen=True, slots=True)
class Service(Desk):
    """An engine behind the API."""

    library: KVRagEngine
    precomputes: Admission
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engine(self) -> KVRagEngine:
        """Engine that answers."""
        return self.library

    def check_model(self, name: str | None) -> None:
        """Raise ``APIError`` if a client asks for a model that is not served.

        A request without a name is for the served model.
        """
        if name not in (None, self.name):
            raise APIError(
                404,
                f"the model {name!r} is not served here; ask for {self.name!r}",
                "model_not_found",
                param="model",
            )

    def reuse(self, reuse: Reuse, tenant: str | None) -> dict[str, Any]:
        """Return the engine's options of reuse for a request."""
        return {
            "mode": reuse.mode,
            "repair": reuse.config,
            "max_context": reuse.max_context,
            "namespace": self.namespace(tenant),
        }

    def stream(
        self, prompt: Prompt, body: ChatRequest | TextRequest, index: int, *, tenant: str | None
    ) -> Answer:
        """Return the stream of the choice ``index`` of a request.

        Its limit is the request's, or else the room that the context window leaves. Where reuse
        ends before that window, it is the engine's own, if the server's limit allows it.
        """
        options = self.options(body, index, tenant=tenant)
        start = partial(self.engine.astream, prompt, **options)
        if body.limit is not None:
            return start(max_new_tokens=max(1, body.limit))
        lm = self.engine.loaded.lm
        most = self.config.max_tokens
        own = max(lm.reuse_window, lm.model.generation_config.max_new_tokens or 0)
        if lm.refusal is None and lm.reuse_window < lm.context_window and own <= most:
            return start()
        return Fitting(start, most)

    def options(
        self, body: ChatRequest | TextRequest, index: int, *, tenant: str | None
    ) -> dict[str, Any]:
        """Return the engine's options for the choice ``index`` of a request, without its limit."""
        most = self.config.max_tokens
        if (body.limit or 0) > most:
            raise APIError(
                400,
                f"max_tokens is {body.limit}, and this server gives {most} at most; ask for less, "
                "leave it out, or start the server with a larger --max-tokens",
                "invalid_value",
                param="max_tokens",
            )
        given = {
            name: value for name in _OPTIONS if (value := getattr(body, name, None)) is not None
        }
        given["logprobs"] = body.num_logprobs
        if isinstance(body, ChatRequest):
            given["chat_template_kwargs"] = body.variables
        elif body.echo:
            given["prompt_logprobs"] = body.num_logprobs
        if body.min_tokens:
            given["min_new_tokens"] = body.min_tokens
        if body.seed is not None:
            given["seed"] = (body.seed + index) % 2**64
        return given | self.reuse(body.kvrag, tenant)


class Fitting:
    """Stream of an answer without a limit in its request.

    It has at most ``most`` tokens, or as many as the context window leaves. ``start`` makes a
    stream of at most ``max_new_tokens``. The room that a prompt leaves is known when the prompt is
    tokenised, so the first stream reports it with :class:`kvrag.errors.ContextLengthError`.
    """

    def __init__(self, start: Callable[..., AsyncTokenStream], most: int) -> None:
        self._start = start
        self._stream = start(max_new_tokens=most)
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for text in self._stream:
                yield text
        except ContextLengthError as error:
            if self._is_cancelled or not error.room:
                raise
            self._stream = self._start(max_new_tokens=error.room)
            async for text in self._stream:
                yield text

    @property
    def result(self) -> GenerationResult:
        """Result of the answer, once it has ended."""
        return self._stream.result

    def cancel(self) -> None:
        """Cancel the stream."""
        self._is_cancelled = True
        self._stream.cancel()


Answer = AsyncTokenStream | Fitting
"""Stream of a choice."""


def served_name(name: str, config: ServerConfig) -> str:
    """Return the name of a model for clients; for a local path, its last part only."""
    return config.model_name or (Path(name).resolve().name if os.path.exists(name) else name)


def desk_of(request: Request) -> Desk:
    """Return the state that routes without a model share."""
    return cast(Desk, request.app.state.service)


def service_of(request: Request) -> Service:
    """Return the service of a request's application."""
    return cast(Service, request.app.state.service)
