"""How much stored KV to reuse: decide, load it, and decide again if loading fails.

The mode sets the most; a refusal, a failure of the store or the costs of ``auto`` may leave less. A
failure of the store costs time, never the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvrag.blend.cost import Price
from kvrag.blend.layout import Layout, lay_out
from kvrag.blend.stitch import HistoryMatch
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.layers import parts
from kvrag.model import CausalLM
from kvrag.model.lock import Clock
from kvrag.model.rows import LayerShape
from kvrag.prompt.plan import Plan
from kvrag.store import TieredStore
from kvrag.types import ChunkIdentity, ChunkKV, Hole, Mode

logger = logging.getLogger(__name__)

# Reasons that don't apply when the store failed: the KV may be stored, but could not be read.
_NOT_STORED = frozenset(
    {"no stored KV for this prompt", "no stored KV for the head of this prompt"}
)

# Maps the layout with all possible reuse to ``(layout to use, reason if it reuses less)``.
Choice = Callable[[Layout], tuple[Layout, str | None]]


def joined_reasons(failure: str | None, reason: str | None) -> str | None:
    """Join a store failure, if any, with the reason why less is reused than requested."""
    if failure and reason in _NOT_STORED:
        reason = None
    return "; ".join(filter(None, (failure, reason))) or None


def in_words(holes: Sequence[Hole]) -> str | None:
    """Describe the chunks that could not be loaded; ``None`` if all were."""
    if not holes:
        return None
    return (
        f"{len(holes)} stored chunk(s) could not be loaded in time or intact, and were computed: "
        f"{'; '.join(map(str, holes))}"
    )


def decide_plan(
    plan: Plan, mode: Mode, cheapest: Choice | None, history: HistoryMatch | None = None
) -> tuple[Layout, str | None]:
    """Lay out a plan and call :func:`decide`; add the plan's own reasons to the result.

    ``history`` are the first rows of the prompt that an earlier request has computed.
    """
    layout = lay_out(plan)
    reason = plan.reason
    if history is not None:
        layout = layout.behind(history.num_rows, history.num_exact)
    if reason is None and mode == "prefix" and plan.kv_dtype != "auto":
        reason = (
            f"mode 'prefix' reuses exact KV only, and this store's is rounded to {plan.kv_dtype}"
        )
    if reason is not None:
        return layout.only_live(), reason
    layout, reason = decide(layout, mode, cheapest)
    if mode == "full":
        return layout, reason
    return layout, joined_reasons(plan.fault or plan.miss_reason, reason)


def outcome_of(plan: Plan, mode: Mode, price: Price | None) -> tuple[Mode, str | None]:
    """Predict the mode of a plan if all its KV loads, and the reason if it reuses less."""
    layout, reason = decide_plan(plan, mode, None if price is None else price.cheapest)
    if not layout.reused:
        return "full", reason
    return "prefix" if layout.is_exact and plan.kv_dtype == "auto" else "stitch", reason


def decide(layout: Layout, mode: Mode, cheapest: Choice | None = None) -> tuple[Layout, str | None]:
    """Choose how much of the possible reuse to use.

    Parameters
    ----------
    layout
        The layout with all possible reuse.
    mode
        ``stitch``: everything. ``prefix``: leading exact segments. ``auto``: the cheapest layout.
        ``full``: nothing.
    cheapest
        Cost model of ``auto``; see :meth:`kvrag.blend.cost.Price.cheapest`.

    Returns
    -------
    layout : Layout
        The layout to use.
    reason : str or None
        The reason if it reuses less than the mode allows.
    """
    if mode == "full":
        return layout.only_live(), None
    if not layout.reused:
        if layout.history:
            return layout, None
        return layout.only_live(), "no stored KV for this prompt"
    if mode == "prefix":
        head = layout.only_exact_head()
        if head.reused or head.history:
            return head, None
        return head, "no stored KV for the head of this prompt"
    if cheapest is None or mode == "stitch":
        return layout, None
    return cheapest(layout)


def read(
    model: CausalLM,
    store: TieredStore,
    plan: Plan,
    mode: Mode,
    price: Price | None,
    timeout_s: float,
    clock: Clock,
    history: HistoryMatch | None,
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
        reason = joined_reasons(joined_reasons(in_words(list(holes.values())), also), reason)
        if not layout.reused:
            kvs = []
    return layout, reason, kvs, holes


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
    num_rows = len(identity.token_ids)
    for layer, shape in zip(kv.layers, shapes, strict=True):
        keys = shape.num_heads, num_rows, shape.key_dim
        values = shape.num_heads, num_rows, shape.value_dim
        if layer.scales is None and identity.kv_dtype == "auto":
            if (layer.keys.shape, layer.values.shape) != (keys, values):
                return False
            continue
        if [tensor.shape for tensor in layer.tensors] != [
            part.shape for part in parts(identity.kv_dtype, layer.keys.dtype, keys, values)
        ]:
            return False
    return True
