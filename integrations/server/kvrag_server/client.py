"""Client of the KV that a server keeps: ``kvrag serve``, or its front before vLLM.

Every request can be sent again, because a server skips chunks that it has, and documents that are
gone.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, astuple, dataclass, field, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter

from kvrag import (
    ConfigError,
    Explanation,
    InputError,
    KVRagError,
    MaxContext,
    Mode,
    PrecomputeReport,
    RepairConfig,
    StoreError,
)
from kvrag.adapters import IndexRequest, Progress, RemoteHost, tell_short
from kvrag.config import parameters_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 10.0  # a server that takes longer to accept a connection can't be reached
FIRST_WAIT_S = 0.5  # before a request is sent again; doubled each time
LONGEST_WAIT_S = 60.0  # whatever a server asks for
PART_DOCUMENTS = 32  # documents per request: seconds of work, so that progress shows
PART_IDS = 1000
PART_CHARS = 2**17  # per request; escaped, a character has six bytes, and proxies accept 1 MiB

REPORT = TypeAdapter(PrecomputeReport)

_BUSY = (429, 502, 503, 504)
_PASSING = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Faults seen while a server starts again."""

_OF_ENGINES = {
    "namespace": (
        "every API key has a namespace of its own; pass that key to KVRagClient, or separate "
        "documents by collection"
    ),
    "prefix": "chunks are encoded behind the server's prefix (kvrag serve --prefix)",
    "retention": "its chunks have the default retention",
    "batch_size": "it chooses the chunks per forward",
}
"""Options of engines that requests don't have, and what a server does instead."""


class _TooLargeError(InputError):
    """The body of a request is larger than the server, or a proxy, accepts."""


@dataclass(frozen=True)
class KVRagClient(RemoteHost):
    """Client of a server that holds the model and its KV.

    Pass it to vector stores and hooks in place of an engine: documents are sent to the server when
    they are added or deleted, and any client of OpenAI's API asks the questions. Documents belong
    to the namespace of the API key.

    A client holds no connection, so threads share it and processes inherit it.

    Parameters
    ----------
    base_url
        Address of the server, with or without ``/v1``.
    api_key
        Key of the tenant, if the server has keys.
    timeout_s
        Seconds to wait for the answer to a request, which has at most 32 documents.
    max_retries
        Number of times that a request is sent again if the server is busy or can't be reached.

    Raises
    ------
    ConfigError
        If an option is invalid. By methods: if the address is no kvrag server's, or the server
        refuses the key.
    InputError
        By methods: if an argument is invalid.
    StoreError
        By methods: if the server can't be reached, stays busy, or fails.

    Examples
    --------
    >>> client = KVRagClient("http://127.0.0.1:8000")  # doctest: +SKIP
    >>> store = KVRagVectorStore(existing_store, llm=client)  # doctest: +SKIP
    """

    base_url: str
    _: KW_ONLY
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    max_retries: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", _checked_address(self.base_url))
        key = self.api_key
        if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
            raise ConfigError("api_key is no text of printable ASCII characters; correct it")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s!r}; it must be above 0")
        if not isinstance(self.max_retries, int) or self.max_retries < 0:
            raise ConfigError(
                f"max_retries is {self.max_retries!r}; it must be a whole number of at least 0"
            )

    @parameters_of(IndexRequest)
    def precompute(self, texts: Sequence[str], **options: Any) -> PrecomputeReport:
        """Have the server compute and store the KV of chunks.

        Arguments and report are as for :meth:`kvrag.KVRagEngine.precompute`, but ``prefix``,
        ``namespace``, ``batch_size`` and ``retention`` are the server's and must be left out. Texts
        are sent in parts. A text that is too large for a request is reported as failed.
        """
        start = time.perf_counter()
        asked = IndexRequest(texts=texts, **options)
        self.check_options(**asked.shared())
        items = asked.items()
        documents = [{"id": item.doc_id, "text": item.text} for item in items if not item.fault]
        total = PrecomputeReport(0, 0, items.faults, 0, 0.0)
        # The server erases the KV of texts that it gets a new text for, but gets none of these.
        self.delete(items.unreadable)
        what = f"computing KV at {self.base_url}"
        with Progress(what, len(items), unit="chunks", show=asked.show_progress) as progress:
            for part in _parts(documents, PART_DOCUMENTS):
                total = _sum(total, self._precompute(part))
                progress.advance(len(part))
        tell_short(self, total.short)
        return replace(total, seconds=time.perf_counter() - start)

    def delete(
        self,
        ids: Sequence[str] | None = None,
        *,
        collection: str | None = None,
        namespace: str | None = None,
    ) -> int:
        """Delete documents, or a collection, as :meth:`kvrag.KVRagEngine.delete` does."""
        self.check_options(namespace=namespace)
        if ids is None and collection is not None:
            return self._delete({"collection": collection})
        if isinstance(ids, str):
            ids = [ids]
        names = list(dict.fromkeys(self.stored_ids(ids or (), collection)))
        return sum([self._delete({"ids": part}) for part in _parts(names, PART_IDS)])

    def document_ids(
        self, *, collection: str | None = None, namespace: str | None = None
    ) -> list[str]:
        """Return the ids of all documents, or of a collection's."""
        self.check_options(namespace=namespace)
        query = {} if collection is None else {"collection": collection}
        return self._request("GET", "documents", lambda reply: list(reply["data"]), query=query)

    def explain(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        mode: Mode = "auto",
        repair: RepairConfig | Mapping[str, Any] | str | None = None,
        max_context: MaxContext = "raise",
    ) -> Explanation:
        """Explain a prompt as :meth:`kvrag.KVRagEngine.explain` does.

        ``prompt`` is a text, chat messages, or token ids.
        """
        kinds = {type(part) for part in prompt}
        if not isinstance(prompt, str) and kinds not in ({int}, {dict}):
            raise InputError(
                "the prompt is neither text, chat messages nor token ids; write its segments as "
                "one text"
            )
        body = {
            "messages" if kinds == {dict} else "prompt": prompt,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "continue_final_message": continue_final_message,
            "kvrag": {
                "mode": mode,
                "repair": asdict(repair) if is_dataclass(repair) else repair,
                "max_context": max_context,
            },
        }
        return self._request("POST", "explain", Explanation.of, body)

    def stats(self) -> dict[str, Any]:
        """Return the server's statistics, as :meth:`kvrag.KVRagEngine.stats` does."""
        return self._request("GET", "stats", lambda reply: reply)

    def check_options(self, **options: object) -> None:
        """Raise :class:`ConfigError` if an option that only engines have is not at its default."""
        for name, remedy in _OF_ENGINES.items():
            default = getattr(IndexRequest, name)
            if options.get(name, default) != default:
                raise ConfigError(f"{name} has no effect on a server: {remedy}; leave {name} out")

    def _precompute(self, documents: list[dict[str, str | None]]) -> PrecomputeReport:
        """Send documents; if they are too large for a request, send the two halves."""
        try:
            return self._request(
                "POST", "precompute", REPORT.validate_python, {"documents": documents}
            )
        except _TooLargeError as error:
            if len(documents) > 1:
                half = len(documents) // 2
                return _sum(self._precompute(documents[:half]), self._precompute(documents[half:]))
            name = documents[0]["id"]
            if name is not None:
                self._delete({"ids": [name]})  # the KV of an older text
            return PrecomputeReport(0, 0, [(name or "", str(error))], 0, 0.0)

    def _delete(self, body: Mapping[str, Any]) -> int:
        return self._request("POST", "delete", lambda reply: int(reply["erased_chunks"]), body)

    def _request(
        self,
        method: str,
        route: str,
        read: Callable[[dict[str, Any]], T],
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> T:
        """Send a request, again if its fault may pass; return the reply as ``read`` reads it."""
        url = f"{self.base_url}/v1/kv/{route}"
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        content = None if body is None else json.dumps(body)
        timeout = httpx.Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s))
        tries = 0
        while True:
            wait_s = FIRST_WAIT_S * 2**tries
            try:
                response = httpx.request(
                    method,
                    url,
                    content=content,
                    params=query,
                    headers=headers,
                    timeout=timeout,
                    verify=_tls(),
                )
            except (httpx.HTTPError, ImportError, ValueError) as error:  # the latter: of proxies
                fault: KVRagError = self._unreachable(error)
                may_pass = isinstance(error, _PASSING)
            else:
                if response.is_success:
                    return self._read(response, read)
                fault = self._fault(response)
                may_pass = _is_busy(response)
                wait_s = _asked_wait_s(response, wait_s)
            if not may_pass or tries == self.max_retries:
                raise fault
            wait_s = min(wait_s, LONGEST_WAIT_S)
            logger.warning("%s; trying again in %.1f s", fault, wait_s)
            time.sleep(wait_s)
            tries += 1

    def _read(self, response: httpx.Response, read: Callable[[dict[str, Any]], T]) -> T:
        try:
            return read(response.json())
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{response.url} does not answer as kvrag does; pass the address of a kvrag server "
                "of this version"
            ) from None

    def _unreachable(self, error: Exception) -> StoreError:
        if isinstance(error, httpx.ReadTimeout):
            return StoreError(
                f"{self.base_url} has not answered within {self.timeout_s:g} s; raise timeout_s of "
                "KVRagClient, or look at the server's load"
            )
        return StoreError(
            f"{self.base_url} can't be reached ({str(error) or type(error).__name__}); start the "
            "server, or correct the address"
        )

    def _fault(self, response: httpx.Response) -> KVRagError:
        """Return the exception for a response that is not a success."""
        status = response.status_code
        message = message_of(response)
        if status == 413:
            return _TooLargeError(f"{self.base_url}: {message}")
        if status in (400, 422):
            return InputError(f"{self.base_url}: {message}")
        if status in (401, 403):
            return ConfigError(
                f"{self.base_url} refuses the API key: {message}; pass KVRagClient(..., "
                "api_key=...)"
            )
        if response.is_redirect:
            return ConfigError(
                f"{self.base_url} redirects to {response.headers['location']}; pass that address"
            )
        if status < 500 and status not in _BUSY:
            return ConfigError(
                f"{self.base_url} has no {response.url.path} ({status}: {message}); pass the "
                "address of a kvrag server"
            )
        return StoreError(
            f"{self.base_url} has not done it ({status}: {message}); look at the server's load and "
            "log"
        )


@cache
def _tls() -> Any:
    """Return the context for TLS, which takes milliseconds to make."""
    return httpx.create_ssl_context()


def _checked_address(base_url: object) -> str:
    """Return an address without ``/v1``; raise :class:`ConfigError` if it is none."""
    given = str(base_url).strip()
    if "@" in given:  # not repeated in the message
        raise ConfigError("base_url holds a user or password; pass the server's key as api_key")
    try:
        url = httpx.URL(given)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(
            f"base_url is {base_url!r}; pass the address of a server, such as "
            "'http://127.0.0.1:8000'"
        )
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")


def _parts(values: Sequence[T], most: int) -> Iterator[list[T]]:
    """Split values into parts of at most ``most`` values and :data:`PART_CHARS`.

    A larger value is a part of its own.
    """
    part: list[T] = []
    size = 0
    for value in values:
        length = len(str(value))
        if part and (len(part) == most or size + length > PART_CHARS):
            yield part
            part = []
            size = 0
        part.append(value)
        size += length
    if part:
        yield part


def _sum(one: PrecomputeReport, other: PrecomputeReport) -> PrecomputeReport:
    """Add the numbers and lists of two reports."""
    pairs = zip(astuple(one), astuple(other), strict=True)
    return PrecomputeReport(*[first + second for first, second in pairs])


def message_of(response: httpx.Response) -> str:
    """Return the message of an error in OpenAI's shape, or the name of its status."""
    try:
        return str(response.json()["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return response.reason_phrase or "no reason given"


def _is_busy(response: httpx.Response) -> bool:
    asked = response.headers.get("x-should-retry")
    return asked == "true" or (asked is None and response.status_code in _BUSY)


def _asked_wait_s(response: httpx.Response, default: float) -> float:
    """Return the seconds of ``Retry-After``, if it is a number."""
    try:
        asked = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return default
    return asked if math.isfinite(asked) and asked >= 0 else default
