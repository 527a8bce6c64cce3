"""What computing a chunk took is measured when it is precomputed, and eviction goes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from texts import make_chunks

import kvrag.precompute.run
from kvrag import KVRagEngine, Retention, StoreConfig
from kvrag.precompute.run import PREFIX_PRIORITY

CHUNKS = make_chunks(6, words=30, seed=11)
MakeEngine = Callable[..., KVRagEngine]


@pytest.fixture
def forward_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that each forward over chunks takes from now on, and nothing else does; the last value stays."""
    now, spent = [0.0], [0.0]

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    real = kvrag.precompute.run.encode_chunks

    def encode(*args: Any) -> Any:
        now[0] += spent[0] if len(spent) == 1 else spent.pop(0)
        return real(*args)

    monkeypatch.setattr("kvrag.precompute.run.time", Clock)
    monkeypatch.setattr("kvrag.precompute.run.encode_chunks", encode)
    return spent


def costs(engine: KVRagEngine) -> list[tuple[int, float]]:
    """Tokens and milliseconds of every chunk but the prefix, shortest first."""
    found = engine.store.catalog.usages()[1]
    return sorted(
        (each.num_tokens, each.usage.cost_ms)
        for each in found
        if each.usage.priority != PREFIX_PRIORITY
    )


def kept(engine: KVRagEngine) -> list[str]:
    """Documents whose chunks are on the disk."""
    catalog, space = engine.store.catalog, engine.space_of(None)
    return sorted(name for name in catalog.documents(space) if catalog.document_keys(space, name))


@pytest.mark.parametrize("order", [("cheap", "dear"), ("dear", "cheap")])
def test_of_two_alike_the_one_that_took_longer_survives(
    engine_of: MakeEngine, forward_s: list[float], order: tuple[str, str]
) -> None:
    texts = {
        name: f"{CHUNKS[0]} {digit}" for name, digit in (("cheap", 1), ("dear", 2), ("third", 3))
    }
    engine = engine_of(prefix="Read.")
    for name in order:
        forward_s[:] = [{"cheap": 0.2, "dear": 0.3}[name]]
        engine.precompute([texts[name]], ids=[name])
    (one, two) = costs(engine)
    assert one[0] == two[0], "as many tokens, so as many bytes"
    full = engine.store.stats()["disk"].num_bytes
    engine.close()
    config = StoreConfig(disk_bytes=full, min_free_bytes=0)
    engine = engine_of(prefix="Read.", store_config=config)
    forward_s[:] = [0.25]
    assert engine.precompute([texts["third"]], ids=["third"]).stored == 1
    assert kept(engine) == ["dear", "third"]


def test_the_time_of_a_forward_is_split_by_tokens(
    engine_of: MakeEngine, forward_s: list[float]
) -> None:
    engine = engine_of(prefix="Read.")
    forward_s[:] = [6.0, 1.0]
    engine.precompute([CHUNKS[0], CHUNKS[1] + CHUNKS[2], CHUNKS[3] * 3], batch_size=2)
    (short, first), (longer, second), (_, third) = costs(engine)
    assert first + second == pytest.approx(6000)
    assert first / short == pytest.approx(second / longer)
    assert third == pytest.approx(1000)


def test_the_prefix_has_a_time_of_its_own(
    engine_of: MakeEngine, forward_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kvrag.precompute.run.encode_prefix

    def slow(*args: Any) -> Any:
        kvrag.precompute.run.time.sleep(7.0)
        return real(*args)

    monkeypatch.setattr("kvrag.precompute.run.encode_prefix", slow)
    engine = engine_of(prefix="Read.")
    forward_s[:] = [2.0]
    engine.precompute(CHUNKS[:1])
    uses = [each.usage for each in engine.store.catalog.usages()[1]]
    assert sorted((usage.priority, usage.cost_ms) for usage in uses) == [
        (35, 2000.0),
        (PREFIX_PRIORITY, 7000.0),
    ]


def test_a_cost_that_the_user_gives_stands(engine_of: MakeEngine, forward_s: list[float]) -> None:
    engine = engine_of(prefix="Read.")
    forward_s[:] = [2.0]
    engine.precompute(CHUNKS[:1], retention=Retention(60, duration_s=100, cost_ms=7))
    engine.precompute(CHUNKS[1:2], retention=Retention(60))
    assert sorted(cost for _, cost in costs(engine)) == pytest.approx([7.0, 2000.0])
    assert {each.usage.priority_now() for each in engine.store.catalog.usages()[1]} == {
        60,
        PREFIX_PRIORITY,
    }


def test_a_forward_that_ran_out_of_memory_is_not_counted(
    engine_of: MakeEngine, forward_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = kvrag.precompute.run.encode_chunks

    def small(model: Any, prefix: Any, chunks: Any) -> Any:
        if len(chunks) > 1:
            kvrag.precompute.run.time.sleep(50.0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timed(model, prefix, chunks)

    monkeypatch.setattr("kvrag.precompute.run.encode_chunks", small)
    engine = engine_of(prefix="Read.")
    forward_s[:] = [1.0, 3.0]
    engine.precompute(CHUNKS[:2])
    assert sorted(cost for _, cost in costs(engine)) == pytest.approx([1000.0, 3000.0])
