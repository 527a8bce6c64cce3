"""Routing: prefer the replica that had the prompt's chunks before, unless it is overloaded."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

SLACK = 1.25
"""Replicas with this multiple of the mean load, or more, are asked last (consistent hashing with
bounded loads, 2016)."""
FREE = 2  # a replica with fewer requests is never overloaded


def by_owner(keys: Iterable[str], replicas: Iterable[str]) -> list[str]:
    """Return the replicas, sorted by the number of keys that they own, highest first.

    Rendezvous hashing (Thaler and Ravishankar, 1998) assigns every key to the replica with the
    highest hash of both names. So the result doesn't depend on the order of the keys, all fronts
    agree, and when a replica joins or leaves, only its keys move.
    """
    replicas = sorted(replicas)
    keys = sorted(set(keys))
    if not replicas:
        return []
    owned = Counter(max(replicas, key=lambda replica: _hash(key, replica)) for key in keys)
    return sorted(replicas, key=lambda replica: (-owned[replica], _hash(*keys, replica)))


def ranked(keys: Iterable[str], loads: Mapping[str, int]) -> list[list[str]]:
    """Return the replicas in ranks, in the order in which they are asked.

    Every replica is a rank of its own, in the order of :func:`by_owner`; but overloaded replicas
    are the last rank together. They have at least :data:`FREE` requests and :data:`SLACK` times the
    mean load, counting this request. Within a rank, Ray takes the least loaded replica, and the
    first of equally loaded replicas. So without keys, all replicas are a single rank in random
    order.
    """
    if not list(keys):
        return [random.sample(list(loads), len(loads))]
    limit = max(FREE, SLACK * (sum(loads.values()) + 1) / max(1, len(loads)))
    order = by_owner(keys, loads)
    hot = [replica for replica in order if loads[replica] >= limit]
    return [*([replica] for replica in order if loads[replica] < limit), *([hot] if hot else [])]


def _hash(*names: str) -> bytes:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()


class ChunkRouter(RequestRouter):
    """Ray Serve request router that uses :func:`ranked`, with the request's argument ``keys``."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the ranks of :func:`ranked`."""
        keys: list[str] = []
        if pending_request is not None:
            keys = pending_request.kwargs.get("keys", keys)
            # Back off after all replicas have rejected the request.
            pending_request.routing_context.should_backoff = True
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {
            name: self.replica_queue_len_cache.get(each.replica_id) or 0
            for name, each in by_name.items()
        }
        return [[by_name[name] for name in rank] for rank in ranked(keys, loads)]


def by_queue(context: Any) -> tuple[float, dict[str, Any]]:
    """Autoscaling policy: Ray's own, or more replicas while requests wait for room in memory.

    The running requests are the capacity of the current replicas. So the number of replicas is
    scaled by (running + waiting) ÷ running.
    """
    wanted, state = replica_queue_length_autoscaling_policy(context)
    stats = context.aggregated_metrics or {}
    running, waiting = (sum((stats.get(name) or {}).values()) for name in ("running", "waiting"))
    if waiting and running:
        wanted = max(wanted, context.current_num_replicas * (running + waiting) / running)
    return wanted, state
