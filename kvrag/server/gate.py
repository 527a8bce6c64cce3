"""What every request passes: an id, the key, the size of its body. Plain ASGI, so that streams are not touched."""

from __future__ import annotations

import uuid
from collections.abc import MutableMapping
from typing import Any

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrag.server.config import ServerConfig
from kvrag.server.errors import APIError

_GUARDED = "/v1"


class Gate:
    """Refuses requests without a key that is known, and bodies that are too large; gives each request an id.

    Responses are counted by route and status. ``scope["state"]`` gets ``tenant`` (``None`` without keys) and ``request_id``, which the
    response has as ``x-request-id``.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, responses: Counter) -> None:
        self._app, self._config, self._responses = app, config, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        request_id = given if 0 < len(given) <= 128 and given.isprintable() else uuid.uuid4().hex
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # the path of one, not what was asked for: that has no end
                self._responses.labels(getattr(route, "path", "none"), message["status"]).inc()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode("latin-1"))]
            await send(message)

        try:
            state["tenant"] = self._tenant(scope["path"], headers)
            limited = self._limited(headers, receive)
        except APIError as error:
            await error.response(scope, receive, send_named)
            return
        await self._app(scope, limited, send_named)

    def _tenant(self, path: str, headers: dict[bytes, str]) -> str | None:
        """Return whose key it is, or raise ``APIError``."""
        if not self._config.api_keys or not path.startswith(_GUARDED):
            return None
        kind, _, key = headers.get(b"authorization", "").partition(" ")
        tenant = self._config.tenant_of(key.strip()) if kind.lower() == "bearer" else None
        if tenant is None:
            message = "the API key is missing or unknown; send 'Authorization: Bearer KEY'"
            raise APIError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return tenant

    def _limited(self, headers: dict[bytes, str], receive: Receive) -> Receive:
        """Return ``receive`` that raises ``APIError`` when a body outgrows the limit, whatever its length was said to be."""
        limit, length = self._config.max_body_bytes, headers.get(b"content-length", "0")
        error = APIError(413, f"the body has more than {limit} bytes; send less", "request_too_large")
        if length.isdigit() and int(length) > limit:
            raise error
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise error
            return message

        return counted
