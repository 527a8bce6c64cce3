"""``engine.clear()``: everything goes, of every namespace or of one, and an answer afterwards is that of an empty store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from texts import make_chunks

import kvrag.precompute.run
from kvrag import Chunk, ConfigError, KVRagEngine, StoreConfig
from kvrag.store import StoreEvent

CHUNKS = make_chunks(3, words=30, seed=41)
PROMPT = ["Read this.\n", Chunk(CHUNKS[0]), "\nWho?"]
MakeEngine = Callable[..., KVRagEngine]


@pytest.mark.parametrize("kv_dir", [True, False], ids=["on disk", "in memory"])
def test_everything_is_erased_and_answers_go_on(engine_of: MakeEngine, kv_dir: bool) -> None:
    events: list[StoreEvent] = []
    options: dict[str, Any] = {} if kv_dir else {"kv_dir": None}
    engine = engine_of(
        prefix="Read this.\n", store_config=StoreConfig(on_event=events.append), **options
    )
    engine.precompute(CHUNKS[:2], ids=["a", "b"])
    engine.precompute(CHUNKS[2:], ids=["c"], namespace="other")
    assert engine.prefill(PROMPT, mode="stitch").cached_tokens > 0
    assert engine.clear() == 5, "three chunks, and the prefix in two namespaces"
    assert {event.medium for event in events if event.type == "AllBlocksCleared"} == {
        "disk",
        "host",
    }.difference(() if kv_dir else ("disk",))
    assert engine.document_ids() == engine.document_ids(namespace="other") == []
    assert engine.prefill(PROMPT, mode="stitch").exactness == "full"
    assert all(tier.chunks == 0 for tier in engine.stats()["store"].values())
    assert engine.precompute(CHUNKS[:1]).stored == 1
    assert engine.prefill(PROMPT, mode="stitch").cached_tokens > 0


@pytest.mark.parametrize(
    "options", [{}, {"encryption_key": lambda: b"s" * 32}], ids=["plain", "encrypted"]
)
@pytest.mark.parametrize("kv_dir", [True, False], ids=["on disk", "in memory"])
def test_a_namespace_is_erased_with_and_without_ids(
    engine_of: MakeEngine, kv_dir: bool, options: dict[str, Any]
) -> None:
    config = StoreConfig(**options)
    engine = engine_of(
        prefix="Read this.\n", store_config=config, **({} if kv_dir else {"kv_dir": None})
    )
    engine.precompute(CHUNKS[:1], ids=["a"])
    engine.precompute(CHUNKS[:1], ids=["a"], namespace="other")
    engine.precompute(CHUNKS[1:], namespace="other")
    other = engine_of(prefix="Read this.\n", store_config=config) if kv_dir else engine
    for each in (engine, other):
        assert each.prefill(PROMPT, mode="stitch", namespace="other").cached_tokens > 0
    assert engine.clear(namespace="other") == 4, "three chunks and the prefix"
    for each in (engine, other):
        assert each.prefill(PROMPT, mode="stitch", namespace="other").exactness == "full"
        assert each.prefill(PROMPT, mode="stitch").cached_tokens > 0
    assert engine.document_ids() == ["a"]
    assert engine.document_ids(namespace="other") == []
    assert engine.clear(namespace="default") == 2
    assert engine.store.catalog.keys() == []
    for wrong in ("", ["other"], {"other": 1}):
        with pytest.raises(ConfigError, match="namespace is"):
            engine.clear(namespace=wrong)
        with pytest.raises(ConfigError, match="namespace is"):
            engine.prefill(PROMPT, namespace=wrong)


@pytest.mark.parametrize("namespace", [None, "default"])
def test_what_is_cleared_is_not_written_back(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, namespace: str | None
) -> None:
    engine = engine_of(prefix="Read this.\n", store_config=StoreConfig(on_miss="store"))
    reached, go_on = threading.Event(), threading.Event()
    encode = kvrag.precompute.run.encode_chunks

    def paused(*args: Any) -> Any:
        reached.set()
        go_on.wait(60)
        return encode(*args)

    monkeypatch.setattr("kvrag.precompute.run.encode_chunks", paused)
    engine.generate(PROMPT, max_new_tokens=2, mode="stitch")
    assert reached.wait(60)
    engine.clear(namespace=namespace)
    go_on.set()
    assert engine.flush_write_back(60)
    assert engine.store.catalog.keys() == []
    assert engine.stats()["write_back"]["dropped"] == 1
