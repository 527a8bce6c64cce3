"""Forwards stop where nobody looks any more, and the probe asks the layers that it is told to, with the results of whole forwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from kvrag.blend.layout import Layout, place, rows_of
from kvrag.blend.repair import REREAD, probe, probed_layers
from kvrag.model import CausalLM
from kvrag.model.forward import Forward
from kvrag.model.rows import Rows
from kvrag.testing.models import tiny_model

TOKENS = 60
IDS = torch.randint(1, 90, (TOKENS,), generator=torch.Generator().manual_seed(3))
LAYOUT: Layout = place([(40, "chunk", False, 0, False), (TOKENS - 40, "live", False, -1, False)])


@pytest.fixture(scope="module", params=["llama", "gemma2", "gemma3n_text", "gemma4_text", "bloom"])
def lm(request):
    """A plain model, one with soft caps and windows, two with layers that keep no KV, and one whose attention can't be replaced."""
    return CausalLM(tiny_model(request.param))


@contextmanager
def rows_of_each_layer(lm: CausalLM) -> Iterator[dict[int, int]]:
    """Count, by layer, the rows whose attention output is not zero."""
    seen: dict[int, int] = {}
    handles = []
    for layer, attention in enumerate(lm._attentions):

        def note(_: object, __: object, out: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            seen[layer] = int((out[0].abs().sum(dim=-1) > 0).sum())

        handles.append(attention.register_forward_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def filled(lm: CausalLM) -> tuple[torch.Tensor, object]:
    buffer = lm.buffer(TOKENS)
    return lm.forward(IDS, Rows.span(0, TOKENS), buffer, logits=TOKENS)[0], buffer


@pytest.mark.parametrize("logits", [1, 3])
def test_the_last_layer_attends_for_the_rows_that_are_looked_at(lm, logits):
    expected, whole = filled(lm)
    buffer = lm.buffer(TOKENS)
    with rows_of_each_layer(lm) as seen:
        out, _ = lm.forward(IDS, Rows.span(0, TOKENS), buffer, logits=logits)
    assert torch.allclose(out, expected[:, -logits:], atol=1e-4)
    for layer in range(lm.num_layers):
        assert torch.equal(buffer.keys(layer), whole.keys(layer))
        assert torch.equal(buffer.values(layer), whole.values(layer))
    last = TOKENS if lm.is_dense else logits
    tail = lm.depth - lm.num_layers + 1  # the last that writes KV, and all that only read it
    assert list(seen.values()) == [TOKENS] * (lm.num_layers - 1) + [last] * tail


def test_a_forward_without_logits_ends_in_the_last_layer_and_writes_all_kv(lm):
    _, whole = filled(lm)
    buffer = lm.buffer(TOKENS)
    with rows_of_each_layer(lm) as seen:
        out, mass = lm.forward(IDS, Rows.span(0, TOKENS), buffer, logits=0)
    assert out.numel() == 0
    assert mass is None
    assert lm.is_dense or max(seen) == lm.num_layers - 2
    assert all(torch.equal(buffer.keys(layer), whole.keys(layer)) for layer in range(lm.num_layers))
    assert all(
        torch.equal(buffer.values(layer), whole.values(layer)) for layer in range(lm.num_layers)
    )


def test_mass_comes_from_the_layers_asked_for_and_the_rest_is_not_run(lm):
    def mass_of(layers):
        _, buffer = filled(lm)
        _, mass = lm.forward(
            IDS[40:], Rows.span(40, TOKENS), buffer, logits=0, mass_rows=5, mass_layers=layers
        )
        assert mass is not None
        return mass

    single = [mass_of(range(layer, layer + 1)) for layer in range(lm.depth)]
    assert torch.allclose(torch.stack(single).sum(dim=0), mass_of(None), atol=1e-4)
    assert not torch.allclose(single[0], single[1], atol=1e-4)
    for layer, mass in enumerate(
        single
    ):  # of one row it would be a key head's 1, or more where its query heads differ
        heads = lm.shapes[min(layer, lm.num_layers - 1)].num_heads
        assert heads < float(mass.sum()) < 5 * lm.config.num_attention_heads
        assert float(mass.max()) <= heads + 1e-4
    _, buffer = filled(lm)
    with rows_of_each_layer(lm) as seen:
        lm.forward(
            IDS[40:], Rows.span(40, TOKENS), buffer, logits=0, mass_rows=5, mass_layers=range(1)
        )
    assert lm.is_dense or not seen


def test_logits_and_mass_can_be_asked_together(lm):
    expected, buffer = filled(lm)
    rows = {"mass_rows": 7}
    _, mass = lm.forward(IDS[40:], Rows.span(40, TOKENS), buffer, logits=0, **rows)
    out, both = lm.forward(IDS[40:], Rows.span(40, TOKENS), buffer, logits=2, **rows)
    torch.testing.assert_close(both, mass, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out, expected[:, -2:], atol=1e-4, rtol=1e-4)


def test_a_forward_gives_way_in_every_layer(lm, monkeypatch):
    ways: list[bool] = []
    monkeypatch.setattr(Forward, "_pause", lambda _: ways.append(True))
    lm.forward(IDS, Rows.span(0, TOKENS), lm.buffer(TOKENS))
    assert len(ways) == lm.depth


def probed(lm: CausalLM, span: tuple[float, float] = (0.0, 1.0)) -> torch.Tensor:
    buffer = lm.buffer(TOKENS + REREAD)
    lm.forward(IDS, Rows.span(0, TOKENS), buffer, logits=0)
    return probe(lm, buffer, LAYOUT, IDS, span=span)


def test_the_probe_goes_by_its_span(lm):
    assert not torch.allclose(probed(lm, (0.0, 1 / lm.depth)), probed(lm), atol=1e-4)


@pytest.mark.parametrize("left", [0, 3, 1000])
def test_the_probe_reads_the_question_twice_as_far_as_there_are_positions(lm, left):
    again = min(left, LAYOUT.num_suffix)
    rows = torch.cat([rows_of(LAYOUT.live), torch.arange(TOKENS, TOKENS + again)])
    ids = torch.cat([IDS, IDS[TOKENS - again :]])
    buffer = lm.buffer(TOKENS + again)
    lm.forward(IDS, Rows.span(0, TOKENS), buffer, logits=0)
    _, expected = lm.forward(
        ids[rows], Rows.at(rows), buffer, logits=0, mass_rows=LAYOUT.num_suffix + again
    )

    with patch.object(lm, "reuse_window", TOKENS + left):
        assert torch.equal(probed(lm), expected[:TOKENS])


@pytest.mark.parametrize(
    ("span", "num_layers", "layers"),
    [
        ((1 / 3, 0.8), 30, range(10, 24)),
        ((1 / 3, 0.8), 2, range(1, 2)),
        ((1 / 3, 0.8), 1, range(1)),
        ((0.0, 1.0), 4, range(4)),
        ((0.0, 0.01), 4, range(1)),
        ((0.99, 1.0), 4, range(3, 4)),
    ],
)
def test_a_span_takes_in_at_least_one_layer(span, num_layers, layers):
    assert probed_layers(span, num_layers) == layers
