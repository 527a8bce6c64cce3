"""OpenAI-compatible HTTP API over an engine; needs the extra ``server``.

::

    request ─▶ gate (id, key, size) ─▶ schema ─▶ completions or documents
            ─▶ admission (its slot) ─▶ engine ─▶ JSON or events

``app`` assembles the application. ``page`` serves the static files at ``/``, which use the same
API. ``service`` holds the state that routes share. ``shapes`` and ``errors`` have OpenAI's formats.
``metrics`` counts, and ``record`` is the content of the log and the traces. ``command`` is
``kvrag serve``, and ``client`` what other processes send documents with. Imports the core and
``cli``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrag_server.app import create_app
    from kvrag_server.client import KVRagClient
    from kvrag_server.config import ServerConfig

__all__ = ["KVRagClient", "ServerConfig", "create_app"]

_LAZY = {"KVRagClient": "client", "ServerConfig": "config", "create_app": "app"}
"""Modules imported at first use of their names: a client needs no FastAPI."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvrag_server' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvrag_server.{_LAZY[name]}"), name)
