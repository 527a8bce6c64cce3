"""``kvrag serve --ray`` and ``kvrag precompute --ray``."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from kvrag import ConfigError, require
from kvrag.cli.options import EngineGroup
from kvrag_ray.config import ServingConfig
from kvrag_ray.dataset import Workers, precompute_dataset
from kvrag_server.command import Given, bound, server_options


def serve(ctx: typer.Context, engine: EngineGroup, repair: Given, limits: Given) -> None:
    """Serve on a Ray cluster until a signal ends it; ``ctx`` has the other options."""
    options = engine.arguments(repair=repair, limits=limits)
    given = ctx.params
    if given["log_format"] != "text":
        raise ConfigError(
            "--log-format has no effect with --ray, which writes the logs itself; leave it out"
        )
    ray, on_ray = (
        require(name, extra="ray", purpose="kvrag serve --ray") for name in ("ray", "ray.serve")
    )
    from kvrag_ray.app import build

    config_of_repair = options.pop("repair")
    own = {name: options.pop(name) for name in ("model", "kv_dir")}
    config = ServingConfig(
        **own,
        store=asdict(options.pop("store_config")),
        engine=options,
        repair=config_of_repair and asdict(config_of_repair),
        server=server_options(given),
        replicas=given["replicas"] or 1,
    )
    build(config)  # reports invalid options before Ray starts
    ray.init(ignore_reinit_error=True, logging_level="warning")
    if ray.cluster_resources().get("GPU") and options.get("device") != "cpu":
        config = replace(config, num_gpus=1.0)
    place = {"host": given["host"], "port": given["port"]}
    if not on_ray.status().proxies:  # else the cluster serves already, at a port of its own
        bound(**place).close()
        on_ray.start(http_options=place)
    try:
        on_ray.run(build(config), blocking=True)
    finally:
        on_ray.delete("default")


def precompute(
    chunks: list[Any],
    options: Given,
    run: Given,
    workers: int | None,
    file: Path | None,
    *,
    is_quiet: bool,
) -> Given:
    """Store chunks on a Ray cluster and return the sums of the report.

    Also writes the report to a file if a file is given.
    """
    ray = require("ray", extra="ray", purpose="kvrag precompute --ray")
    pyarrow, parquet = (
        require(name, extra="ray", purpose="its report") for name in ("pyarrow", "pyarrow.parquet")
    )
    if file is not None:
        file.touch()  # a path that can't be written to fails now, not after hours
    rows = [{"id": chunk.id, "text": chunk.text} for chunk in chunks]
    start = time.perf_counter()
    with redirect_stdout(sys.stderr):  # Ray prints events of workers there
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="error")
        ray.data.DataContext.get_current().enable_progress_bars = not is_quiet
        report = precompute_dataset(
            ray.data.from_items(rows), **options, workers=Workers(workers), run=run
        )
        table = pyarrow.concat_tables(ray.get(report.to_arrow_refs()))
        ray.shutdown()
    if file is not None:
        parquet.write_table(table, file)
    done = table.to_pylist()
    named = {
        what: [(each["id"], each["reason"]) for row in done for each in row[what]]
        for what in ("failed", "short")
    }
    sums = {what: sum(row[what] for row in done) for what in ("stored", "skipped", "stored_bytes")}
    return {**sums, **named, "seconds": time.perf_counter() - start}
