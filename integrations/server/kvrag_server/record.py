"""Record of a request: a line in the log, and spans. It holds no text of client or model."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from kvrag import GenerationResult
from kvrag_server.fields import JsonObject

logger = logging.getLogger("kvrag_server")

Ending = Literal["answered", "client_left", "client_too_slow", "timeout", "broken_off"]
SUMMED = ("prompt_tokens", "cached_tokens", "repaired_tokens", "computed_tokens")
# Endpoints that are polled every few seconds, or probed by scanners.
_POLLED = ("/health", "/ready", "/metrics", "none")
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


@dataclass(slots=True)
class RequestRecord:
    """Record of a request. Times are seconds on the clock of ``time.perf_counter``.

    ``ended`` says how its answer ended, regardless of the status. ``queue_s`` is the time in the
    queue and ``ttft_s`` the time to the first text; ``code`` is an error's code.
    """

    request_id: str
    method: str = ""
    endpoint: str = "none"
    tenant: str | None = None
    model: str | None = None
    is_stream: bool = False
    status: int = 0
    code: str | None = None
    ended: Ending = "answered"
    start_s: float = field(default_factory=time.perf_counter)
    queue_s: float | None = None
    ttft_s: float | None = None
    results: list[GenerationResult] = field(default_factory=list)

    def fields(self) -> JsonObject:
        """Return the fields of the log line, without unknown values."""
        results = self.results
        stages = Counter[str]()
        for result in results:
            stages.update(result.timings_ms)
        made: JsonObject = {}
        if results:
            made = {
                **{name: sum(getattr(result, name) for result in results) for name in SUMMED},
                "completion_tokens": sum(len(result.token_ids) for result in results),
                "exactness": _joined(result.exactness for result in results),
                "finish_reason": _joined(result.finish_reason for result in results),
                "fallback_reason": _joined(result.fallback_reason for result in results) or None,
                "stages_ms": {name: round(ms, 3) for name, ms in stages.items()},
            }
        known = {
            name: getattr(self, name)
            for name in (
                "request_id",
                "tenant",
                "method",
                "endpoint",
                "status",
                "code",
                "ended",
                "model",
            )
        } | {"stream": self.is_stream or None}
        times = {
            "queue_ms": self.queue_s,
            "ttft_ms": self.ttft_s,
            "total_ms": time.perf_counter() - self.start_s,
        }
        rounded = {
            name: round(seconds * 1e3, 3) for name, seconds in times.items() if seconds is not None
        }
        return {
            name: value for name, value in {**known, **rounded, **made}.items() if value is not None
        }

    def log(self, trace_id: str | None = None) -> None:
        """Write the log line of the request.

        It is a warning if the server failed, and a debug line if the request was a mere poll.
        """
        level = logging.WARNING if self.status >= 500 else logging.INFO
        if self.endpoint in _POLLED and self.status < 500:
            level = logging.DEBUG
        if logger.isEnabledFor(level):
            fields = self.fields() | ({"trace_id": trace_id} if trace_id else {})
            said = " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
            logger.log(level, "request %s", said, extra={"kvrag": fields})


def _joined(values: Any) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


class JsonLines(logging.Formatter):
    """Writes log records as lines of JSON.

    A line has time, level, logger, and the fields of a request or the message of another record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a log record."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = getattr(record, "kvrag", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return json.dumps(
            {
                "time": when,
                "level": record.levelname.lower(),
                "logger": record.name,
                **fields,
            }
        )


class Tracer:
    """Writes requests as OpenTelemetry spans when they have ended.

    Does nothing if OpenTelemetry's API is not installed or spans are not recorded.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            self._trace = None
        else:
            self._trace = trace
            self._extract = propagate.extract
            self._tracer = trace.get_tracer("kvrag")

    def write(self, record: RequestRecord, headers: Mapping[str, str]) -> str | None:
        """Write the span of a request, which continues the client's trace, and a span per stage.

        Returns the id of the trace if the span is recorded.
        """
        if self._trace is None or record.endpoint in _POLLED:
            return None
        api = self._trace
        offset = time.time_ns() - time.perf_counter_ns()
        end = time.time_ns()

        def at(seconds: float) -> int:
            return offset + int(seconds * 1e9)

        operation = _OPERATIONS.get(record.endpoint)
        name = f"{record.method} {record.endpoint}"
        if operation and record.model:
            name = f"{operation} {record.model}"
        span = self._tracer.start_span(
            name,
            context=self._extract(dict(headers)),
            kind=api.SpanKind.SERVER,
            start_time=at(record.start_s),
        )
        if not span.is_recording():
            return None
        span.set_attributes(_attributes(record, operation))
        if record.status >= 500 or record.ended != "answered":
            span.set_status(api.StatusCode.ERROR, record.code or record.ended)
        stages = [
            (index, *stage)
            for index, result in enumerate(record.results)
            for stage in result.stages
        ]
        if record.queue_s is not None:
            stages.insert(0, (0, "queue", record.start_s, record.start_s + record.queue_s))
        inside = api.set_span_in_context(span)
        for index, name, start_s, end_s in stages:
            child = self._tracer.start_span(
                f"kvrag.{name}",
                context=inside,
                start_time=at(start_s),
                attributes={"kvrag.choice": index},
            )
            child.end(end_time=at(end_s))
        span.end(end_time=end)
        return format(span.get_span_context().trace_id, "032x")


def _attributes(record: RequestRecord, operation: str | None) -> JsonObject:
    """Return the attributes of a request's span.

    They follow OpenTelemetry's conventions for HTTP and generative AI, and add kvrag's own.
    """
    found: JsonObject = {
        "http.request.method": record.method,
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "error.type": record.code if record.status >= 400 else None,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": operation and "kvrag",
        "gen_ai.request.model": operation and record.model,
        "kvrag.request_id": record.request_id,
        "kvrag.tenant": record.tenant,
        "kvrag.ended": record.ended,
    }
    if record.results:
        fields = record.fields()
        found |= {
            f"kvrag.{name}": fields.get(name)
            for name in (*SUMMED[1:], "exactness", "fallback_reason")
        }
        found |= {
            "gen_ai.response.model": record.model,
            "gen_ai.response.finish_reasons": [result.finish_reason for result in record.results],
            "gen_ai.usage.input_tokens": fields["prompt_tokens"],
            "gen_ai.usage.output_tokens": fields["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": fields["cached_tokens"],
            "gen_ai.server.time_to_first_token": record.ttft_s,
        }
    return {name: value for name, value in found.items() if value is not None}
