"""What chunks are worth keeping, said anew: by ``retain``, by precomputing again, by hooks; in every tier, written or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from texts import make_chunks

from kvrag import (
    InputError,
    KVRagEngine,
    Retention,
    StoreConfig,
    StoreError,
    precompute_kv,
    sync_kv,
)
from kvrag.prompt.spans import text_entry
from kvrag.types import ChunkKey

CHUNKS = make_chunks(4, words=30, seed=53)
IDS = ["a", "b", "c", "d"]
ENTRIES = [text_entry(chunk) for chunk in CHUNKS]
MakeEngine = Callable[..., KVRagEngine]
WHERE = pytest.mark.parametrize("options", [{}, {"kv_dir": None}], ids=["disk", "memory"])


def worth(
    engine: KVRagEngine, texts: slice = slice(None), *, namespace: str = "default"
) -> list[int]:
    """Priorities of the chunks that are stored in a namespace, in the order of the texts, and the prefix's last."""
    catalog, space = engine.store.catalog, engine.store.names.namespace(namespace)
    found = {}
    for record in filter(None, map(catalog.get, catalog.keys())):
        if record.namespace == space:
            entries = catalog.key_texts(record.key)
            found[entries[0] if entries else None] = engine.store.retention(record.key)
    return [
        (found[entry] or Retention()).priority
        for entry in [*ENTRIES[texts], None]
        if entry in found
    ]


def cost(engine: KVRagEngine, key: str) -> float | None:
    found = engine.store.retention(ChunkKey(key))
    return None if found is None else found.cost_ms


def held(engine: KVRagEngine) -> set[int]:
    """Priorities of what is in the host's memory; a store in memory alone has no copies above it."""
    return {
        entry.usage.priority_now()
        for tier in engine.store.tiers
        for entry in tier._entries.values()
    }


@WHERE
def test_documents_are_worth_what_was_said_last_in_every_tier(
    engine_of: MakeEngine, options: dict[str, object]
) -> None:
    engine = engine_of(**options)
    engine.precompute(CHUNKS, ids=IDS, retention=Retention(20))
    assert worth(engine) == [20, 20, 20, 20, 85]
    assert engine.retain(["a", "b", "unknown"], retention=Retention(70)) == 2
    assert engine.retain("c", retention=Retention(99, duration_s=3600)) == 1
    assert worth(engine) == [70, 70, 99, 20, 85]
    assert held(engine) == ({70, 99, 20, 85} if engine.store.tiers else set())


def test_a_cost_that_was_measured_stays(engine_of: MakeEngine) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS[:1], ids=IDS[:1])
    (key,) = engine.store.catalog.document_keys(engine.store.names.namespace("default"), "a")
    before = engine.store.retention(key)
    assert before is not None
    engine.retain(IDS[:1], retention=Retention(50))
    assert engine.store.retention(key) == Retention(50, None, before.cost_ms)


def test_chunks_may_be_named_by_their_keys_and_collections(engine_of: MakeEngine) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS[:2], ids=["manuals/a", "manuals/cars/b"])
    engine.precompute(CHUNKS[:1], ids=["manuals/a"], namespace="other")
    keys = engine.store.catalog.keys()
    assert engine.retain(keys=[*keys, "unknown"], retention=Retention(10)) == 3, (
        "two chunks and the prefix"
    )
    others = [
        key
        for key in keys
        if engine.store.retention(key) != Retention(10, cost_ms=cost(engine, key))
    ]
    assert len(others) == 2
    assert (
        engine.retain(keys=others[0], retention=Retention(11))
        == engine.retain(retention=Retention(11))
        == 0
    )
    assert worth(engine, namespace="other") == [35, 85]
    assert engine.retain(collection="manuals", retention=Retention(50)) == 2
    assert engine.retain(collection="manuals", retention=Retention(60), namespace="other") == 1
    assert (worth(engine), worth(engine, namespace="other")) == ([50, 50, 10], [60, 85])
    with pytest.raises(InputError, match="collection is"):
        engine.retain(collection="/", retention=Retention(1))


@WHERE
def test_precomputing_again_says_it_anew_if_it_says_anything(
    engine_of: MakeEngine, options: dict[str, object]
) -> None:
    engine = engine_of(**options)
    engine.precompute(CHUNKS[:2], retention=Retention(20))
    report = engine.precompute(CHUNKS[:3], retention=Retention(90))
    assert (report.stored, report.skipped) == (1, 2)
    assert worth(engine) == [90, 90, 90, 90], "no prompt can do without the prefix"
    engine.precompute(CHUNKS[:3])
    engine.precompute(CHUNKS[:1], retention=Retention(10))
    assert worth(engine) == [10, 90, 90, 90]
    assert held(engine) == ({10, 90} if engine.store.tiers else set())


def test_a_store_that_can_not_be_changed_fails_no_precompute(
    engine_of: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it can't be told is logged; what it can't store is reported, as without a retention."""
    engine_of(kv_dir=tmp_path).precompute(CHUNKS[:1], retention=Retention(20))
    reader = engine_of(kv_dir=tmp_path, store_config=StoreConfig(read_only=True))
    for retention in (None, Retention(90)):
        report = reader.precompute(CHUNKS[:2], retention=retention)
        assert (report.stored, len(report.failed)) == (0, 2), (
            "a new reference to the first is refused too"
        )
    assert worth(engine_of(kv_dir=tmp_path), slice(0, 1))[0] == 20


def test_a_retention_that_can_not_be_applied_is_no_reason_to_compute_nothing(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()
    engine.precompute(CHUNKS[:1])

    def locked(*_: object) -> int:
        raise StoreError("the database stays locked")

    monkeypatch.setattr(engine.store, "retain", locked)
    report = engine.precompute(CHUNKS[:2], retention=Retention(90))
    assert (report.stored, report.skipped, report.failed) == (1, 1, [])
    assert "stored chunks keep their retention: the database stays locked" in caplog.text


def test_a_store_for_reading_only_says_so(engine_of: MakeEngine, tmp_path: Path) -> None:
    engine_of(kv_dir=tmp_path).precompute(CHUNKS[:1], ids=IDS[:1])
    reader = engine_of(kv_dir=tmp_path, store_config=StoreConfig(read_only=True))
    with pytest.raises(StoreError, match="reading only"):
        reader.retain(IDS[:1], retention=Retention(1))


def test_hooks_pass_it_on(engine_of: MakeEngine) -> None:
    engine = engine_of()
    precompute_kv(CHUNKS[:2], llm=engine, ids=IDS[:2], retention=Retention(40))
    assert worth(engine) == [40, 40, 85]
    sync_kv(CHUNKS[1:3], llm=engine, ids=IDS[1:3], retention=Retention(41))
    assert worth(engine) == [41, 41, 85]
