"""Limits of running and waiting requests.

Requests beyond them are told when to retry, before memory is at risk.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi.concurrency import run_in_threadpool

from kvrag_server.errors import APIError

_SMOOTHING = 0.1  # weight of the newest request in the mean of seconds


class Admission:
    """Slots for requests of an event loop, first come, first served."""

    def __init__(self, max_running: int, max_waiting: int, max_per_key: int | None = None) -> None:
        self._max_per_key = max_per_key
        self._of_tenant = Counter[str]()
        self._slots = asyncio.Semaphore(max_running)
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._seconds = 1.0
        self.running = 0
        self.is_draining = False

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._of_tenant.total() - self.running

    @property
    def retry_after_s(self) -> int:
        """Seconds after which the requests that wait now have probably been answered."""
        return max(1, math.ceil(self._seconds * (self.waiting + 1) / self._max_running))

    def check(self, tenant: str | None = None) -> None:
        """Raise ``APIError`` if no more requests are accepted, in total or from this tenant."""
        if self.is_draining:
            raise self._refusal(
                "the server is shutting down; retry later, or use another replica", "draining"
            )
        if self._of_tenant.total() >= self._max_running + self._max_waiting:
            raise self._refusal(
                f"{self.running} requests run and {self.waiting} wait; retry later",
                "overloaded",
            )
        if (
            tenant is not None
            and self._max_per_key is not None
            and self._of_tenant[tenant] >= self._max_per_key
        ):
            raise self._refusal(
                f"{self._of_tenant[tenant]} requests of this key are under way; wait for one of "
                "them",
                "rate_limit_exceeded",
                429,
            )

    def _refusal(self, message: str, code: str, status: int = 503) -> APIError:
        return APIError(status, message, code, headers={"Retry-After": str(self.retry_after_s)})

    @asynccontextmanager
    async def slot(
        self, tenant: str | None = None, first: Callable[[], object] | None = None
    ) -> AsyncIterator[None]:
        """Wait for a slot, and keep it until the context ends.

        ``first`` runs in a thread before the wait, unless the request is refused.
        """
        self.check(tenant)
        self._of_tenant[tenant or ""] += 1
        try:
            if first:
                await run_in_threadpool(first)
            async with self._slots:
                start = time.monotonic()
                self.running += 1
                try:
                    yield
                finally:
                    self._seconds += _SMOOTHING * (time.monotonic() - start - self._seconds)
                    self.running -= 1
        finally:
            self._of_tenant[tenant or ""] -= 1
