"""``kvrag serve --engine vllm``: vLLM, and the front before it."""

from __future__ import annotations

import logging.config
import signal

import typer

from kvrag import ConfigError
from kvrag.cli.options import EngineGroup, is_on_command_line
from kvrag_server.command import (
    Given,
    bound,
    check_packages,
    keys_for,
    log_config,
    run,
    server_options,
)
from kvrag_server.config import ServerConfig

_NOT_WITH_VLLM = {
    "device": "vLLM chooses the device",
    "history_bytes": "vLLM has a prefix cache of its own",
    "max_waiting": "vLLM queues requests; -- --max-num-seqs N sets how many run at a time",
    "max_tokens": "-- --max-model-len N limits prompt and answer together",
    "ray": "start a front per machine, on a shared store",
    "replicas": "start a front per machine, on a shared store",
}
"""Options without an effect before vLLM, with the remedy."""


def serve(
    ctx: typer.Context,
    engine: EngineGroup,
    repair: Given,
    limits: Given,
    words: list[str],
) -> None:
    """Answer requests in front of vLLM until a signal ends both, or vLLM ends.

    Exits with vLLM's code if it ends by itself.
    """
    at = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    engine.name_model(ctx, words[:at])
    for name, remedy in _NOT_WITH_VLLM.items():
        if is_on_command_line(ctx, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --engine vllm; leave it out: "
                f"{remedy}"
            )
    check_packages()
    from kvrag_server.app import prepare_process
    from vllm_kvrag.front.start import started

    options = engine.arguments(
        repair=repair, limits={n: v for n, v in limits.items() if n != "history_bytes"}
    )
    if not is_on_command_line(ctx, "chunk_context"):
        del options["context"]
    given = ctx.params
    config = ServerConfig(
        api_keys=keys_for(given["host"], is_insecure=given["insecure"]), **server_options(given)
    )
    prepare_process()
    log_format = given["log_format"]
    logging.config.dictConfig(log_config(log_format))
    signal.signal(signal.SIGTERM, _exit)  # while vLLM loads
    with (
        bound(given["host"], given["port"]) as listening,
        started(options, config, words[at:]) as (app, child),
    ):
        run(app, listening, drain_s=config.drain_s, log_format=log_format)
        code = child.code
    if code is not None:
        raise typer.Exit(code)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)
