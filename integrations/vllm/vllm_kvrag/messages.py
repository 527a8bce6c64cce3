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


@dataclass
class Jobs(KVConnectorMetadata):
    """Jobs for the worker."""

    jobs: list[Job] = field(default_factory=list)


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """Description of the worker's model."""

    about: ModelFacts


@dataclass
class Ended(KVConnectorWorkerMetadata):
    """What ended jobs say, by request; ``None``: it failed.

    ``adapters`` are fingerprints of the model with adapters that vLLM has loaded, by number.
    """

    said: dict[str, Said | None]
    adapters: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Ended:
        """Join the reports of two workers."""
        assert isinstance(other, Ended)
        return Ended(self.said | other.said, self.adapters | other.adapters)
