"""Layouts and selections: integers, no model."""

import itertools
import math
from types import SimpleNamespace

import fake_cuda
import pytest
import torch

from kvrag.blend.covariance import NOISE, STEPS, RowCovariance, choose, kernel
from kvrag.blend.layout import Layout, Segment, place, rows_of
from kvrag.blend.reuse import decide
from kvrag.blend.select import DISTANCES, RUNS_SHARE, Signals, _runs, effective_ratio, select_rows
from kvrag.config import RepairConfig

#   prefix 0:10 | chunk 10:110 exact | glue 110:112 | chunk 112:212 | glue 212:214 | chunk 214:314 | suffix 314:330
LAYOUT = place(
    [
        (10, "prefix", True, 0, False),
        (100, "chunk", True, 1, False),
        (2, "live", False, -1, False),
        (100, "chunk", False, 2, False),
        (2, "live", False, -1, False),
        (100, "chunk", False, 3, False),
        (16, "live", False, -1, False),
    ]
)


def test_a_layout_covers_the_prompt_without_gap():
    assert LAYOUT.segments[0].start == 0
    assert all(
        a.stop == b.start for a, b in zip(LAYOUT.segments, LAYOUT.segments[1:], strict=False)
    )
    assert (LAYOUT.num_tokens, LAYOUT.num_live, LAYOUT.num_suffix) == (330, 20, 16)
    assert [s.start for s in LAYOUT.stale] == [112, 214]
    assert not LAYOUT.is_exact


def test_the_last_row_is_always_live():
    layout = place([(5, "prefix", True, 0, False), (1, "chunk", False, 1, False)])
    assert layout.segments[-1] == Segment(5, 6, "live")
    assert place([(4, "chunk", False, 0, False), (0, "live", False, -1, False)]).segments == (
        Segment(0, 3, "chunk", False, 0),
        Segment(3, 4, "live"),
    )


def test_only_the_leading_exact_segments_remain_in_prefix_mode():
    head = LAYOUT.only_exact_head()
    assert [(s.start, s.stop, s.kind) for s in head.segments] == [
        (0, 10, "prefix"),
        (10, 110, "chunk"),
        (110, 330, "live"),
    ]
    assert head.is_exact


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("strategy", ["random", "first_k", "boundary", "hkvd", "query"])
def test_selected_rows_keep_the_budget_and_lie_in_stale_chunks(strategy, ratio):
    torch.manual_seed(0)
    config = RepairConfig(strategy=strategy, recompute_ratio=ratio, first_k=4)
    rows = select_rows(LAYOUT, config, mass=torch.rand(330), deviation=torch.rand(330))
    assert torch.equal(rows, torch.unique(rows))
    assert set(rows.tolist()) <= set(rows_of(LAYOUT.stale).tolist())
    heads = {*range(112, 116), *range(214, 218)}
    assert heads <= set(rows.tolist())
    if ratio == 1.0:
        assert len(rows) == 200
    else:
        assert len(rows) == max(8, round(ratio * 200))


def test_none_selects_nothing_and_all_everything():
    assert len(select_rows(LAYOUT, RepairConfig(strategy="none"))) == 0
    assert torch.equal(select_rows(LAYOUT, RepairConfig(strategy="all")), rows_of(LAYOUT.stale))
    nothing_stale = place([(5, "live", False, -1, False)])
    for strategy in ("all", "first_k", "boundary"):
        assert len(select_rows(nothing_stale, RepairConfig(strategy=strategy))) == 0


def covariance_of(layout, seed=0):
    """Rows of made-up values, as the repair compares them."""
    torch.manual_seed(seed)
    span = slice(layout.stale[0].start, layout.stale[-1].stop)
    owner = torch.full((span.stop - span.start,), -1)
    for number, chunk in enumerate(layout.stale):
        owner[chunk.start - span.start : chunk.stop - span.start] = number
    rows = torch.nn.functional.normalize(torch.randn(len(owner), 8), dim=1)
    return RowCovariance(span, rows, owner, torch.ones(len(owner)))


def breaks_of(sizes="1", num_tokens=330):
    """Return breaks of a text: a digit is the break before a row, and the digits recur."""
    return torch.tensor(
        [int(d) for d, _ in zip(itertools.cycle(sizes), range(num_tokens), strict=False)]
    )


def chosen_runs(layout, ratio, mass, breaks, seed=0):
    """Return the rows that ``query_runs`` chooses, as a set; heads are not added."""
    config = RepairConfig("query_runs", recompute_ratio=ratio, first_k=0)
    rows = select_rows(
        layout, config, mass=mass, covariance=covariance_of(layout, seed), breaks=breaks
    )
    assert len(rows) == round(ratio * len(rows_of(layout.stale)))
    return set(rows.tolist())


def test_a_run_grows_around_the_row_that_the_question_attends_to():
    mass = torch.full((330,), 1e-6)
    mass[150] = 1.0
    rows = chosen_runs(LAYOUT, 0.24, mass, breaks_of())
    assert set(range(135, 165)) <= rows  # two thirds of 48 rows, on both sides


def test_a_run_ends_with_its_line_where_another_place_counts_more():
    mass = torch.full((330,), 1e-6)
    mass[150], mass[250] = 1.0, 0.9
    breaks = breaks_of("2" + "1" * 9)
    rows = chosen_runs(LAYOUT, 0.24, mass, breaks)
    assert {*range(150, 160), *range(250, 260)} <= rows


def test_the_lines_of_a_record_are_nearer_than_the_next_record():
    mass = torch.full((330,), 1e-6)
    mass[150] = 1.0
    breaks = breaks_of("3111121111")
    rows = chosen_runs(LAYOUT, 0.075, mass, breaks)
    assert {*range(150, 160)} <= rows
    assert 149 not in rows


def test_no_run_goes_over_from_a_chunk_to_the_next():
    layout = place(
        [
            (20, "chunk", False, 0, False),
            (20, "chunk", False, 1, False),
            (4, "live", False, -1, False),
        ]
    )
    mass = torch.full((44,), 1e-6)
    mass[18] = 1.0
    covariance = covariance_of(layout)
    signals = Signals(
        layout.stale,
        rows_of(layout.stale),
        30,
        0.75,
        {"mass": mass, "covariance": covariance, "breaks": breaks_of(num_tokens=44)},
        RepairConfig(),
    )
    assert set(_runs(signals)[:20].tolist()) == set(range(20))


@pytest.mark.parametrize("budget", range(2, 40, 3))
def test_no_run_begins_or_ends_inside_a_word(budget):
    layout = place([(60, "chunk", False, 0, False), (4, "live", False, -1, False)])
    mass = torch.rand(64)
    breaks = breaks_of("10000", 64)
    signals = Signals(
        layout.stale,
        rows_of(layout.stale),
        budget,
        budget / 60,
        {"mass": mass, "covariance": covariance_of(layout), "breaks": breaks},
        RepairConfig(),
    )
    taken = _runs(signals)[: int(budget * RUNS_SHARE) // 5 * 5].reshape(-1, 5)
    assert torch.equal(taken - taken[:, :1], torch.arange(5).expand(len(taken), 5))
    assert not (taken[:, 0] % 5).any()


def test_runs_are_those_of_distances_looked_up_one_by_one():
    """The reference looks from each row at all others of its chunk."""
    layout = place(
        [
            *((60, "chunk", False, number, False) for number in range(3)),
            (4, "live", False, -1, False),
        ]
    )
    for seed in range(5):
        torch.manual_seed(seed)
        mass, breaks = torch.rand(184) ** 4, torch.randint(1, 4, (184,))
        far = DISTANCES[breaks]
        read = [
            max(
                math.log(mass[j]) - float(far[min(i, j) + 1 : max(i, j) + 1].sum())
                for j in range(i // 60 * 60, i // 60 * 60 + 60)
            )
            for i in range(180)
        ]
        want = sorted(range(180), key=lambda i: -read[i])[: int(RUNS_SHARE * 36)]
        assert set(want) <= chosen_runs(layout, 0.2, mass, breaks, seed)


def informative(covariance, candidates, mass, count):
    """Choose the most informative rows by a solution in each step: the reference."""
    at = candidates - covariance.span.start
    left = kernel(*[covariance.rows[at], covariance.owner[at]] * 2)
    weight = mass.clamp(min=0).sqrt()
    taken = torch.zeros_like(candidates, dtype=torch.bool)
    each = -(-count // STEPS)
    chosen = []
    for start in range(0, count, each):
        variance = left.diagonal()
        told = (weight @ left.square() - weight * variance.square()) / (variance + NOISE)
        gain = (weight * (variance + NOISE) + told).masked_fill(taken, -torch.inf)
        rows = gain.topk(min(each, count - start)).indices
        chosen.append(rows)
        taken[rows] = True
        weight[rows] = 0
        known = left[rows]
        inner = known[:, rows]
        inner.diagonal().add_(NOISE)
        left -= known.T @ torch.linalg.solve(inner, known)
    return candidates[torch.cat(chosen)].tolist()


MANY = place(
    [*((100, "chunk", False, number, False) for number in range(12)), (4, "live", False, -1, False)]
)


@pytest.mark.parametrize("count", [1, 5, 32, 33, 100, 250, 256])
def test_the_most_informative_rows_are_those_of_one_solution_after_the_other(count):
    for seed in range(3):
        covariance = covariance_of(MANY, seed)
        candidates = torch.randperm(1200)[:512]
        mass = torch.rand(512) ** 4
        mass[::7] = 0
        want = informative(covariance, candidates, mass, count)
        assert covariance.most_informative(candidates, mass, count).tolist() == want


def test_candidates_that_fill_the_inputs_up_change_nothing_and_are_not_chosen():
    """A recording has inputs of one size."""
    covariance = covariance_of(MANY)
    candidates = torch.randperm(1200)[:300]
    mass = torch.rand(300)
    want = covariance.most_informative(candidates, mass, 256)
    filled = torch.cat([candidates, candidates[:1].expand(212)])
    hidden = torch.zeros(512)
    hidden[300:] = -torch.inf
    weight = torch.cat([mass.sqrt(), torch.zeros(212)])
    got = choose(
        covariance.rows[filled], covariance.owner[filled], weight, hidden, each=8, steps=STEPS
    )
    assert filled[got].tolist() == want.tolist()


def test_a_choice_can_be_recorded(monkeypatch):
    """It asks the device for nothing that a recording can't have, however often it is replayed."""
    fake = fake_cuda.install(monkeypatch)
    covariance = covariance_of(MANY)
    inputs = covariance.rows[:512], covariance.owner[:512], torch.rand(512), torch.zeros(512)
    want = choose(*(x.clone() for x in inputs), each=8, steps=STEPS)
    with fake:
        given = [x.to("cuda", non_blocking=True) for x in inputs]
        fake.clear()
        with fake.replay():
            got = choose(*given, each=8, steps=STEPS)
        assert fake.num_launches == 1
        assert torch.equal(got.cpu(), want)


def test_the_covariance_takes_one_upload_and_no_wait(monkeypatch):
    """Whose rows are, and how much they change."""
    fake = fake_cuda.install(monkeypatch)
    layers, mass = [torch.randn(1, 2, 1204, 16) for _ in range(4)], torch.rand(1204)

    def found(values):
        buffer = SimpleNamespace(layers=values, values=values.__getitem__)
        return RowCovariance.of(buffer, MANY, mass)

    want = found(layers)
    with fake:
        layers = [x.to("cuda", non_blocking=True) for x in layers]
        fake.clear()
        got = found(layers)
        assert [kind for kind, _ in fake.log] == ["upload"]
        for name in ("rows", "owner", "size"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name))


@pytest.mark.parametrize("ratio", [0.005, 0.01, 0.015, 0.5, 0.99, 1.0, None])
def test_runs_keep_the_budget(ratio):
    config = RepairConfig("query_runs", recompute_ratio=ratio)
    breaks = breaks_of("21110100311")
    rows = select_rows(
        LAYOUT, config, mass=torch.rand(330), covariance=covariance_of(LAYOUT), breaks=breaks
    )
    assert torch.equal(rows, torch.unique(rows))
    assert len(rows) == max(2, round((0.25 if ratio is None else ratio) * 200))
    assert set(rows.tolist()) <= set(rows_of(LAYOUT.stale).tolist())


@pytest.mark.parametrize(
    ("num_rows", "count"), [(100, 25), (1000, 232), (2500, 292), (10_000, 592)]
)
def test_the_default_ratio_has_a_number_of_rows_in_it(num_rows, count):
    assert round(effective_ratio(LAYOUT, RepairConfig(), num_rows) * num_rows) == count


def test_query_takes_the_rows_of_most_mass_and_hkvd_those_of_most_deviation():
    mass, change = torch.zeros(330), torch.zeros(330)
    mass[[50, 150, 160]] = 1.0  # row 50 is exact: no candidate
    change[[220, 300]] = 1.0
    query = RepairConfig("query", recompute_ratio=0.01, first_k=0)
    assert select_rows(LAYOUT, query, mass=mass).tolist() == [150, 160]
    hkvd = RepairConfig(strategy="hkvd", recompute_ratio=0.01, first_k=0)
    assert select_rows(LAYOUT, hkvd, deviation=change).tolist() == [220, 300]
    ties = RepairConfig("query", recompute_ratio=0.01, first_k=0)
    assert select_rows(LAYOUT, ties, mass=torch.ones(330)).tolist() == [112, 113]


def test_random_repeats_with_its_seed():
    one, two, other = (
        select_rows(LAYOUT, RepairConfig(strategy="random", seed=s)).tolist() for s in (1, 1, 2)
    )
    assert one == two != other


def test_another_prefix_raises_the_ratio():
    layout = Layout(
        (
            Segment(0, 10, "live"),
            Segment(10, 110, "chunk", False, 0, True),
            Segment(110, 111, "live"),
        )
    )
    assert effective_ratio(layout, RepairConfig(recompute_ratio=0.1), 100) == 0.20
    assert effective_ratio(layout, RepairConfig(recompute_ratio=0.3), 100) == 0.3
    assert effective_ratio(layout, RepairConfig(recompute_ratio=0.0), 100) == 0.0
    assert effective_ratio(LAYOUT, RepairConfig(recompute_ratio=0.1), 200) == 0.1


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("full", ["live"]),
        ("prefix", ["prefix", "chunk", "live"]),
        ("stitch", [s.kind for s in LAYOUT.segments]),
    ],
)
def test_modes_decide_how_much_is_reused(mode, kinds):
    layout, reason = decide(LAYOUT, mode)
    assert [s.kind for s in layout.segments] == kinds
    assert reason is None


def test_only_auto_asks_what_is_cheapest():
    cheap = LAYOUT.only_exact_head()
    asked = {
        mode: decide(LAYOUT, mode, lambda layout: (cheap, "asked"))
        for mode in ("full", "prefix", "stitch", "auto")
    }
    assert [mode for mode, (_, reason) in asked.items() if reason == "asked"] == ["auto"]
    assert asked["auto"][0] is cheap
