"""What the routes share: the engine, its options, and who may ask for what."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from anyio import CapacityLimiter
from fastapi import Request

from kvrag.engine import KVRagEngine
from kvrag.errors import ContextLengthError
from kvrag.generate.streams import AsyncTokenStream
from kvrag.prompt.template import Prompt
from kvrag.server.admission import Admission
from kvrag.server.config import ServerConfig
from kvrag.server.errors import APIError
from kvrag.server.metrics import Metrics
from kvrag.server.schema import ChatRequest, Reuse, TextRequest
from kvrag.types import GenerationResult

_SAMPLING = (
    *(
        "top_p",
        "top_k",
        "repetition_penalty",
        "stop",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
    ),
    "stop_token_ids",
    *("tools", "tool_choice", "response_format"),
)

PRECOMPUTES = (
    4  # threads of requests that precompute: what others ask for must not wait until one is free
)


@dataclass(frozen=True, slots=True)
class Service:
    """An engine behind the API."""

    engine: KVRagEngine
    config: ServerConfig
    admission: Admission
    metrics: Metrics
    precomputes: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(PRECOMPUTES))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """Name of the model, as clients say it; of one on this machine, its own, and not the way to it."""
        source = self.engine.source.name
        return self.config.model_name or (
            Path(source).resolve().name if os.path.exists(source) else source
        )

    def check_model(self, name: str | None) -> None:
        """Raise ``APIError`` if a client asks for a model that isn't here; ``None``: the one that is."""
        if name not in (None, self.name):
            message = f"the model {name!r} is not served here; ask for {self.name!r}"
            raise APIError(404, message, "model_not_found", param="model")

    def namespace(self, tenant: str | None) -> str:
        """Return the namespace of a tenant's chunks; ``None``, where there are no keys: the engine's."""
        return self.engine.namespace if tenant is None else f"{self.engine.namespace}/{tenant}"

    def reuse(self, reuse: Reuse, tenant: str | None) -> dict[str, Any]:
        """Return the engine's options of reuse."""
        own = {"mode": reuse.mode, "repair": reuse.config, "max_context": reuse.max_context}
        return own | {"namespace": self.namespace(tenant)}

    def stream(
        self, prompt: Prompt, body: ChatRequest | TextRequest, index: int, *, tenant: str | None
    ) -> AsyncTokenStream | Fitting:
        """Return the stream of the choice ``index`` of a request: as long as that asks for, else as long as there is room."""
        options = self.options(body, index, tenant=tenant)
        if body.limit is not None:
            return self.engine.astream(prompt, max_new_tokens=max(1, body.limit), **options)
        start = partial(self.engine.astream, prompt, **options)
        return Fitting(lambda most: start(max_new_tokens=most), self.config.max_tokens)

    def options(
        self, body: ChatRequest | TextRequest, index: int, *, tenant: str | None
    ) -> dict[str, Any]:
        """Return the engine's options for the choice ``index`` of a request, but for the length of its answer."""
        limit = body.limit
        most = self.config.max_tokens
        if limit is not None and limit > most:
            remedy = "ask for less, leave it out, or start the server with a larger --max-tokens"
            raise APIError(
                400,
                f"max_tokens is {limit}, and this server gives {most} at most; {remedy}",
                "invalid_value",
                param="max_tokens",
            )
        given = {
            name: value for name in _SAMPLING if (value := getattr(body, name, None)) is not None
        }
        if body.num_logprobs is not None:
            given["logprobs"] = body.num_logprobs
        if isinstance(body, ChatRequest):
            given |= {
                "chat_template_kwargs": body.variables,
                "continue_final_message": body.continue_final_message,
            }
        elif body.echo:
            given["prompt_logprobs"] = body.num_logprobs
        if body.min_tokens:
            given["min_new_tokens"] = body.min_tokens
        if body.min_p:
            given["min_p"] = float(body.min_p)
        if body.temperature is not None:
            given["temperature"] = float(body.temperature)
        if body.seed is not None:
            given["seed"] = (body.seed + index) % 2**64
        return given | self.reuse(body.kvrag, tenant)


class Fitting:
    """A stream of an answer that names no limit: of ``most`` tokens, or of those that the context window leaves, if they are fewer.

    ``start`` makes a stream for a number of tokens. How many the prompt leaves is known when it is tokenised, so the first stream says it.
    """

    def __init__(self, start: Callable[[int], AsyncTokenStream], most: int) -> None:
        self._start = start
        self._stream = start(most)
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for text in self._stream:
                yield text
        except ContextLengthError as error:
            if self._is_cancelled or not error.room:
                raise
            self._stream = self._start(error.room)
            async for text in self._stream:
                yield text

    @property
    def result(self) -> GenerationResult:
        """How the answer was made, when it has ended."""
        return self._stream.result

    def cancel(self) -> None:
        """Stop early."""
        self._is_cancelled = True
        self._stream.cancel()


def service_of(request: Request) -> Service:
    """Return what the application of a request serves."""
    return cast(Service, request.app.state.service)
