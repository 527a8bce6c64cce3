"""Pass requests to vLLM's server and its answers back, part by part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
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

_OF_CONNECTION = ("connection", "keep-alive", "te", "transfer-encoding", "upgrade", "expect")
# With an origin, vLLM would add CORS headers of its own; the front's key is not vLLM's.
_DROPPED = (
    *_OF_CONNECTION,
    "host",
    "content-length",
    "authorization",
    "x-api-key",
    "accept-encoding",
    "origin",
    "x-request-id",
)
_RETURNED = (*_OF_CONNECTION, "date", "server", "x-request-id")
_ANY_TWO_IDS = [0, 1]
EVENTS = "text/event-stream"
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
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        transport = httpx.AsyncHTTPTransport(uds=uds, limits=limits)
        self.client = httpx.AsyncClient(transport=transport, base_url=url, timeout=None)

    async def pass_on(self, request: Request, body: bytes, report: str | None = None) -> Response:
        """Send a request with this body, and return the answer.

        ``report``: the id of a completion, by which vLLM's worker knows its record. A whole answer,
        or the event of a stream that has the usage, gets it as the field ``kvrag``.
        """
        answer = await self._send(request, body)
        is_stream = answer.headers.get("content-type", "").startswith(EVENTS)
        headers = [(name, value) for name, value in answer.headers.raw if not _is(name, _RETURNED)]
        response: Response
        if report is not None and answer.status_code == 200 and not is_stream:
            response = Response(await self._with_record(await answer.aread(), report))
            headers = [each for each in headers if not _is(each[0], ("content-length",))]
            headers += [each for each in response.raw_headers if each[0] == b"content-length"]
        else:
            parts = answer.aiter_raw()
            if report is not None and is_stream:
                parts = self._recorded(parts, report)
            response = StreamingResponse(
                self._parts(answer, parts, is_events=is_stream), answer.status_code
            )
        response.raw_headers = headers
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
        try:
            answer = await self.client.post("/v1/completions", json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise self._gone(error) from None
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
            raise error_of(told)
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
        headers = [(name, value) for name, value in request.headers.raw if not _is(name, _DROPPED)]
        headers += [
            (b"accept-encoding", b"identity"),
            (b"x-request-id", record.request_id.encode("latin-1")),
        ]
        target = request.scope["raw_path"]
        if request.scope["query_string"]:
            target += b"?" + request.scope["query_string"]
        url = self.client.base_url.copy_with(raw_path=target)
        sent = self.client.build_request(request.method, url, headers=headers, content=body)
        try:
            answer: httpx.Response = await unless_gone(
                request, asyncio.create_task(self.client.send(sent, stream=True)), None
            )
        except httpx.TransportError as error:
            raise self._gone(error) from None
        except (ClientDisconnect, asyncio.CancelledError):
            record.ended = "client_left"
            raise
        return answer

    async def _parts(
        self, answer: httpx.Response, parts: AsyncIterator[bytes], *, is_events: bool
    ) -> AsyncIterator[bytes]:
        """Yield an answer's parts as they come; leaving the generator ends vLLM's work."""
        try:
            async for part in parts:
                yield part
        except httpx.TransportError as error:
            if not is_events:
                raise
            body = json.dumps(self._gone(error).body)
            yield f"data: {body}\n\ndata: [DONE]\n\n".encode()
        finally:
            await answer.aclose()

    async def _recorded(self, parts: AsyncIterator[bytes], report: str) -> AsyncIterator[bytes]:
        """Yield a stream's events; the event with the usage gets the record."""
        left = b""
        async for part in parts:
            *events, left = (left + part).split(b"\n\n")
            for event in events:
                data = _usage_of(event)
                if data is not None:
                    record = await self._report(report)
                    if record is not None:
                        event = b"data: " + json.dumps({**data, "kvrag": [record]}).encode()
                yield event + b"\n\n"
        yield left

    async def _with_record(self, content: bytes, report: str) -> bytes:
        """Return a JSON answer with its record of reuse in the field ``kvrag``.

        vLLM gives none with an answer that a stop string ends. Without one it stays as it is.
        """
        data = json.loads(content)
        record = (data.get("kv_transfer_params") or {}).get("kvrag") or await self._report(report)
        return content if record is None else json.dumps({**data, "kvrag": [record]}).encode()

    async def _report(self, report: str) -> Any:
        try:
            return (await self.ask(RECORD_S, report=report)).get("report")
        except (APIError, KVRagError):
            return None

    def _gone(self, error: Exception) -> APIError:
        """Return the error of a request that vLLM does not answer."""
        fault = self._fault() or f"vLLM does not answer ({type(error).__name__}); retry later"
        return APIError(503, fault, "engine_gone", headers={"Retry-After": "1"})


def error_of(told: Mapping[str, Any]) -> KVRagError:
    """Return the error that the worker reports: its message, and the name of its class."""
    kind = getattr(errors, str(told.get("code")), None)
    if not (isinstance(kind, type) and issubclass(kind, KVRagError)):
        kind = KVRagError
    return kind(str(told["error"]))


def _usage_of(event: bytes) -> dict[str, Any] | None:
    """Return the data of an event that has the usage and no choices; ``None`` for others."""
    if b'"choices":[]' not in event.replace(b" ", b"") or not event.startswith(b"data: "):
        return None
    data: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return data if data.get("usage") else None


def _is(name: bytes, names: tuple[str, ...]) -> bool:
    return name.decode("latin-1").lower() in names


def upstream_of(request: Request) -> Upstream:
    """Return vLLM's server of a request's application."""
    return cast(Upstream, request.app.state.upstream)
