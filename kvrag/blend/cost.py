"""What each way of prefilling a prompt costs: measured on the loaded model at first use, and kept for later processes.

A price is linear: what a forward costs in any case, what each of its rows adds, and each key that a row sees; what each row adds that is
loaded or stitched. Only ``auto`` asks for prices. Each request tells whether they hold: a tier or a stitch that took twice as long as its
price, or half as long, has that price from then on, and where forwards did, the model is measured again.
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
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from pydantic import TypeAdapter

from kvrag.blend.layout import Layout, Segment, num_rows_of
from kvrag.blend.repair import CHECK_LAYER, REREAD
from kvrag.blend.select import needs_of, num_selected
from kvrag.config import RepairConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.identity.weights import keep
from kvrag.model.attention import ragged_attention
from kvrag.model.lm import CausalLM, LoadedModel
from kvrag.model.load import kept_file
from kvrag.model.rows import Limits, Rows
from kvrag.model.turns import lost_s
from kvrag.progress import Progress
from kvrag.prompt.plan import Plan
from kvrag.store import TieredStore
from kvrag.threads import fork_lock

logger = logging.getLogger(__name__)

VERSION = "2"  # of what is kept; a change leaves what other versions have kept alone
SMALL, LARGE = 16, 2048  # rows of the smallest and of the largest forward that is timed
ENOUGH_MS = 200.0  # nothing larger is timed after a forward that takes so long
PATIENCE_MS = 1000.0  # forwards that took longer together are timed twice only
ROUNDS = 3  # in which each forward is timed; the fastest run counts
BYTES_PER_MS = {"disk": 1e6, "host": 2e7, "gpu": 1e8, "stitch": 1.5e6}
"""First guesses, until a request tells: 1 GB/s from a disk, 20 from memory, where nothing is copied, and 1.5 stitched."""
MARGIN = 0.9  # of an exact answer's price; what saves less is not worth an approximation, and may be an error of the prediction
WRONG = 2.0  # times as much, or as little, as predicted: the price is wrong
NOTABLE_MS = 20.0  # no price is wrong by less
REFUSALS = 8  # in a row, after which it is measured again whether they are right


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model costs where it runs, in ``unit``.

    ``forward`` is the cost of any forward, ``row`` of each row that it computes, ``pair`` of each key that a row sees. ``each`` has the
    rest by name: ``"host"``, ``"disk"`` and other tiers, for each row that is loaded from there; ``"stitch"``, for each row that is
    stitched; ``"request"``, for each repaired prompt, besides its forwards. They are guessed until a request shows that they are wrong.
    """

    forward: float
    row: float
    pair: float
    each: Mapping[str, float]
    unit: str = "ms"

    def of(self, name: str) -> float:
        """Return what one row, or one request, costs; nothing where nobody knows."""
        return self.each.get(name, 0.0)

    def after(self, name: str, took: float, count: float) -> Costs:
        """Return the costs after a request that took so long for so many rows: a price that is wrong gives way."""
        if not count or not is_wrong(took, self.of(name) * count):
            return self
        return replace(self, each={**self.each, name: took / count})

    def of_forward(self, rows: float, pairs: float) -> float:
        """Return what a forward costs that computes ``rows``, which see ``pairs`` keys together."""
        return self.forward + rows * self.row + pairs * self.pair

    def in_words(self, cost: float) -> str:
        """Say a cost: ``18.4 s``, ``340 ms``, or ``as much as 1,120 tokens``."""
        if self.unit != "ms":
            return f"as much as {cost:,.0f} {self.unit}"
        return f"{cost / 1e3:.1f} s" if cost >= 1000 else f"{cost:.0f} ms"


def is_wrong(took: float, predicted: float) -> bool:
    """Whether a prediction, in milliseconds, was wrong by a factor of :data:`WRONG`, and by more than a moment."""
    is_far = max(took, predicted) > WRONG * min(took, predicted)
    return is_far and abs(took - predicted) > NOTABLE_MS


IN_ROWS = Costs(0.0, 1.0, 0.0, {"request": 160.0}, unit="tokens")
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
        cost = self.of_forwards(layout) + costs.of("stitch") * num_rows_of(layout.reused)
        cost += sum([costs.of(tier) * rows for tier, rows in loaded.items()])
        return cost + costs.of("request") if layout.stale else cost

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
            again = min(layout.num_suffix, REREAD)
            cost += config.probe_span[1] * costs.of_forward(live + again, pairs + again * total)
        if "deviation" in needs:
            cost += (CHECK_LAYER + 1) / self.num_layers * costs.of_forward(total, total * total / 2)
        return cost

    def cheapest(self, layout: Layout) -> tuple[Layout, str | None]:
        """Return the layout to use of all that is possible, and why less is reused than that.

        Prices are nearly linear in the chunks, so each is loaded or computed by its own price; then what is left, repaired, stands against
        what needs no repair.
        """
        without = [
            Segment(s.start, s.stop, "live") if s in layout.stale else s for s in layout.segments
        ]
        reuse, exact = self._lean(layout), self._lean(Layout(tuple(without)))
        price, other = self.of(reuse), self.of(exact)
        if layout.stale and (not reuse.stale or price >= MARGIN * other):
            return exact, self._refusal(layout, exact)
        count = len({s.source for s in layout.reused} - {s.source for s in reuse.reused})
        if not count:
            return reuse, None
        estimates = self._estimates({"with them": self.of(layout), "without": price})
        return (
            reuse,
            f"{count} stored chunk(s) would cost more to load than to compute; {estimates}",
        )

    def _refusal(self, layout: Layout, exact: Layout) -> str:
        """Say why repaired reuse does not pay, with what it and the alternatives would cost."""
        price, other, full = self.of(layout), self.of(exact), self.of(layout.only_live())
        costs = {"reuse": price, "full prefill": full}
        if exact.reused or exact.history:
            costs = {"reuse": price, "exact reuse alone": other, "full prefill": full}
        is_close = "" if price >= other else ", and an approximation must save a tenth"
        return f"repaired reuse would not pay; {self._estimates(costs)}{is_close}"

    def _estimates(self, costs: Mapping[str, float]) -> str:
        return "estimated: " + ", ".join(
            f"{name} {self.costs.in_words(cost)}" for name, cost in costs.items()
        )

    def _lean(self, layout: Layout) -> Layout:
        """Return the layout without what costs more to load than to compute; mostly no tier is that slow."""
        costs = self.costs
        if (
            max([costs.of(tier) for tier, _ in self.stored], default=0.0) + costs.of("stitch")
            < costs.row / 2
        ):
            return layout
        price, sources = self.of(layout), {segment.source for segment in layout.reused}
        return layout.without(
            {source for source in sources if self.of(layout.without({source})) < price}
        )


class CostModel:
    """Costs of one engine: of its model, measured when they are first asked for or read from the cache, and of its store, by requests."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.costs: Costs | None = None
        self._loaded = loaded
        self._lock = fork_lock()
        self._is_doubted = False  # measured again at the next request
        self._patience = 1  # wrong predictions until then, doubled by each measurement: a machine may be busy for long
        self._misses = 0
        self._refusals = 0

    def known(self) -> Costs:
        """Return the costs; measure them, if no process has on this machine, or if requests have shown that they are wrong."""
        lm = self._loaded.reusable
        with self._lock:
            if self.costs is None:
                self.costs = costs_of(lm, self._file)
            elif self._is_doubted:
                self._measure_again(lm)
            return self.costs

    def price(self, plan: Plan, config: RepairConfig, store: TieredStore) -> Price:
        """Return the prices of a plan's layouts."""
        stored, costs = list[tuple[str, int]](), self.known()
        for identity in plan.identities:
            key = chunk_key(identity)
            tier = next(
                (tier.name for tier in store.tiers if tier.identity(key) is not None), store.name
            )
            stored.append((tier, len(identity.token_ids)))
        return Price(costs, config, self._loaded.reusable.num_layers, stored)

    def learn(
        self, price: Price, layout: Layout, late: Collection[int], ms: Mapping[str, float]
    ) -> None:
        """Compare prices with the milliseconds by stage of a request that used ``layout``, and could not load the sources ``late``."""
        with self._lock:
            costs = self.costs or IN_ROWS
            if costs.unit != "ms":
                return
            rows = price.loaded({*late, *(s.source for s in layout.reused)})
            if rows:  # tiers are read at once: the time is that of the slowest
                tier = max(rows, key=lambda tier: costs.of(tier) * rows[tier])
                costs = costs.after(tier, ms.get("load", 0.0), rows[tier])
            costs = costs.after("stitch", ms.get("stitch", 0.0), num_rows_of(layout.reused))
            took = sum(ms.get(stage, 0.0) for stage in ("select", "repair", "prefill"))
            forwards = price.of_forwards(layout)
            predicted = forwards + (price.costs.of("request") if layout.stale else 0.0)
            if layout.stale and is_wrong(took, predicted):
                # At most as much as the forwards: who waited for others must not put off all reuse.
                rest = min(max(0.0, took - forwards), forwards)
                costs = replace(costs, each={**costs.each, "request": rest})
            if costs is not self.costs:
                self.costs = costs
                keep(self._file, json.dumps(asdict(costs)))
            used = {*late, *(s.source for s in layout.reused)}
            self._judge(took, predicted, is_refused=len(used) < len(price.stored))

    def _judge(self, took: float, predicted: float, *, is_refused: bool) -> None:
        """Doubt what was measured if forwards took something else, or if reuse of what is stored is refused again and again."""
        if is_wrong(took, predicted):
            self._misses += 1
            with suppress(OSError):  # the next process measures anew
                self._file.unlink(missing_ok=True)
        self._refusals = self._refusals + 1 if is_refused else 0
        self._is_doubted = (
            self._misses >= self._patience or self._refusals >= REFUSALS * self._patience
        )
        if self._misses >= self._patience:
            words = "a prompt took %.0f ms to compute, for which %.0f ms were predicted; prices are measured again"
            logger.warning(words, took, predicted)

    def _measure_again(self, lm: CausalLM) -> None:
        """Measure the model once more; tiers and stitches are guessed again, so that what was slow is tried again."""
        self._is_doubted = False
        self._patience *= 2
        self._misses = self._refusals = 0
        self.costs = measure_and_keep(lm, self._file)

    @cached_property
    def _file(self) -> Path:
        threads, cores = str(torch.get_num_threads()), str(os.cpu_count())
        where = {"threads": threads, "cores": cores, "processor": _processor(), "prices": VERSION}
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
    return measure_and_keep(lm, file)


def measure_and_keep(lm: CausalLM, file: Path) -> Costs:
    """Measure a model's costs, and keep them; :data:`IN_ROWS` if that fails."""
    try:
        with Progress("measuring what prompts cost on this machine"):
            costs = measured(lm)
    except Exception as error:  # out of memory, or a model that takes no random tokens
        logger.info(
            "the costs of this model can't be measured (%s); mode 'auto' goes by the number of rows",
            error,
        )
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
    spent = sum(times.values())
    for _ in range(
        1, ROUNDS if spent < PATIENCE_MS else 2
    ):  # the first runs are slower, and others may be at work
        times = {rows: min(ms, taken(rows)) for rows, ms in times.items()}
    few, many = min(times), max(times)
    row = (times[many] - times[few] - pair * (many**2 - few**2) / 2) / (many - few)
    if row <= 0:
        raise ArithmeticError(
            f"forwards of {few} and {many} rows took {times[few]:.2f} and {times[many]:.2f} ms"
        )
    forward = max(0.0, times[few] - row * few)
    guessed = {name: lm.kv_bytes_per_token / speed for name, speed in BYTES_PER_MS.items()}
    return Costs(forward, row, pair, guessed | {"request": forward})


def _pair_ms(lm: CausalLM) -> float:
    """Return what it costs, in all layers, that a row sees a key."""
    shape, config, rows = lm.shapes[0], lm.config.get_text_config(), min(1024, lm.reuse_window)
    heads = getattr(config, "num_attention_heads", shape.num_heads)
    sizes = (
        (heads, shape.key_dim),
        (shape.num_heads, shape.key_dim),
        (shape.num_heads, shape.value_dim),
    )
    query, keys, values = (
        torch.ones(1, n, rows, dim, dtype=lm.dtype, device=lm.device) for n, dim in sizes
    )
    limits, cap = (
        Limits(torch.arange(rows, device=lm.device), rows),
        getattr(config, "attn_logit_softcapping", None),
    )
    best = min(
        _ms(lambda: ragged_attention(query, keys, values, limits, scale=1.0, softcap=cap))
        for _ in range(3)
    )
    return best * lm.num_layers / (rows * rows / 2)


def _ms(run: Callable[[], torch.Tensor]) -> float:
    """Return the milliseconds until a result is there, without those that this thread waited for the model or worked for others."""
    start, lost = time.perf_counter(), lost_s()
    run().flatten()[-1].item()
    return (time.perf_counter() - start - (lost_s() - lost)) * 1e3
