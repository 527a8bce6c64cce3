"""The front: Ray Serve's ingress, which finds a prompt's chunks and passes requests to replicas.

If a replica is lost, the front passes the request to another replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from kvrag import KVRagError
from kvrag.adapters import ChunkFinder
from kvrag_ray.config import Options, ServingConfig
from kvrag_server.errors import APIError

ATTEMPTS = 5  # most replicas that a request is passed to, in sequence
LOST = (RayActorError, ReplicaUnavailableError)
"""Errors that mean that a replica, or its machine, has died."""
PASSED_ON = (
    "type",
    "http_version",
    "method",
    "scheme",
    "root_path",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)
"""Fields of an ASGI scope that can be sent to another process."""

_TOLD = APIError(503, "the replica was lost in the middle of the answer; ask again", "replica_lost")
BROKEN_OFF = {"type": "http.response.body", "body": f"data: {json.dumps(_TOLD.body)}\n\n".encode()}
"""Last event of a stream that can't be continued."""

logger = logging.getLogger(__name__)


class Front:
    """The ingress deployment. It has the catalog of the store, but no model."""

    def __init__(self, replica: DeploymentHandle[Any], options: Options) -> None:
        config = ServingConfig(**options)
        self._replica: Any = replica
        self._server = config.server_config
        self._library = config.open_library()
        self._chunks = ChunkFinder(self._library.store.catalog)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > (most := self._server.max_body_bytes):
                return APIError(
                    413, f"the body has more than {most} bytes; send less", "request_too_large"
                ).response
        keys = await asyncio.to_thread(self.keys, request.headers, body)
        scope = {name: request.scope[name] for name in PASSED_ON if name in request.scope}
        messages = self._passed(scope, body, keys)
        try:
            start = await anext(messages)
        except (*LOST, BackPressureError):
            return APIError(
                503, "no replica answers; retry later", "no_replica", headers={"Retry-After": "1"}
            ).response
        response = StreamingResponse(
            (message.get("body", b"") async for message in messages), start["status"]
        )
        # Ray's proxy assigned the request id, and adds it to the response itself.
        response.raw_headers = [each for each in start["headers"] if each[0] != b"x-request-id"]
        return response

    def keys(self, headers: Mapping[str, str], body: bytes) -> list[str]:
        """Return the routing keys of a request.

        They are the digests of the chunks in its first text that contains any; without chunks, the
        digest of its first question. The first texts stay the same in all turns of a chat, so the
        replica that holds the chat's history gets every turn.
        """
        try:
            tenant = self._server.tenant_of(
                headers.get("authorization", ""), headers.get("x-api-key", "")
            )
            namespace = self._library.namespace + ("" if tenant is None else f"/{tenant}")
            found = texts(json.loads(body))
            spans = self._chunks.scanner(self._library, namespace)
            for _, text in found:
                chunks = spans.scan(text)
                if chunks:
                    return [chunk.digest for chunk in chunks]
            questions = [text for is_question, text in found if is_question]
            return [self._chunks.digest_of(text) for text in questions[:1]]
        except (KVRagError, OSError, ValueError, RecursionError):  # the replica reports the error
            return []

    async def _passed(self, scope: Scope, body: bytes, keys: list[str]) -> AsyncIterator[Message]:
        """Pass a request to replicas, in sequence, until an answer is complete.

        Yields the answer's ASGI messages. An answer that is not streamed is sent only once it is
        complete. If a replica is lost while it streams, the next replica repeats the answer from
        the start, and messages that were yielded already are dropped. If its answer differs, as
        sampled answers do, the stream ends with an error.
        """
        sent = list[Any]()
        for attempt in range(1, ATTEMPTS + 1):
            count = 0
            try:
                answer = self._replica.answer.options(stream=True)
                async for message in answer.remote(scope, body, keys=keys):
                    said = saying(message)
                    count += said is not None
                    if count > len(sent):
                        sent.append(said)
                        yield message
                    elif said is None and count == len(sent):
                        yield message
                    elif said not in (None, sent[count - 1]):
                        yield BROKEN_OFF
                        return
                return
            except (*LOST, BackPressureError) as error:
                if attempt < ATTEMPTS and isinstance(error, LOST):
                    logger.warning("a replica was lost; asking another")
                    continue
                if not sent:
                    raise
                yield BROKEN_OFF
                return


def texts(body: Any) -> list[tuple[bool, str]]:
    """Return the texts of a request in order, as ``(is question, text)``.

    User messages and prompts are questions.
    """
    if not isinstance(body, dict):
        return []
    found = list[tuple[bool, str]]()
    for message in _many(body.get("messages")):
        if isinstance(message, dict):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            text = "".join(
                part["text"]
                for part in parts
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
            found.append((message.get("role") == "user", text))
    found += [(True, each) for each in _many(body.get("prompt")) if isinstance(each, str)]
    reuse = body.get("kvrag")
    if isinstance(reuse, dict):
        documents = [each for each in _many(reuse.get("documents")) if isinstance(each, dict)]
        found.append((False, "\n\n".join(str(each.get("text")) for each in documents)))
    return [(is_question, text) for is_question, text in found if text]


def _many(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]


def saying(message: Message) -> Any:
    """Return the content of an ASGI response message without ids and times, for comparison.

    ``None`` for a keep-alive comment.
    """
    if message["type"] == "http.response.start":
        return message["status"]
    data = bytes(message.get("body", b""))
    if data.startswith(b":"):
        return None
    try:
        return json.loads(data.removeprefix(b"data:"))["choices"]
    except (ValueError, TypeError, KeyError):
        return data
