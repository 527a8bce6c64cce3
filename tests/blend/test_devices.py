"""What ``auto`` chooses on devices whose times are given: on each it must cost about as little as the better of both ways.

A simulated device has a clock, which forwards, attention and copies set forward by what they take. Prices are measured there as anywhere;
what is chosen by them is then charged by the device's own times. Figures of the 8B shape are an H200's; the others are of the same kind.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvrag import RepairConfig
from kvrag.blend import cost
from kvrag.blend.cost import Costs, Price, measured
from kvrag.blend.layout import Layout, place
from kvrag.model import CausalLM
from kvrag.model.rows import Rows

BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
Time = Callable[[float, float], float]
LENGTHS = (200, 600, 1_200, 3_000, 6_000, 30_000)
SHARES = (0.25, 0.5, 0.9, 1.0)
LIMIT = 1.05


def linear(floor: float, row: float, pair: float) -> Time:
    """Every row takes its time: a CPU."""
    return lambda rows, pairs: floor + row * rows + pair * pairs


def launched(floor: float, row: float, pair: float) -> Time:
    """The host launches, the device computes, and the slower of them counts."""
    return lambda rows, pairs: max(floor, row * rows + pair * pairs)


def recorded(times: dict[int, float], pair: float) -> Time:
    """Rows are filled up to the next bucket, and run in pieces of the largest."""

    def time(rows: float, pairs: float) -> float:
        pieces, rest = divmod(rows, BUCKETS[-1])
        sizes = [BUCKETS[-1]] * int(pieces) + [
            BUCKETS[bisect_left(BUCKETS, rest)] for _ in range(rest > 0)
        ]
        return float(np.interp(sizes, [*times], [*times.values()]).sum()) + pair * pairs

    return time


@dataclass(frozen=True)
class Device:
    """A device's times, in ms: forwards, a copied row, and a request besides; bytes of KV per row."""

    time: Time
    copy: float
    request: float
    kv_bytes: int
    is_cpu: bool = False
    noise: float = 0.0
    window: int = 131_072
    seed: int = 7

    def measured(self, monkeypatch: pytest.MonkeyPatch) -> Costs:
        """Return the costs as they are measured here."""
        now, rng = [0.0], random.Random(self.seed)

        def spend(ms: float) -> torch.Tensor:
            busy = 2 if rng.random() < self.noise else 1
            now[0] += ms * busy * (1 + rng.uniform(0, self.noise)) / 1e3
            return torch.zeros(1)

        def forward(ids: torch.Tensor, rows: Rows, kv: None) -> tuple[torch.Tensor, None]:
            count = len(ids)
            return spend(self.time(count, count * (rows.stop - count / 2))), None

        lm = SimpleNamespace(
            device=torch.device("cpu" if self.is_cpu else "cuda"),
            vocab_size=100,
            most_timed=self.window // 2,
            reuse_window=self.window,
            kv_bytes_per_token=self.kv_bytes,
            buffer=lambda *_, **__: None,
            records=False,
            recorded=None,
            forward=forward,
        )
        copied = self.copy * cost.COPIED / self.kv_bytes
        with monkeypatch.context() as patch:
            patch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: now[0]))
            pinned = SimpleNamespace(to=lambda *_, **__: spend(copied))
            patch.setattr(torch, "empty", lambda *_, **__: pinned)
            return measured(cast(CausalLM, lm))

    @property
    def pair(self) -> float:
        """What a (row, key) pair takes."""
        return (self.time(1, 1e12) - self.time(1, 5e11)) / 5e11

    def charged(self, price: Price, layout: Layout) -> float:
        """Return what a layout takes here."""
        each = {"host": 1e-4, "stitch": self.copy, "request": self.request}
        own = Own(((0.0,), (0.0,)), 0.0, 0.0, each)
        object.__setattr__(own, "of_forward", self.time)
        own.__dict__["floor"] = price.costs.floor
        return replace(price, costs=own).of(layout)


class Own(Costs):
    """A device's own costs; what is computed ahead is decided by those that were measured."""

    floor = 0.0


H200 = {1: 8.3, 16: 8.3, 64: 9.0, 192: 10.7, 512: 17.1, 1024: 30.0, 1536: 43.6, 2048: 58.0}
SMALL = {1: 3.0, 512: 3.2, 1024: 4.5, 2048: 9.0}
DEVICES = {
    "8B, recorded": Device(recorded(H200, 0.53e-6), 0.0024, 10, 131_072),
    "8B, launched": Device(launched(50, 0.0285, 0.9e-6), 0.0024, 45, 131_072),
    "8B, linear": Device(linear(1, 0.03, 0.53e-6), 0.0024, 1, 131_072),
    "8B, high floor": Device(linear(30, 0.03, 0.53e-6), 0.0024, 30, 131_072),
    "small, recorded": Device(recorded(SMALL, 6e-8), 0.00024, 3, 12_288),
    "small, launched": Device(launched(40, 0.0044, 6e-8), 0.00024, 35, 12_288),
    "CPU, 0.5B": Device(linear(25, 10, 4e-4), 0.008, 30, 12_288, is_cpu=True),
    "CPU, 8B": Device(linear(900, 160, 5e-3), 0.08, 900, 131_072, is_cpu=True),
}


def prompt(length: int, share: float) -> tuple[Layout, list[tuple[str, int]]]:
    """Return the layout of a prompt with all possible reuse, and what is stored: an exact prefix, and the last chunks."""
    count = max(4, length // 500)
    rows = (length - 70) // count
    stored = round(share * count)
    chunks = [
        (rows, "chunk" if n >= count - stored else "live", False, n + 1, False)
        for n in range(count)
    ]
    head, tail = (30, "prefix", True, 0, False), (40, "live", False, -1, False)
    layout = place(cast(Any, [head, *chunks, tail]))
    return layout, [("host", 30), *[("host", rows)] * count]


def ratio(device: Device, costs: Costs, length: int, share: float) -> tuple[float, str]:
    """Return what ``auto`` takes on a device, as a share of the better of both ways, and the figures in words."""
    layout, stored = prompt(length, share)
    price = Price(costs, RepairConfig(), 32, stored)
    chosen, _ = price.cheapest(layout)
    full, repaired, auto = (
        device.charged(price, each) for each in (layout.only_live(), layout, chosen)
    )
    words = f"{length} tokens, {share:.0%} stored: {full:.1f} ms in full, {repaired:.1f} repaired, {auto:.1f} by auto"
    return auto / min(full, repaired), words


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.05, 1), (0.05, 2), (0.05, 3)])
def test_auto_takes_about_as_little_as_the_better_way(
    monkeypatch: pytest.MonkeyPatch, name: str, noise: float, seed: int
) -> None:
    device = replace(DEVICES[name], noise=noise, seed=seed)
    costs = device.measured(monkeypatch)
    for length in LENGTHS:
        for share in SHARES:
            found, words = ratio(device, costs, length, share)
            assert found <= LIMIT, words


@pytest.mark.parametrize("name", DEVICES)
def test_both_ways_are_the_better_one_somewhere(name: str) -> None:
    """Else the cells say nothing of a choice."""
    device = DEVICES[name]
    better = set()
    for length in LENGTHS:
        for share in SHARES:
            layout, stored = prompt(length, share)
            price = Price(Costs(((0.0,), (0.0,)), 1, 0, {}), RepairConfig(), 32, stored)
            full, repaired = (device.charged(price, each) for each in (layout.only_live(), layout))
            better.add(repaired < full)
    assert better == {True, False}


@pytest.mark.parametrize("name", ["8B, recorded", "8B, launched", "small, recorded", "CPU, 0.5B"])
def test_forwards_cost_what_the_device_takes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Between the sizes that are timed a recorded forward computes as many rows as the larger of them has."""
    device = DEVICES[name]
    costs = device.measured(monkeypatch)
    for rows in (16, 192, 512, 1_500, 2_048, 6_000, 30_000):
        pairs = rows * rows / 2
        assert costs.of_forward(rows, pairs) == pytest.approx(device.time(rows, pairs), rel=0.1)
    assert costs.pair == pytest.approx(device.pair, rel=0.01)
    if not device.is_cpu:
        assert costs.of("stitch") == pytest.approx(device.copy)


def test_slow_tiers_are_read_where_a_forward_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that takes as long for 500 rows as for 16 computes a slow tier's chunks beside, but not twenty of them."""
    device = replace(
        DEVICES["8B, recorded"], time=recorded({1: 8.0, 512: 8.0, 1024: 30.0, 2048: 60.0}, 5e-7)
    )
    costs = device.measured(monkeypatch)
    layout, stored = prompt(3_000, 1.0)
    costs = replace(costs, each={**costs.each, "disk": 0.02})
    price = Price(costs, RepairConfig(strategy="none"), 32, [("disk", rows) for _, rows in stored])
    lean, reason = price.cheapest(layout)
    assert 0 < len(layout.stale) - len(lean.stale) < len(layout.stale)
    assert price.of(lean) < price.of(layout)
    assert "would cost more to load than to compute" in str(reason)
    slower = replace(price, costs=replace(costs, each={**costs.each, "disk": 0.2}))
    assert not slower.cheapest(layout)[0].reused, "all of them together cost less to compute"
