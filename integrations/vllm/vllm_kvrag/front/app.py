"""ASGI application of the front: its own routes, and vLLM behind all others."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvrag import KVRagError, Library
from kvrag.adapters import ModelFacts, StorePlanner
from kvrag_server.admission import Admission
from kvrag_server.app import QUIET, guard, health
from kvrag_server.config import ServerConfig
from kvrag_server.errors import APIError
from kvrag_server.metrics import Metrics
from kvrag_server.record import RequestRecord
from kvrag_server.schema import ChatRequest, Completion, TextRequest
from kvrag_server.service import Desk, desk_of
from vllm_kvrag.front import documents
from vllm_kvrag.front.prompts import (
    Body,
    Tokenise,
    left_to_vllm,
    object_of,
    planner_of,
    put_options,
    renamed,
    tokenised,
    tokenised_chat,
    tokenised_text,
)
from vllm_kvrag.front.upstream import Upstream, upstream_of

OPEN = ("/health", "/ready", "/metrics")
"""Paths that need no key. vLLM answers prompts at more paths than those under ``/v1``."""
KNOWS_PARAMETERS = (
    "/v1/responses",
    "/v1/messages",
    "/v1/chat/completions/batch",
    "/inference/v1/generate",
)
"""vLLM's other paths whose bodies may hold ``kv_transfer_params``."""
COUNTED = (
    "kvrag_requests_total",
    "kvrag_request_rejected_total",
    "kvrag_requests_cancelled_total",
    "kvrag_chunk_lookups_total",
    "kvrag_store_bytes",
    "kvrag_store_chunks",
    "kvrag_store_evictions_total",
)
"""Metrics of the front; vLLM has the times and the tokens."""
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

logger = logging.getLogger(__name__)


def create_front(
    library: Library, name: str, planner: StorePlanner, upstream: Upstream, config: ServerConfig
) -> FastAPI:
    """Make the ASGI application of a front; run it in a single process.

    Parameters
    ----------
    library, name
        The documents; the model's name for clients.
    planner, upstream
        Planner over the same store; vLLM's server, which answers already.
    config
        API keys and limits; admission is vLLM's.
    """
    app = FastAPI(
        title="kvrag",
        lifespan=_life,
        telemetry=QUIET,
        openapi_url=None,
    )
    admission = Admission(config.max_running, config.max_waiting)
    metered = Metrics(library, admission, int)  # vLLM counts its KV
    app.state.service = Desk(library, name, config, admission, metered)
    app.state.invitation = "the OpenAI API, before vLLM, is at"
    app.state.planner = planner
    app.state.upstream = upstream
    app.get("/health")(health)
    app.get("/ready")(ready)
    app.get("/metrics")(metrics)
    app.post("/v1/chat/completions")(chat_completions)
    app.post("/v1/completions")(completions)
    app.include_router(documents.router)
    app.add_route("/{path:path}", passed, methods=_METHODS)
    app.add_exception_handler(RecursionError, _refuse_depth)
    guard(app, OPEN)
    return app


@asynccontextmanager
async def _life(app: FastAPI) -> AsyncIterator[None]:
    planner: StorePlanner = app.state.planner
    upstream: Upstream = app.state.upstream
    try:
        planner.facts = ModelFacts.of(await upstream.ask(describe=True))
    except (APIError, KVRagError) as error:
        logger.warning("prompts are tokenised without regard to stored chunks: %s", error)
    if planner.facts.refusal is not None:
        logger.warning("vLLM's worker reuses no KV: %s", planner.facts.refusal)
    yield
    await upstream.client.aclose()


async def ready(request: Request) -> JSONResponse:
    """Say whether vLLM accepts requests."""
    if desk_of(request).admission.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    if not await upstream_of(request).is_healthy():
        return JSONResponse({"status": "loading"}, 503)
    return JSONResponse({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Return the front's metrics for Prometheus, and vLLM's."""
    own = await run_in_threadpool(
        generate_latest, desk_of(request).metrics.registry.restricted_registry(COUNTED)
    )
    return Response(own + await upstream_of(request).metrics(), media_type=CONTENT_TYPE_LATEST)


async def chat_completions(request: Request) -> Response:
    """Answer chat messages: vLLM gets them with their token ids."""
    return await _complete(request, tokenised_chat, ChatRequest)


async def completions(request: Request) -> Response:
    """Continue text: vLLM gets token ids."""
    return await _complete(request, tokenised_text, TextRequest)


async def passed(request: Request) -> Response:
    """Pass any other request, with its key's namespace where vLLM might read another."""
    path = request.scope["path"]
    if {".", ".."} & set(path.split("/")):  # vLLM would get another path than the one seen here
        raise APIError(
            400, "the path has a segment '.' or '..'; send the path without it", "invalid_value"
        )
    content = await request.body()
    body = _object(content)
    if body is not None and (
        path in KNOWS_PARAMETERS or {"kv_transfer_params", "kvrag"} & body.keys()
    ):
        left_to_vllm(put_options(body, desk_of(request).namespace(request.state.tenant)))
        content = json.dumps(body).encode()
    return await upstream_of(request).pass_on(request, content)


async def _complete(request: Request, tokenise: Tokenise, schema: type[Completion]) -> Response:
    """Pass a completion with its prompt as ids, cut where stored chunks begin and end."""
    body = _object(await request.body())
    if body is None:
        return await passed(request)
    body = renamed(body, schema)
    desk = desk_of(request)
    record: RequestRecord = request.state.record
    record.is_stream = bool(body.get("stream"))
    namespace = desk.namespace(request.state.tenant)
    options = put_options(body, namespace)
    if options.trace and record.is_stream:  # the event with the usage has it
        body["stream_options"] = {**object_of(body, "stream_options"), "include_usage": True}
    report = body["kv_transfer_params"]["kvrag"]["stream"] = uuid.uuid4().hex
    if body.get("model") in (None, "", desk.name):
        record.model = desk.name
        body = await run_in_threadpool(
            tokenised, tokenise, planner_of(request), body, options, namespace
        )
    else:
        left_to_vllm(options)
    return await upstream_of(request).pass_on(request, json.dumps(body).encode(), report)


def _object(content: bytes) -> Body | None:
    """Return the JSON object of a body; ``None`` if it is none: vLLM says why."""
    try:
        body = json.loads(content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _refuse_depth(request: Request, error: Exception) -> Response:
    """Refuse a body that is deeper than is read here: vLLM may read it, with a namespace."""
    raise APIError(400, "the body nests too deep; make it flatter", "invalid_value")
