"""Chunks without stored KV are computed once, before the probe, where the repair would cost less than to compute them twice."""

from collections import Counter

import pytest
import torch
from kit import lm_of
from texts import asking, make_chunks

from kvrag import RepairConfig
from kvrag.blend.cost import Costs, Price
from kvrag.blend.layout import Layout, Segment, place, rows_of
from kvrag.blend.repair import fill
from kvrag.blend.select import QUESTION, filled
from kvrag.model import CausalLM
from kvrag.model.rows import Rows

#   missing 0:300 | glue 300:302 | chunk 302:602 | glue 602:604 | missing 604:904, glue, question 904:1064
LAYOUT = place(
    [
        (300, "live", False, -1, False),
        (2, "live", False, -1, False),
        (300, "chunk", False, 0, False),
        (2, "live", False, -1, False),
        (460, "live", False, -1, False),
    ]
)
CUT = 1064 - QUESTION


def test_live_rows_but_the_last_ones_are_filled():
    found = LAYOUT.filled(QUESTION)
    assert [(s.start, s.stop, s.kind) for s in found.segments] == [
        (0, 300, "filled"),
        (300, 302, "filled"),
        (302, 602, "chunk"),
        (602, 604, "filled"),
        (604, CUT, "filled"),
        (CUT, 1064, "live"),
    ]
    assert (found.num_live, found.num_suffix, found.num_stale) == (QUESTION, QUESTION, 300)
    short = place([(300, "chunk", False, 0, False), (40, "live", False, -1, False)])
    assert short.filled(QUESTION) == short


@pytest.mark.parametrize("missing", [70, 80])
def test_rows_are_filled_where_they_are_more_than_those_to_repair(missing):
    layout = place(
        [
            (missing, "live", False, -1, False),
            (300, "chunk", False, 0, False),
            (QUESTION, "live", False, -1, False),
        ]
    )
    assert bool(filled(layout, RepairConfig()).ahead) == (missing > 75)
    for strategy in ("none", "all", "hkvd"):
        assert filled(layout, RepairConfig(strategy=strategy)) == layout, "nothing probes"


def test_filled_rows_have_seen_the_stitched_rows():
    """Rows in front of the first chunk are exact; those behind are as if nothing were repaired."""
    lm = lm_of()
    ids = torch.randint(1, 90, (1064,), generator=torch.Generator().manual_seed(3))
    layout = LAYOUT.filled(QUESTION)
    exact, once, found = (lm.buffer(1064) for _ in range(3))
    lm.forward(ids, Rows.span(0, 1064), exact)
    for buffer in (once, found):
        for layer in range(lm.num_layers):
            buffer.keys(layer)[:, :, 302:602] = exact.keys(layer)[:, :, 302:602] + 1
            buffer.values(layer)[:, :, 302:602] = exact.values(layer)[:, :, 302:602] + 1
    lm.forward(ids[LAYOUT.live_rows], Rows.at(LAYOUT.live_rows), once)
    fill(lm, found, layout, ids)
    rows = rows_of(layout.ahead)
    for layer in range(lm.num_layers):
        for own, whole, stale in zip(*(b.layers[layer] for b in (found, exact, once)), strict=True):
            torch.testing.assert_close(own[:, :, :302], whole[:, :, :302], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(own[:, :, rows], stale[:, :, rows], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found.keys(1)[:, :, 604:CUT], exact.keys(1)[:, :, 604:CUT], atol=0.01)


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
    for row, source in enumerate(s for s, size in whole.sources for _ in range(size)):
        if source == "computed":
            assert count[row] == (1 if row < whole.prompt_tokens - QUESTION else 2)
    assert "prefill" in found.timings_ms
    assert found.computed_tokens == whole.computed_tokens
    assert 0 < found.repaired_tokens < whole.computed_tokens


def test_the_price_counts_missing_rows_once():
    costs = Costs(((0.0,), (100.0,)), row=1, pair=0, each={})
    price = Price(costs, RepairConfig(), 30)
    ahead = 1064 - 300 - QUESTION
    twice = 0.8 * (100 + 2 * QUESTION)
    assert price.of_forwards(LAYOUT) == pytest.approx(100 + ahead + twice + 100 + QUESTION + 75)
    few = Layout((*LAYOUT.segments[2:4], Segment(604, 644, "live")))
    assert price.of_forwards(few) == pytest.approx(0.8 * (100 + 42 + 42) + 100 + 42 + 75)
