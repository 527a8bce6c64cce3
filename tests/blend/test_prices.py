"""What ``auto`` goes by: prices of layouts, what is measured and kept of them, and what requests teach."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from kit import lm_of, raising, request_of
from test_selection import LAYOUT
from texts import asking, make_chunks

from kvrag import RepairConfig
from kvrag.blend.cost import (
    IN_ROWS,
    REFUSALS,
    CostModel,
    Costs,
    Price,
    _line,
    _ms,
    costs_of,
    measured,
)
from kvrag.blend.layout import lay_out, place

CHUNKS = make_chunks(4, words=60, seed=9)
prompt = partial(asking, CHUNKS)
COSTS = Costs(((0.0,), (10.0,)), row=1, pair=0, each={"request": 10, "host": 0})
TEN = [(250, "chunk", False, n, False) for n in range(1, 11)]
LONG = place([(10, "prefix", True, 0, False), *TEN, (16, "live", False, -1, False)])
FIVE = RepairConfig(recompute_ratio=0.05, first_k=4)
ONCE = replace(FIVE, strategy="first_k")
HOST = [("host", 10), *[("host", 250)] * 10]


@pytest.fixture(autouse=True)
def own_cache_of_costs(monkeypatch, tmp_path):
    """Costs are kept and read here, in a place of their own: made-up ones are for no other test."""
    monkeypatch.setattr("kvrag.blend.cost.costs_of", costs_of)
    monkeypatch.setenv("KVRAG_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def engine(engine_of):
    made = engine_of()
    made.precompute(CHUNKS)
    return made


def test_prices_count_every_pass():
    def rows(config: RepairConfig) -> float:
        return Price(IN_ROWS, config, 30).of(LAYOUT) - 160

    assert rows(RepairConfig(strategy="none")) == 20
    assert rows(RepairConfig(strategy="all")) == 220
    probed = pytest.approx(0.8 * (20 + 16))
    assert rows(FIVE) - 20 - 10 == probed, (
        "the probe reads the question twice, and ends at 0.8 of the layers"
    )
    assert rows(replace(FIVE, strategy="hkvd")) == 20 + 10 + 330 * 2 // 30
    for ratio in (0.0, 0.04):
        assert rows(replace(FIVE, recompute_ratio=ratio)) == 20 + 8, "nothing asks for a probe"


def test_prices_are_forwards_rows_keys_and_what_is_loaded_and_stitched():
    costs = Costs(((0,), (100,)), 1, 0.01, {"disk": 2, "host": 0.5, "stitch": 3, "request": 7})
    stored = [("host", 10), ("disk", 120), ("host", 100), ("host", 100)]
    price = Price(costs, RepairConfig(strategy="none"), 30, stored)
    seen = 2 * 111 + 2 * 213 + 16 * 322
    loaded = 0.5 * 210 + 2 * 120  # a chunk is loaded whole, whatever is used of it
    assert price.of(LAYOUT) == pytest.approx(100 + 20 + 0.01 * seen + loaded + 3 * 310 + 7)
    assert price.of(LAYOUT.only_live()) == pytest.approx(100 + 330 + 0.01 * 330 * 330 / 2)
    probed = Price(costs, FIVE, 30, stored).of(LAYOUT)
    probe = 100 + 20 + 16 + 0.01 * (seen + 16 * 330)
    assert probed == pytest.approx(price.of(LAYOUT) + 10 + 0.01 * 10 * 330 + 0.8 * probe)


@pytest.mark.parametrize("costs", [IN_ROWS, COSTS])
def test_auto_repairs_long_prompts_and_not_short_ones(costs):
    short, reason = Price(costs, RepairConfig(recompute_ratio=0.9), 30, HOST).cheapest(LAYOUT)
    assert short.is_exact
    estimate = r"(\d+ ms|as much as [\d,]+ tokens)"
    assert re.fullmatch(
        f"repaired reuse would not pay; estimated: reuse {estimate}, exact reuse alone {estimate}, full prefill {estimate}"
        "(, and an approximation must save 4%)?",
        str(reason),
    )
    assert Price(costs, RepairConfig(), 30, HOST).cheapest(LONG) == (LONG, None)
    everything, reason = Price(costs, RepairConfig(strategy="all"), 30, HOST).cheapest(LONG)
    assert everything.is_exact
    assert [s.source for s in everything.reused] == [0], "the prefix costs nothing"


def test_repair_must_save_something():
    """Exact answers are worth more than a little time, which may be an error of the prediction."""
    exact = 10 + 2516
    repaired = 10 + 16 + 125
    for request, is_reused in ((exact * 0.95 - repaired, True), (exact * 0.97 - repaired, False)):
        costs = replace(COSTS, each={**COSTS.each, "request": request})
        layout, reason = Price(costs, ONCE, 30, HOST).cheapest(LONG)
        assert bool(layout.stale) == is_reused
        assert is_reused == (reason is None or "must save 4%" not in reason)


def test_a_chunk_that_is_exact_in_one_place_and_stale_in_another_stays_exact():
    twice = [
        (100, "chunk", True, 1, False),
        (100, "chunk", False, 2, False),
        (100, "chunk", False, 1, False),
    ]
    layout = place([(10, "prefix", True, 0, False), *twice, (16, "live", False, -1, False)])
    exact, _ = Price(COSTS, RepairConfig(strategy="all"), 30, HOST).cheapest(layout)
    assert [(s.start, s.exact) for s in exact.reused] == [(0, True), (10, True)]


def test_chunks_are_computed_where_loading_costs_more():
    stored = [("host", 10), *[("disk" if n in (2, 5) else "host", 250) for n in range(10)]]
    costs = replace(COSTS, each={**COSTS.each, "disk": 5})
    layout, reason = Price(costs, ONCE, 30, stored).cheapest(LONG)
    assert {s.source for s in LONG.reused} - {s.source for s in layout.reused} == {3, 6}
    assert layout.num_tokens == LONG.num_tokens
    assert reason == (
        "2 stored chunk(s) would cost more to load than to compute; estimated: with them 2.7 s, without 636 ms"
    )
    slow = Price(costs, ONCE, 30, [("disk", count) for _, count in stored])
    assert not slow.cheapest(LONG)[0].reused
    head = LONG.only_exact_head()
    assert slow.cheapest(head)[0].reused == []
    assert Price(costs, ONCE, 30, HOST).cheapest(head) == (head, None), (
        "exact reuse needs to save nothing but time"
    )


def asked(engine, *order):
    """Return the cost model of an engine, a plan's price now, and its layout with all that is possible."""
    model = engine._answering.costs
    plan = engine._answering.plan(request_of(engine, prompt(*order)))
    return model, model.price(plan, RepairConfig(), engine.store), lay_out(plan)


def took(price, layout, factor=1.0):
    """Return stages as they are predicted, times a factor."""
    ms = factor * (price.of_forwards(layout) + bool(layout.stale) * 10)
    return {"repair" if layout.stale else "prefill": ms}


def test_a_slow_tier_is_learned_at_once_and_tried_again(engine, monkeypatch):
    monkeypatch.setattr("kvrag.blend.cost.measured", lambda _: replace(COSTS, row=2))
    engine._answering.costs.costs = replace(COSTS, row=2)
    model, price, whole = asked(engine, 0, 1, 2)
    assert {tier for tier, _ in price.stored} == {"host"}
    rows = sum(count for _, count in price.stored)
    model.learn(price, whole, (), {"load": 5000.0, "stitch": 100.0, **took(price, whole)})
    assert model.costs.of("host") == pytest.approx(5000 / rows, rel=0.01)
    assert model.costs.of("stitch") == pytest.approx(100 / sum(s.num_rows for s in whole.reused))
    model, slow, _ = asked(engine, 0, 1, 2)
    layout, _ = slow.cheapest(whole)
    assert not layout.reused
    for _ in range(REFUSALS):
        assert model.costs.of("host") > 1
        model.learn(slow, layout, (), took(slow, layout))
    _, again, _ = asked(engine, 0, 1, 2)
    assert again.cheapest(whole) == (whole, None)


def test_what_earlier_requests_left_is_no_refusal(engine):
    engine._answering.costs.costs = replace(COSTS, row=2)
    model, price, whole = asked(engine, 0, 1, 2)
    layout = whole.behind(whole.num_tokens - 9, whole.num_tokens - 9)
    for _ in range(2 * REFUSALS):
        model.learn(price, layout, (), took(price, layout))
    assert model.costs == replace(COSTS, row=2)


def test_a_request_that_waited_for_others_does_not_put_off_all_reuse(engine, monkeypatch):
    true = replace(COSTS, row=2)
    monkeypatch.setattr("kvrag.blend.cost.measured", lambda _: true)
    engine._answering.costs.costs = true
    reused = 0
    for _ in range(8):
        model, price, whole = asked(engine, 0, 1, 2)
        layout, _ = price.cheapest(whole)
        reused += layout == whole
        model.learn(price, whole, (), {"repair": 1e9})
    assert reused == 8


def test_a_price_that_is_about_right_stays(engine):
    model = engine._answering.costs
    model.costs = costs = replace(COSTS, row=2)
    for factor in (0.6, 1.0, 1.9):
        model, price, whole = asked(engine, 0, 1, 2)
        model.learn(price, whole, (), took(price, whole, factor) | {"load": 1.0, "stitch": 1.0})
        assert model.costs is costs
    assert not model._file.exists(), "nothing was learnt, so nothing is written"


def test_copies_that_run_on_keep_their_price(engine, monkeypatch):
    """A device copies while the host goes on: later stages wait for it."""
    costs = engine._answering.costs.costs = replace(COSTS, each={**COSTS.each, "stitch": 5.0})
    model, price, whole = asked(engine, 0, 1, 2)
    monkeypatch.setattr(engine.loaded.lm, "device", torch.device("cuda"))
    ms = took(price, whole)["repair"] + 5 * whole.num_reused
    model.learn(price, whole, (), {"stitch": 1.0, "repair": ms})
    assert model.costs is costs


@pytest.mark.parametrize("wrong", [5.0, 0.2])
@pytest.mark.parametrize("is_reused", [True, False])
def test_prices_of_a_busy_moment_are_measured_again(engine, monkeypatch, caplog, wrong, is_reused):
    """Forwards that were five times too slow, or too quick, when they were measured are right two requests later."""
    true = replace(COSTS, row=2)
    measurements = [true]
    monkeypatch.setattr("kvrag.blend.cost.measured", lambda _: measurements.pop())
    engine._answering.costs.costs = replace(true, forwards=((0.0,), (10 * wrong,)), row=2 * wrong)
    model, price, whole = asked(engine, 0, 1, 2)
    layout = whole if is_reused else whole.only_live()
    really = took(Price(true, RepairConfig(), 4), layout)
    model.learn(price, layout, (), really)
    assert "measuring the prices again" in caplog.text
    _, price, _ = asked(engine, 0, 1, 2)
    assert price.costs == true
    assert price.of_forwards(layout) == pytest.approx(
        really["repair" if is_reused else "prefill"] - 10 * is_reused
    )
    model.learn(price, layout, (), really)
    asked(engine, 0, 1, 2)
    assert measurements == [], "measured once"


def test_a_machine_that_is_never_as_measured_is_measured_ever_more_seldom(engine, monkeypatch):
    count = []
    monkeypatch.setattr(
        "kvrag.blend.cost.measured", lambda _: (count.append(1), replace(COSTS, row=2))[1]
    )
    engine._answering.costs.costs = replace(COSTS, row=2)
    for _ in range(40):
        model, price, whole = asked(engine, 0, 1, 2)
        model.learn(price, whole.only_live(), (), took(price, whole.only_live(), 10))
    assert 3 <= len(count) <= 6


def test_late_chunks_teach_how_slow_their_tier_is(engine):
    engine._answering.costs.costs = COSTS
    model, price, _ = asked(engine, 0, 1)
    layout = LAYOUT.only_live()
    model.learn(price, layout, {0, 1}, {"load": 1000.0, **took(price, layout)})
    assert model.costs.of("host") > 5


def test_requests_are_answered_as_the_costs_say(engine, monkeypatch):
    """Costs can be set: ``auto`` follows them, in every request and in ``explain``."""
    monkeypatch.setattr("kvrag.blend.cost.is_wrong", lambda *_: False)
    model, ask = engine._answering.costs, prompt(2, 0, 1)
    for each, kind, exactness in (
        (COSTS.each, "stitch", "repaired"),
        ({"request": 1e6}, "prefix", "exact"),
    ):
        model.costs = costs = Costs(((0,), (1,)), 1, 0, each)
        told = engine.explain(ask)
        assert told.mode == kind
        assert model.costs is costs, "explain teaches nothing"
        result = engine.prefill(ask, repair=RepairConfig(strategy="query"))
        assert result.exactness == exactness
        assert told.notes == [] if kind == "stitch" else "estimated: reuse 1000." in told.notes[0]


def test_only_auto_asks_for_prices(engine, monkeypatch):
    monkeypatch.setattr("kvrag.blend.cost.CostModel.known", raising(AssertionError))
    for mode in ("full", "prefix", "stitch"):
        assert engine.prefill(prompt(0, 1), mode=mode).logits.isfinite().all()
    assert engine.prefill("Nothing is stored of this.", mode="auto").exactness == "full"


def test_costs_are_measured_once_and_kept(tmp_path, monkeypatch):
    ticks = count()
    monkeypatch.setattr("kvrag.blend.cost._ms", lambda run: (run(), 1.05 ** next(ticks))[1])
    lm, file = lm_of(), tmp_path / "cache" / "costs" / "one.json"
    found = costs_of(lm, file)
    assert found.unit == "ms"
    assert min(found.row, found.pair) > 0
    assert {"disk", "stitch", "request"} <= found.each.keys()
    monkeypatch.setattr("kvrag.blend.cost.measured", raising(AssertionError, "measured again"))
    assert costs_of(lm, file) == found
    file.write_text("{")
    assert costs_of(lm, file) is IN_ROWS, "neither read nor measured: rows count"


def test_what_requests_taught_is_kept_for_the_next_process(engine_of, monkeypatch):
    monkeypatch.setattr("kvrag.blend.cost.measured", lambda _: COSTS)
    engine, other = engine_of(), engine_of()
    engine.precompute(CHUNKS)
    model, price, whole = asked(engine, 2, 0, 1)
    model.learn(price, whole, (), {"load": 700.0, **took(price, whole)})
    monkeypatch.setattr("kvrag.blend.cost.measured", raising(AssertionError, "measured again"))
    assert asked(other, 0, 1)[1].costs == model.costs != COSTS


def test_prices_that_were_wrong_are_measured_by_the_next_process(engine_of, monkeypatch):
    monkeypatch.setattr("kvrag.blend.cost.measured", lambda _: COSTS)
    engine, other = engine_of(), engine_of()
    engine.precompute(CHUNKS)
    model, price, whole = asked(engine, 2, 0, 1)
    model.learn(price, whole.only_live(), (), took(price, whole.only_live(), 0.1))
    monkeypatch.setattr("kvrag.blend.cost.measured", lambda _: replace(COSTS, row=0.1))
    assert asked(other, 0, 1)[1].costs.row == 0.1


def test_other_numbers_of_threads_processors_and_drivers_have_other_costs(engine, monkeypatch):
    def file():
        return CostModel(engine.loaded)._file

    files = [file()]
    lines = {"/proc/cpuinfo": "a processor", "/proc/driver/nvidia/version": "a driver"}
    for name, value in (
        ("torch.get_num_threads", lambda: 7),
        ("os.cpu_count", lambda: 1000),
        ("torch.version.cuda", "99.9"),
        *(("kvrag.blend.cost._line", lambda path, _, own=path: f"{path == own}") for path in lines),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            files.append(file())
    assert len({*files, file()}) == 6


def test_a_line_of_a_file_of_the_system(tmp_path):
    (tmp_path / "cpuinfo").write_text("cores: 2\nmodel name: one\nmodel name: two\n")
    assert _line(str(tmp_path / "cpuinfo"), "model name") == "model name: one"
    assert _line(str(tmp_path / "cpuinfo"), "NVRM") == _line(str(tmp_path / "none"), "NVRM") == ""


def test_forwards_that_all_take_as_long_are_costs_as_well(monkeypatch):
    """On a device that waits for its host, a probe and a repair cost two forwards: a full prefill costs one."""
    monkeypatch.setattr("kvrag.blend.cost._ms", lambda run: 5.0)
    costs = measured(lm_of())
    assert costs.of_forward(1, 1) == costs.of_forward(5000, 1e6) == 5.0
    layout, reason = Price(costs, RepairConfig(), 4, HOST).cheapest(LONG)
    assert not layout.stale
    assert "full prefill 5 ms" in str(reason)


def test_more_rows_never_cost_less(monkeypatch):
    """What slowed a smaller forward down did not slow a larger one: it was another process."""
    took = {16: 9.0, 32: 30.0, 64: 11.0, 128: 35.0, 192: 20.0, 256: 40.0}
    forwards = count()
    monkeypatch.setattr(
        "kvrag.blend.cost._ms", lambda run: [*took.values(), 40.0][next(forwards) // 3]
    )
    costs = measured(lm_of())
    assert costs.forwards == (tuple(took), (9.0, 11.0, 11.0, 20.0, 20.0, 40.0))


@pytest.mark.parametrize(("per_row", "largest"), [(0.001, 2048), (0.5, 128), (20.0, 32)])
def test_measuring_is_bounded(monkeypatch, per_row, largest):
    """Forwards grow until they tell something; no large one is run where small ones are slow."""
    timed = []

    def forward(ids, *_, **__):
        timed.append(len(ids))
        return lm.buffer(1).keys(0)[None], None

    lm = lm_of()
    monkeypatch.setattr(lm, "forward", forward, raising=False)

    def ms(run):
        run()
        return 10 + per_row * timed[-1]

    monkeypatch.setattr("kvrag.blend.cost._ms", ms)
    costs = measured(lm)
    assert max(timed) == largest <= lm.reuse_window / 2
    assert costs.each["request"] == pytest.approx(10)
    assert costs.row == pytest.approx(per_row)
    assert costs.of_forward(24, 0) == pytest.approx(10 + per_row * 24)
    assert costs.of_forward(5000, 0) == pytest.approx(10 + per_row * 5000)
    assert sum(10 + per_row * rows for rows in timed) < 4000


def test_rows_of_a_slow_model_have_a_price(monkeypatch):
    """Larger forwards are timed while the weights take all the time, whatever the rows are."""
    took = {16: 500.0, 32: 501.0, 64: 520.0, 128: 900.0}
    forwards = count()
    monkeypatch.setattr(
        "kvrag.blend.cost._ms", lambda run: [*took.values(), 900.0][next(forwards) // 2]
    )
    costs = measured(lm_of())
    assert costs.forwards[0] == tuple(took)
    assert costs.of_forward(1024, 0) == pytest.approx(900 + 896 * 380 / 64)


def test_time_that_went_to_others_is_no_price(engine_of):
    lock = engine_of().loaded.lm.lock

    def run():
        with lock:
            return torch.zeros(1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.acquire).result(10)
        threading.Timer(0.3, lambda: pool.submit(lock.release)).start()
        assert _ms(run) < 200
