"""Messages between vLLM's scheduler and its worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvrag.adapters import ModelFacts
from vllm_kvrag.blending import Job, Said
from vllm_kvrag.steps import Step


@dataclass
class Jobs(KVConnectorMetadata):
    """Jobs for the worker, and the step that it is to time."""

    jobs: list[Job] = field(default_factory=list)
    step: Step = field(default_factory=Step)


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """Description of the worker's model."""

    about: ModelFacts


@dataclass
class Ended(KVConnectorWorkerMetadata):
    """What ended jobs say, by request; ``None``: it failed. ``steps`` were timed."""

    said: dict[str, Said | None]
    steps: list[Step] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Ended:
        """Join the reports of two workers."""
        assert isinstance(other, Ended)
        return Ended(self.said | other.said, self.steps + other.steps)
