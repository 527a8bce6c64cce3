"""Which replica answers: the one that had the prompt's chunks before, unless it has too much to do."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

SLACK = 1.25
"""Requests of a replica, over the mean of all, from which on others are asked first: consistent hashing with bounded loads, 2016."""
FREE = 2  # requests that a replica takes in any case


def by_owner(keys: Iterable[str], replicas: Iterable[str]) -> list[str]:
    """Return the replicas, first those that own most of the keys.

    Each key has an owner by rendezvous hashing (Thaler and Ravishankar, 1998): the replica with the highest hash of both names. So the
    order doesn't depend on that of the keys, every front finds the same one, and where a replica comes or goes, only its keys move.
    """
    replicas, keys = sorted(replicas), sorted(set(keys))
    owned = (
        Counter(max(replicas, key=lambda replica: _hash(key, replica)) for key in keys)
        if replicas
        else Counter[str]()
    )
    return sorted(replicas, key=lambda replica: (-owned[replica], _hash(*keys, replica)))


def ranked(keys: Iterable[str], loads: Mapping[str, int]) -> list[list[str]]:
    """Return replicas in the order in which they are asked; those of one rank are equals, of which Ray takes the least loaded.

    Those that have more than :data:`SLACK` times the mean load come last, together. Without keys all are equals, in any order: of those
    with as little to do Ray takes the first.
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
    """Ray Serve's request router by :func:`ranked`; a request's ``keys`` are its argument of that name."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, those to be asked first in front."""
        keys = [] if pending_request is None else pending_request.kwargs.get("keys", [])
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # once none of them has taken it
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {
            name: self.replica_queue_len_cache.get(each.replica_id) or 0
            for name, each in by_name.items()
        }
        return [[by_name[name] for name in rank] for rank in ranked(keys, loads)]


def by_queue(context: Any) -> tuple[float, dict[str, Any]]:
    """Return how many replicas are wanted: Ray's own policy, and more while requests wait for room in a replica's memory.

    What runs is what the replicas have room for, so as many more are wanted as would run what waits.
    """
    wanted, state = replica_queue_length_autoscaling_policy(context)
    stats = context.aggregated_metrics or {}
    running, waiting = (sum((stats.get(name) or {}).values()) for name in ("running", "waiting"))
    if waiting and running:
        wanted = max(wanted, context.current_num_replicas * (running + waiting) / running)
    return wanted, state
