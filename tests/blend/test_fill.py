"""Chunks without stored KV are computed once, before the probe, where the repair would cost less than to compute them twice."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit import lm_of
from texts import asking, make_chunks

from kvrag import RepairConfig
from kvrag.blend import prefill as stage
from kvrag.blend.cost import Costs, Price
from kvrag.blend.layout import Layout, place, rows_of
from kvrag.blend.repair import REREAD, fill
from kvrag.blend.select import filled
from kvrag.model import CausalLM
from kvrag.model.lock import Clock
from kvrag.model.rows import Rows
from kvrag.testing.models import tiny_model


def layout_of(*sizes: int) -> Layout:
    """Lay out live segments, and stored chunks where sizes are negative."""
    return place(
        [
            (abs(n), "chunk" if n < 0 else "live", False, i if n < 0 else -1, False)
            for i, n in enumerate(sizes)
        ]
    )


#   missing 0:300 | glue 300:302 | chunk 302:602 | glue 602:604 | missing 604:904 | question 904:1064
LAYOUT = layout_of(300, 2, -300, 2, 300, 160)
AHEAD = 604


def test_live_rows_but_the_question_are_filled():
    found = LAYOUT.filled()
    kinds = ["filled", "filled", "chunk", "filled", "filled", "live"]
    assert [s.kind for s in found.segments] == kinds
    assert [s.stop for s in found.segments] == [300, 302, 602, 604, 904, 1064]
    assert (found.num_live, found.num_suffix, found.num_stale) == (160, 160, 300)
    assert layout_of(-300, 40).filled() == layout_of(-300, 40)


@pytest.mark.parametrize("missing", [70, 80])
def test_rows_are_filled_where_they_are_more_than_those_to_repair(missing):
    """A question of any length is left to the repair."""
    layout = layout_of(missing, -300, 500)
    assert bool(filled(layout, RepairConfig(), 0).ahead) == (missing > 75)
    assert filled(layout, RepairConfig(), 80) == layout, "a forward more would take longer"
    for strategy in ("none", "all", "hkvd"):
        assert filled(layout, RepairConfig(strategy=strategy), 0) == layout, "nothing probes"


def test_filled_rows_have_seen_the_stitched_rows():
    """Rows in front of the first chunk are exact; those behind are as if nothing were repaired."""
    lm = lm_of()
    ids = torch.randint(1, 90, (1064,), generator=torch.Generator().manual_seed(3))
    layout = LAYOUT.filled()
    exact, once, found = (lm.buffer(1064) for _ in range(3))
    lm.forward(ids, Rows.span(0, 1064), exact)
    for buffer in (once, found):
        for own, whole in zip(sum(buffer.layers, ()), sum(exact.layers, ()), strict=True):
            own[:, :, 302:602] = whole[:, :, 302:602] + 1
    lm.forward(ids[LAYOUT.live_rows], Rows.at(LAYOUT.live_rows), once)
    fill(lm, found, layout, ids)
    rows = rows_of(layout.ahead)
    for own, whole, stale in zip(*(sum(b.layers, ()) for b in (found, exact, once)), strict=True):
        torch.testing.assert_close(own[:, :, :302], whole[:, :, :302], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own[:, :, rows], stale[:, :, rows], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found.keys(1)[:, :, 604:904], exact.keys(1)[:, :, 604:904], atol=0.01)


def test_a_missing_chunk_is_computed_once(engine_of, monkeypatch):
    chunks = make_chunks(4, words=200)
    engine = engine_of()
    engine.precompute(chunks[::2])
    prompt = asking(chunks, 1, 0, 3, 2)
    whole = engine.prefill(prompt, mode="stitch", repair=RepairConfig(strategy="none"))
    count = Counter[int]()
    real = CausalLM.forward

    def forward(lm, ids, rows, *rest, **options):
        count.update(torch.arange(rows.stop)[rows.slots].tolist())
        return real(lm, ids, rows, *rest, **options)

    monkeypatch.setattr(CausalLM, "forward", forward)
    found = engine.prefill(prompt, mode="stitch")
    last = whole.prompt_tokens - whole.sources[-1][1]
    for row, source in enumerate(s for s, size in whole.sources for _ in range(size)):
        if source == "computed":
            assert count[row] == (1 if row < last else 2)
    assert found.computed_tokens == whole.computed_tokens
    assert 0 < found.repaired_tokens < whole.computed_tokens


def test_the_price_counts_missing_rows_once():
    costs = Costs(((0.0,), (100.0,)), row=1, pair=0, each={})
    price = Price(costs, RepairConfig(), 30)
    twice = 0.8 * (100 + 160 + REREAD)
    assert price.of_forwards(LAYOUT) == pytest.approx(100 + AHEAD + twice + 100 + 160 + 75)
    slow = replace(costs, forwards=((0.0,), (1000.0,)))
    probe = 0.8 * (1000 + AHEAD + 160 + REREAD)
    both = probe + 1000 + AHEAD + 160 + 75
    assert replace(price, costs=slow).of_forwards(LAYOUT) == pytest.approx(both)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3n_text", "gemma4_text", "bloom"])
def test_over_exact_rows_everything_is_exact(monkeypatch, name, is_recorded):
    """Where the stitched rows equal a full prefill's, so do all others, and the logits."""
    lm = CausalLM(tiny_model(name))
    layout = layout_of(60, -40, 2, 70, -40, 2, 90, -30, 20)
    count = layout.num_tokens
    ids = torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(3))
    exact = lm.buffer(count)
    logits, _ = lm.forward(ids, Rows.span(0, count), exact)
    run = None
    if is_recorded:
        if not lm.can_share_forwards:
            pytest.skip("it computes one request at a time")
        lm.record(4096, record=lambda compute: (compute(), compute)[1])
        run = lm.recorded.pool.take(count + REREAD)
    buffer = lm.buffer(count + REREAD, run=run)
    pairs = list(zip(sum(buffer.layers, ()), sum(exact.layers, ()), strict=True))
    for own, _ in pairs:
        own.fill_(300.0)

    def stitch(*_, **__):
        rows = rows_of(layout.reused)
        for own, whole in pairs:
            own[:, :, rows] = whole[:, :, rows]

    monkeypatch.setattr(stage, "stitch", stitch)
    encoder = SimpleNamespace(token_texts=lambda ids: ["ab "] * len(ids))
    config = RepairConfig(recompute_ratio=0.2)
    assert filled(layout, config, 0).ahead
    prompt = lm, buffer, layout, encoder, ids, config, [], Clock(), None
    selected, found = stage._blended(*prompt, logits=1, floor=0)
    assert 0 < len(selected) < layout.num_stale
    torch.testing.assert_close(found, logits.flatten(), atol=2e-3, rtol=0)
    for own, whole in pairs:
        torch.testing.assert_close(
            own[:, :, : count - 1], whole[:, :, : count - 1], atol=2e-3, rtol=0
        )
