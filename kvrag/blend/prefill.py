"""The query-time stages in their order, for one planned prompt: load, stitch, select, repair. Ends with the first token's logits."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kvrag.blend.decide import because, decide
from kvrag.blend.layout import Layout
from kvrag.blend.repair import deviation, may_shift, probe, repair
from kvrag.blend.select import select_rows, strategy_of
from kvrag.blend.stitch import stitch
from kvrag.config import RepairConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.model import CausalLM
from kvrag.model.kv import KVBuffer, LayerShape
from kvrag.model.plain import Extend, PlainLM
from kvrag.prompt.plan import Plan, lay_out, why_inexact
from kvrag.store import TieredStore
from kvrag.store.layers import parts
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Exactness, Hole, KVDtype, Missed, Mode

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Clock:
    """Milliseconds per stage."""

    timings_ms: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings_ms[name] = self.timings_ms.get(name, 0.0) + (time.perf_counter() - start) * 1e3


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefilled prompt, ready to decode.

    ``extend`` computes the rows that follow, ``logits`` is ``(vocab,)`` of the last row, ``buffer`` holds the prompt's KV (``None`` where
    the model keeps it in a cache of its own); the counts and ``exactness`` are those of :class:`~kvrag.types.Accounting`. ``missed`` may be
    written back.
    """

    extend: Extend
    buffer: KVBuffer | None
    logits: torch.Tensor
    token_ids: list[int]
    num_repaired: int
    num_live: int
    exactness: Exactness
    loaded_bytes: int
    fallback_reason: str | None
    has_other_prefix: bool
    missed: Missed | None = None
    holes: tuple[Hole, ...] = ()
    kv_dtype: KVDtype = "auto"


def load(
    identities: list[ChunkIdentity], store: TieredStore, *, timeout_s: float
) -> tuple[dict[ChunkIdentity, ChunkKV | None], list[Hole]]:
    """Load chunks; what is late, damaged or gone is ``None`` and a hole, and so is everything if the store breaks."""
    try:
        got = store.get_many(identities, timeout_s=timeout_s)
    except Exception as error:  # a fault below costs time, never the answer
        logger.warning("the KV store failed to load (%s); computing instead", error)
        got = [Hole(chunk_key(identity), "unreadable", None) for identity in identities]
    pairs = list(zip(identities, got, strict=True))
    return {i: kv if isinstance(kv, ChunkKV) else None for i, kv in pairs}, [h for _, h in pairs if isinstance(h, Hole)]


def in_words(holes: Sequence[Hole]) -> str | None:
    """Say which chunks could not be loaded, and why; ``None`` if there are none."""
    what = "; ".join(map(str, holes))
    return (
        f"{len(holes)} stored chunk(s) could not be loaded in time or intact, and were computed: {what}"
        if holes
        else None
    )


def _drop_misfits(loaded: dict[ChunkIdentity, ChunkKV | None], shapes: list[LayerShape]) -> set[ChunkKey]:
    """Drop chunks that have not the model's layers, and return their keys: without a MAC, anyone who can write to a store can lie."""
    misfits = {identity for identity, kv in loaded.items() if kv is not None and not _fits(kv, identity, shapes)}
    for identity in misfits:
        loaded[identity] = None
        logger.warning(
            "a stored chunk has not the layers of the model, and is computed; delete it: %s", chunk_key(identity)
        )
    return set(map(chunk_key, misfits))


def _fits(kv: ChunkKV, identity: ChunkIdentity, shapes: list[LayerShape]) -> bool:
    if len(kv.layers) != len(shapes):
        return False
    for layer, shape in zip(kv.layers, shapes, strict=True):
        rows = shape.num_heads, len(identity.token_ids)
        wanted = [(*rows, shape.key_dim), (*rows, shape.value_dim)]
        if layer.scales is not None:
            try:
                wanted = [part.shape for part in parts(kv.kv_dtype, layer.scales.dtype, wanted[0], wanted[1])]
            except StoreError:
                return False
        if [tuple(tensor.shape) for tensor in layer.tensors] != wanted:
            return False
    return True


def prefill(
    model: CausalLM,
    store: TieredStore,
    plan: Plan,
    *,
    mode: Mode,
    config: RepairConfig,
    max_new_tokens: int,
    load_timeout_s: float,
    clock: Clock,
) -> Prefilled:
    """Bring a prompt's KV into a buffer with room for the answer, by as much reuse as the mode allows and pays.

    Parameters
    ----------
    model, store
        Where forwards and stored KV come from.
    plan
        The prompt.
    mode, config
        How much to reuse and how to repair.
    max_new_tokens
        Room for the answer.
    load_timeout_s
        What planning has left of the time that the store has; chunks that are later are computed.
    clock
        Collects milliseconds per stage.
    """
    refused = None if mode == "full" else too_long_to_reuse(model, len(plan.token_ids) + max_new_tokens)
    refused = refused or why_inexact(plan, mode)
    mode = "full" if refused else mode
    wanted = decide(lay_out(plan, _present(plan))[0], mode, config, num_layers=model.num_layers)[0]
    loaded: dict[ChunkIdentity, ChunkKV | None] = {}
    holes: list[Hole] = []
    if wanted.reused:  # nothing is read for a prompt that will be prefilled anyway
        with clock.stage("load"):
            needed = [plan.identities[segment.source] for segment in wanted.reused]
            loaded, holes = load(list(dict.fromkeys(needed)), store, timeout_s=load_timeout_s)
            holes += [Hole(key, "damaged", None) for key in _drop_misfits(loaded, model.shapes)]
    possible, kvs = lay_out(plan, loaded if wanted.reused else _present(plan))
    layout, reason = decide(possible, mode, config, num_layers=model.num_layers)
    if mode != "full":
        reason = because(in_words(holes), because(plan.fault, reason))
    token_ids = plan.token_ids
    buffer = model.buffer(layout.num_tokens + max_new_tokens)
    num_bytes = sum(kv.num_bytes for kv in kvs) if layout.reused else 0
    used_dtypes = {kvs[segment.source].kv_dtype for segment in layout.reused}
    loaded.clear()  # the buffer is the second copy of the prompt's KV; don't keep a third while the model runs
    selected, logits = _blend(model, buffer, layout, kvs, torch.tensor(token_ids), config, clock)
    num_stale = sum(s.num_rows for s in layout.stale)
    # Otherwise every row was computed, whatever was loaded.
    has_cached = sum(s.num_rows for s in layout.reused) > len(selected)
    kv_dtype: KVDtype = next((d for d in used_dtypes if d != "auto" and has_cached), "auto")
    is_exact = len(selected) == num_stale and kv_dtype == "auto"
    exactness: Exactness = "full" if not layout.reused else "exact" if is_exact else "repaired"
    return Prefilled(
        extend=_extension(model, buffer),
        buffer=buffer,
        logits=logits,
        token_ids=token_ids,
        num_repaired=len(selected),
        num_live=layout.num_live,
        exactness=exactness,
        loaded_bytes=num_bytes,
        fallback_reason=refused or reason,
        has_other_prefix=any(segment.is_mismatched for segment in layout.stale),
        holes=tuple(holes),
        kv_dtype=kv_dtype,
    )


def too_long_to_reuse(model: CausalLM, total: int) -> str | None:
    """Return why stored KV does not hold for prompt and answer of ``total`` tokens, or ``None`` where it does."""
    if total <= model.reuse_window:
        return None
    return f"prompt and answer of {total} tokens turn by other angles than stored KV of {model.reuse_window}"


def prefill_plain(model: PlainLM, plan: Plan, *, max_new_tokens: int, clock: Clock) -> Prefilled:
    """Bring a prompt through a model whose KV is not reused.

    Parameters
    ----------
    model
        Where forwards come from, and why nothing is reused.
    plan, max_new_tokens, clock
        As for :func:`prefill`.
    """
    token_ids = plan.token_ids
    with clock.stage("prefill"):
        logits, extend = model.prefill(torch.tensor(token_ids), max_new_tokens=max_new_tokens)
        _wait_for(logits)
    return Prefilled(
        extend=extend,
        buffer=None,
        logits=logits,
        token_ids=token_ids,
        num_repaired=0,
        num_live=len(token_ids),
        exactness="full",
        loaded_bytes=0,
        fallback_reason=model.refusal,
        has_other_prefix=False,
    )


def _extension(model: CausalLM, buffer: KVBuffer) -> Extend:
    """Return what computes the rows after the last valid one of a buffer."""

    def extend(ids: torch.Tensor) -> torch.Tensor:
        rows = slice(buffer.length, buffer.length + len(ids))
        return model.forward(ids, rows, buffer, logits=len(ids))[0][0]

    return extend


def _wait_for(logits: torch.Tensor) -> None:
    """Wait for the device, so that a stage's time is its own."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)


def _present(plan: Plan) -> dict[ChunkIdentity, ChunkKV | None]:
    """Stand-ins for KV that the index promises: enough to lay out and decide before anything is read."""
    return {identity: ChunkKV(()) for identity in plan.identities}


def _blend(
    model: CausalLM,
    buffer: KVBuffer,
    layout: Layout,
    kvs: list[ChunkKV],
    ids: torch.Tensor,
    config: RepairConfig,
    clock: Clock,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stitch (and let go of ``kvs``), measure what the strategy needs, select, repair: repaired rows, last row's logits."""
    rotary = stored = selected = None
    needs = strategy_of(config).needs if layout.stale else frozenset()
    if not needs:  # what will be computed is known: it need not be stitched
        with clock.stage("select"):
            selected = select_rows(layout, config)
    if layout.reused:
        with clock.stage("stitch"):
            rotary, keep = model.rotary(layout.num_tokens), may_shift(layout, selected, config.shift)
            stored = stitch(buffer, layout, kvs, rotary, skip=None if keep else selected, keep=keep)
    kvs.clear()
    if selected is None:
        with clock.stage("select"):
            mass = probe(model, buffer, layout, ids, span=config.probe_span) if "mass" in needs else None
            change = None
            if "deviation" in needs:
                change = deviation(model, buffer, layout, ids, check_layer=config.check_layer)
                if stored is not None:  # up to there, every row is a fresh one now
                    stored.forget(range(config.check_layer + 1))
            selected = select_rows(layout, config, mass=mass, deviation=change)
    with clock.stage("repair" if layout.reused else "prefill"):
        again = None if stored is None else stored.place_again
        logits = repair(model, buffer, layout, ids, selected, shift=config.shift, rotary=rotary, place_again=again)
        _wait_for(logits)
    return selected, logits
