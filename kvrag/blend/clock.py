"""Time of a request per stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kvrag.model.lock import WAITED
from kvrag.types import Stage

T = TypeVar("T")
NOTABLE_S = 0.001  # shorter waits are not counted


@dataclass(slots=True)
class Clock:
    """Measure the stages of a request.

    Attributes
    ----------
    start
        Time of the call, in seconds on ``time.perf_counter``'s clock.
    timings_ms
        Milliseconds per stage. Time spent waiting for other requests, or computing for them, is a
        stage of its own, ``wait``.
    stages
        Names, starts and ends of stages, on the same clock.
    """

    start: float = field(default_factory=lambda: time.perf_counter())
    timings_ms: dict[str, float] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    def begin(self) -> None:
        """Count the time since ``start`` as ``wait``: a thread started, or the caller idled."""
        waited = time.perf_counter() - self.start
        if waited > NOTABLE_S:
            self._add("wait", waited)
            self.stages.append(("wait", self.start, self.start + waited))

    @contextmanager
    def stage(self, name: str, *, least_s: float = 0.0) -> Iterator[None]:
        """Add the time spent inside to a stage, if it exceeds ``least_s``."""
        start = time.perf_counter()
        lost = WAITED.seconds
        try:
            yield
        finally:
            end = time.perf_counter()
            lost = WAITED.seconds - lost
            if end - start > least_s:
                self._add(name, end - start - lost)
                self.stages.append((name, start, end))
            if lost > 0:
                self._add("wait", lost)

    @contextmanager
    def waiting(self, turn: AbstractContextManager[T]) -> Iterator[T]:
        """Enter a context, and count the time until it is entered as ``wait``."""
        start = time.perf_counter()
        with turn as entered:
            waited = time.perf_counter() - start
            if waited > NOTABLE_S:
                self._add("wait", waited)
                self.stages.append(("wait", start, start + waited))
            yield entered

    def _add(self, name: str, seconds: float) -> None:
        self.timings_ms[name] = self.timings_ms.get(name, 0.0) + seconds * 1e3
