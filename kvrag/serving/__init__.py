"""Serving on Ray Serve: replicas of the OpenAI-compatible server on one shared store, behind a front that knows whose memory holds what.

::

    client ─▶ front: which chunks does the prompt hold? ─▶ router: which replica had them? ─▶ replica: kvrag.server ─▶ engine
"""

from kvrag.serving.app import ServingConfig, build

__all__ = ["ServingConfig", "build"]
