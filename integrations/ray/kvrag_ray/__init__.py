"""kvrag on Ray: a store filled by many machines, and replicas of the server on a shared store.

A request goes to the replica that had its chunks before, and so has them in memory.

::

    client ─▶ front (finds chunks) ─▶ router (chooses a replica) ─▶ replica: kvrag_server ─▶ engine

``app`` builds it from ``config``, and ``dataset`` precomputes with Ray Data; ``command`` is for the
command line. Imports the core, ``cli`` and the server's package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrag_ray.app import build
    from kvrag_ray.config import ServingConfig
    from kvrag_ray.dataset import Workers, precompute_dataset

__all__ = ["ServingConfig", "Workers", "build", "precompute_dataset"]

_LAZY = {
    "ServingConfig": "config",
    "Workers": "dataset",
    "build": "app",
    "precompute_dataset": "dataset",
}
"""Modules imported at first use of their names: a worker of Ray Data needs no server."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvrag_ray' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvrag_ray.{_LAZY[name]}"), name)
