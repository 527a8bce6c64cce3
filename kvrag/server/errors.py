"""Errors in OpenAI's shape, and which status each of kvrag's errors has."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Mapping
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvrag.errors import (
    ConfigError,
    ContextLengthError,
    InputError,
    KVRagError,
    MissingDependencyError,
    OutOfMemoryError,
)

logger = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[BaseException], int, str], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (InputError, 400, "invalid_value"),
    (ConfigError, 400, "invalid_value"),
    (OutOfMemoryError, 413, "request_too_large"),
    (MissingDependencyError, 501, "not_installed"),
    (asyncio.TimeoutError, 504, "timeout"),
    (ClientDisconnect, 499, "client_left"),
)
_WORDS = {"timeout": "the answer took too long; ask for fewer tokens", "client_left": "the client left"}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}


class APIError(Exception):
    """A request that is refused, with the status, code and parameter that the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """What the client reads."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The whole response; a client that asked again at once would fail again, but for a lack of room."""
        never = {"x-should-retry": "false"} if self.status >= 500 and self.status != 503 else {}
        return JSONResponse(self.body, self.status, never | self.headers)


def as_api_error(error: BaseException) -> APIError:
    """Return what a client is told of an error: kvrag's own sentences, and nothing of any other's inside."""
    if isinstance(error, APIError):
        return error
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return APIError(status, str(error) or _WORDS.get(code, "the request failed"), code)
    own = str(error) if isinstance(error, KVRagError) else None
    # Messages of others may quote the prompt, so the log has their type and the way there.
    logger.error(
        "a request failed: %s\n%s", own or type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
    )
    return APIError(500, own or "the server failed on this request; its log has the error", "server_error")


def _answer(request: Request, error: APIError) -> JSONResponse:
    request.state.record.code = error.code
    return error.response


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, as_api_error(error))


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Answer 400 with the first fault of a body: OpenAI's clients know no 422."""
    first = cast(RequestValidationError, error).errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body") or None
    if first["type"] == "extra_forbidden":
        unknown = APIError(400, f"unknown parameter {place!r}; leave it out", "unknown_parameter", param=place)
        return _answer(request, unknown)
    return _answer(request, APIError(400, f"{place or 'the body'}: {first['msg']}", "invalid_value", param=place))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    fault = cast(HTTPException, error)
    if isinstance(fault.__cause__, APIError):  # raised while FastAPI read the body
        return _answer(request, fault.__cause__)
    code = {404: "not_found", 405: "method_not_allowed"}.get(fault.status_code, "invalid_request")
    return _answer(request, APIError(fault.status_code, f"{fault.detail}; see /docs for what there is", code))


def handle_errors(app: FastAPI) -> None:
    """Let an application answer all errors in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    for kind in (APIError, KVRagError, asyncio.TimeoutError):
        app.add_exception_handler(kind, _on_error)
