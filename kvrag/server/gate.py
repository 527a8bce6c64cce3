"""Every request passes here: its id, key, size and type are checked, and its end is written down. Plain ASGI, for streams' sake."""

from __future__ import annotations

import uuid
from collections.abc import Callable, MutableMapping
from typing import Any

from sse_starlette.sse import SendTimeoutError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrag.server.config import ServerConfig
from kvrag.server.errors import APIError, as_api_error
from kvrag.server.record import Record, Tracer

_GUARDED = "/v1"


class Gate:
    """Refuses requests without a key that is known, and bodies that are too large; gives each request an id.

    ``scope["state"]`` gets ``tenant`` (``None`` without keys) and ``record``, which is passed to ``count``, logged and traced at the end.
    Nothing but kvrag's own words leaves: what a request fails with inside is answered and logged here, and raised no further.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, count: Callable[[Record], None]) -> None:
        self._app, self._config, self._count, self._tracer = app, config, count, Tracer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = self._plain(scope)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        request_id = given if 0 < len(given) <= 128 and given.isprintable() else uuid.uuid4().hex
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        record = state["record"] = Record(request_id, scope["method"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("latin-1")),
                ]
            await send(message)

        try:
            state["tenant"] = record.tenant = self._tenant(scope["path"], headers)
            await self._app(scope, self._limited(headers, receive), send_named)
        except Exception as error:
            if record.status:  # it has begun; uvicorn closes the connection of what has no end
                record.ended = "client_too_slow" if _is_too_slow(error) else "broken_off"
            if record.ended != "client_too_slow":
                told = as_api_error(error)
                record.code = told.code
                if not record.status:
                    await told.response(scope, receive, send_named)
        finally:
            route = scope.get("route")  # the path of one, not what was asked for: that has no end
            record.endpoint = getattr(route, "path", "none")
            self._count(record)
            record.log(
                self._tracer.write(
                    record, {name.decode("latin-1"): headers[name] for name in headers}
                )
            )

    def _plain(self, scope: Scope) -> Scope:
        """Return a request as the routes know it: no slash at the end of its path, GET for HEAD, and JSON where no type is named.

        Clients such as ``curl -d`` name another type, or none. A page of another site could do that, too, without asking the browser's
        leave for it, so requests of pages need the right type, or an origin that is allowed.
        """
        path = scope["path"]
        plain = {
            **scope,
            "path": path.rstrip("/") or "/",
            "raw_path": scope.get("raw_path", b"").rstrip(b"/") or b"/",
        }
        if scope["method"] == "HEAD":  # servers leave the body out, as they know what was asked
            plain["method"] = "GET"
        headers = dict(scope["headers"])
        if scope["method"] == "POST" and self._is_trusted(headers):
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            plain["headers"] = [*others, (b"content-type", b"application/json")]
        return plain

    def _is_trusted(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request comes from no page, from the server's own, or from one that may call it."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        own = origin.partition("://")[2] == headers.get(b"host", b"").decode("latin-1")
        return (
            not origin
            or own
            or origin in self._config.cors_origins
            or "*" in self._config.cors_origins
        )

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
        error = APIError(
            413, f"the body has more than {limit} bytes; send less", "request_too_large"
        )
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


def _is_too_slow(error: BaseException) -> bool:
    """Return whether an error comes of a client that read nothing for too long; others are wrapped around that one."""
    inner = (
        error.exceptions
        if isinstance(error, BaseExceptionGroup)
        else [error.__cause__]
        if error.__cause__
        else ()
    )
    return isinstance(error, SendTimeoutError) or any([_is_too_slow(each) for each in inner])
