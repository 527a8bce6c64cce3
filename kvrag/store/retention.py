"""What a chunk is worth keeping: what was said of it, and what is known of its use."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.errors import ConfigError
from kvrag.options import Named

DEFAULT_PRIORITY = 35


@dataclass(frozen=True, slots=True)
class Retention(Named):
    """How much a chunk is worth keeping.

    Parameters
    ----------
    priority
        0 to 100; what has less leaves first. System prompts 80 to 90, documents 35 to 60, one-off texts 20 to 30.
    duration_s
        After this many seconds the priority is :data:`DEFAULT_PRIORITY` again; ``None``: never.
    cost_ms
        Time that it took to compute, in milliseconds; ``None``: what a precompute measures or is known already, else as much per token
        as the store's other chunks took.

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """

    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None
    cost_ms: float | None = None

    def __post_init__(self) -> None:
        if type(self.priority) is not int or not 0 <= self.priority <= 100:
            raise ConfigError(f"Retention.priority is {self.priority!r}; it must be a whole number in [0, 100]")
        for name in ("duration_s", "cost_ms"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value < float("inf")):
                raise ConfigError(f"Retention.{name} is {value!r}; it must be a number of at least 0, or None")


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
