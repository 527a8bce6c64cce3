"""OpenAI-compatible HTTP API over an engine; needs the extra ``server``.

::

    request ─▶ gate (id, key, size) ─▶ schema ─▶ completions or documents
            ─▶ admission (its slot) ─▶ engine ─▶ JSON or events

``app`` assembles the application. ``page`` serves the static files at ``/``, which use the same
API. ``service`` holds the state that routes share. ``shapes`` and ``errors`` have OpenAI's formats.
``metrics`` counts, and ``record`` is the content of the log and the traces. Imports the facade and
``generate``'s streams.
"""

from kvrag.server.app import create_app
from kvrag.server.config import ServerConfig

__all__ = ["ServerConfig", "create_app"]
