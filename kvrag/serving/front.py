"""What clients reach: it finds the chunks of a prompt, passes the request to a replica, and asks another one where that is lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvrag.errors import KVRagError
from kvrag.identity.fingerprint import text_digest
from kvrag.prompt.spans import SpanIndex
from kvrag.server.errors import APIError
from kvrag.serving.app import ServingConfig

ATTEMPTS = 5  # replicas that a request is passed to, one after the other
LOST = (RayActorError, ReplicaUnavailableError)
"""A replica that has died, or whose machine has."""
PASSED_ON = (
    *(
        "type",
        "http_version",
        "method",
        "scheme",
        "path",
        "raw_path",
        "query_string",
        "headers",
        "client",
        "server",
    ),
)
"""What of an ASGI scope can be sent to another process."""

_TOLD = APIError(503, "the replica was lost in the middle of the answer; ask again", "replica_lost")
BROKEN_OFF = {"type": "http.response.body", "body": f"data: {json.dumps(_TOLD.body)}\n\n".encode()}
"""The last event of a stream that can't be continued."""

logger = logging.getLogger(__name__)


class Front:
    """The ingress deployment. It has the catalog of the store, and no model."""

    def __init__(self, replica: DeploymentHandle[Any], options: Mapping[str, Any]) -> None:
        config = ServingConfig(**options)
        self._replica, self._server, self._engine = replica, config.server_config, config.open()
        self._spans = dict[str, tuple[SpanIndex, int]]()

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > (most := self._server.max_body_bytes):
                return APIError(
                    413, f"the body has more than {most} bytes; send less", "request_too_large"
                ).response
        keys = await asyncio.to_thread(self.keys, request.headers.get("authorization", ""), body)
        scope = {name: request.scope[name] for name in PASSED_ON if name in request.scope}
        messages = self._passed(
            {**scope, "root_path": "", "headers": list(scope["headers"])}, body, keys
        )
        try:
            start = await anext(messages)
        except (*LOST, BackPressureError):
            told = APIError(
                503,
                "no replica answers; come again later",
                "no_replica",
                headers={"Retry-After": "1"},
            )
            return told.response
        response = StreamingResponse(
            (message.get("body", b"") async for message in messages), start["status"]
        )
        named = [(bytes(name), bytes(value)) for name, value in start.get("headers", ())]
        # Ray's proxy has given the request its id, and adds it to the response.
        response.raw_headers = [each for each in named if each[0] != b"x-request-id"]
        return response

    def keys(self, authorization: str, body: bytes) -> list[str]:
        """Return the digests of the chunks in a request's first text that has some; of its first question, where none has.

        The first texts stay the same in all turns of a chat: the replica that has the chat's history gets them all.
        """
        try:
            tenant = (
                self._server.tenant_of(authorization.partition(" ")[2].strip())
                if self._server.api_keys
                else None
            )
            namespace = self._engine.namespace + ("" if tenant is None else f"/{tenant}")
            found = texts(json.loads(body))
            spans = self._known(self._engine.store.names.namespace(namespace))
            for _, text in found:
                if chunks := spans.scan(text):
                    return [chunk.digest for chunk in chunks]
            return [text_digest(text) for is_question, text in found if is_question][:1]
        except (
            KVRagError,
            OSError,
            ValueError,
            RecursionError,
        ):  # the replica says what is wrong with it
            return []

    def _known(self, namespace: str) -> SpanIndex:
        """Return the texts of a namespace that the store has now."""
        spans, cursor = self._spans.get(namespace) or (SpanIndex(text_digest), 0)
        new, cursor = self._engine.store.catalog.texts(namespace, cursor)
        spans.add(new)
        self._spans[namespace] = spans, cursor
        return spans

    async def _passed(
        self, scope: Mapping[str, Any], body: bytes, keys: list[str]
    ) -> AsyncIterator[dict[str, Any]]:
        """Pass a request to one replica after the other until one has answered it.

        Nothing of an answer that isn't streamed is sent before it is complete. Of one that is, another replica repeats what was sent, which
        is left out; where it differs, as sampled answers do, the stream ends with an error.
        """
        sent = list[Any]()
        for attempt in range(1, ATTEMPTS + 1):
            count = 0
            try:
                answer = self._replica.answer.options(stream=True)
                async for message in cast(
                    AsyncIterator[dict[str, Any]], answer.remote(scope, body, keys=keys)
                ):
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
            except LOST:
                logger.warning(
                    "a replica was lost; another one is asked (attempt %d of %d)", attempt, ATTEMPTS
                )
                if attempt == ATTEMPTS:
                    if not sent:
                        raise
                    yield BROKEN_OFF


def texts(body: Any) -> list[tuple[bool, str]]:
    """Return the texts of a request in their order, and of each whether it is a question: a user's, or a prompt."""
    if not isinstance(body, dict):
        return []
    found, messages = list[tuple[bool, str]](), body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            text = "".join(
                part["text"]
                for part in parts
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
            found.append((message.get("role") == "user", text))
    prompts, reuse = body.get("prompt"), body.get("kvrag")
    found += [
        (True, each)
        for each in (prompts if isinstance(prompts, list) else [prompts])
        if isinstance(each, str)
    ]
    documents = reuse.get("documents") if isinstance(reuse, dict) else None
    listed = documents if isinstance(documents, list) else []
    found.append(
        (False, "\n\n".join(str(each.get("text")) for each in listed if isinstance(each, dict)))
    )
    return [(is_question, text) for is_question, text in found if text]


def saying(message: Mapping[str, Any]) -> Any:
    """Return what an ASGI message of a response says, but for ids and times; ``None`` for a sign of life."""
    if message["type"] == "http.response.start":
        return message["status"]
    data = bytes(message.get("body", b""))
    if data.startswith(b":"):
        return None
    try:
        return json.loads(data.removeprefix(b"data:"))["choices"]
    except (ValueError, TypeError, KeyError):
        return data
