"""Count how answers were made, in totals over requests."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, TypeVar

from kvrag.prompt.explain import Watch
from kvrag.types import Accounting

Counted = TypeVar("Counted", bound=Accounting)

SUMMED = (
    "prompt_tokens",
    "cached_tokens",
    "history_tokens",
    "repaired_tokens",
    "computed_tokens",
    "loaded_bytes",
)


class Figures(dict[str, Any]):
    """Figures by name, for JSON; also readable as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class EngineStats:
    """Totals over the requests of an engine, counting how their answers were made; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._totals: Counter[str] = Counter()
        self.watch = Watch()

    def count(self, result: Counted) -> Counted:
        """Add a request's result to the totals, and return it."""
        with self._lock:
            self._totals.update(["requests", f"requests_{result.exactness}"])
            self._totals.update({name: getattr(result, name) for name in SUMMED})
            self._totals["fallbacks"] += result.fallback_reason is not None
        return result

    def snapshot(self) -> dict[str, Any]:
        """Return the totals and the overall reuse ratio."""
        with self._lock:
            totals = self._totals.copy()
        ratio = totals["cached_tokens"] / max(totals["prompt_tokens"], 1)
        own = {"kv_reuse_ratio": ratio, "requests_without_hits": self.watch.num_without_hits}
        return {**totals, **own}
