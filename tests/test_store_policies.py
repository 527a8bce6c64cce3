"""Tiers, write policies and prefetch as an engine uses them: whatever they do, the answer is that of a full prefill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import make_chunks

import kvrag.generate.sequence
from kvrag import KVRagEngine, OutOfMemoryError, RepairConfig, Retention, StoreConfig, StoreError, hooks
from kvrag.hooks import prefetch_kv
from kvrag.identity.fingerprint import chunk_key
from kvrag.prompt.spans import text_entry
from kvrag.store import DiskStore, MemoryStore, TieredStore, reader, writer

CHUNKS = make_chunks(4, words=30, seed=3)
ALL = RepairConfig(strategy="all")
MakeEngine = Callable[..., KVRagEngine]


def ask(*order: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join(CHUNKS[i] for i in order) + "\n\nWho?"}]


def key_of(engine: KVRagEngine, chunk: int) -> str:
    """The key of a chunk's KV."""
    identities = engine._answering.plan(engine._request(ask(chunk), "full", None, None)).identities
    return chunk_key(identities[-1])


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], threading.Event]]:
    """Call with a key and a layer: reads of that chunk then wait before that layer, until the event is set."""
    go_on = threading.Event()
    real = reader.Blob.load
    monkeypatch.setattr(reader, "HELPED_BYTES", 1)
    monkeypatch.setattr(reader, "STEP_BYTES", 1)

    def hold(key: str, layer: int) -> threading.Event:
        def slow(self: Any, layers: range, place: Any) -> Any:
            if chunk_key(self.header.identity) == key and layers[0] == layer:
                go_on.wait(30)
            return real(self, layers, place)

        monkeypatch.setattr(reader.Blob, "load", slow)
        return go_on

    yield hold
    go_on.set()


def test_a_late_chunk_is_a_hole_and_the_answer_is_right(engine_of: MakeEngine, held_up: Any) -> None:
    engine = engine_of(store_config=StoreConfig(ram_bytes=0, load_timeout_s=0.3))
    engine.precompute(CHUNKS)
    full = engine.prefill(ask(0, 1, 2), mode="full")
    assert full.holes == ()
    key = key_of(engine, 1)
    held_up(key, 1)
    result = engine.prefill(ask(0, 1, 2), mode="stitch", repair=ALL)
    assert torch.allclose(result.logits, full.logits, atol=1e-3)
    (hole,) = result.holes
    assert (hole.key, hole.reason, hole.layer) == (key, "late", 1)
    assert f"{key[:12]} late at layer 1" in str(result.fallback_reason)
    assert result.repaired_tokens > 0
    assert result.computed_tokens > len(engine.loaded.encoder.chunk_ids(CHUNKS[1]))
    assert result.loaded_bytes > 0


def test_a_chunk_damaged_in_one_layer_is_a_hole_and_the_answer_is_right(engine_of: MakeEngine, tmp_path: Path) -> None:
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
    engine.store = TieredStore(MemoryStore(2**24, name="gpu"), engine.store, keeps_puts=False)
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
    real, calls = kvrag.generate.sequence.prefill, []

    def tight(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["mode"])
        if engine.stats()["store"]["host"].chunks:
            raise torch.OutOfMemoryError("no room")
        return real(*args, **kwargs)

    monkeypatch.setattr(kvrag.generate.sequence, "prefill", tight)
    result = engine.prefill(ask(0, 1), mode=mode)
    assert calls == [mode, "full"]
    assert torch.allclose(result.logits, full.logits, atol=1e-3)
    assert result.fallback_reason == ("memory ran out with reuse" if mode == "stitch" else None)
    monkeypatch.setattr(
        kvrag.generate.sequence, "prefill", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("none"))
    )
    with pytest.raises(OutOfMemoryError):
        engine.prefill(ask(0, 1), mode="full")


def test_precompute_writes_behind_and_reports_what_is_on_disk(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(store_config=StoreConfig(write_policy="back"))
    report = engine.precompute(CHUNKS[:3], ids=list("abc"))
    assert (report.stored, report.failed) == (3, [])
    assert engine.stats()["store"]["disk"].unwritten == 0
    engine.flush()
    fresh = engine_of(store_config=StoreConfig())
    assert fresh.explain(ask(0, 1, 2)).hits == 3

    def full_disk(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write", full_disk)
    report = engine.precompute(CHUNKS[3:], ids=["d"])
    assert (report.stored, report.failed[0][0]) == (0, "d")
    assert "No space left" in report.failed[0][1]
    engine.flush()  # has been told
    identity = engine._answering.plan(engine._request(ask(0), "full", None, None)).identities[-1]
    kv = engine.store.get(identity)
    assert kv is not None
    engine.store.put(replace(identity, prefix="another"), kv, text=None)
    with pytest.raises(StoreError, match="could not be written"):
        engine.flush()


def test_a_prefetch_by_texts_and_by_keys(engine_of: MakeEngine) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS)
    keys = [key_of(engine, i) for i in range(3)]
    engine.store.release()  # type: ignore[attr-defined]
    assert engine.prefetch(CHUNKS[:2]).wait(30)
    assert engine.prefetch(keys=[keys[2], "f" * 64]).wait(30)  # type: ignore[list-item]
    assert engine.stats()["store"]["host"].chunks == 4  # and the prefix
    assert engine.prefetch(keys=keys[:1], namespace="other").found == 0  # type: ignore[arg-type]
    reads = engine.stats()["store"]["disk"].hits
    assert engine.prefill(ask(0, 1, 2), mode="stitch").exactness == "repaired"
    assert engine.stats()["store"]["disk"].hits == reads
    in_memory = engine_of(kv_dir=None)
    in_memory.precompute(CHUNKS[:1])
    assert in_memory.prefetch(CHUNKS[:1]).wait(0)
    assert in_memory.prefetch(CHUNKS[:1]).found == 2


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait"])
def test_a_request_and_a_prefetch_that_is_not_over(engine_of: MakeEngine, held_up: Any, policy: str) -> None:
    engine = engine_of(store_config=StoreConfig(prefetch=policy, load_timeout_s=0.5 if policy == "timeout" else 1000.0))
    engine.precompute(CHUNKS)
    full = engine.prefill(ask(0, 1, 2), mode="full")
    key = key_of(engine, 1)
    engine.store.release()  # type: ignore[attr-defined]
    go_on = held_up(key, 0)
    handle = engine.prefetch(CHUNKS[:3])
    while key not in engine.store._prefetcher._state.running:  # type: ignore[attr-defined]
        time.sleep(0.01)
    while len(engine.store._prefetcher._state.running) > 1 or engine.store._prefetcher._state.queued:  # type: ignore[attr-defined]
        time.sleep(0.01)
    if policy == "wait":
        threading.Timer(0.3, go_on.set).start()
    result = engine.prefill(ask(0, 1, 2), mode="stitch", repair=ALL)
    assert torch.allclose(result.logits, full.logits, atol=1e-3)
    assert [hole.key for hole in result.holes] == ([] if policy == "wait" else [key])
    go_on.set()
    assert handle.wait(30)
    assert engine.prefill(ask(0, 1, 2), mode="stitch").holes == ()


def _wait_for_prefetches() -> None:
    for _ in range(hooks.MAX_PREFETCHES):
        assert hooks._prefetches.acquire(timeout=30)
    hooks._prefetches.release(hooks.MAX_PREFETCHES)


def test_only_so_many_prefetches_are_planned_at_once(engine: KVRagEngine, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_precompute_says_how_much_chunks_are_worth_keeping(engine_of: MakeEngine, tmp_path: Path) -> None:
    engine = engine_of(kv_dir=tmp_path)
    engine.precompute([CHUNKS[0]], retention=Retention(60))
    engine.precompute([CHUNKS[1]])
    engine.precompute([CHUNKS[0]])  # is stored already, and keeps its own
    records = [engine.store.index.get(key) for key in engine.store.index.keys()]  # noqa: SIM118
    priorities = {record.text: engine.store.priority(record.key) for record in records if record}  # type: ignore[attr-defined]
    assert priorities == {text_entry(CHUNKS[0]): 60, text_entry(CHUNKS[1]): 35, None: 85}


def test_a_chunk_in_memory_alone_is_found_in_part_and_erased(engine_of: MakeEngine, tmp_path: Path) -> None:
    """Its row has no file behind it: looking for the first part of the text must not take that row for a leftover."""
    engine = engine_of(kv_dir=tmp_path, store_config=StoreConfig(disk_min_priority=50, min_chunk_tokens=8))
    engine.precompute(CHUNKS[:1], ids=["doc"])
    part = " ".join(CHUNKS[0].split()[:20])
    result = engine.prefill([{"role": "user", "content": part + "\n\nWho?"}], mode="stitch")
    assert any(
        "first" in str(span.reason) for span in engine.explain([{"role": "user", "content": part + " Who?"}]).spans
    )
    assert result.cached_tokens > 8
    assert engine.delete(["doc"]) == 1
    assert engine.explain(ask(0)).hits == 0


def test_an_engine_gives_up_the_rows_of_what_memory_alone_had(engine_of: MakeEngine, tmp_path: Path) -> None:
    engine = engine_of(kv_dir=tmp_path, store_config=StoreConfig(disk_min_priority=50))
    engine.precompute(CHUNKS[:1], ids=["doc"])
    assert isinstance(engine.store, TieredStore)
    assert engine.store.release() > 0
    assert engine.explain(ask(0)).hits == 0
    assert engine.prefill(ask(0), mode="stitch").holes == ()


def test_what_another_process_pushes_off_the_disk_takes_no_memory(engine_of: MakeEngine, tmp_path: Path) -> None:
    engine = engine_of(kv_dir=tmp_path)
    engine.precompute(CHUNKS[:3])
    assert engine.prefill(ask(0, 1, 2), mode="stitch").cached_tokens > 0
    host = engine.stats()["store"]["host"]
    other = DiskStore(tmp_path, StoreConfig(min_free_bytes=0))
    other._evictor.evict(2**40, max_priority=50)  # all but the prefix
    assert engine.prefill(ask(1, 2), mode="stitch").exactness == "exact"  # its prefix
    left = engine.stats()["store"]["host"]
    assert (host.chunks, left.chunks) == (4, 1)
    assert left.num_bytes < host.num_bytes
    other.close()


def test_a_precompute_says_what_chunks_in_memory_cost(engine_of: MakeEngine) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS)
    entries = engine.store._memory._shelf.chunks.values()  # type: ignore[attr-defined]
    assert len(entries) == 5  # and the prefix
    assert all(entry.usage.cost_ms > 0 for entry in entries)
