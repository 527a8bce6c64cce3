"""Prefill of a planned prompt: decide, load, stitch, select, repair. Returns the first logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor

from kvrag.blend.cost import CostModel
from kvrag.blend.covariance import RowCovariance
from kvrag.blend.layout import Layout, sources_of
from kvrag.blend.repair import REREAD, deviation, fill, may_shift, probe, repair
from kvrag.blend.reuse import joined_reasons, read
from kvrag.blend.select import Signal, breaks_of, filled, needs_of, select_rows
from kvrag.blend.slide import SlidingWindow
from kvrag.blend.stitch import HistoryMatch, filling, stitch
from kvrag.config import RepairConfig
from kvrag.kv.snapshot import Layers, Snapshot
from kvrag.model import CausalLM
from kvrag.model.lock import NOTABLE_S, Clock
from kvrag.model.plain import Extend, PlainLM, Run
from kvrag.model.rows import KVBuffer
from kvrag.prompt.plan import Plan
from kvrag.prompt.template import PromptEncoder
from kvrag.runtime import Cancel
from kvrag.store import TieredStore
from kvrag.types import ChunkKV, Exactness, Hole, KVDtype, Mode, Source, Sources, TokenLogprob

logger = logging.getLogger(__name__)


# Rows that take about as long as a forward takes for itself, where that was not measured: on a CPU,
# and on other devices.
FLOORS = 64, 512

# Finds the rows of earlier requests that a prompt begins with.
FindHistory = Callable[..., HistoryMatch | None]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefilled prompt, ready to decode.

    Attributes that are not listed here go into :class:`~kvrag.types.Accounting`.

    Attributes
    ----------
    extend
        Computes the rows after the prompt; a sliding window may evict rows from the buffer.
    buffer
        KV of the prompt; ``None`` if the model keeps it in a cache of its own.
    logits
        Logits of the last row, ``(vocab,)``, on the host.
    num_history
        Number of first rows taken from an earlier request.
    prompt_logprobs
        Log-probabilities of the prompt's own tokens, if they were scored.
    """

    extend: Extend
    buffer: KVBuffer | None
    logits: Tensor
    token_ids: list[int]
    fallback_reason: str | None
    sources: Sources
    loaded_bytes: int = 0
    has_other_prefix: bool = False
    holes: tuple[Hole, ...] = ()
    kv_dtype: KVDtype = "auto"
    num_history: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def exactness(self) -> Exactness:
        """How the answer compares with a full prefill's."""
        if self.num_rows("computed") == len(self.token_ids):
            return "full"
        return "repaired" if self.num_rows("reused") else "exact"

    @property
    def num_exact(self) -> int:
        """Number of first rows that equal a full prefill's."""
        rows = list(self.sources)
        # A row behind reused KV has attended to it, so it is approximate even if it was computed.
        if self.exactness == "repaired":
            rows = [*takewhile(lambda run: run[0] in ("computed", "exact"), rows)]
        return sum([count for _, count in rows])

    def num_rows(self, source: Source) -> int:
        """Return the number of rows of a source."""
        return sum([count for each, count in self.sources if each == source])

    def kept(self) -> tuple[Layers, Mapping[int, Snapshot]]:
        """Return the rows and snapshots of an answered prompt."""
        if self.buffer is None:
            return cast(Run, self.extend).kept()
        return self.buffer.layers, {}

    def release(self) -> None:
        """Free the buffer's memory now, even if this object is still referenced."""
        if self.buffer is not None:
            self.buffer.layers = ()

    def accounting(self, clock: Clock) -> dict[str, Any]:
        """Return the fields of :class:`~kvrag.types.Accounting`.

        They change while the answer is decoded, because the window may evict rows.
        """
        total = len(self.token_ids)
        repaired, computed = self.num_rows("repaired"), self.num_rows("computed")
        found = dict[str, Any]()
        # Evicted rows make the answer approximate, even if no stored KV was used.
        evicted = self.extend.evicted_tokens if isinstance(self.extend, SlidingWindow) else 0
        if evicted:
            reason = joined_reasons(
                self.fallback_reason, f"{evicted} of the oldest tokens left the context window"
            )
            found = {"exactness": "repaired", "fallback_reason": reason, "evicted_tokens": evicted}
        same = (
            "exactness",
            "loaded_bytes",
            "fallback_reason",
            "has_other_prefix",
            "holes",
            "kv_dtype",
            "sources",
        )
        return {name: getattr(self, name) for name in same} | {
            "prompt_ids": self.token_ids,
            "prompt_tokens": total,
            "cached_tokens": total - computed - repaired,
            "repaired_tokens": repaired,
            "computed_tokens": computed,
            "history_tokens": self.num_history,
            "timings_ms": clock.timings_ms,
            "stages": tuple(clock.stages),
            **found,
        }


def reason_against_reuse(model: CausalLM | PlainLM, total: int) -> str | None:
    """Return the reason why prompt and answer of ``total`` tokens can't use stored KV, if any.

    Beyond ``model.reuse_window`` tokens, RoPE uses other angles than for the stored KV (longrope).
    """
    if model.refusal is not None or total <= model.reuse_window:
        return model.refusal
    return (
        f"prompt and answer ({total} tokens) exceed {model.reuse_window} tokens, "
        "where this model's RoPE scaling changes"
    )


def prefill(
    model: CausalLM,
    store: TieredStore,
    plan: Plan,
    *,
    mode: Mode,
    config: RepairConfig,
    costs: CostModel,
    max_new_tokens: int,
    load_timeout_s: float,
    clock: Clock,
    find_history: FindHistory | None = None,
    slides: bool = False,
    cancel: Cancel = None,
    run: range | None = None,
) -> Prefilled:
    """Prefill a prompt, with room for the answer.

    Parameters
    ----------
    max_new_tokens
        Most tokens of the answer; without any, the logits are empty.
    load_timeout_s
        Time left for loading: the store's deadline minus the time spent on planning.
    find_history
        Finds the rows of earlier requests that the prompt begins with.
    slides
        Whether prompt and answer exceed the context window, so that rows are evicted. A prompt
        that exceeds it alone is computed in pieces.
    cancel
        If set, ``CancelledError`` is raised between these pieces, and after waiting for the model.
    run
        Slots of the model's pool for :func:`capacity_of` rows; by default, memory is allocated.
    """
    token_ids = plan.token_ids
    buffer_of = partial(
        model.buffer, capacity_of(model, len(token_ids), max_new_tokens, slides), run=run
    )
    if slides and len(token_ids) > model.context_window:
        return _in_window(model, buffer_of(), plan, clock, cancel)
    price = None
    if mode == "auto":
        with clock.stage("price", least_s=NOTABLE_S):
            price = costs.price(plan, config, store)
    history = None if mode == "full" or find_history is None else find_history()
    layout, reason, kvs, holes = read(
        model, store, plan, mode, price, load_timeout_s, clock, history
    )
    # Counted now, because stitching empties the list.
    loaded_bytes = sum([t.nbytes for kv in kvs for layer in kv.layers for t in layer.tensors])
    buffer = buffer_of()
    with filling(buffer):
        if history and layout.history:
            with clock.stage("history"):
                history.fill(buffer.layers, layout.history.num_rows)
        selected, logits = _blended(
            model,
            buffer,
            layout,
            plan.encoder,
            torch.tensor(token_ids),
            config,
            kvs,
            clock,
            cancel,
            logits=min(1, max_new_tokens),
            floor=price.costs.floor if price else FLOORS[model.device.type != "cpu"],
        )
    if price is not None:
        with clock.stage("price", least_s=NOTABLE_S):
            costs.learn(price, layout, holes, clock.timings_ms)
    behind = buffer, layout.num_tokens
    return Prefilled(
        extend=SlidingWindow(model, *behind) if slides else model.extension(*behind),
        buffer=buffer,
        logits=logits,
        token_ids=token_ids,
        fallback_reason=reason,
        loaded_bytes=loaded_bytes,
        has_other_prefix=any(segment.is_mismatched for segment in layout.stale),
        holes=tuple(holes.values()),
        # If repair recomputed every reused row, no rounded KV is left.
        kv_dtype=plan.kv_dtype if layout.num_reused > len(selected) else "auto",
        num_history=layout.history.num_rows if layout.history else 0,
        sources=sources_of(
            layout,
            selected,
            is_rounded=plan.kv_dtype != "auto",
            num_exact=history.num_exact if history else 0,
        ),
    )


def _blended(
    model: CausalLM,
    buffer: KVBuffer,
    layout: Layout,
    encoder: PromptEncoder,
    ids: Tensor,
    config: RepairConfig,
    kvs: list[ChunkKV],
    clock: Clock,
    cancel: Cancel,
    *,
    logits: int,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Stitch, select and repair; return the repaired rows and the last row's logits, if wanted.

    ``kvs`` is emptied on the way. ``floor`` is that of :func:`~kvrag.blend.select.filled`.
    """
    selected = covariance = rotary = None
    # Recorded forwards share the model with other requests.
    turn = partial(model.lock.unless, cancel, holds=buffer.start is None)
    needs = needs_of(layout, config)
    whole = layout
    layout = filled(whole, config, floor)
    if not needs:  # select before stitching, so that selected rows needn't be stitched
        with clock.stage("select"):
            selected = select_rows(layout, config)
    if layout.reused:
        with clock.stage("stitch"):
            rotary = model.rotary(layout.num_tokens)
            # A shift compares the stored rows with the repaired ones, so it needs both.
            is_compared = may_shift(layout, selected, config.shift)
            stitch(buffer, layout, kvs, rotary, skip=None if is_compared else selected)
    kvs.clear()  # the buffer holds a copy; don't keep the loaded KV while the model runs
    if selected is None:
        with clock.stage("select"), turn():
            if layout is not whole:
                fill(model, buffer, layout, ids)
            measured = _measured(model, buffer, layout, encoder, ids, config, needs)
            selected = select_rows(layout, config, **measured)
            covariance = measured.get("covariance")
    with clock.stage("repair" if layout.reused or layout.history else "prefill"), turn():
        found = repair(
            model,
            buffer,
            layout,
            ids,
            selected,
            shift=config.shift,
            rotary=rotary,
            covariance=covariance,
            logits=logits,
        )
        found = found.cpu()  # waits until the device has computed everything
    return selected, found


def _measured(
    model: CausalLM,
    buffer: KVBuffer,
    layout: Layout,
    encoder: PromptEncoder,
    ids: Tensor,
    config: RepairConfig,
    needs: frozenset[Signal],
) -> dict[str, Any]:
    """Measure the strategy's signals, and the covariance if rows are shifted by it."""
    measured = dict[str, Any]()
    prompt = model, buffer, layout, ids
    if "breaks" in needs:
        measured["breaks"] = breaks_of(encoder.token_texts(ids.tolist()))
    if "mass" in needs:
        measured["mass"] = probe(*prompt, span=config.probe_span)
    if "deviation" in needs:
        measured["deviation"] = deviation(*prompt)
    if "covariance" in needs or config.shift:
        recorded = model.recorded
        run = None if recorded is None or buffer.start is None else recorded.run
        measured["covariance"] = RowCovariance.of(buffer, layout, measured.get("mass"), run=run)
    return measured


def capacity_of(
    model: CausalLM | PlainLM, num_tokens: int, max_new_tokens: int, slides: bool
) -> int:
    """Return the number of rows of a request's buffer."""
    # The probe reads rows again behind the prompt, before the answer takes their place.
    return model.context_window if slides else num_tokens + max(max_new_tokens, REREAD)


def _in_window(
    model: CausalLM, buffer: KVBuffer, plan: Plan, clock: Clock, cancel: Cancel
) -> Prefilled:
    """Prefill a prompt that is longer than the context window, with a sliding window."""
    ids = torch.tensor(plan.token_ids)
    window = SlidingWindow(model, buffer)
    buffer.events = ()  # nothing is stitched
    with clock.stage("prefill"):
        logits = window.prefill(ids, cancel).cpu()
    return Prefilled(
        window,
        buffer,
        logits,
        plan.token_ids,
        plan.reason,
        (("computed", len(ids)),),
    )
