"""Prices of the blend mode: what vLLM takes is what its steps took, and a blend is what blends took."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_blend import blend as worker_side
from test_blend import prompt_of, request_with, scheduler_side
from texts import make_chunks
from vllm_kit import BLOCK, step_of

from kvrag.adapters import ModelFacts
from kvrag.blend.cost import Costs

CHUNKS = [text.partition(": ")[2] for text in make_chunks(4, words=60)]
FLAT = Costs(((16.0, 512.0), (50.0, 50.0)), 0.1, 0.0, {"request": 50.0})
"""A forward that the host launches."""


@pytest.fixture
def steps(connector):
    return importlib.import_module("vllm_kvrag.steps")


def scheduled(counts: dict[str, int], new: dict[str, int], cached: dict[str, int]) -> Any:
    """What vLLM's scheduler has decided: tokens by request, and the computed tokens of new and known requests."""
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[*cached], num_computed_tokens=[*cached.values()]
        ),
    )


def test_a_step_has_the_tokens_and_pairs_of_its_requests(steps):
    counter = steps.StepCounter()
    found = counter.of(scheduled({"a": 100, "b": 1, "c": 40}, {"a": 0, "c": 60}, {"b": 300}))
    assert found == steps.Step(141, 100 * 50 + 300.5 + 40 * 80)


def test_small_steps_are_timed_now_and_then(steps):
    counter = steps.StepCounter()
    timed = [
        counter.of(scheduled({"a": 1}, {}, {"a": n})).tokens for n in range(2 * steps.EVERY + 1)
    ]
    assert [n for n, tokens in enumerate(timed) if tokens] == [0, steps.EVERY, 2 * steps.EVERY]
    assert counter.of(scheduled({}, {}, {})) == steps.Step(), "a step without a forward"
    assert counter.of(scheduled({"a": 64}, {}, {"a": 0})).tokens == 64


@pytest.mark.parametrize(
    "output",
    [None, SimpleNamespace(), scheduled({"a": 90}, {}, {}), scheduled({"a": None}, {}, {"a": 1})],
)
def test_schedules_of_other_versions_are_not_timed(steps, output):
    assert steps.StepCounter().of(output) == steps.Step()


def test_a_prefill_is_priced_by_steps_of_about_its_size(steps):
    prices = steps.StepPrices()
    assert prices.factor(1) == prices.factor(6000) == 1.0
    prices.note(steps.Step(600, 0.0, 20.0), ModelFacts(costs=FLAT))
    assert prices.factor(600) == 1.0, "a first step may compile"
    for ms in (5.88, 5.88, 5000.0):
        prices.note(steps.Step(600, 0.0, ms), ModelFacts(costs=FLAT))
        prices.note(steps.Step(4096, 0.0, 10 * ms), ModelFacts(costs=FLAT))
        prices.note(steps.Step(8, 0.0, ms + 4.12), ModelFacts(costs=FLAT))
    assert prices.factor(600) == prices.factor(64) == pytest.approx(0.1)
    assert (
        prices.factor(5000)
        == prices.factor(30_000)
        == pytest.approx(58.8 / FLAT.of_forward(4096, 0))
    )
    assert prices.factor(1) == prices.factor(63) == pytest.approx(0.2)
    for _ in range(steps.LATEST):
        prices.note(steps.Step(600, 0.0, 58.8), ModelFacts(costs=FLAT))
    assert prices.factor(600) == pytest.approx(1.0), "the latest count"


def test_costs_that_are_no_times_are_compared_with_nothing(steps):
    prices = steps.StepPrices()
    for costs in (replace(FLAT, unit="tokens"), Costs(((0.0,), (0.0,)), 0.0, 0.0, {})):
        prices.note(steps.Step(600, 0.0, 20.0), ModelFacts(costs=costs))
        prices.note(steps.Step(600, 0.0, 20.0), ModelFacts(costs=costs))
    assert prices.factor(600) == 1.0


def test_a_step_lasts_from_its_beginning_to_its_end(steps, monkeypatch):
    now = iter([1.0, 1.25, 2.0, 2.5])
    monkeypatch.setattr(steps.time, "perf_counter", lambda: next(now))
    clock = steps.StepClock(torch.device("cpu"))
    clock.end()
    clock.begin(steps.Step())
    clock.end()
    assert clock.ended() == [], "steps that nobody asks for are not timed"
    for tokens in (70, 80):
        clock.begin(steps.Step(tokens, 9.0))
        clock.end()
        clock.end()
    assert clock.ended() == [steps.Step(70, 9.0, 250.0), steps.Step(80, 9.0, 500.0)]
    assert clock.ended() == []


def test_events_of_a_device_are_asked_for_and_not_waited_for(steps, monkeypatch):
    made: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at, self.is_done = len(made), False
            made.append(self)

        def record(self) -> None:
            self.is_recorded = True

        def query(self) -> bool:
            return self.is_done

        def elapsed_time(self, other: Any) -> float:
            assert self.is_recorded
            assert other.is_done
            return 7.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = steps.StepClock(torch.device("cuda"))
    for tokens in (70, 80):
        clock.begin(steps.Step(tokens))
        clock.end()
    assert clock.ended() == []
    made[1].is_done = True
    assert clock.ended() == [steps.Step(70, 0.0, 7.0)]
    made[3].is_done = True
    assert clock.ended() == [steps.Step(80, 0.0, 7.0)]


def reasons(own: Any, ids: list[int], number: int) -> str | None:
    """Ask for a prompt by ``auto``; return why it is not blended."""
    own.get_num_new_matched_tokens(request_with(ids, number, mode="auto"), 0)
    return own._scheduler._decisions[f"r{number}"][1].reason


def test_auto_goes_by_what_vllm_took(connector, setting, steps):
    """A launched forward costs as much for a prompt as for its repair; vLLM takes what it takes."""
    messages = importlib.import_module("vllm_kvrag.messages")
    own, ids = scheduler_side(connector, setting, costs=FLAT), prompt_of(setting, 2, 0, 3)
    assert "repaired reuse would not pay: estimated" in str(reasons(own, ids, 0))

    def hear(tokens: int, ms: float) -> None:
        ended = messages.Ended({}).aggregate(messages.Ended({}, [steps.Step(tokens, 0.0, ms)] * 2))
        own.update_connector_output(SimpleNamespace(kv_connector_worker_meta=ended))

    hear(len(ids), 900.0)
    hear(1, 5.0)
    assert reasons(own, ids, 1) is None, "vLLM is slow"
    for _ in range(steps.LATEST):
        hear(len(ids), 9.0)
    said = str(reasons(own, ids, 2))
    assert said.endswith(f"and 9 ms to compute the {len(ids)} tokens that vLLM does not have")


def test_auto_goes_by_what_blends_took(connector, setting, steps):
    """A blend that takes longer than it should is refused, but not for ever."""
    messages = importlib.import_module("vllm_kvrag.messages")
    costs = replace(FLAT, forwards=((0.0,), (1.0,)), row=1.0, each={})
    own, ids = scheduler_side(connector, setting, costs=costs), prompt_of(setting, 2, 0, 3)
    request = request_with(ids, mode="stitch")
    count, _ = own.get_num_new_matched_tokens(request, 0)
    blocks = list(range(-(-len(ids) // BLOCK)))
    own.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), count)
    assert reasons(own, ids, 1) is None
    said = {"r0": {"timings_ms": {"load": 1e4, "repair": 2e4}}}
    own.update_connector_output(SimpleNamespace(kv_connector_worker_meta=messages.Ended(said)))
    assert own._scheduler._prices == {}
    assert "estimated 30.0 s" in str(reasons(own, ids, 2))
    assert reasons(own, ids, 3) is None


def test_the_worker_times_the_step_that_the_scheduler_names(connector, setting, steps, monkeypatch):
    own = worker_side(connector, setting, role="WORKER")
    step = steps.Step(100, 5000.0)
    messages = importlib.import_module("vllm_kvrag.messages")
    own.bind_connector_metadata(
        messages.Jobs([], step)
    )  # before the worker has described its model
    assert own.get_finished(set()) == (None, None)
    assert own.build_connector_worker_meta() is None
    worker = own._worker
    worker._clock = steps.StepClock(torch.device("cpu"))
    worker._blender = SimpleNamespace(
        cancel=lambda _: None,
        ended=lambda _: [],
        close=lambda: None,
        engine=SimpleNamespace(close=lambda: None),
    )
    own.bind_connector_metadata(messages.Jobs([], step))
    own.start_load_kv(step_of())
    own.get_finished(set())
    (timed,) = own.build_connector_worker_meta().steps
    assert timed[:2] == step[:2]
    assert timed.ms > 0
    own.bind_connector_metadata(messages.Jobs())
    own.get_finished(set())
    assert own.build_connector_worker_meta() is None
    scheduler = scheduler_side(connector, setting, costs=FLAT)
    jobs = scheduler.build_connector_meta(scheduled({"a": 100}, {"a": 0}, {}))
    assert jobs.step == steps.Step(100, 5000.0)


def test_facts_that_a_response_leaves_out_are_those_of_no_model():
    """A connector that has had no handshake says nothing of its model."""
    assert ModelFacts.of({}) == ModelFacts()
