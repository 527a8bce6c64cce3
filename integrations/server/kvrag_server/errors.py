"""Errors in OpenAI's shape, and the HTTP status of every kvrag error."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvrag import (
    ConfigError,
    ContextLengthError,
    InputError,
    KVRagError,
    MissingDependencyError,
    OutOfMemoryError,
)
from kvrag.config import first_fault, respelt

logger = logging.getLogger(__name__)

_NAMES = {
    "SamplingConfig.": "",
    "SamplingConfig": "the request",
    "RepairConfig": "kvrag.repair",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""The API's names of options."""
_LONGEST = 80  # characters of a value that a message repeats
_OF_FIELDS = ("unknown_parameter", "unsupported_parameter", "invalid_value")
"""Types of the faults that :mod:`kvrag_server.fields` raises; clients get them as error codes."""

_STATUS: tuple[tuple[Any, int, str], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    ((InputError, ConfigError), 400, "invalid_value"),
    (OutOfMemoryError, 413, "request_too_large"),
    (MissingDependencyError, 501, "not_installed"),
    (asyncio.TimeoutError, 504, "timeout"),
    (ClientDisconnect, 499, "client_left"),
    (asyncio.CancelledError, 503, "draining"),
)
_WORDS = {
    "timeout": "the answer took too long; ask for fewer tokens",
    "client_left": "the client left",
    "draining": "the server shut down before the answer; retry later, or use another replica",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class APIError(Exception):
    """Refusal of a request, with the status, code and parameter for the client."""

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
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Body of the response, as JSON values."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def response(self) -> JSONResponse:
        """Response with body, status and headers.

        Server errors except 503 (overload) ask clients not to retry: a retry would fail again.
        """
        never = {"x-should-retry": "false"} if self.status >= 500 and self.status != 503 else {}
        return JSONResponse(self.body, self.status, never | self.headers)


def as_api_error(error: BaseException) -> APIError:
    """Return the error that a client sees.

    Messages of kvrag's own errors are passed on; other errors reveal nothing.
    """
    if isinstance(error, APIError):
        return error
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return APIError(status, _WORDS.get(code) or respelt(str(error), _NAMES), code)
    own = str(error) if isinstance(error, KVRagError) else None
    # Messages of other libraries may quote the prompt, so the log has only type and traceback.
    logger.error(
        "a request failed: %s\n%s",
        own or type(error).__name__,
        "".join(traceback.format_tb(error.__traceback__)),
    )
    return APIError(
        500, own or "the server failed on this request; its log has the error", "server_error"
    )


async def _on_invalid(_: Request, error: Any) -> NoReturn:
    """Raise the first fault of a body, with 400: OpenAI's clients know no 422."""
    raise refusal(error.errors(), error.body)


async def _on_http(_: Request, error: Any) -> NoReturn:
    if isinstance(error.__cause__, APIError):  # raised while FastAPI read the body
        raise error.__cause__
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    sentence = f"{error.detail}; /docs lists the endpoints"
    if error.status_code == 404:
        sentence = (
            f"there is nothing at this path ({error.detail}); the API is under /v1, and /docs "
            "lists it"
        )
    elif error.status_code == 400:  # of FastAPI, which could not decode the body
        sentence = "the body is no text in UTF-8; send one JSON object"
    raise APIError(error.status_code, sentence, code)


def refusal(errors: Iterable[Mapping[str, Any]], body: Any) -> APIError:
    """Return the error for the first of pydantic's faults of a body."""
    # Each place begins with the word "body".
    inner = [{**error, "loc": error["loc"][1:]} for error in errors]
    place, error, demand = first_fault(inner, body)
    kind = error["type"]
    param = ".".join(place) or None
    if kind == "json_invalid":
        return APIError(
            400,
            f"the body is no JSON ({error['ctx']['error']} at character {error['loc'][-1]}); send "
            "one JSON object",
            "invalid_json",
        )
    if kind in _OF_FIELDS:
        name = ".".join([*place, error["ctx"]["field"]])
        return APIError(
            400, f"{param}: {error['msg']}" if param else error["msg"], kind, param=name
        )
    if kind == "missing" and param:
        return APIError(400, f"{param} is missing; send it", "missing_parameter", param=param)
    if kind == "value_error":
        sentence = f"{param or 'the body'}: {demand}"
    elif param:
        sentence = f"{param} is {_shown(error['input'])}; {demand}".replace("dictionary", "object")
    elif isinstance(body, bytes):
        sentence = (
            "the body is no JSON object; its content type is not JSON; send Content-Type: "
            "application/json"
        )
    else:
        sentence = "the body is no JSON object; send one JSON object"
    return APIError(400, sentence, "invalid_value", param=param)


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}..."


def handle_errors(app: FastAPI) -> None:
    """Make an application raise its framework's errors as those that the gate answers."""
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
