"""Serving on Ray Serve: replicas of the OpenAI-compatible server on a shared store.

A request goes to the replica that had its chunks before, and so has them in memory.

::

    client ─▶ front (finds chunks) ─▶ router (chooses a replica) ─▶ replica: kvrag.server ─▶ engine

``app`` builds it from ``config``. Imports the facade, ``server`` and ``prompt.spans``, which finds
chunks in texts.
"""

from kvrag.serving.app import build
from kvrag.serving.config import ServingConfig

__all__ = ["ServingConfig", "build"]
