"""Where a request's time goes before its first token, the first one of a process too; and that no wait is silent."""

import importlib
import itertools
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from kit import all_answers_are_right
from texts import make_chunks

from kvrag import ConfigError, KVRagEngine
from kvrag.blend.cost import Costs, costs_of
from kvrag.testing.models import save_tiny_model

CHUNKS = make_chunks(6, words=60, seed=3)
PROMPT = [{"role": "user", "content": f"{CHUNKS[1]}\n\n{CHUNKS[0]}\n\nWho?"}]
SECONDS = {
    "load_model": "kvrag.engine.load",
    "prepare": "kvrag.engine.QueryPipeline",
    "plan": "kvrag.prompt.planner.plan_prompt",
    "price": "kvrag.blend.cost.costs_of",
    "load": "kvrag.blend.reuse._load",
    "stitch": "kvrag.blend.prefill.stitch",
    "select": "kvrag.blend.prefill.select_rows",
    "repair": "kvrag.blend.prefill.repair",
}
"""What a request does, by stage: each takes some seconds more below, and nothing else takes any."""


class FakeTime:
    """A clock that goes on only where it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(__import__("time"), name)


@pytest.fixture
def slow(monkeypatch):
    """Make what each stage does take 1, 2, 4, ... seconds of a fake clock; return these by stage."""
    clock, took = FakeTime(), {}
    for module in (
        "kvrag.engine",
        "kvrag.model.lock",
        "kvrag.generate.sampling",
        "kvrag.generate.pipeline",
    ):
        monkeypatch.setattr(f"{module}.time", clock)
    costs = Costs(((0.0,), (1.0,)), 1.0, 0.0, {"request": 0.0})
    monkeypatch.setattr("kvrag.blend.cost.costs_of", lambda *_: costs)
    monkeypatch.setattr("kvrag.blend.cost.is_wrong", lambda *_: False)
    for number, (stage, name) in enumerate(SECONDS.items()):
        took[stage] = 2.0**number
        module, _, function = name.rpartition(".")
        real = getattr(importlib.import_module(module), function)
        monkeypatch.setattr(name, lasting(real, clock, took[stage]))
    return took


def lasting(real: Callable[..., Any], clock: FakeTime, seconds: float) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        clock.now += seconds
        return real(*args, **options)

    return run


@pytest.mark.parametrize("ask", ["generate", "stream", "prefill"])
def test_the_stages_of_a_first_request_explain_its_time_to_the_first_token(slow, ask, tmp_path):
    directory = save_tiny_model(tmp_path / "model")
    with closing(KVRagEngine.from_pretrained(directory, kv_dir=tmp_path / "kv")) as filling:
        filling.precompute(CHUNKS)
    with closing(KVRagEngine.from_pretrained(directory, kv_dir=tmp_path / "kv")) as engine:
        first, second = (answered(engine, ask) for _ in range(2))
    assert first.exactness == "repaired"
    spent = {name: ms for name, ms in first.timings_ms.items() if name != "decode"}
    assert {name: round(ms) / 1e3 for name, ms in spent.items() if ms > 10} == slow
    assert sum(spent.values()) == pytest.approx(first.ttft_ms)
    assert {"load_model", "prepare", "price"}.isdisjoint(second.timings_ms), "done once"
    assert sum(second.timings_ms.values()) == pytest.approx(second.ttft_ms)


def answered(engine: KVRagEngine, ask: str) -> Any:
    if ask == "prefill":
        return engine.prefill(PROMPT)
    if ask == "generate":
        return engine.generate(PROMPT, max_new_tokens=1)
    with engine.stream(PROMPT, max_new_tokens=1) as stream:
        list(stream)
    return stream.result


# -- progress --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch):
    """Names, totals and counts of everything that shows progress."""
    found: list[list[Any]] = []
    all_answers_are_right(monkeypatch)

    class Noted:
        def __init__(self, what, total=None, *, unit="items", done=0, show=None):
            found.append([what, total, done, show])

        def __enter__(self):
            self._row = found[-1]
            return self

        def __exit__(self, *_):
            pass

        def advance(self, count=1):
            self._row[2] += count

    for module in (
        "model.load",
        "blend.cost",
        "evaluate.verify",
        "evaluate.answers",
        "evaluate.calibrate",
        "precompute.run",
    ):
        monkeypatch.setattr(f"kvrag.{module}.Progress", Noted)
    return found


def test_loading_proving_and_measuring_show_progress(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("KVRAG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kvrag.blend.cost.costs_of", costs_of)
    directory = save_tiny_model(tmp_path / "a-model")
    with closing(KVRagEngine.from_pretrained(directory, context=None)) as engine:
        engine.loaded  # noqa: B018
        named = [row[0] for row in shown]
        assert named[:2] == ["loading a-model", "identifying the weights of a-model"]
        assert any(name.startswith("proving") for name in named)
        engine.precompute(CHUNKS)
        engine.prefill(PROMPT)
        assert any(row[0].startswith("measuring") for row in shown)


@pytest.mark.parametrize("show", [None, True, False])
def test_verify_and_calibrate_count_their_prompts(shown, engine, show):
    engine.precompute(CHUNKS)
    shown.clear()
    engine.verify([PROMPT, PROMPT], max_new_tokens=1, show_progress=show)
    assert shown == [["verifying", 2, 2, show]]
    shown.clear()
    engine.calibrate(CHUNKS, prompts=3, chunks_per_prompt=2, keep=False, show_progress=show)
    counted = [row for row in shown if row[1] == 3]
    assert [row[0] for row in counted][:2] == ["answering by full prefill", "calibrating, trial 1"]
    assert all(row[1:] == [3, 3, show] for row in counted)
    assert all(row[3] is show for row in shown if row[0] == "computing KV")
    numbers = [int(row[0].split()[-1]) for row in counted[1:]]
    assert numbers == list(itertools.islice(itertools.count(1), len(numbers)))
    shown.clear()
    engine.evaluate(CHUNKS, count=2, chunks_per_prompt=2, max_new_tokens=1, show_progress=show)
    assert ["comparing answers", 2, 2, show] in shown


def test_a_switch_that_is_none_is_refused_before_anything_is_computed(engine, monkeypatch):
    monkeypatch.setattr(type(engine), "loaded", property(lambda _: pytest.fail("it was loaded")))
    for act in (engine.verify, engine.evaluate, engine.calibrate, engine.precompute):
        with pytest.raises(ConfigError, match="show_progress is 'yes'; "):
            act(["a text"], show_progress="yes")
