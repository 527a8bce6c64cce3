"""What each way of prefilling a prompt costs: measured on the loaded model at first use, corrected by requests, kept for later processes.

A price is linear: what a forward costs in any case, what each of its rows adds, and each key that a row sees; what each row adds that is
loaded or stitched. Only ``auto`` asks for prices.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from pydantic import TypeAdapter

from kvrag.blend.layout import Layout, Segment, num_rows_of
from kvrag.blend.select import needs_of, num_selected
from kvrag.config import RepairConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.identity.weights import keep
from kvrag.model.attention import ragged_attention
from kvrag.model.lm import CausalLM, LoadedModel
from kvrag.model.load import kept_file
from kvrag.model.rows import Limits, Rows
from kvrag.model.turns import lost_s
from kvrag.prompt.plan import Plan
from kvrag.store import TieredStore
from kvrag.threads import fork_lock

logger = logging.getLogger(__name__)

SMALL, LARGE = 16, 2048  # rows of the smallest and of the largest forward that is timed
ENOUGH_MS = 200.0  # nothing larger is timed after a forward that takes so long
PATIENCE_MS = 1000.0  # forwards that took longer together are not timed again
MEMORY = 0.8  # what observations of before count for beside a new one
GUESS_ROWS = 50  # that a guess counts for
BYTES_PER_MS = {"disk": 1e6, "host": 2e7, "gpu": 1e8, "stitch": 1.5e6}
"""First guesses, until a request tells: 1 GB/s from a disk, 20 from memory, where nothing is copied, and 1.5 stitched."""
KEPT_EVERY = 16  # requests
MARGIN = 0.9  # of an exact answer's price; what saves less is not worth an approximation, and may be an error of the prediction

Amount = tuple[float, float]
"""A cost, and how many rows or requests it is for."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model costs where it runs, in ``unit``.

    ``forward`` is the cost of any forward, ``row`` of each row that it computes, ``pair`` of each key that a row sees. The rest goes by
    name, guessed at first and then ``observed``: ``"host"``, ``"disk"`` and other tiers, for each row that is loaded from there;
    ``"stitch"``, for each row that is stitched; ``"request"``, for each repaired prompt, besides its forwards; and ``"forward"``, what
    forwards took for what was predicted.
    """

    forward: float
    row: float
    pair: float
    guessed: Mapping[str, Amount] = field(default_factory=dict)
    observed: Mapping[str, Amount] = field(default_factory=dict)
    unit: str = "ms"

    def each(self, name: str) -> float:
        """Return what one row, or one request, costs; nothing where nobody knows."""
        (guess, weight), (cost, count) = self.guessed.get(name, (0.0, 1.0)), self.observed.get(name, (0.0, 0.0))
        return (guess + cost) / (weight + count)

    def after(self, name: str, seen: Amount = (0.0, 0.0)) -> Costs:
        """Return the costs after one more request; where it saw nothing, they fall back to the guess: what was slow is tried again."""
        cost, count = self.observed.get(name, (0.0, 0.0))
        amount = cost * MEMORY + seen[0], count * MEMORY + seen[1]
        return replace(self, observed={**self.observed, name: amount})

    def of_forward(self, rows: float, pairs: float) -> float:
        """Return what a forward costs that computes ``rows``, which see ``pairs`` keys together."""
        return self.forward + rows * self.row + pairs * self.pair


IN_ROWS = Costs(0.0, 1.0, 0.0, {"request": (160.0, 1.0), "forward": (1.0, 1.0)}, unit="tokens")
"""Where nothing can be measured, rows count; a repaired prompt costs as much as 160 of them besides."""


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of one prompt's layouts; ``stored`` has, by source, the tier that its KV is in, and its rows."""

    costs: Costs
    config: RepairConfig
    num_layers: int
    stored: Sequence[tuple[str, int]] = ()

    def of(self, layout: Layout) -> float:
        """Return what a prompt costs once it is planned."""
        costs, loaded = self.costs, self.loaded({segment.source for segment in layout.reused})
        cost = costs.each("forward") * self.of_forwards(layout) + costs.each("stitch") * num_rows_of(layout.reused)
        cost += sum([costs.each(tier) * rows for tier, rows in loaded.items()])
        return cost + costs.each("request") if layout.stale else cost

    def loaded(self, sources: Collection[int]) -> Counter[str]:
        """Return how many rows are loaded, by tier; a chunk is loaded whole."""
        rows = Counter[str]()
        for tier, count in map(self.stored.__getitem__, sources if self.stored else ()):
            rows[tier] += count
        return rows

    def of_forwards(self, layout: Layout) -> float:
        """Return what the forwards cost; a repaired row counts as if it saw every key: its change is carried to other rows, too."""
        costs, config, needs = self.costs, self.config, needs_of(layout, self.config)
        live, total, repaired = layout.num_live, layout.num_tokens, num_selected(layout, config)
        pairs = sum([s.num_rows * (s.start + s.stop) / 2 for s in layout.live])
        cost = costs.of_forward(live + repaired, pairs + repaired * total)
        if "mass" in needs:
            cost += config.probe_span[1] * costs.of_forward(live, pairs)
        if "deviation" in needs:
            cost += (config.check_layer + 1) / self.num_layers * costs.of_forward(total, total * total / 2)
        return cost

    def cheapest(self, layout: Layout) -> tuple[Layout, str | None]:
        """Return the layout to use of all that is possible, and why less is reused than that.

        Prices are nearly linear in the chunks, so each is loaded or computed by its own price; then what is left, repaired, stands against
        what needs no repair.
        """
        without = [Segment(s.start, s.stop, "live") if s in layout.stale else s for s in layout.segments]
        reuse, exact = self._lean(layout), self._lean(Layout(tuple(without)))
        price, other = self.of(reuse), self.of(exact)
        if layout.stale and (not reuse.stale or price >= MARGIN * other):
            unit, price = self.costs.unit, self.of(layout)
            return exact, f"reuse would cost as much as {price:.0f} {unit} of {other:.0f} to prefill"
        count = len({s.source for s in layout.reused} - {s.source for s in reuse.reused})
        return reuse, f"{count} stored chunk(s) would cost more to load than to compute" if count else None

    def _lean(self, layout: Layout) -> Layout:
        """Return the layout without what costs more to load than to compute; mostly no tier is that slow."""
        costs = self.costs
        if max([costs.each(tier) for tier, _ in self.stored], default=0.0) + costs.each("stitch") < costs.row / 2:
            return layout
        price, sources = self.of(layout), {segment.source for segment in layout.reused}
        return layout.without({source for source in sources if self.of(layout.without({source})) < price})


class CostModel:
    """Costs of one engine: of its model, measured when they are first asked for or read from the cache, and of its store, by requests."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.costs: Costs | None = None
        self._loaded, self._lock, self._num_learned = loaded, fork_lock(), 0

    def price(self, plan: Plan, config: RepairConfig, store: TieredStore) -> Price:
        """Return the prices of a plan's layouts."""
        lm, stored = self._loaded.reusable, list[tuple[str, int]]()
        with self._lock:
            if self.costs is None:
                self.costs = costs_of(lm, self._file)
        for identity in plan.identities:
            key = chunk_key(identity)
            tier = next((tier.name for tier in store.tiers if tier.identity(key) is not None), store.name)
            stored.append((tier, len(identity.token_ids)))
        return Price(self.costs, config, lm.num_layers, stored)

    def learn(self, price: Price, layout: Layout, late: Collection[int], ms: Mapping[str, float]) -> None:
        """Learn from the milliseconds by stage of a request that used ``layout``, and could not load the sources ``late``."""
        with self._lock:
            costs = self.costs or IN_ROWS
            if costs.unit != "ms":
                return
            seen, rows = dict[str, Amount](), price.loaded({*late, *(s.source for s in layout.reused)})
            if rows:  # tiers are read at once: the time is that of the slowest
                tier = max(rows, key=lambda tier: costs.each(tier) * rows[tier])
                seen[tier] = ms.get("load", 0.0), rows[tier]
            if layout.reused:
                seen["stitch"] = ms.get("stitch", 0.0), num_rows_of(layout.reused)
            took = sum(ms.get(stage, 0.0) for stage in ("select", "repair", "prefill"))
            predicted = price.of_forwards(layout)
            if layout.stale:  # at most twice what is expected: who waited for others must not put off all reuse
                expected = costs.each("forward") * predicted
                seen["request"] = min(max(0.0, took - expected), expected), 1.0
            else:
                seen["forward"] = took, predicted
            for name in {tier for tier, _ in price.stored} | {"stitch", "request"} | seen.keys():
                costs = costs.after(name, seen.get(name, (0.0, 0.0)))
            self.costs = costs
            if self._num_learned % KEPT_EVERY == 0:
                keep(self._file, json.dumps(asdict(costs)))
            self._num_learned += 1

    @cached_property
    def _file(self) -> Path:
        threads, cores = str(torch.get_num_threads()), str(os.cpu_count())
        where = {"threads": threads, "cores": cores, "processor": _processor()}
        return kept_file("cost", self._loaded.reusable, self._loaded.fingerprint, **where)


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name"))
    return platform.processor()


def costs_of(lm: CausalLM, file: Path) -> Costs:
    """Return what was kept of a model's costs, or measure and keep them; :data:`IN_ROWS` if that fails."""
    with suppress(OSError, ValueError):
        return TypeAdapter(Costs).validate_json(file.read_bytes())
    try:
        costs = measured(lm)
    except Exception as error:  # out of memory, or a model that takes no random tokens
        logger.info("the costs of this model can't be measured (%s); mode 'auto' goes by the number of rows", error)
        return IN_ROWS
    keep(file, json.dumps(asdict(costs)))
    return costs


@torch.inference_mode()
def measured(lm: CausalLM) -> Costs:
    """Time the attention of one layer, and a few forwards over random tokens."""
    pair, rows, times = _pair_ms(lm), SMALL, dict[int, float]()
    ids = torch.randint(lm.vocab_size, (LARGE,), generator=torch.Generator().manual_seed(0))

    def taken(rows: int) -> float:
        return _ms(lambda: lm.forward(ids[:rows], Rows.span(0, rows), lm.buffer(rows))[0])

    while rows <= min(LARGE, lm.reuse_window):
        times[rows] = taken(rows)
        if rows > SMALL and times[rows] > min(4 * times[SMALL], ENOUGH_MS):
            break
        rows *= 4 if times[rows] < ENOUGH_MS / 4 else 2
    if sum(times.values()) < PATIENCE_MS:  # the first runs are slower, and others may be at work
        times = {rows: min(ms, taken(rows), taken(rows)) for rows, ms in times.items()}
    few, many = min(times), max(times)
    row = (times[many] - times[few] - pair * (many**2 - few**2) / 2) / (many - few)
    if row <= 0:
        raise ArithmeticError(f"forwards of {few} and {many} rows took {times[few]:.2f} and {times[many]:.2f} ms")
    forward = max(0.0, times[few] - row * few)
    per_ms, each = BYTES_PER_MS.items(), GUESS_ROWS * lm.kv_bytes_per_token
    guessed = {name: (each / speed, float(GUESS_ROWS)) for name, speed in per_ms}
    return Costs(forward, row, pair, guessed | {"request": (0.2 * forward, 0.2), "forward": (GUESS_ROWS, GUESS_ROWS)})


def _pair_ms(lm: CausalLM) -> float:
    """Return what it costs, in all layers, that a row sees a key."""
    shape, config, rows = lm.shapes[0], lm.config.get_text_config(), min(1024, lm.reuse_window)
    heads = getattr(config, "num_attention_heads", shape.num_heads)
    sizes = (heads, shape.key_dim), (shape.num_heads, shape.key_dim), (shape.num_heads, shape.value_dim)
    query, keys, values = (torch.ones(1, n, rows, dim, dtype=lm.dtype, device=lm.device) for n, dim in sizes)
    limits, cap = Limits(torch.arange(rows, device=lm.device), rows), getattr(config, "attn_logit_softcapping", None)
    best = min(_ms(lambda: ragged_attention(query, keys, values, limits, scale=1.0, softcap=cap)) for _ in range(3))
    return best * lm.num_layers / (rows * rows / 2)


def _ms(run: Callable[[], torch.Tensor]) -> float:
    """Return the milliseconds until a result is there, without those that this thread waited for the model or worked for others."""
    start, lost = time.perf_counter(), lost_s()
    run().flatten()[-1].item()
    return (time.perf_counter() - start - (lost_s() - lost)) * 1e3
