"""Tiers, holes and prefetch as an engine uses them: whatever they do, the answer is that of a full prefill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import asking, make_chunks

import kvrag.generate.pipeline
from kvrag import KVRagEngine, OutOfMemoryError, RepairConfig, Retention, StoreConfig, hooks
from kvrag.hooks import prefetch_kv
from kvrag.prompt.spans import text_entry
from kvrag.store import FileBlobs, MemoryTier
from kvrag.types import ChunkKey

CHUNKS = make_chunks(4, words=30, seed=3)
ask = partial(asking, CHUNKS)
ALL = RepairConfig(strategy="all")
MakeEngine = Callable[..., KVRagEngine]


def key_of(engine: KVRagEngine, chunk: int) -> ChunkKey:
    """The key of a chunk's KV."""
    catalog, digest = engine.store.catalog, text_entry(CHUNKS[chunk]).digest
    (key,) = catalog.text_keys(engine.store.names.namespace("default"), digest)
    return key


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Call with a key: reads of that chunk then wait until the event is set."""
    go_on = threading.Event()
    real = FileBlobs.read

    def hold(key: str) -> threading.Event:
        def slow(self: Any, asked: ChunkKey, *args: Any) -> Any:
            if asked == key:
                go_on.wait(30)
            return real(self, asked, *args)

        monkeypatch.setattr(FileBlobs, "read", slow)
        return go_on

    yield hold
    go_on.set()


def test_a_late_chunk_is_a_hole_and_the_answer_is_right(
    engine_of: MakeEngine, held_up: Any
) -> None:
    engine = engine_of(store_config=StoreConfig(ram_bytes=0, load_timeout_s=0.3))
    engine.precompute(CHUNKS)
    full = engine.prefill(ask(0, 1, 2), mode="full")
    assert full.holes == ()
    key = key_of(engine, 1)
    held_up(key)
    result = engine.prefill(ask(0, 1, 2), mode="stitch", repair=ALL)
    assert torch.allclose(result.logits, full.logits, atol=1e-3)
    (hole,) = result.holes
    assert (hole.key, hole.reason, hole.layer) == (key, "late", None)
    assert f"{key[:12]} late" in str(result.fallback_reason)
    assert result.repaired_tokens > 0
    assert result.computed_tokens > len(engine.loaded.encoder.chunk_ids(CHUNKS[1]))
    assert result.loaded_bytes > 0


def test_a_chunk_damaged_in_one_layer_is_a_hole_and_the_answer_is_right(
    engine_of: MakeEngine, tmp_path: Path
) -> None:
    engine = engine_of(store_config=StoreConfig(ram_bytes=0))
    engine.precompute(CHUNKS)
    full = engine.prefill(ask(0, 1, 2), mode="full")
    key = key_of(engine, 2)
    (path,) = tmp_path.glob(f"**/{key}.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # in the last layer
    path.write_bytes(data)
    result = engine.prefill(ask(0, 1, 2), mode="stitch", repair=ALL)
    assert torch.allclose(result.logits, full.logits, atol=1e-3)
    (hole,) = result.holes
    assert (hole.key, hole.reason, hole.layer) == (key, "damaged", engine.loaded.lm.num_layers - 1)
    answer = engine.generate(ask(0, 1, 2), mode="stitch", max_new_tokens=2)
    assert answer.holes == ()  # put away: not stored any more


def test_an_engine_uses_a_tier_in_the_accelerators_memory(engine_of: MakeEngine) -> None:
    engine = engine_of(store_config=StoreConfig(ram_bytes=0))
    engine.precompute(CHUNKS)
    full = engine.prefill(ask(0, 1), mode="full")
    engine.store.memory.put_above(MemoryTier(2**24, name="gpu"))
    engine._query_side = None
    for hits in (0, 3):  # the prefix and two chunks
        result = engine.prefill(ask(0, 1), mode="stitch", repair=ALL)
        assert torch.allclose(result.logits, full.logits, atol=1e-3)
        assert engine.stats()["store"]["gpu"].hits == hits
    assert engine.stats()["store"]["gpu"].chunks == 3


@pytest.mark.parametrize("mode", ["stitch", "full"])
def test_the_uppermost_tier_is_given_up_when_memory_runs_out(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS)
    full = engine.prefill(ask(0, 1), mode="full")
    assert engine.stats()["store"]["host"].chunks > 0
    real, calls = kvrag.generate.pipeline.prefill, []

    def tight(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["mode"])
        if engine.stats()["store"]["host"].chunks:
            raise torch.OutOfMemoryError("no room")
        return real(*args, **kwargs)

    monkeypatch.setattr(kvrag.generate.pipeline, "prefill", tight)
    result = engine.prefill(ask(0, 1), mode=mode)
    assert calls == [mode, "full"]
    assert torch.allclose(result.logits, full.logits, atol=1e-3)
    assert result.fallback_reason == ("memory ran out with reuse" if mode == "stitch" else None)
    monkeypatch.setattr(
        kvrag.generate.pipeline,
        "prefill",
        lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("none")),
    )
    with pytest.raises(OutOfMemoryError):
        engine.prefill(ask(0, 1), mode="full")


def test_a_prefetch_by_texts_and_by_keys(engine_of: MakeEngine) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS)
    keys = [key_of(engine, i) for i in range(3)]
    engine.store.release()
    assert engine.prefetch(CHUNKS[:2]).wait(30)
    assert engine.prefetch(keys=[keys[2], ChunkKey("f" * 64)]).wait(30)
    assert engine.stats()["store"]["host"].chunks == 4  # and the prefix
    assert engine.prefetch(keys=keys[:1], namespace="other").found == 0
    reads = engine.stats()["store"]["disk"].hits
    assert engine.prefill(ask(0, 1, 2), mode="stitch").exactness == "repaired"
    assert engine.stats()["store"]["disk"].hits == reads
    in_memory = engine_of(kv_dir=None)
    in_memory.precompute(CHUNKS[:1])
    assert in_memory.prefetch(CHUNKS[:1]).wait(0)
    assert in_memory.prefetch(CHUNKS[:1]).found == in_memory.prefetch(CHUNKS[0]).found == 2


def test_a_request_computes_what_a_prefetch_has_not_read_in_time(
    engine_of: MakeEngine, held_up: Any
) -> None:
    engine = engine_of(store_config=StoreConfig(load_timeout_s=0.5))
    engine.precompute(CHUNKS)
    full = engine.prefill(ask(0, 1, 2), mode="full")
    key = key_of(engine, 1)
    engine.store.release()
    go_on = held_up(key)
    handle = engine.prefetch(CHUNKS[:3])
    while list(engine.store.memory.reads._reads) != [key]:
        time.sleep(0.01)
    result = engine.prefill(ask(0, 1, 2), mode="stitch", repair=ALL)
    assert torch.allclose(result.logits, full.logits, atol=1e-3)
    assert [hole.key for hole in result.holes] == [key]
    go_on.set()
    assert handle.wait(30)
    assert engine.prefill(ask(0, 1, 2), mode="stitch").holes == ()


def _wait_for_prefetches() -> None:
    for _ in range(hooks.MAX_PREFETCHES):
        assert hooks._prefetches.acquire(timeout=30)
    hooks._prefetches.release(hooks.MAX_PREFETCHES)


def test_only_so_many_prefetches_are_planned_at_once(
    engine: KVRagEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun = threading.Event(), []

    def slow(texts: Any, **_: Any) -> None:
        begun.append(texts)
        go_on.wait(30)

    monkeypatch.setattr(engine, "prefetch", slow)
    start = time.monotonic()
    for _ in range(9):
        prefetch_kv(CHUNKS[:1], llm=engine)
    assert time.monotonic() - start < 10
    go_on.set()
    _wait_for_prefetches()
    assert 1 <= len(begun) <= 4
    prefetch_kv([], llm=engine)
    prefetch_kv(CHUNKS[:1], llm=engine)  # there is room again
    _wait_for_prefetches()
    assert begun[-1] == CHUNKS[:1]
    assert 2 <= len(begun) <= 5


def test_precompute_says_how_much_chunks_are_worth_keeping(
    engine_of: MakeEngine, tmp_path: Path
) -> None:
    engine = engine_of(kv_dir=tmp_path)
    engine.precompute([CHUNKS[0]], retention=Retention(60))
    engine.precompute([CHUNKS[1]])
    engine.precompute([CHUNKS[0]])  # is stored already, and keeps its own
    retentions = [engine.store.retention(key) for key in engine.store.catalog.keys()]  # noqa: SIM118
    assert sorted(kept.priority for kept in retentions if kept) == [35, 60, 85]


def test_a_precompute_says_what_chunks_in_memory_cost(engine_of: MakeEngine) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS)
    entries = engine.store.tiers[0]._entries.values()
    assert len(entries) == 5  # and the prefix
    assert all(entry.usage.cost_ms > 0 for entry in entries)
