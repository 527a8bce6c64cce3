"""The Ray Serve application and its deployments."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvrag import ConfigError, require
from kvrag.adapters import unknown_option
from kvrag_ray.config import Options, ServingConfig

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: ServingConfig | Options) -> Application:
    """Build the Ray Serve application.

    For ``serve.run``, or as ``import_path: kvrag_ray:build`` in a Serve YAML file.

    Parameters
    ----------
    args
        A :class:`ServingConfig`, or its options.

    Raises
    ------
    ConfigError
        If an option is unknown or invalid.
    MissingDependencyError
        If Ray Serve is not installed.
    """
    serve = require("ray.serve", extra="ray", purpose="kvrag_ray")
    from kvrag_ray.front import Front
    from kvrag_ray.replica import Replica

    config = args if isinstance(args, ServingConfig) else _config(args)
    with closing(config.open()) as engine:  # raises on invalid options
        config = replace(
            config,
            model=str(engine.source.model),
            # Replicas run elsewhere, and must not serve without a key where one is asked for here.
            has_keys=bool(config.server_config.api_keys),
        )
    replica = serve.deployment(Replica).options(**_of_replicas(config)).bind(asdict(config))
    front = serve.deployment(Front).options(
        num_replicas=config.fronts, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )
    application: Application = front.bind(replica, asdict(config))
    return application


def _of_replicas(config: ServingConfig) -> dict[str, Any]:
    """Return the options of the replicas' deployment."""
    server, (least, most) = config.server_config, config.least_and_most
    options: dict[str, Any] = {
        "max_ongoing_requests": server.max_running + 2 * server.max_waiting,
        "max_queued_requests": max(1, server.max_waiting),
        "ray_actor_options": {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
        "request_router_config": {"request_router_class": "kvrag_ray.router.ChunkRouter"},
        "graceful_shutdown_timeout_s": server.drain_s,
    }
    if least == most:
        return options | {"num_replicas": least}
    return options | {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": server.max_running,
            "policy": {"policy_function": "kvrag_ray.router:by_queue"},
            **config.autoscaling,
        }
    }


def _config(options: Options) -> ServingConfig:
    known = list(ServingConfig.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise unknown_option(name, known, of="kvrag_ray")
    if "model" not in options:
        raise ConfigError("kvrag_ray has no model; pass its hub id or path as the option 'model'")
    return ServingConfig(**options)
