"""The driver for KVShareArena: its contract on a tiny model, and how its run here is scored."""

import json
import sys
from pathlib import Path

import pytest
from texts import make_chunks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import arena

SOURCES = [f"{text}\n\n" for text in make_chunks(4, words=40, seed=3)]
CONFIG = {"exam": {**arena.EXAM, "max_new_tokens": 4}, "dtype": "float32"}


@pytest.fixture
def method(tiny_dir):
    method = arena.METHODS["kvrag"]()
    method.setup(str(tiny_dir), CONFIG | {"context": None})
    yield method
    method.teardown()


def test_sources_are_encoded_without_the_question_and_reused_in_any_order(method):
    caches = [method.build_cache(text) for text in SOURCES]
    found = method.answer("Who keeps the ledger?", caches[::-1], CONFIG)
    assert found.aux["exactness"] == "repaired"
    assert 0 < found.recomputed_layer_tokens < found.dense_payload_layer_tokens
    assert found.recomputed_layer_tokens % method.layers == 0
    assert found.kv_bytes == sum(cache.num_bytes for cache in caches) > 0
    assert found.ttft_ms > 0
    full = method.answer("Who keeps the ledger?", caches[::-1], CONFIG | {"mode": "full"})
    assert full.recomputed_layer_tokens == full.dense_payload_layer_tokens
    assert full.dense_payload_layer_tokens == found.dense_payload_layer_tokens


def test_a_single_source_is_exact(method):
    found = method.answer("Who?", [method.build_cache(SOURCES[0])], CONFIG)
    assert found.aux["exactness"] == "exact"
    assert found.recomputed_layer_tokens == 0


def test_a_source_that_comes_again_has_its_bytes(method):
    one, again = method.build_cache(SOURCES[0]), method.build_cache(SOURCES[0])
    assert one == again
    assert one.num_bytes > 0


def test_words_are_scored_as_squad_scores_them():
    assert arena.word_f1("The red house.", ["red house"]) == 1
    assert arena.word_f1("a red barn", ["red house", "barn"]) == pytest.approx(2 / 3)
    assert arena.word_f1("blue", ["red"]) == 0


def test_the_gap_is_recovered_in_part():
    assert arena.recovered(0.5, 0.2, 0.6) == pytest.approx(0.75)
    assert arena.recovered(0.1, 0.2, 0.6) == pytest.approx(-0.25)
    assert arena.recovered(0.5, 0.6, 0.6) is None


def test_a_run_goes_on_where_it_was(method, tmp_path, monkeypatch):
    rows = [("Who?", ["Ada"], SOURCES[:2]), ("Where?", ["Jena"], SOURCES[2:])]
    monkeypatch.setattr(arena, "questions", lambda count: iter(rows[:count]))
    monkeypatch.setattr(arena, "EXAM", CONFIG["exam"])
    path = tmp_path / "arena.jsonl"
    (first,) = arena.measure(method, 1, path)
    kept, second = arena.measure(method, 2, path)
    assert kept == json.loads(json.dumps(first))
    assert second["number"] == 1
    found = arena.summary([kept, second])
    assert found["questions"] == 2
    assert 0 < found["recompute_fraction"] < 1
    assert found["beyond_full_ci"][0] <= found["beyond_full"] <= found["beyond_full_ci"][1]
