"""Metrics for Prometheus at ``/metrics``: request times, sources of tokens, size of the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrag import Library
from kvrag_server.admission import Admission
from kvrag_server.record import RequestRecord

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

REFUSALS = (401, 413, 429, 503)
"""Statuses of requests that are refused, or that a vLLM behind this server does not answer."""


class StoreCollector(Collector):
    """Reads the store's own counters when Prometheus asks."""

    def __init__(self, library: Library) -> None:
        self._store = library.store

    def collect(self) -> Iterator[Metric]:
        """Yield the content of the tiers, and the results of their look-ups."""
        held = GaugeMetricFamily("kvrag_store_bytes", "Bytes of KV in a tier.", labels=["tier"])
        chunks = GaugeMetricFamily("kvrag_store_chunks", "Chunks in a tier.", labels=["tier"])
        looked_up = CounterMetricFamily(
            "kvrag_chunk_lookups", "Look-ups of chunks in a tier.", labels=["tier", "result"]
        )
        for tier, stats in self._store.stats().items():
            held.add_metric([tier], stats.num_bytes)
            chunks.add_metric([tier], stats.chunks)
            for result, count in (
                ("hit", stats.hits),
                ("miss", stats.misses),
                ("rejected", stats.rejected),
            ):
                looked_up.add_metric([tier, result], count)
        yield from (held, chunks, looked_up)


class Metrics:
    """Metrics of an application, in their own registry.

    ``kv_bytes`` returns the bytes of KV that running requests hold.
    """

    def __init__(
        self, library: Library, admission: Admission, kv_bytes: Callable[[], float]
    ) -> None:
        own = self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"kvrag_{name}", about, labels, registry=own)

        def gauge(name: str, about: str, value: Callable[[], float]) -> None:
            Gauge(f"kvrag_{name}", about, registry=own).set_function(value)

        def histogram(name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"kvrag_{name}_seconds", about, buckets=buckets, registry=own)

        self._ttft = histogram("time_to_first_token", "From a request's arrival to its first text.")
        self._step = histogram(
            "inter_token_latency", "Between two pieces of an answer.", _STEP_SECONDS
        )
        self._queue = histogram("request_queue_time", "Waiting for a turn.")
        self._whole = histogram("e2e_request_latency", "From a request's arrival to its end.")
        self._responses = counter("requests", "Requests that have ended.", "endpoint", "code")
        self._refused = counter(
            "request_rejected", "Requests that got no answer, by error code.", "reason"
        )
        self._timeouts = counter("request_timeouts", "Answers that took too long.")
        self._left = counter(
            "requests_cancelled", "Answers that came to no end, by reason.", "reason"
        )
        self._tokens = counter(
            "prompt_tokens_by_source", "Tokens of prompts, by where their KV came from.", "source"
        )
        self._answers = counter("answers", "Answers, by how they were made.", "exactness")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._fallbacks = counter("fallbacks", "Answers with less reuse than asked for.")
        self._loaded = counter("loaded_bytes", "Bytes of KV that were loaded for prompts.")
        gauge("requests_running", "Requests that are answered.", lambda: admission.running)
        gauge("requests_waiting", "Requests that wait.", lambda: admission.waiting)
        gauge("running_kv_bytes", "Bytes of KV that running requests hold.", kv_bytes)
        self._removed = counter("store_evictions", "Chunks that left a tier.", "tier", "reason")
        library.store.listen(self._hear)
        own.register(StoreCollector(library))

    def _hear(self, event: Any) -> None:
        if event.type == "BlockRemoved":
            self._removed.labels(event.medium, event.reason).inc(len(event.block_hashes))

    def timer(self, record: RequestRecord) -> Timer:
        """Return a timer for the answer to a request."""
        return Timer(record, self._queue, self._ttft, self._step)

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._responses.labels(record.endpoint, record.status).inc()
        if record.ended == "timeout":
            self._timeouts.inc()
        elif record.ended != "answered":
            self._left.labels(record.ended).inc()
        elif record.status in REFUSALS:
            self._refused.labels(record.code).inc()
        if record.queue_s is not None:
            self._whole.observe(time.perf_counter() - record.start_s)
        for result in record.results:
            self._answers.labels(result.exactness).inc()
            self._generated.inc(len(result.token_ids))
            self._fallbacks.inc(result.fallback_reason is not None)
            self._loaded.inc(result.loaded_bytes)
            for source in ("cached", "repaired", "computed"):
                self._tokens.labels(source).inc(getattr(result, f"{source}_tokens"))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


@dataclass(slots=True)
class Timer:
    """Notes the times of an answer as they occur."""

    record: RequestRecord
    queue: Histogram
    ttft: Histogram
    step: Histogram
    latest: dict[int, float] = field(default_factory=dict)

    def note_slot(self) -> None:
        """Note that the request has a slot."""
        self.record.queue_s = time.perf_counter() - self.record.start_s
        self.queue.observe(self.record.queue_s)

    def note_piece(self, choice: int) -> None:
        """Note a piece of a choice's text."""
        now = time.perf_counter()
        if choice in self.latest:
            self.step.observe(now - self.latest[choice])
        else:
            self.ttft.observe(now - self.record.start_s)
            self.record.ttft_s = self.record.ttft_s or now - self.record.start_s
        self.latest[choice] = now
