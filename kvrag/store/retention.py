"""What a chunk is worth keeping: what was said of it, and what is known of its use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from kvrag.config import config_class
from kvrag.errors import ConfigError

DEFAULT_PRIORITY = 35


@config_class
class Retention:
    """How much a chunk is worth keeping."""

    priority: Annotated[int, Field(strict=True, ge=0, le=100)] = DEFAULT_PRIORITY
    """0 to 100; the lowest leaves first. System prompts 80 to 90, documents 35 to 60, one-off texts 20 to 30."""
    duration_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """After this many seconds the priority is :data:`DEFAULT_PRIORITY` again; ``None``: never."""
    cost_ms: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """Time that it took to compute, in milliseconds; ``None``: as measured by a precompute or known already, else as much per token as
    the store's other chunks took."""


def check_retention(value: object, *, is_needed: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a :class:`Retention`, or ``None`` where that is not needed."""
    if not isinstance(value, Retention) and (is_needed or value is not None):
        raise ConfigError(f"retention is {value!r}; pass a kvrag.Retention, for example Retention(priority=90)")


@dataclass(frozen=True, slots=True)
class Worth:
    """What is known of a chunk's use: its recent hits, and the milliseconds that it took to compute; ``None`` if nobody said."""

    hits: float = 0.0
    cost_ms: float | None = None


def priority_of(retention: Retention | None) -> int:
    """Priority that a chunk is stored with; raises ``ConfigError`` if ``retention`` is none."""
    check_retention(retention)
    return DEFAULT_PRIORITY if retention is None else retention.priority
