"""Pass requests to vLLM's server and its answers back, part by part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import httpx
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect

from kvrag import KVRagError, errors
from kvrag_server.client import message_of
from kvrag_server.completions import unless_gone
from kvrag_server.errors import APIError
from kvrag_server.record import RequestRecord

_OF_CONNECTION = (b"connection", b"keep-alive", b"te", b"transfer-encoding", b"upgrade", b"expect")
# With an origin, vLLM would add CORS headers of its own; the front's key is not vLLM's.
_DROPPED = (
    *_OF_CONNECTION,
    b"host",
    b"content-length",
    b"authorization",
    b"x-api-key",
    b"accept-encoding",
    b"origin",
    b"x-request-id",
)
_RETURNED = (*_OF_CONNECTION, b"date", b"server", b"x-request-id")
_ANY_TWO_IDS = [0, 1]
EVENTS = "text/event-stream"
_DONE = b"data: [DONE]\n\n"
SOON_S = 60.0
"""Seconds in which vLLM answers questions that need no computation, even under load."""
RECORD_S = 2.0
"""Seconds that the last event of a stream waits for its record."""


class Upstream:
    """vLLM's server at a URL, or at a Unix socket.

    ``fault`` returns why the server has ended, if it has.
    """

    def __init__(
        self, *, url: str = "http://vllm", uds: str | None = None, fault: Callable[[], str | None]
    ) -> None:
        self._fault = fault
        # vLLM closes idle connections after 5 s; the front must be first.
        transport = httpx.AsyncHTTPTransport(
            uds=uds, limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        )
        self.client = httpx.AsyncClient(transport=transport, base_url=url, timeout=None)

    async def pass_on(self, request: Request, body: bytes, report: str | None = None) -> Response:
        """Send a request with this body, and return the answer.

        ``report``: the id of a completion, by which vLLM's worker knows its record. A whole answer,
        or the event of a stream that has the usage, gets it as the field ``kvrag``.
        """
        answer = await self._send(request, body)
        is_events = answer.headers.get("content-type", "").startswith(EVENTS)
        response: Response
        if report and answer.status_code == 200 and not is_events:
            with self._reached():
                content = await self._with_record(await answer.aread(), report)
            answer.headers["content-length"] = str(len(content))
            response = Response(content)
        else:
            parts = answer.aiter_raw()
            if report and is_events:
                parts = self._recorded(parts, report)
            response = StreamingResponse(
                self._parts(answer, parts, request.state.record, is_events=is_events),
                answer.status_code,
            )
        response.raw_headers = [
            each for each in answer.headers.raw if each[0].lower() not in _RETURNED
        ]
        return response

    async def ask(
        self, timeout_s: float | None = SOON_S, model: str | None = None, **asked: Any
    ) -> dict[str, Any]:
        """Ask vLLM's worker, by a completion of a token, perhaps by a model of vLLM's.

        Raises the worker's error, and ``APIError`` if it does not know the question or vLLM refuses
        it.
        """
        body = {
            "model": model,
            "prompt": _ANY_TWO_IDS,
            "max_tokens": 1,
            "kv_transfer_params": {"kvrag": asked},
        }
        with self._reached():
            answer = await self.client.post("/v1/completions", json=body, timeout=timeout_s)
        status = answer.status_code
        if status != 200:
            raise APIError(503 if status >= 500 else status, message_of(answer), "engine_gone")
        told = (answer.json().get("kv_transfer_params") or {}).get("kvrag")
        if not isinstance(told, dict):
            raise APIError(
                501,
                f"vLLM's worker does not answer the question {', '.join(asked)!r}; let it load "
                "KVRagConnector of this kvrag, in its mode 'blend'",
                "not_supported",
            )
        if "error" in told:
            kind: type[KVRagError] = getattr(errors, str(told.get("code")), KVRagError)
            raise kind(told["error"])
        return told

    async def is_healthy(self) -> bool:
        """Whether vLLM accepts requests."""
        try:
            return (await self.client.get("/health", timeout=SOON_S)).status_code == 200
        except httpx.TransportError:
            return False

    async def metrics(self) -> bytes:
        """Return vLLM's metrics; none while it does not answer."""
        try:
            return (await self.client.get("/metrics", timeout=SOON_S)).content
        except httpx.TransportError:
            return b""

    async def _send(self, request: Request, body: bytes) -> httpx.Response:
        """Send a request, and wait for the answer's first part while the client waits."""
        record: RequestRecord = request.state.record
        headers = [
            *[each for each in request.headers.raw if each[0] not in _DROPPED],
            (b"accept-encoding", b"identity"),
            (b"x-request-id", record.request_id.encode("latin-1")),
        ]
        target = request.scope["raw_path"] + b"?" + request.scope["query_string"]
        sent = self.client.build_request(
            request.method,
            self.client.base_url.copy_with(raw_path=target),
            headers=headers,
            content=body,
        )
        try:
            with self._reached():
                answer: httpx.Response = await unless_gone(
                    request, asyncio.create_task(self.client.send(sent, stream=True)), None
                )
        except ClientDisconnect:
            record.ended = "client_left"
            raise
        return answer

    async def _parts(
        self,
        answer: httpx.Response,
        parts: AsyncIterator[bytes],
        record: RequestRecord,
        *,
        is_events: bool,
    ) -> AsyncIterator[bytes]:
        """Yield an answer's parts as they come; leaving the generator ends vLLM's work."""
        record.ended = "client_left"  # unless the last part is reached
        try:
            with self._reached():
                async for part in parts:
                    if part.endswith(_DONE):
                        record.ended = "answered"  # clients need not wait for the end behind it
                    yield part
        except APIError as fault:
            if not is_events:
                raise
            record.status = fault.status
            record.code = fault.code
            record.ended = "broken_off"
            yield f"data: {json.dumps(fault.body)}\n\n".encode() + _DONE
        else:
            record.ended = "answered"
        finally:
            await answer.aclose()

    async def _recorded(self, parts: AsyncIterator[bytes], report: str) -> AsyncIterator[bytes]:
        """Yield a stream's events; the event with the usage gets the record."""
        left = b""
        async for part in parts:
            *events, left = (left + part).split(b"\n\n")
            for event in events:
                if b'"choices":[]' in event.replace(b" ", b""):
                    event = b"data: " + await self._with_record(
                        event.removeprefix(b"data: "), report
                    )
                yield event + b"\n\n"
        yield left

    async def _with_record(self, content: bytes, report: str) -> bytes:
        """Return JSON with its record of reuse in the field ``kvrag``, whose count is the usage's.

        vLLM gives none with an answer that a stop string ends. Without one it stays as it is.
        """
        data = json.loads(content)
        record = (data.get("kv_transfer_params") or {}).get("kvrag")
        if not record:
            with suppress(APIError, KVRagError):
                record = (await self.ask(RECORD_S, report=report)).get("report")
        if not record:
            return content
        details = (data.get("usage") or {}).get("prompt_tokens_details")
        if details and "cached_tokens" in record:  # vLLM counts repaired rows, too
            details["cached_tokens"] = record["cached_tokens"]
        return json.dumps({**data, "kvrag": [record]}).encode()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raise ``APIError`` if vLLM does not answer."""
        try:
            yield
        except httpx.TransportError as error:
            fault = self._fault() or f"vLLM does not answer ({type(error).__name__}); retry later"
            raise APIError(503, fault, "engine_gone", headers={"Retry-After": "1"}) from None


def upstream_of(request: Request) -> Upstream:
    """Return vLLM's server of a request's application."""
    return cast(Upstream, request.app.state.upstream)
