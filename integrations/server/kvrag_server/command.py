"""``kvrag serve``: the OpenAI-compatible server."""

from __future__ import annotations

import errno
import logging
import logging.config
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Annotated, Any, Literal

import typer

from kvrag import ConfigError, require
from kvrag.cli import plugins
from kvrag.cli.options import EngineGroup, serving

Given = dict[str, Any]
"""Options by name."""

logger = logging.getLogger(__name__)

_ON_RAY = "With Ray"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_LOGGERS = ("kvrag", "kvrag_ray", "kvrag_server", "kvrag_shared", "vllm_kvrag", "uvicorn")
"""Loggers of which messages are shown, too, that are no warnings."""


_BACKEND = typer.Option(
    "--engine",
    help=(
        "kvrag, or vllm: vLLM decodes behind a front; its own options go after --, as "
        "-- --max-model-len 8192."
    ),
)
_RAY = typer.Option(
    "--ray",
    help="Serve on the Ray cluster RAY_ADDRESS, or on one started here; name a shared store.",
    rich_help_panel=_ON_RAY,
)
_REPLICAS = typer.Option(
    help="Replicas, or the least and the most, as 2-8. Default: 1.",
    metavar="N[-M]",
    rich_help_panel=_ON_RAY,
)
_TOKENS = typer.Option(
    min=1,
    help=(
        "Most tokens of an answer; requests without a limit get as many as the window leaves, up "
        "to this."
    ),
)
_ORIGIN = typer.Option(
    "--cors-origin",
    help=(
        "Origin of web pages that may call the API, as https://chat.example.com, or *; repeatable."
    ),
)
_ALLOWED = typer.Option(
    "--allowed-host",
    help=(
        "Name that clients without a key may use beside localhost and addresses, as "
        "kvrag.example.com, *.example.com, or *; repeatable."
    ),
)
_HOST = typer.Option(help="Address to listen on.")
_PORT = typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")
_WAITING = typer.Option(min=0, help="Requests that may wait; more are refused with 503.")
_INSECURE = typer.Option("--insecure", help="Listen beyond this machine without API keys.")
_MODEL = typer.Argument(
    metavar="[MODEL]", help="Hub id, directory, or .gguf file; may be set by KVRAG_MODEL."
)


@serving
def serve(
    engine: EngineGroup,
    repair: Given,
    limits: Given,
    ctx: typer.Context,
    words: Annotated[list[str] | None, _MODEL] = None,
    backend: Annotated[Literal["kvrag", "vllm"], _BACKEND] = "kvrag",
    host: Annotated[str, _HOST] = "127.0.0.1",
    port: Annotated[int, _PORT] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="Name that clients ask for; default: the model's own.")
    ] = None,
    max_waiting: Annotated[int, _WAITING] = 256,
    max_tokens: Annotated[int, _TOKENS] = 4096,
    cors_origin: Annotated[list[str] | None, _ORIGIN] = None,
    allowed_host: Annotated[list[str] | None, _ALLOWED] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="How lines of the log are written.")
    ] = "text",
    ray: Annotated[bool, _RAY] = False,
    replicas: Annotated[str | None, _REPLICAS] = None,
    insecure: Annotated[bool, _INSECURE] = False,
) -> None:
    """Serve the OpenAI API over precomputed chunks.

    Answers chat and text completions; /v1/kv precomputes more chunks.
    """
    if backend == "vllm":
        plugins.backend("vllm", purpose="kvrag serve --engine vllm").serve(
            ctx, engine, repair, limits, words or []
        )
        return
    engine.name_model(ctx, words)
    check_packages()
    keys = keys_for(host, is_insecure=insecure)
    from kvrag_server import ServerConfig, create_app
    from kvrag_server.app import prepare_process

    if ray:
        plugins.backend("ray", purpose="kvrag serve --ray").serve(ctx, engine, repair, limits)
        return
    if replicas is not None:
        raise ConfigError("--replicas has no effect without --ray; pass it, or leave it out")
    prepare_process()
    config = ServerConfig(api_keys=keys, **server_options(ctx.params))
    listening = bound(host, port)  # before the model is loaded, which takes long
    with listening, closing(engine.open(repair=repair, limits=limits)) as opened:
        run(create_app(opened, config), listening, drain_s=config.drain_s, log_format=log_format)


def server_options(given: Given) -> Given:
    """Return the options of a server, and of a front, among those of the command."""
    return {
        **{name: given[name] for name in ("model_name", "max_waiting", "max_tokens")},
        "cors_origins": tuple(given["cors_origin"] or ()),
        "allowed_hosts": (given["host"], *(given["allowed_host"] or ())),
    }


def check_packages() -> None:
    """Raise ``MissingDependencyError`` if a package of the server is not installed."""
    for package in ("uvicorn", "sse_starlette", "httpx"):
        require(package, extra="server", purpose="kvrag serve")


def run(app: Any, listening: socket.socket, *, drain_s: float, log_format: str) -> None:
    """Answer requests at a socket until a signal ends the server."""
    import uvicorn

    # uvicorn raises the signal again after the last answer; the store must still be closed then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    options = uvicorn.Config(
        app,
        timeout_graceful_shutdown=int(drain_s) + 5,
        access_log=False,
        log_config=log_config(log_format),
    )
    with suppress(KeyboardInterrupt):
        _server_of(options, app).run(sockets=[listening])


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; raise ``ConfigError`` if the address is not free.

    The socket does not listen yet, so clients are refused instead of kept waiting while the model
    loads.
    """
    with _listening(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
        except OSError:
            made.close()
            raise
    return made


@contextmanager
def _listening(host: str, port: int) -> Iterator[None]:
    """Raise ``ConfigError`` if a step on the way to listen at an address fails."""
    try:
        yield
    except OSError as error:
        remedy = "pass another --host"
        if error.errno == errno.EADDRINUSE:
            remedy = "stop what listens there, or pass another --port (0: any that is free)"
        elif error.errno == errno.EACCES:
            remedy = "pass a --port above 1023"
        raise ConfigError(
            f"kvrag serve can't listen at {_shown(host)}:{port}: {error.strerror or error}; "
            f"{remedy}"
        ) from None


def _shown(host: str) -> str:
    """Return a host as in an address."""
    return f"[{host}]" if ":" in host else host


def _server_of(options: Any, app: Any) -> Any:
    """Return uvicorn's server with two additions.

    It logs the address of its page. At a signal it marks the admission as draining while it still
    answers accepted requests.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            host, port = sockets[0].getsockname()[:2]
            # Since it was bound, another server may listen there, of which uvloop says nothing.
            with sockets[0].dup() as same, _listening(host, port):
                await super().startup(sockets)
                same.listen(self.config.backlog)
            if self.started:
                if host in ("0.0.0.0", "::"):
                    host = "localhost"
                logger.info("%s: http://%s:%d/", app.state.invitation, _shown(host), port)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.service.admission.is_draining = True
            super().handle_exit(sig, frame)

    return Server(options)


def keys_for(host: str, *, is_insecure: bool) -> dict[str, str]:
    """Return the API keys; raise ``ConfigError`` if a host that others reach has none."""
    from kvrag_server.config import KEYS_VARIABLE, keys_of_environment

    keys = keys_of_environment()
    if host not in _LOCAL and not keys and not is_insecure:
        raise ConfigError(
            f"--host {host} accepts requests of other machines without a key; "
            f"set {KEYS_VARIABLE}=tenant=key,..., or pass --insecure"
        )
    return keys


def log_config(log_format: str) -> Given:
    """Return the logging configuration: lines to standard error, a line per request.

    Loggers other than kvrag's and uvicorn's log warnings and errors only.
    """
    form: Given = {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}
    if log_format == "json":
        form = {"()": "kvrag_server.record.JsonLines"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": form},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {name: {"level": "INFO"} for name in _LOGGERS},
    }
