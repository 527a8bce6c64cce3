"""Decide on reuse, load the KV, and decide again if loading fails.

A failure of the store costs time, never the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvrag.blend.clock import Clock
from kvrag.blend.cost import Price
from kvrag.blend.decide import because, decide, decide_plan, in_words
from kvrag.blend.layout import Layout
from kvrag.identity.fingerprint import chunk_key
from kvrag.layers import parts
from kvrag.model import CausalLM
from kvrag.model.rows import LayerShape
from kvrag.prompt.plan import Plan
from kvrag.store import TieredStore
from kvrag.types import ChunkIdentity, ChunkKV, Hole, Mode

logger = logging.getLogger(__name__)


def read(
    model: CausalLM,
    store: TieredStore,
    plan: Plan,
    mode: Mode,
    price: Price | None,
    timeout_s: float,
    clock: Clock,
    history: tuple[int, int] | None,
) -> tuple[Layout, str | None, list[ChunkKV], dict[int, Hole]]:
    """Return the layout, the reason if it reuses less than requested, the KV and the holes.

    Decides on reuse, loads the KV, and decides again without the chunks that could not be loaded.
    """
    cheapest = None if price is None else price.cheapest
    layout, reason = decide_plan(plan, mode, cheapest, history)
    if not layout.reused:  # nothing to load
        return layout, reason, [], {}
    with clock.stage("load"):
        kvs, holes = _load(plan.identities, layout, store, model.shapes, timeout_s=timeout_s)
    if holes:
        layout, also = decide(layout.without(holes), mode, cheapest)
        reason = because(because(in_words(list(holes.values())), also), reason)
    return layout, reason, kvs if layout.reused else [], holes


def _load(
    identities: list[ChunkIdentity],
    layout: Layout,
    store: TieredStore,
    shapes: Sequence[LayerShape],
    *,
    timeout_s: float,
) -> tuple[list[ChunkKV], dict[int, Hole]]:
    """Load the KV that a layout reuses.

    Returns a chunk per source, empty if it is not needed or was not loaded, and a hole for every
    source that could not be loaded.
    """
    sources = list(dict.fromkeys([segment.source for segment in layout.reused]))
    wanted = [identities[source] for source in sources]
    try:
        found: list[ChunkKV | Hole] = store.get_many(wanted, timeout_s=timeout_s)
    except Exception as error:  # a failure of the store costs time, never the answer
        logger.warning("the KV store failed to load (%s); computing instead", error)
        found = [Hole(chunk_key(identity), "unreadable", None) for identity in wanted]
    kvs = [ChunkKV(())] * len(identities)
    holes = {}
    for source, identity, kv in zip(sources, wanted, found, strict=True):
        if isinstance(kv, Hole):
            holes[source] = kv
        elif _fits(kv, identity, shapes):
            kvs[source] = kv
        else:  # a writer to an unencrypted store can forge chunks
            holes[source] = Hole(key := chunk_key(identity), "damaged", None)
            logger.warning(
                "a stored chunk does not match the model's layers; recomputing. Delete it: %s", key
            )
    return kvs, holes


def _fits(kv: ChunkKV, identity: ChunkIdentity, shapes: Sequence[LayerShape]) -> bool:
    """Whether a chunk has the model's layers, heads and head dims, and the type asked for."""
    if len(kv.layers) != len(shapes):
        return False
    for layer, shape in zip(kv.layers, shapes, strict=True):
        rows = shape.num_heads, len(identity.token_ids)
        keys = (*rows, shape.key_dim)
        values = (*rows, shape.value_dim)
        if layer.scales is None and identity.kv_dtype == "auto":
            if (layer.keys.shape, layer.values.shape) != (keys, values):
                return False
            continue
        wanted = [part.shape for part in parts(identity.kv_dtype, layer.keys.dtype, keys, values)]
        if [tensor.shape for tensor in layer.tensors] != wanted:
            return False
    return True
