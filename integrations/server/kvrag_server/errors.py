"""Errors in OpenAI's shape, and the HTTP status of every kvrag error."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

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
from kvrag.config import respelt

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
_WANTED = re.compile(r"^\w+ should (be|have) | after validation(?=,)")

Fault = Mapping[str, Any]
"""An error as pydantic describes it: its type, location, message and input."""

_STATUS: tuple[tuple[type[BaseException], int, str], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (InputError, 400, "invalid_value"),
    (ConfigError, 400, "invalid_value"),
    (OutOfMemoryError, 413, "request_too_large"),
    (MissingDependencyError, 501, "not_installed"),
    (asyncio.TimeoutError, 504, "timeout"),
    (ClientDisconnect, 499, "client_left"),
)
_WORDS = {
    "timeout": "the answer took too long; ask for fewer tokens",
    "client_left": "the client left",
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
            return APIError(
                status, respelt(str(error), _NAMES) or _WORDS.get(code, "the request failed"), code
            )
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


def _answer(request: Request, error: APIError) -> JSONResponse:
    request.state.record.code = error.code
    return error.response


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, as_api_error(error))


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Answer 400 with the first fault of a body: OpenAI's clients know no 422."""
    invalid = cast(RequestValidationError, error)
    return _answer(request, first_fault(invalid.errors(), invalid.body))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    fault = cast(HTTPException, error)
    if isinstance(fault.__cause__, APIError):  # raised while FastAPI read the body
        return _answer(request, fault.__cause__)
    code = {404: "not_found", 405: "method_not_allowed"}.get(fault.status_code, "invalid_request")
    sentence = f"{fault.detail}; /docs lists the endpoints"
    if fault.status_code == 404:
        sentence = (
            f"there is nothing at this path ({fault.detail}); the API is under /v1, and /docs "
            "lists it"
        )
    elif fault.status_code == 400:  # of FastAPI, which could not decode the body
        sentence = "the body is no text in UTF-8; send one JSON object"
    return _answer(request, APIError(fault.status_code, sentence, code))


def first_fault(errors: Sequence[Fault], body: Any) -> APIError:
    """Describe the first fault of a body.

    Where a field accepts values of several types, pydantic reports an error for every type. The
    error deepest in the value is the relevant error.
    """
    faults = [(_place(error["loc"][1:], body), error) for error in errors]
    first = _field(faults[0])
    own = [(place, error) for place, error in faults if _field((place, error)) == first]
    depth = max(len(place) for place, _ in own)
    deepest = [(place, error) for place, error in own if len(place) == depth]
    meant = [
        (place, error) for place, error in deepest if not error["type"].endswith("_type")
    ] or deepest
    return _described(*meant[0], [str(error["msg"]) for _, error in meant], body)


def _field(fault: tuple[Sequence[str], Fault]) -> str:
    return next(iter(fault[0]), "")


def _place(loc: Iterable[Any], body: Any) -> list[str]:
    """Return the path to a fault in a body, without pydantic's names for the types of a union."""
    place = []
    value = body
    parts = list(loc)
    for at, part in enumerate(parts):
        is_last = at == len(parts) - 1
        if isinstance(value, Mapping) and (
            part in value or (is_last and isinstance(part, str) and not _is_type(part))
        ):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        place.append(str(part))
    return place


def _is_type(name: str) -> bool:
    return re.fullmatch(r"[a-z_]+", name) is None or name in (
        "str",
        "int",
        "dict",
        "list",
        "bool",
        "float",
    )


def _described(place: Sequence[str], error: Fault, messages: Sequence[str], body: Any) -> APIError:
    """Return the error for a fault at a place in the body.

    ``messages`` are pydantic's, a message per type that the value may have there.
    """
    kind = error["type"]
    param = ".".join(place) or None
    if kind == "json_invalid":
        at = error["loc"][-1]
        sentence = (
            f"the body is no JSON ({error['ctx']['error']} at character {at}); send one JSON object"
        )
        return APIError(400, sentence, "invalid_json")
    if kind in _OF_FIELDS:
        name = ".".join([*place, error["ctx"]["field"]])
        return APIError(
            400, f"{param}: {error['msg']}" if param else error["msg"], kind, param=name
        )
    if kind == "extra_forbidden":
        return APIError(
            400, f"unknown parameter {param!r}; leave it out", "unknown_parameter", param=param
        )
    if kind == "value_error":
        sentence = str(error["msg"]).removeprefix("Value error, ")
        return APIError(400, f"{param or 'the body'}: {sentence}", "invalid_value", param=param)
    if param is None:
        return APIError(400, f"the body is no JSON object; {_sent(body)}", "invalid_value")
    if kind == "missing":
        return APIError(400, f"{param} is missing; send it", "missing_parameter", param=param)
    wanted = " or ".join(dict.fromkeys(_WANTED.sub("", each) for each in messages))
    verb = "have" if " should have " in messages[0] else "be"
    sentence = f"{param} is {_shown(error['input'])}; it should {verb} {wanted}".replace(
        "dictionary", "object"
    )
    return APIError(400, sentence, "invalid_value", param=param)


def _sent(body: Any) -> str:
    if isinstance(body, bytes):
        return "its content type is not JSON; send Content-Type: application/json"
    return "send one JSON object"


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
    """Make an application answer all errors in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    for kind in (APIError, KVRagError, asyncio.TimeoutError):
        app.add_exception_handler(kind, _on_error)
