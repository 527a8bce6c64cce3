"""ASGI application: routes, health, and shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import warnings
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

import kvrag
from kvrag import KVRagEngine
from kvrag_server import completions, documents, page
from kvrag_server.admission import Admission
from kvrag_server.config import ServerConfig
from kvrag_server.errors import handle_errors
from kvrag_server.fields import JsonObject
from kvrag_server.gate import Gate
from kvrag_server.metrics import Metrics
from kvrag_server.service import PRECOMPUTES, Desk, Service, served_name, service_of

QUIET: Any = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans"), False)
"""Switches off the telemetry of newer FastAPI versions.

It would reveal unreadable bodies and messages of exceptions; kvrag has its own telemetry.
"""

_MOST_ARENAS = -8, 1  # M_ARENA_MAX of malloc.h, and its value
GIVE_BACK_S = 15.0
"""Seconds between returns of freed memory to the system."""

logger = logging.getLogger(__name__)


def create_app(engine: KVRagEngine, config: ServerConfig | None = None) -> FastAPI:
    """Make the ASGI application of an engine.

    The model loads when the application starts; until then ``/ready`` answers 503. Run it with any
    ASGI server, in a single process, because every process would load the model again.
    ``kvrag serve`` does so.

    Parameters
    ----------
    engine
        Engine that answers.
    config
        API keys, limits and the model's name.
    """
    config = config or ServerConfig()
    app = FastAPI(title="kvrag", version=kvrag.__version__, lifespan=_life, telemetry=QUIET)
    turns = config.max_waiting, config.max_per_key
    admission = Admission(config.max_running, *turns)
    metered = Metrics(engine, admission, lambda: engine.load.kv_bytes)
    app.state.service = Service(
        engine,
        served_name(engine.source.name, config),
        config,
        admission,
        metered,
        Admission(PRECOMPUTES, *turns),
    )
    app.state.is_loaded = False
    app.state.invitation = "ask it in a browser"
    app.include_router(completions.router)
    app.include_router(documents.router)
    app.include_router(page.router)
    app.get("/health")(health)
    app.get("/ready")(ready)
    app.get("/metrics")(metrics)
    app.get("/v1/models")(models)
    app.get("/v1/models/{name:path}")(model)
    guard(app)
    return app


def guard(app: FastAPI, open_paths: Collection[str] = ()) -> None:
    """Put the gate before an application, answer its errors, and let allowed origins call it."""
    desk: Desk = app.state.service
    handle_errors(app)
    app.add_middleware(Gate, config=desk.config, count=desk.metrics.count, open_paths=open_paths)
    if desk.config.cors_origins:  # outside the gate, because preflight requests carry no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=desk.config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-should-retry"],
        )


@asynccontextmanager
async def _life(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    await run_in_threadpool(service.engine.warm_up)
    if not getattr(service.engine.loaded.lm, "can_share_forwards", False):
        logger.warning("answers of this model are decoded one after the other; see docs/support.md")
    app.state.is_loaded = True
    giving_back = asyncio.create_task(_give_memory_back())
    yield
    giving_back.cancel()
    service.admission.is_draining = True


def prepare_process() -> None:
    """Keep prompts out of the log, and make all threads allocate from a single arena of glibc.

    Arenas keep the memory freed in them, so with many arenas memory grows with the requests.
    """
    # These warnings quote prompts; explain() reports the same.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(vllm_)?kvrag")
    warnings.filterwarnings("default", ".*this prompt has known chunks escaped", UserWarning)
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError, TypeError):  # another C library
            ctypes.CDLL(None).mallopt(*_MOST_ARENAS)


async def _give_memory_back() -> None:
    """Make glibc return freed memory to the system.

    By itself glibc keeps free memory between blocks in use, up to the peak ever used.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(GIVE_BACK_S)
        await run_in_threadpool(trim, 0)


async def health() -> dict[str, str]:
    """Say that the process is alive."""
    return {"status": "ok"}


async def ready(request: Request) -> JSONResponse:
    """Say whether the server accepts requests."""
    draining = service_of(request).admission.is_draining
    if draining or not request.app.state.is_loaded:
        return JSONResponse({"status": "draining" if draining else "loading"}, 503)
    return JSONResponse({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    return Response(
        await run_in_threadpool(service_of(request).metrics.text), media_type=CONTENT_TYPE_LATEST
    )


def _model_object(service: Service) -> JsonObject:
    """Describe the model as OpenAI does, and its context window as vLLM does."""
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvrag",
        "root": service.name,
        "parent": None,
        "max_model_len": service.engine.loaded.lm.context_window,
    }


async def models(request: Request) -> JsonObject:
    """List the served model."""
    return {"object": "list", "data": [_model_object(service_of(request))]}


async def model(name: str, request: Request) -> JsonObject:
    """Describe the served model."""
    service = service_of(request)
    service.check_model(name)
    return _model_object(service)
