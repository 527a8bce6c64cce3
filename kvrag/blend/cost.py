"""The cost model behind ``auto``: measured on the loaded model at first use, cached on disk.

A forward costs what forwards of similar size took, plus a price per (row, key) pair. (On an
accelerator a forward of 16 rows may take as long as one of hundreds.) Loading and stitching cost a
price per row. Only ``auto`` asks for predictions.

Requests correct the model. If loading from a tier or stitching takes more than twice as long as
predicted, or less than half, the observed price replaces the old price. If forwards do, or if
reuse is refused many times in a row, the model is measured again.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from kvrag.blend.layout import Layout, Segment, num_rows_of
from kvrag.blend.repair import CHECK_LAYER, REREAD
from kvrag.blend.select import filled, needs_of, num_selected
from kvrag.cache import keep
from kvrag.config import RepairConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.model.lm import CausalLM, LoadedModel
from kvrag.model.load import kept_file
from kvrag.model.lock import WAITED
from kvrag.model.rows import Rows
from kvrag.model.shared import BUCKETS
from kvrag.model.steps import scratch
from kvrag.progress import Progress
from kvrag.prompt.plan import Plan
from kvrag.store import TieredStore
from kvrag.types import ChunkKey

logger = logging.getLogger(__name__)

VERSION = "4"  # part of the cache file's name, so versions don't overwrite each other's costs
# Rows of the timed forwards: those of recorded forwards, and more where these take no longer.
SIZES = (*BUCKETS, 4096, 8192, 16384)
ENOUGH_MS = 200.0  # a forward slower than this is the largest that is timed
ROUNDS = 3  # most runs of what is timed; the fastest counts, and the first may record it
PATIENCE_MS = 1000.0  # if runs together take longer, two suffice
COPIED = 2**26  # bytes of the timed copy to a CUDA device
# Initial guesses: 1 GB/s from disk, nothing from memory, which is not copied, and 1.5 GB/s to
# stitch on a CPU. Requests correct them.
DISK_MS_PER_BYTE = 1e-6
STITCH_MS_PER_BYTE = 6.7e-7
# Repaired reuse must cost less than this fraction of exact reuse. A smaller saving doesn't justify
# an approximation, and may be a prediction error.
MARGIN = 0.96
WRONG = 2.0  # a prediction off by more than this factor is wrong
NOTABLE_MS = 20.0  # smaller errors are ignored
REFUSALS = 8  # consecutive refusals of reuse after which the model is measured again


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a model on this machine, in ``unit``.

    Attributes
    ----------
    forwards
        Cost of forwards without their attention: numbers of rows, ascending, and a cost for each.
    row
        Cost per row beyond the last point.
    pair
        Cost per (row, key) pair.
    each
        Other costs by name: per row loaded from a tier (``"host"``, ``"disk"``, ...), per stitched
        row (``"stitch"``), and per repaired prompt besides its forwards (``"request"``). They are
        guesses until a request proves them wrong.
    """

    forwards: tuple[tuple[float, ...], tuple[float, ...]]
    row: float
    pair: float
    each: Mapping[str, float]
    unit: str = "ms"

    def of(self, name: str) -> float:
        """Return the cost per row (or per request); 0 if unknown."""
        return self.each.get(name, 0.0)

    def after(self, name: str, took: float, count: float) -> Costs:
        """Return the costs, with ``name`` set to ``took / count`` if ``took`` was mispredicted."""
        if not count or not is_wrong(took, self.of(name) * count):
            return self
        return replace(self, each={**self.each, name: took / count})

    @property
    def floor(self) -> float:
        """Number of rows that take as long as a forward takes for itself."""
        return self.forwards[1][0] / max(self.row, 1e-9)

    def of_forward(self, rows: float, pairs: float) -> float:
        """Return the cost of a forward over ``rows`` rows with ``pairs`` (row, key) pairs."""
        return (
            float(np.interp(rows, *self.forwards))
            + pairs * self.pair
            + max(0.0, rows - self.forwards[0][-1]) * self.row
        )

    def in_words(self, cost: float) -> str:
        """Format a cost: ``18.4 s``, ``340 ms``, or ``as much as 1,120 tokens``."""
        if self.unit != "ms":
            return f"as much as {cost:,.0f} {self.unit}"
        if cost >= 1000:
            return f"{cost / 1e3:.1f} s"
        return f"{cost:.0f} ms"


def is_wrong(took: float, predicted: float) -> bool:
    """Whether a prediction was off by a factor of :data:`WRONG` and by :data:`NOTABLE_MS`.

    Both arguments are in milliseconds.
    """
    return (
        max(took, predicted) > WRONG * min(took, predicted) and abs(took - predicted) > NOTABLE_MS
    )


# Costs of a model that can't be measured: 1 per computed row, and 160 per repaired prompt.
IN_ROWS = Costs(((0.0,), (0.0,)), 1.0, 0.0, {"request": 160.0}, unit="tokens")


@dataclass(frozen=True, slots=True)
class Price:
    """Cost model of a prompt's layouts. ``stored`` holds ``(tier, rows)`` per source."""

    costs: Costs
    config: RepairConfig
    num_layers: int
    stored: Sequence[tuple[str, int]] = ()

    def of(self, layout: Layout) -> float:
        """Return the cost of loading, stitching and computing a layout."""
        loaded = self.loaded({segment.source for segment in layout.reused})
        return (
            self.of_forwards(layout)
            + self.costs.of("stitch") * layout.num_reused
            + sum([self.costs.of(tier) * rows for tier, rows in loaded.items()])
            + self.costs.of("request") * bool(layout.stale)
        )

    def loaded(self, sources: Collection[int]) -> Counter[str]:
        """Return the number of rows loaded from each tier. Chunks are loaded whole."""
        rows = Counter[str]()
        for tier, count in map(self.stored.__getitem__, sources if self.stored else ()):
            rows[tier] += count
        return rows

    def of_forwards(self, layout: Layout) -> float:
        """Return the cost of all forwards: those before the probe, probe, deviation and repair.

        A repaired row counts as if it saw every key, because the residual shift also propagates its
        change to other rows.
        """
        config = self.config
        needs = needs_of(layout, config)
        layout = filled(layout, config, self.costs.floor)
        total = layout.num_tokens

        def forward(segments: Sequence[Segment], more: int) -> float:
            return self.costs.of_forward(
                num_rows_of(segments) + more,
                sum([s.num_rows * (s.start + s.stop) / 2 for s in segments]) + more * total,
            )

        cost = forward(layout.live, num_selected(layout, config))
        if layout.ahead:
            cost += forward(layout.ahead, 0)
        if "mass" in needs:
            cost += config.probe_span[1] * forward(layout.live, min(layout.num_suffix, REREAD))
        if "deviation" in needs:
            cost += (CHECK_LAYER + 1) / self.num_layers * self.costs.of_forward(total, total**2 / 2)
        return cost

    def cheapest(self, layout: Layout) -> tuple[Layout, str | None]:
        """Return the cheapest layout, and the reason if it reuses less than ``layout``.

        Chunks that cost more to load than to compute are dropped. The rest, repaired, is then
        compared with exact reuse alone.
        """
        reuse = self._lean(layout)
        exact = self._lean(
            Layout(
                tuple(
                    [
                        Segment(s.start, s.stop, "live") if s in layout.stale else s
                        for s in layout.segments
                    ]
                )
            )
        )
        price = self.of(reuse)
        if layout.stale and (not reuse.stale or price >= MARGIN * self.of(exact)):
            return exact, self._reason(layout, exact)
        count = len({s.source for s in layout.reused} - {s.source for s in reuse.reused})
        if count:
            return reuse, (
                f"{count} stored chunk(s) would cost more to load than to compute; "
                + self._estimates({"with them": self.of(layout), "without": price})
            )
        return reuse, None

    def _reason(self, layout: Layout, exact: Layout) -> str:
        """Explain why repaired reuse is rejected, with its cost and that of the alternatives."""
        price = self.of(layout)
        other = self.of(exact)
        costs = {
            "reuse": price,
            "exact reuse alone": other,
            "full prefill": self.of(layout.only_live()),
        }
        if not (exact.reused or exact.history):
            del costs["exact reuse alone"]
        return (
            f"repaired reuse would not pay; {self._estimates(costs)}"
            + ", and an approximation must save 4%" * (price < other)
        )

    def _estimates(self, costs: Mapping[str, float]) -> str:
        return "estimated: " + ", ".join(
            f"{name} {self.costs.in_words(cost)}" for name, cost in costs.items()
        )

    def _lean(self, layout: Layout) -> Layout:
        """Drop the sources that cost more to load than to compute; few tiers are that slow.

        They are dropped one by one: a forward may have room for some of them, but not for all.
        """
        if (
            max([self.costs.of(tier) for tier, _ in self.stored], default=0.0)
            + self.costs.of("stitch")
            < self.costs.row / 2
        ):
            return layout
        sources = {segment.source for segment in layout.reused}
        nothing = layout.without(sources)
        for source in sources:
            layout = min(layout, layout.without({source}), key=self.of)
        return min(layout, nothing, key=self.of)


class CostModel:
    """Costs of an engine: its model's (measured, cached) and its store's (from requests)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.costs: Costs | None = None
        self._loaded = loaded
        self._lock = threading.RLock()
        # Number of wrong predictions after which the costs are forgotten. It doubles every time,
        # because the machine may stay busy for long.
        self._patience = 1
        self._misses = self._refusals = 0

    def known(self) -> Costs:
        """Return the costs. Measure them if none are cached, or if predictions proved wrong."""
        with self._lock:
            if self.costs is None:
                self.costs = costs_of(self._loaded.reusable, self._file)
            return self.costs

    def price(self, plan: Plan, config: RepairConfig, store: TieredStore) -> Price | None:
        """Return the cost model for layouts of a plan; ``None`` for a plan without stored KV."""
        if not plan.identities:
            return None

        def tier_of(key: ChunkKey) -> str:
            return next((t.name for t in store.tiers if t.identity(key) is not None), store.name)

        return Price(
            self.known(),
            config,
            self._loaded.reusable.depth,
            [(tier_of(chunk_key(each)), len(each.token_ids)) for each in plan.identities],
        )

    def learn(
        self, price: Price, layout: Layout, late: Collection[int], ms: Mapping[str, float]
    ) -> None:
        """Correct the costs by the measured milliseconds per stage of a request.

        ``layout`` is the layout used; ``late`` are the sources that could not be loaded.
        """
        with self._lock:
            # Another request may have had them forgotten meanwhile.
            costs = self.costs or IN_ROWS
            if costs.unit != "ms":
                return
            used = {*late, *(s.source for s in layout.reused)}
            rows = price.loaded(used)
            if rows:  # tiers are read concurrently, so the slowest determines the time
                tier = max(rows, key=lambda tier: costs.of(tier) * rows[tier])
                costs = costs.after(tier, ms.get("load", 0.0), rows[tier])
            took = sum(ms.get(stage, 0.0) for stage in ("select", "repair", "prefill"))
            # Copies to a device run on, and later stages wait.
            copied = layout.num_reused * (self._loaded.lm.device.type == "cuda")
            costs = costs.after("stitch", ms.get("stitch", 0.0), layout.num_reused - copied)
            forwards = price.of_forwards(layout) + price.costs.of("stitch") * copied
            took += ms.get("stitch", 0.0) * (copied > 0)
            predicted = forwards + (price.costs.of("request") if layout.stale else 0.0)
            if layout.stale and is_wrong(took, predicted):
                # Cap at the forwards' cost: a delay by other requests must not prevent all reuse.
                costs = replace(
                    costs, each={**costs.each, "request": min(max(0.0, took - forwards), forwards)}
                )
            if costs is not self.costs:
                self.costs = costs
                keep(self._file, json.dumps(asdict(costs)))
            self._judge(
                took, predicted, is_refused=not layout.history and len(used) < len(price.stored)
            )

    def _judge(self, took: float, predicted: float, *, is_refused: bool) -> None:
        """Forget the costs after wrong predictions, or after many refusals of reuse.

        The next request, or the next process, measures the model again and tries slow tiers again.
        """
        self._misses += is_wrong(took, predicted)
        self._refusals = self._refusals + 1 if is_refused else 0
        if self._misses >= self._patience:
            logger.warning(
                "a prompt took %.0f ms to compute, and %.0f ms were predicted; "
                "measuring the prices again",
                took,
                predicted,
            )
        elif self._refusals < REFUSALS * self._patience:
            return
        self.costs = None
        with suppress(OSError):
            self._file.unlink()
        self._patience *= 2
        self._misses = self._refusals = 0

    @cached_property
    def _file(self) -> Path:
        # Everything that changes the times: other machines and drivers measure anew.
        return kept_file(
            "cost",
            self._loaded.reusable,
            self._loaded.fingerprint,
            threads=str(torch.get_num_threads()),
            cores=str(os.cpu_count()),
            processor=_line("/proc/cpuinfo", "model name") or platform.processor(),
            driver=f"{torch.version.cuda}, {_line('/proc/driver/nvidia/version', 'NVRM')}",
            prices=VERSION,
        )


def _line(path: str, beginning: str) -> str:
    """Return the first line of a file with this beginning; empty if there is none."""
    with suppress(OSError, StopIteration):
        return next(
            line for line in Path(path).read_text().splitlines() if line.startswith(beginning)
        )
    return ""


def costs_of(lm: CausalLM, file: Path) -> Costs:
    """Read a model's costs from the cache file, or measure and cache them.

    Return :data:`IN_ROWS` if measuring fails.
    """
    with suppress(OSError, ValueError):
        return TypeAdapter(Costs).validate_json(file.read_bytes())
    try:
        with Progress("measuring what prompts cost on this machine"):
            costs = measured(lm)
    except Exception as error:  # out of memory, or a model that rejects random tokens
        logger.info(
            "the costs of this model can't be measured (%s); "
            "mode 'auto' goes by the number of rows",
            error,
        )
        return IN_ROWS
    keep(file, json.dumps(asdict(costs)))
    return costs


@torch.inference_mode()
def measured(lm: CausalLM) -> Costs:
    """Time forwards, and a copy to the device; derive the costs.

    Each forward runs several times, so a model that records its forwards has recorded them.
    """

    def taken(rows: int, before: int = 0) -> float:
        ids = torch.arange(rows) % lm.vocab_size
        at = Rows.span(before, before + rows)
        with scratch(lm, at.stop) as kv:
            return _best_ms(lambda: lm.forward(ids, at, kv)[0])

    times = dict[int, float]()
    for rows in SIZES:
        if rows > lm.most_timed:
            break
        times[rows] = ms = taken(rows)
        # As long as rows take no time of their own, a slow model's forwards tell nothing of them.
        least = min(times.values())
        if ms > min(4 * least, max(ENOUGH_MS, 1.5 * least)):
            break
    sizes = tuple(times)
    most = max(times)
    # Behind many keys, the same rows tell what a pair costs.
    before = min(64 * most, 8192, lm.reuse_window - most)
    pair = max(0.0, taken(most, before) - times[most]) / (most * before)
    # If more rows took less, the machine was busy before.
    own = tuple(
        [max(0.0, min([*times.values()][n:]) - pair * rows**2 / 2) for n, rows in enumerate(sizes)]
    )
    row = max(0.0, own[-1] - float(np.interp(most / 2, sizes, own))) / (most / 2)
    return Costs(
        (sizes, own),
        row,
        pair,
        {
            "disk": lm.kv_bytes_per_token * DISK_MS_PER_BYTE,
            "stitch": lm.kv_bytes_per_token * _stitch_ms(lm.device),
            "request": max(0.0, own[0] - row * SIZES[0]),
        },
    )


def _stitch_ms(device: torch.device) -> float:
    """Return the milliseconds to stitch a byte; on CUDA, those to copy it to the device."""
    if device.type != "cuda":
        return STITCH_MS_PER_BYTE
    source = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    return _best_ms(lambda: source.to(device, non_blocking=True)) / COPIED


def _best_ms(run: Callable[[], Tensor]) -> float:
    """Return the milliseconds of the fastest of a few runs."""
    times = list[float]()
    while len(times) < (ROUNDS if sum(times) < PATIENCE_MS else 2):
        times.append(_ms(run))
    return min(times)


def _ms(run: Callable[[], Tensor]) -> float:
    """Return the milliseconds until a result is ready.

    Excludes the time that this thread waited for the model or computed steps of other requests.
    """
    start = time.perf_counter()
    lost = WAITED.seconds
    run().flatten()[-1].item()
    return (time.perf_counter() - start - (WAITED.seconds - lost)) * 1e3
