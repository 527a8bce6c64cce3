"""Counts of what the connector did, for vLLM's log and for Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


def tokens_of(said: dict[str, Any]) -> dict[str, int]:
    """Return the number of a prompt's tokens by the origin of their KV."""
    found = Counter[str]()
    for origin, num_tokens in said["sources"]:
        found[origin] += num_tokens
    return dict(found)


class Counts(KVConnectorStats):
    """Tokens by origin (``tokens_…``) and requests by exactness (``requests_…``)."""

    def reset(self) -> None:
        """Count from zero."""
        self.data = dict[str, int]()

    def aggregate(self, other: KVConnectorStats) -> Counts:
        """Add other counts."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def add(self, said: dict[str, Any]) -> None:
        """Count a finished request."""
        found = Counter(self.data)
        found[f"requests_{said['exactness']}"] += 1
        for origin, num_tokens in tokens_of(said).items():
            found[f"tokens_{origin}"] += num_tokens
        self.data = dict(found)


class Metrics(KVConnectorPromMetrics):
    """Counters ``vllm:kvrag_prompt_tokens`` by origin and ``vllm:kvrag_requests`` by exactness."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        make = metric_types[PromCounter]
        self._tokens = make(
            name="vllm:kvrag_prompt_tokens",
            documentation="Prompt tokens by the origin of their KV.",
            labelnames=[*labelnames, "origin"],
        )
        self._requests = make(
            name="vllm:kvrag_requests",
            documentation="Requests by the exactness of their prompt's KV.",
            labelnames=[*labelnames, "exactness"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            kind, _, label = name.partition("_")
            (self._tokens if kind == "tokens" else self._requests).labels(*labels, label).inc(count)
