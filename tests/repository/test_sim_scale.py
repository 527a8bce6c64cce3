"""The simulation behind docs/scale.md: its caches beside a plain LRU and a closed form, its routing, its tables."""

import json
import sys
from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import sim_scale as sim
from roofline import full_prefill_ms

from kvrag.store.memory import READERS

ROOT = Path(__file__).parents[2]
SMALL = sim.Plan(chunks=4000, replicas=8, requests=16_000, looked_at=8, window=400)
SETUP = sim.Setup(sim.LLAMA_8B)

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs").is_dir(), reason="the documents are not here: run from a checkout"
)


@pytest.fixture(scope="module", params=sim.WORKLOADS)
def traces(request):
    return {routing: sim.simulate(SMALL, request.param, routing) for routing in sim.ROUTINGS}


def hits_of_a_plain_lru(ids, size):
    cache, hits = OrderedDict(), []
    for each in ids:
        hits.append(each in cache)
        cache[each] = None
        cache.move_to_end(each)
        if len(cache) > size:
            cache.popitem(last=False)
    return np.array(hits)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_stack_distances_tell_the_hits_of_an_lru_cache_of_any_size(count):
    ids = np.random.default_rng(0).zipf(1.3, count) % 200
    distances = sim.stack_distances(ids)
    for size in (1, 7, 60, 500):
        np.testing.assert_array_equal(distances < size, hits_of_a_plain_lru(ids.tolist(), size))


def test_hit_rates_are_those_of_ches_approximation():
    """Che, Tung and Wang 2002: a chunk of probability p is in the cache with 1 - exp(-p T), where T fills it."""
    plan = replace(SMALL, chunks=20_000, replicas=1, requests=100_000, looked_at=1, per_request=1)
    distances, _ = sim.simulate(plan, "zipf", "random")
    p = np.arange(1, plan.chunks + 1) ** -plan.skew[0]
    p /= p.sum()
    for size in (100, 1000, 5000):
        low, high = 0.0, 1e9
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if (1 - np.exp(-p * middle)).sum() < size else (low, middle)
        assert (distances < size).mean() == pytest.approx(
            (p * (1 - np.exp(-p * low))).sum(), abs=0.02
        )


def test_every_chunk_of_every_request_comes_from_exactly_one_tier(traces):
    for trace in traces.values():
        out = sim.outcome(trace, SETUP, SMALL)
        assert sum(out["hits"].values()) == pytest.approx(1)
        new = trace[0] == sim.NEVER
        assert new.any()
        assert set(np.unique(sim.tiers_of(trace, SETUP)[new])) == {sim.TIERS.index("objects")}


def test_a_chunk_comes_from_the_first_tier_that_has_it():
    gpu, host, disk = SETUP.sizes()
    distances = np.array([0, gpu - 1, gpu, host - 1, host, disk - 1, disk, sim.NEVER, sim.NEVER])
    ranks = np.array([9, 9, 9, 9, 9, 9, 9, 9, 0])
    setup = replace(SETUP, redis_gb=2 * SETUP.chunk_gb)
    assert sim.tiers_of((distances, ranks), setup).tolist() == [0, 0, 1, 1, 2, 2, 4, 4, 3]


def test_popularity_drifts_where_it_is_said_to():
    same = {}
    for workload in ("zipf", "drift"):
        rows = sim.requests(SMALL, workload, np.random.default_rng(3))
        tops = [
            np.argsort(-np.bincount(part.ravel()))[:50].tolist()
            for part in (rows[:4000], rows[-4000:])
        ]
        same[workload] = len(set(tops[0]) & set(tops[1]))
    assert same["drift"] < 25 < 40 < same["zipf"]


def test_a_larger_cache_never_hits_less(traces):
    setups = [
        replace(SETUP, kind=kind) for kind in ("bf16", "int8", "int4")
    ]  # a chunk takes less and less
    for trace in traces.values():
        local = [sim.tiers_of(trace, setup) for setup in setups]
        assert all((larger <= smaller).all() for smaller, larger in pairwise(local))
        near = [(trace[0] < size).mean() for size in (0, 10, 100, 1000)]
        assert near == sorted(near)
        assert near[0] == 0 < near[1] < near[-1]


def test_requests_go_where_their_chunks_are(traces):
    """Affinity finds more in memory than random routing does."""
    for size in (100, 400):
        hits = {routing: (traces[routing][0] < size).mean() for routing in sim.ROUTINGS}
        assert hits["rendezvous"] > hits["random"] + 0.01


@pytest.mark.parametrize("workload", sim.WORKLOADS)
def test_no_replica_gets_much_more_than_its_share(workload):
    rng = np.random.default_rng(1)
    rows = sim.requests(SMALL, workload, rng)
    assert all(len(set(row)) == SMALL.per_request for row in rows.tolist())
    assert rows.min() >= 0
    assert rows.max() < SMALL.chunks
    plan = replace(SMALL, replicas=40, window=2000)

    def most(bound):
        to = sim.route(replace(plan, bound=bound), rows, "rendezvous", np.random.default_rng(2))
        return max(np.bincount(part).max() for part in to.reshape(-1, plan.window)) / (
            plan.window / plan.replicas
        )

    assert most(1.25) <= 1.6, (
        "by choice 1.25, and a few requests that had no place with either choice"
    )
    if workload == "zipf":
        assert most(1e9) > 2


def test_times_are_those_worked_out_by_hand():
    """67.1 MB of 512 tokens in bf16; 2 · 6.98e9 · 2,634 FLOP at half of 989.4 TFLOP/s take 74 ms, attention the rest."""
    bf16 = replace(SETUP, kind="bf16")
    assert bf16.chunk_gb == pytest.approx(512 * 131072 / 1e9)
    assert bf16.full_ms() == pytest.approx(full_prefill_ms(sim.LLAMA_8B, 5 * 514 + 64, bf16.device))
    assert 2 * sim.LLAMA_8B.parameters * 2634 / (989.4e12 / 2) * 1e3 == pytest.approx(74.3, abs=0.1)
    assert 74.3 < bf16.full_ms() < 80
    assert bf16.wait_ms("objects", 1) == pytest.approx(150 + 67.1 / 0.0875, rel=0.01)
    assert bf16.wait_ms("redis", 8) == pytest.approx(8 * bf16.wait_ms("redis", 1) / 4, rel=0.05), (
        "four at a time"
    )
    assert bf16.wait_ms("gpu", 5) == bf16.wait_ms("host", 5) == bf16.wait_ms("disk", 0) == 0
    assert sim.VALUES["readers"] == READERS._max_threads


def test_fastest_is_never_slower_than_computing_and_costs_follow_times(traces):
    for trace in traces.values():
        for ratio in (0.03, 0.15):
            setup = replace(SETUP, ratio=ratio)
            out = sim.outcome(trace, setup, SMALL)
            ms, dollars = out["ms"], out["dollars"]
            assert ms["fastest"] <= min(ms["full"], ms["least_gpu"])
            assert ms["on_gpu"] <= ms["fastest"]
            assert dollars["full"] == pytest.approx(ms["full"] * sim.VALUES["gpu_hour"] / 3600)
        four = sim.outcome(trace, sim.Setup(sim.LLAMA_70B, 4), SMALL)
        assert four["dollars"]["full"] == pytest.approx(
            four["ms"]["full"] * 4 * sim.VALUES["gpu_hour"] / 3600
        )


def test_the_result_is_of_these_constants():
    """A figure that is measured again elsewhere, or a constant that changes, asks for a new run."""
    result = json.loads((ROOT / "tests" / "benchmarks" / "results" / "scale.json").read_text())
    values = {name: value for name, value, *_ in result["constants"]}
    assert values == pytest.approx(sim.VALUES, rel=1e-3), "run `make bench-scale docs`"
    setups = [sim.Setup(shape, gpus, kind) for shape, gpus in sim.MODELS for kind in sim.KINDS]
    for row, setup in zip(result["loading"], setups, strict=True):
        now = sim.loading(setup)
        assert row["load_ms"] == pytest.approx(now["load_ms"], rel=1e-3)
        assert row["compute_ms"] == pytest.approx(now["compute_ms"], rel=1e-3)
