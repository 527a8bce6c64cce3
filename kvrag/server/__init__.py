"""The OpenAI-compatible HTTP API over one engine; needs the extra ``server``.

::

    request ─▶ gate (id, key, size) ─▶ schema ─▶ completions or documents ─▶ admission (its turn) ─▶ engine ─▶ JSON or events

``app`` puts them together; ``service`` is what routes share, ``shapes`` and ``errors`` are OpenAI's, ``metrics`` counts, and ``record`` is
what the log and the traces say of a request. Imports the facade and ``generate``'s streams.
"""

from kvrag.server.app import create_app
from kvrag.server.config import ServerConfig

__all__ = ["ServerConfig", "create_app"]
