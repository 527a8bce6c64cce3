"""What Prometheus reads at ``/metrics``: how long requests take, where their tokens come from, and how full the store is."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrag.engine import KVRagEngine
from kvrag.server.admission import Admission
from kvrag.types import GenerationResult

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class _OfStore(Collector):
    """Reads the store's own counters when Prometheus asks."""

    def __init__(self, engine: KVRagEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield what each tier holds, and how its look-ups ended."""
        held = GaugeMetricFamily("kvrag_store_bytes", "Bytes of KV in a tier.", labels=["tier"])
        chunks = GaugeMetricFamily("kvrag_store_chunks", "Chunks in a tier.", labels=["tier"])
        looked_up = CounterMetricFamily(
            "kvrag_chunk_lookups", "Look-ups of chunks in a tier.", labels=["tier", "result"]
        )
        for tier, stats in self._engine.store.stats().items():
            held.add_metric([tier], stats.num_bytes)
            chunks.add_metric([tier], stats.chunks)
            for result, count in (("hit", stats.hits), ("miss", stats.misses), ("rejected", stats.rejected)):
                looked_up.add_metric([tier, result], count)
        yield from (held, chunks, looked_up)


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, engine: KVRagEngine, admission: Admission) -> None:
        own = self.registry = CollectorRegistry()
        self.responses = Counter("kvrag_requests", "Responses.", ["endpoint", "code"], registry=own)
        self._ttft = _histogram("time_to_first_token", "From a request's arrival to its first text.", _SECONDS, own)
        self._step = _histogram("inter_token_latency", "Between two pieces of an answer.", _STEP_SECONDS, own)
        self._queue = _histogram("request_queue_time", "Waiting for a turn.", _SECONDS, own)
        self._whole = _histogram("e2e_request_latency", "From a request's arrival to its end.", _SECONDS, own)
        name, about = "kvrag_prompt_tokens_by_source", "Tokens of prompts, by where their KV came from."
        self._tokens = Counter(name, about, ["source"], registry=own)
        self._answers = Counter("kvrag_answers", "Answers, by how they were made.", ["exactness"], registry=own)
        self._generated = Counter("kvrag_generation_tokens", "Tokens of answers.", registry=own)
        self._fallbacks = Counter("kvrag_fallbacks", "Answers with less reuse than asked for.", registry=own)
        Gauge("kvrag_requests_running", "Requests that are answered.", registry=own).set_function(
            lambda: admission.running
        )
        Gauge("kvrag_requests_waiting", "Requests that wait.", registry=own).set_function(lambda: admission.waiting)
        own.register(_OfStore(engine))

    def timer(self) -> Timer:
        """Return what notes the times of a request that has just arrived."""
        return Timer(self._queue, self._ttft, self._step, self._whole)

    def count(self, result: GenerationResult) -> None:
        """Add an answer."""
        self._answers.labels(result.exactness).inc()
        self._generated.inc(len(result.token_ids))
        self._fallbacks.inc(result.fallback_reason is not None)
        for source in ("cached", "repaired", "computed"):
            self._tokens.labels(source).inc(getattr(result, f"{source}_tokens"))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Timer:
    """The times of one request."""

    def __init__(self, queue: Histogram, ttft: Histogram, step: Histogram, whole: Histogram) -> None:
        self._queue, self._ttft, self._step, self._whole = queue, ttft, step, whole
        self._start = time.perf_counter()
        self._latest: dict[int, float] = {}

    def began(self) -> None:
        """Note that its turn has come."""
        self._queue.observe(time.perf_counter() - self._start)

    def took(self, choice: int) -> None:
        """Note a piece of a choice's text."""
        now = time.perf_counter()
        if choice in self._latest:
            self._step.observe(now - self._latest[choice])
        else:
            self._ttft.observe(now - self._start)
        self._latest[choice] = now

    def ended(self) -> None:
        """Note its end."""
        self._whole.observe(time.perf_counter() - self._start)


def _histogram(name: str, about: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"kvrag_{name}_seconds", about, buckets=buckets, registry=registry)
