"""Serving on Ray Serve: replicas of the OpenAI-compatible server on one shared store, behind a front that knows whose memory holds what.

::

    client ─▶ front: which chunks does the prompt hold? ─▶ router: which replica had them? ─▶ replica: kvrag.server ─▶ engine

``app`` configures and builds it. Imports the facade, ``server``, and what finds chunks in texts (``prompt.spans``).
"""

from kvrag.serving.app import ServingConfig, build

__all__ = ["ServingConfig", "build"]
