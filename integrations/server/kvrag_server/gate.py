"""Gate that every request passes: checks id, key, size and type, and records the request's end.

It is plain ASGI, because responses are streamed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrag_server.config import ServerConfig
from kvrag_server.errors import APIError, as_api_error
from kvrag_server.record import RequestRecord, Tracer

_GUARDED = "/v1"


class Gate:
    """Refuses requests without a known key, and bodies that are too large; gives requests an id.

    ``scope["state"]`` gets ``tenant`` (``None`` without keys) and ``record``. At the end the record
    is passed to ``count``, logged and traced. Clients see only kvrag's own messages: an error
    inside is answered and logged here, and not raised further. ``open_paths`` are the paths that
    need no key; by default all without ``/v1``, behind whatever prefix.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        count: Callable[[RequestRecord], None],
        *,
        open_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._config = config
        self._count = count
        self._tracer = Tracer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = self._plain(scope)
        headers = dict(Headers(scope=scope).items())
        given = headers.get("x-request-id", "")
        request_id = given if 0 < len(given) <= 128 and given.isprintable() else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        record = state["record"] = RequestRecord(request_id, scope["method"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("latin-1")),
                ]
            await send(message)

        try:
            self._check_host(scope, headers)
            state["tenant"] = record.tenant = self._tenant(scope["path"], headers)
            await self._app(scope, self._limited(headers, receive), send_named)
        except (Exception, asyncio.CancelledError) as error:
            if record.status or isinstance(error, asyncio.CancelledError):
                # A response that has begun is closed by uvicorn; the server's end cancels others.
                record.ended = "client_too_slow" if _is_too_slow(error) else "broken_off"
            if record.ended != "client_too_slow":
                api_error = as_api_error(error)
                record.code = api_error.code
                if not record.status:
                    await api_error.response(scope, receive, send_named)
        finally:
            route = scope.get("route")  # a route's path: paths of requests are unlimited in number
            record.endpoint = getattr(route, "path", "none")
            self._count(record)
            record.log(self._tracer.write(record, headers))

    def _plain(self, scope: Scope) -> Scope:
        """Return a request in the form that the routes expect.

        Its path has no slash at the end, HEAD becomes GET, and a trusted POST has the type JSON.
        Clients such as ``curl -d`` send another content type, or no type. A page of another site
        could do that, too, without a preflight request. So requests of pages need the right type,
        or an allowed origin.
        """
        plain = {
            **scope,
            "path": scope["path"].rstrip("/") or "/",
            "raw_path": scope.get("raw_path", b"").rstrip(b"/") or b"/",
        }
        if scope["method"] == "HEAD":  # the server still leaves out the body
            plain["method"] = "GET"
        headers = dict(scope["headers"])
        is_form = headers.get(b"content-type", b"").startswith(b"multipart/")
        if scope["method"] == "POST" and not is_form and self._is_trusted(headers):
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            plain["headers"] = [*others, (b"content-type", b"application/json")]
        return plain

    def _is_trusted(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request comes from no page, the server's own page, or an allowed origin."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        own = origin.partition("://")[2] == headers.get(b"host", b"").decode("latin-1")
        return not origin or own or not {origin, "*"}.isdisjoint(self._config.cors_origins)

    def _check_host(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raise ``APIError`` if a server without keys is asked by a name that is not its own.

        A page whose name is pointed at this machine (DNS rebinding) is of its own origin here.
        """
        given = headers.get("host", "")
        if self._config.api_keys or not given:  # a browser always names the host
            return
        try:
            host = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            host = ""
        if not self._config.answers_to(host, (scope.get("server") or ("",))[0]):
            raise APIError(
                421,
                f"the header Host is {given[:200]!r}, which is not a name of this server without "
                "API keys; start it with --allowed-host NAME (ServerConfig.allowed_hosts), or set "
                "API keys",
                "host_not_allowed",
            )

    def _tenant(self, path: str, headers: dict[str, str]) -> str | None:
        """Return the tenant of the request's key; raise ``APIError`` without a known key."""
        is_open = path in self._open_paths if self._open_paths else _GUARDED not in path
        if is_open or not self._config.api_keys:
            return None
        tenant = self._config.tenant_of(
            headers.get("authorization", ""), headers.get("x-api-key", "")
        )
        if tenant is None:
            raise APIError(
                401,
                "the API key is missing or unknown; "
                "send 'Authorization: Bearer KEY', or 'x-api-key: KEY'",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return tenant

    def _limited(self, headers: dict[str, str], receive: Receive) -> Receive:
        """Return a ``receive`` that raises ``APIError`` when a body exceeds the limit.

        The declared length is checked at once, but not trusted.
        """
        limit = self._config.max_body_bytes
        length = headers.get("content-length", "0")
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
    """Return whether a client that reads too slowly caused an error, directly or as its cause."""
    inner = getattr(error, "exceptions", [error.__cause__])  # of a group
    return isinstance(error, SendTimeoutError) or any(
        [_is_too_slow(each) for each in inner if each]
    )
