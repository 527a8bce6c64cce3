"""Counters of an engine: how answers were made since it was opened."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from kvrag.types import Accounting


class EngineStats:
    """Thread-safe totals over requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def count(self, result: Accounting) -> None:
        """Add one request."""
        with self._lock:
            self._totals.update(
                {
                    "requests": 1,
                    f"requests_{result.exactness}": 1,
                    "prompt_tokens": result.prompt_tokens,
                    "cached_tokens": result.cached_tokens,
                    "repaired_tokens": result.repaired_tokens,
                    "computed_tokens": result.computed_tokens,
                    "loaded_bytes": result.loaded_bytes,
                    "fallbacks": int(result.fallback_reason is not None),
                }
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the totals and the overall reuse ratio."""
        with self._lock:
            totals = dict(self._totals)
        prompt = totals.get("prompt_tokens", 0)
        return {**totals, "kv_reuse_ratio": totals.get("cached_tokens", 0) / prompt if prompt else 0.0}
