"""``kvrag serve``: the OpenAI-compatible server."""

from __future__ import annotations

import errno
import logging
import logging.config
import os
import signal
import socket
from contextlib import closing, suppress
from dataclasses import asdict
from types import FrameType
from typing import Annotated, Any, Literal

import typer

from kvrag.cli.options import (
    ENGINE,
    REPAIR,
    SERVED,
    Given,
    engine_options,
    is_on_command_line,
    name_model,
    open_engine,
    takes,
)
from kvrag.errors import ConfigError, require

logger = logging.getLogger(__name__)

_ON_RAY = "With Ray"
_LOCAL = ("127.0.0.1", "localhost", "::1")


_BACKEND = typer.Option(
    "--engine",
    help=(
        "kvrag, or vllm: vLLM decodes behind a front; its own options go after --, as "
        "-- --max-model-len 8192."
    ),
)
_NOT_WITH_VLLM = {
    "device": "vLLM chooses the device",
    "history_bytes": "vLLM has a prefix cache of its own",
    "max_waiting": "vLLM queues requests; -- --max-num-seqs N sets how many run at a time",
    "max_tokens": "-- --max-model-len N limits prompt and answer together",
    "ray": "start a front per machine, on a shared store",
    "replicas": "start a front per machine, on a shared store",
}
"""Options without an effect before vLLM, with the remedy."""

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


@takes(engine=ENGINE, repair=REPAIR, limits=SERVED)
def serve(
    engine: Given,
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
        _before_vllm(ctx, engine, repair, limits, words or [])
        return
    name_model(ctx, engine, words)
    _check_packages()
    keys = _keys(host, is_insecure=insecure)
    from kvrag_server import ServerConfig, create_app
    from kvrag_server.app import prepare_process

    given = _of_server(ctx.params)
    if ray:
        options = engine_options(engine, repair=repair, limits=limits)
        _on_ray(
            options,
            given,
            host,
            port,
            replicas or "1",
            log_format,
        )
        return
    if replicas is not None:
        raise ConfigError("--replicas has no effect without --ray; pass it, or leave it out")
    prepare_process()
    config = ServerConfig(api_keys=keys, **given)
    listening = bound(host, port)  # before the model is loaded, which takes long
    with listening, closing(open_engine(engine, repair=repair, limits=limits)) as opened:
        _run(create_app(opened, config), listening, drain_s=config.drain_s, log_format=log_format)


def _before_vllm(
    ctx: typer.Context, engine: Given, repair: Given, limits: Given, words: list[str]
) -> None:
    """Answer requests in front of vLLM until a signal ends both, or vLLM ends.

    Exits with vLLM's code if it ends by itself.
    """
    at = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    name_model(ctx, engine, words[:at])
    for name, remedy in _NOT_WITH_VLLM.items():
        if is_on_command_line(ctx, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} has no effect with --engine vllm; leave it out: {remedy}")
    _check_packages()
    from kvrag_server import ServerConfig
    from kvrag_server.app import prepare_process
    from vllm_kvrag.front import started

    options = engine_options(
        engine, repair=repair, limits={n: v for n, v in limits.items() if n != "history_bytes"}
    )
    if not is_on_command_line(ctx, "chunk_context"):
        del options["context"]
    given = ctx.params
    config = ServerConfig(
        api_keys=_keys(given["host"], is_insecure=given["insecure"]), **_of_server(given)
    )
    prepare_process()
    log_format = given["log_format"]
    logging.config.dictConfig(log_config(log_format))
    signal.signal(signal.SIGTERM, _exit)  # while vLLM loads
    with (
        bound(given["host"], given["port"]) as listening,
        started(options, config, words[at:]) as (app, child),
    ):
        _run(app, listening, drain_s=config.drain_s, log_format=log_format)
        code = child.code
    if code is not None:
        raise typer.Exit(code)


def _of_server(given: Given) -> Given:
    """Return the options of a server, and of a front, among those of the command."""
    return {
        **{name: given[name] for name in ("model_name", "max_waiting", "max_tokens")},
        "cors_origins": tuple(given["cors_origin"] or ()),
        "allowed_hosts": (given["host"], *(given["allowed_host"] or ())),
    }


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _check_packages() -> None:
    """Raise ``MissingDependencyError`` if a package of the server is not installed."""
    for package in ("uvicorn", "sse_starlette", "httpx"):
        require(package, extra="server", purpose="kvrag serve")


def _run(app: Any, listening: socket.socket, *, drain_s: float, log_format: str) -> None:
    """Answer requests at a socket until a signal ends the server."""
    import uvicorn

    # uvicorn raises the signal again after the last answer; the store must still be closed then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    grace_s = int(drain_s) + 5
    options = uvicorn.Config(
        app, timeout_graceful_shutdown=grace_s, access_log=False, log_config=log_config(log_format)
    )
    with suppress(KeyboardInterrupt):
        _server_of(options, app).run(sockets=[listening])


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; raise ``ConfigError`` if the address is not free.

    The socket does not listen yet, so clients are refused instead of kept waiting while the model
    loads.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        made = socket.socket(family, kind, protocol)
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        remedy = "pass another --host"
        if error.errno == errno.EADDRINUSE:
            remedy = "stop what listens there, or pass another --port (0: any that is free)"
        elif error.errno == errno.EACCES:
            remedy = "pass a --port above 1023"
        raise ConfigError(
            f"kvrag serve can't listen at {where}: {error.strerror or error}; {remedy}"
        ) from None
    return made


def _server_of(options: Any, app: Any) -> Any:
    """Return uvicorn's server with two additions.

    It logs the address of its page. At a signal it marks the admission as draining while it still
    answers accepted requests.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                if host in ("0.0.0.0", "::"):
                    host = "localhost"
                elif ":" in host:
                    host = f"[{host}]"
                logger.info("%s: http://%s:%d/", app.state.invitation, host, port)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.service.admission.is_draining = True
            super().handle_exit(sig, frame)

    return Server(options)


def _on_ray(
    options: Given, server: Given, host: str, port: int, replicas: str, log_format: str
) -> None:
    """Serve on a Ray cluster until a signal ends it."""
    if log_format != "text":
        raise ConfigError(
            "--log-format has no effect with --ray, which writes the logs itself; leave it out"
        )
    ray, serve = (
        require(name, extra="ray", purpose="kvrag serve --ray") for name in ("ray", "ray.serve")
    )
    from kvrag_ray import ServingConfig, build

    least, _, most = replicas.partition("-")
    if not (least.isdigit() and (most or least).isdigit()):
        raise ConfigError(
            f"--replicas is {replicas!r}; pass a number, or the least and the most, as 2-8"
        )
    store = asdict(options.pop("store_config"))
    repair = options.pop("repair")
    own = {name: options.pop(name) for name in ("model", "kv_dir")}
    config = ServingConfig(
        **own,
        engine=options,
        store=store,
        repair=repair and asdict(repair),
        server=server,
        replicas=(int(least), int(most or least)),
    )
    bound(host, port).close()
    application = build(config)  # reports invalid options before Ray starts
    ray.init(ignore_reinit_error=True, logging_level="warning")
    serve.start(http_options={"host": host, "port": port})
    serve.run(application, blocking=True)


def _keys(host: str, *, is_insecure: bool) -> dict[str, str]:
    from kvrag_server.config import KEYS_VARIABLE, keys_of_environment

    keys = keys_of_environment()
    if host not in _LOCAL and not keys and not is_insecure:
        raise ConfigError(
            f"--host {host} accepts requests of other machines without a key; "
            f"set {KEYS_VARIABLE}=tenant=key,..., or pass --insecure"
        )
    return keys


def log_config(log_format: str) -> dict[str, Any]:
    """Return the logging configuration: lines to standard error, a line per request.

    Loggers other than kvrag's and uvicorn's log warnings and errors only.
    """
    form: dict[str, Any] = {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}
    if log_format == "json":
        form = {"()": "kvrag_server.record.JsonLines"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": form},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {"kvrag": {"level": "INFO"}, "uvicorn": {"level": "INFO"}},
    }
