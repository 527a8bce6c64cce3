"""State that the routes of the front share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from fastapi import Request

from kvrag.front.planner import Planner
from kvrag.front.upstream import Upstream
from kvrag.server.service import Service


@dataclass(frozen=True, slots=True)
class Front:
    """vLLM's server, the planner of prompts, and the service of an engine without its model."""

    service: Service
    planner: Planner
    upstream: Upstream


def front_of(request: Request) -> Front:
    """Return the front of a request's application."""
    return cast(Front, request.app.state.front)
