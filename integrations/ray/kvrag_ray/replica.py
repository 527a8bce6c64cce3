"""The replica: an engine behind the HTTP API, with requests from a front instead of a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress

from ray.serve import get_replica_context
from ray.serve.exceptions import RayServeException
from ray.serve.metrics import Gauge
from starlette.types import Message, Scope

from kvrag import KVRagEngine, StoreError
from kvrag_ray.config import Options, ServingConfig
from kvrag_server.app import create_app, prepare_process

PUBLISH_S = 5.0  # seconds between two updates of Ray's metrics
BACKLOG = 64  # most queued messages of an answer that the front has not taken yet
MOST = 1000  # most chunks that a new replica loads into memory


class Replica:
    """The replica deployment: answers requests with :func:`kvrag_server.create_app`.

    The response header ``x-kvrag-replica`` holds the replica's id.
    """

    _name = ""

    # Ray awaits the constructor.
    async def __init__(self, options: Options) -> None:  # type: ignore[misc]
        prepare_process()
        config = ServingConfig(**options)
        with suppress(RayServeException):  # in tests, there is no replica context
            self._name = get_replica_context().replica_id.unique_id
        self._engine = config.open()
        self._app = create_app(self._engine, config.server_config)
        self._life = AsyncExitStack()
        self._gauges = dict[str, Gauge]()
        await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
        await asyncio.to_thread(warm, self._engine, config.warm_s)
        self._publishing = asyncio.create_task(self._publish())

    async def answer(
        self, scope: Scope, body: bytes, *, keys: Sequence[str] = ()
    ) -> AsyncIterator[Message]:
        """Yield the ASGI messages of a response; disconnect if the consumer stops iterating.

        ``keys`` are not used here; :class:`~kvrag_ray.router.ChunkRouter` reads them.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue(BACKLOG)
        has_left = asyncio.Event()
        parts = [body]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop()}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                await messages.put(None)

        answering = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [
                        *message["headers"],
                        (b"x-kvrag-replica", self._name.encode()),
                    ]
                yield dict(message)
            await answering
        finally:
            has_left.set()
            while not answering.done():  # drain the queue, in case the app waits for room in it
                await asyncio.wait(
                    {answering, asyncio.ensure_future(messages.get())},
                    return_when=asyncio.FIRST_COMPLETED,
                )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of running and waiting requests.

        Ray hands them to :func:`kvrag_ray.router.by_queue`.
        """
        load = self._engine.load
        admission = self._app.state.service.admission
        return {"running": float(load.running), "waiting": float(load.waiting + admission.waiting)}

    def __del__(self) -> None:
        """Close the engine when Ray Serve drops the replica."""
        with suppress(AttributeError):  # no engine yet, if the constructor failed
            self._engine.close()

    async def _publish(self) -> None:
        """Copy the Prometheus metrics to Ray's gauges; Ray serves the metrics of all replicas."""
        registry = self._app.state.service.metrics.registry
        while True:
            for metric in await asyncio.to_thread(lambda: list(registry.collect())):
                for sample in metric.samples:
                    name = sample.name
                    if name not in self._gauges:
                        self._gauges[name] = Gauge(
                            name, metric.documentation, tag_keys=tuple(sample.labels)
                        )
                    self._gauges[name].set(sample.value, sample.labels)
            await asyncio.sleep(PUBLISH_S)


def warm(engine: KVRagEngine, seconds: float) -> int:
    """Load the most used chunks into memory, within its limits, for at most ``seconds``.

    Returns the number of chunks found.
    """
    if seconds <= 0:
        return 0
    with suppress(StoreError):
        accesses, chunks = engine.store.catalog.usages()
        chunks.sort(key=lambda chunk: -chunk.worth(accesses))
        wanted = engine.store.prefetch([chunk.key for chunk in chunks if chunk.usage.hits][:MOST])
        wanted.wait(seconds)
        wanted.cancel()
        return wanted.found
    return 0
