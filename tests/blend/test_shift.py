"""The residual shift: what repaired rows say of the others, and what it leaves alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_equivalence import CHUNKS, TOLERANCE, ask, distance, engines
from test_equivalence import largest_change_before_the_difference as change_before
from texts import make_chunks

import kvrag.blend.covariance as covariance
import kvrag.blend.repair as repairing
import kvrag.blend.select as selecting
import kvrag.blend.stitch as stitching
import kvrag_kernels
from kvrag import RepairConfig
from kvrag.blend.covariance import RowCovariance, kernel
from kvrag.blend.layout import Layout, Segment, place, rows_of
from kvrag.blend.repair import ResidualShift, may_shift, residual_shift
from kvrag.blend.select import select_rows
from kvrag.model import CausalLM
from kvrag.model.rope import NO_ROTATION, Rotations
from kvrag.model.rows import KVBuffer, LayerShape
from kvrag.testing.models import tiny_model

HEADS, DIM, LAYERS = 2, 8, 4


def chunks_of(*lengths: int) -> Layout:
    """Chunks in a row behind three live rows, and a live row between them and behind them."""
    live = (1, "live", False, -1, False)
    parts = [part for i, n in enumerate(lengths) for part in ((n, "chunk", False, i, False), live)]
    return place([(3, "live", False, -1, False), *parts])  # type: ignore[list-item]


def two_kinds(layout: Layout) -> tuple[KVBuffer, torch.Tensor]:
    """A prompt whose stored rows are alike in two kinds, in turn; live rows are not written yet."""
    shapes = [LayerShape(HEADS, DIM, DIM)] * LAYERS
    buffer = KVBuffer.empty(
        shapes, layout.num_tokens, dtype=torch.float32, device=torch.device("cpu")
    )
    kinds = torch.arange(layout.num_tokens) % 2
    for keys, values in buffer.layers:
        keys.fill_(float("nan"))
        rows = rows_of(layout.stale)
        keys[:, :, rows] = (kinds[rows] * 2.0 - 1)[:, None] + 0.01 * torch.randn(
            HEADS, len(rows), DIM
        )
        values.copy_(keys)
    return buffer, kinds


def shift_of(
    layout: Layout,
    buffer: KVBuffer,
    selected: Sequence[int],
    strength: float = 1.0,
    mass: torch.Tensor | None = None,
) -> tuple[ResidualShift | None, torch.Tensor]:
    rows = torch.sort(
        torch.cat([torch.tensor(selected, dtype=torch.int64), rows_of(layout.live)])
    ).values
    rotary: Rotations = [NO_ROTATION.at(torch.arange(layout.num_tokens))] * LAYERS
    return residual_shift(
        RowCovariance.of(buffer, layout, mass), layout, rows, strength, rotary
    ), rows


def changes(
    layout: Layout, buffer: KVBuffer, selected: Sequence[int], kinds: torch.Tensor
) -> torch.Tensor:
    """How far each row of layer 1 is shifted where the repaired rows of the first kind change by 1, and of the second by -1."""
    shift, rows = shift_of(layout, buffer, selected)
    assert shift is not None
    before = buffer.values(1).clone()
    fresh = [x[:, :, rows] + (1.0 - 2 * kinds[rows])[:, None] for x in buffer.layers[1]]
    shift(1, *buffer.layers[1], *fresh)
    torch.testing.assert_close(buffer.keys(1), buffer.values(1), equal_nan=True)
    return (buffer.values(1) - before).mean(dim=(0, 1, 3))


def test_rows_change_as_the_repaired_rows_do_that_are_like_them():
    layout = chunks_of(40, 40)
    buffer, kinds = two_kinds(layout)
    found = changes(layout, buffer, [*range(10, 22), *range(55, 67)], kinds)
    stale = rows_of([Segment(s.start + 4, s.stop, "chunk") for s in layout.stale])
    assert not found[rows_of([s.head(4) for s in layout.stale])].any(), (
        "heads change in their own way"
    )
    assert bool((found[stale][kinds[stale] == 0] > 0.4).all()), "the first kind changed by 1"
    assert bool((found[stale][kinds[stale] == 1] < -0.4).all()), "the second by -1"


@pytest.mark.parametrize("name", ["llama", "gemma3n_text", "gemma2"])
def test_a_repair_for_its_kv_alone_writes_the_same(name):
    """Without logits, the last layer is not computed to its end."""
    layout, lm, found = chunks_of(40, 40), CausalLM(tiny_model(name, seed=3)), []
    ids = torch.arange(layout.num_tokens) + 7
    for logits in (1, 0):
        torch.manual_seed(5)
        buffer = lm.buffer(layout.num_tokens)
        for layer in buffer.layers:
            for side in layer:
                side.normal_()
        rotary = lm.rotary(layout.num_tokens)
        found.append(
            repairing.repair(
                lm,
                buffer,
                layout,
                ids,
                torch.arange(10, 22),
                shift=1.0,
                rotary=rotary,
                logits=logits,
            )
        )
        found.append(torch.cat([side.flatten() for layer in buffer.layers for side in layer]))
    assert torch.equal(found[1], found[3])
    assert len(found[0]) == lm.vocab_size
    assert len(found[2]) == 0


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "llama-yarn", "deepseek_v3-yarn"])
def test_sixteen_bits_shift_keys_and_values_alike(name):
    """Rotate by a wider product, as on a device, and by passes over all rows."""
    layout, lm, found = chunks_of(40, 40), CausalLM(tiny_model(name, seed=3)), []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(5)
        buffer = lm.buffer(layout.num_tokens)
        for keys, values in buffer.layers:
            keys.normal_()
            values.normal_()
        rows = torch.sort(
            torch.cat([torch.arange(10, 22), torch.arange(55, 66), rows_of(layout.live)])
        ).values
        shift = residual_shift(
            RowCovariance.of(buffer, layout), layout, rows, 1.0, lm.rotary(layout.num_tokens)
        )
        assert shift is not None
        if dtype != torch.float32:
            count, shift = len(shift.at), shift.padded(-len(shift.at) % 8, dtype)
            assert count % 8
            assert len(shift.at) % 8 == 0
        before = [x.clone() for x in buffer.layers[1]]
        shift(1, *buffer.layers[1], *(torch.randn(x[:, :, rows].shape) for x in buffer.layers[1]))
        found.append([after - x for after, x in zip(buffer.layers[1], before, strict=True)])
    for wide, narrow in zip(*found, strict=True):
        assert float(narrow.abs().max()) > 0.1
        torch.testing.assert_close(wide, narrow, atol=0.02, rtol=0.02)


def test_a_chunk_learns_from_others_and_more_from_itself():
    layout = chunks_of(40, 40)
    buffer, kinds = two_kinds(layout)
    found = changes(layout, buffer, range(10, 14), kinds)
    one, other = (float(found[s.start : s.stop].abs().mean()) for s in layout.stale)
    assert one > 1.2 * other > 0.1


def test_few_rows_move_others_less_than_many_do():
    moved = []
    for count in (2, 8, 30):
        torch.manual_seed(0)
        layout = chunks_of(60)
        buffer, kinds = two_kinds(layout)
        moved.append(
            float(changes(layout, buffer, range(10, 10 + count), kinds)[50:60].abs().mean())
        )
    assert 0 < moved[0] < moved[1] < moved[2] < 1


@pytest.mark.parametrize("is_read", [False, True])
def test_the_weights_are_those_of_the_formula(is_read):
    """Rasmussen and Williams, eq. 2.25, row by row in float64, for changes divided by their size."""
    torch.manual_seed(0)
    layout = chunks_of(9, 7)
    shapes = [LayerShape(HEADS, DIM, DIM)] * LAYERS
    buffer = KVBuffer.empty(
        shapes, layout.num_tokens, dtype=torch.float32, device=torch.device("cpu")
    )
    for tensors in buffer.layers:
        for tensor in tensors:
            tensor.normal_()
    selected = [8, 10, 18, 19]
    mass = torch.rand(layout.num_tokens)
    mass[9] = 0
    shift, _ = shift_of(layout, buffer, selected, mass=mass if is_read else None)
    assert shift is not None
    span = range(layout.stale[0].start, layout.stale[-1].stop)
    owner = {
        row: i for i, chunk in enumerate(layout.stale) for row in range(chunk.start, chunk.stop)
    }
    mean = float(mass[list(owner)].mean())

    def size(row: int) -> float:
        place = (row - layout.stale[owner[row]].start + 8) ** -0.15
        return place * max(float(mass[row]) / mean, 1e-3) ** 0.1 if is_read else place

    def alike(a: int, b: int) -> float:
        found = 0.0
        for layer in (1, 3):
            values = buffer.values(layer)[0].double().numpy()
            mean = values[:, list(owner)].mean(axis=1)
            x, y = ((values[:, row] - mean).ravel() for row in (a, b))
            found += x @ y / np.linalg.norm(x) / np.linalg.norm(y) / 2
        return (max(0.0, found) + 0.25) * (2 if owner[a] == owner[b] else 1)

    inner = np.array([[alike(a, b) for b in selected] for a in selected]) + 1.5 * np.eye(4)
    for row, weights in zip(span, shift.weights, strict=True):
        expected = np.zeros(4)
        if row in owner and row - layout.stale[owner[row]].start >= 4:
            expected = (
                np.linalg.solve(inner, [alike(row, b) for b in selected])
                * size(row)
                / [*map(size, selected)]
            )
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-5)


def test_rows_that_the_question_reads_are_shifted_more():
    layout = chunks_of(30)
    buffer, kinds = two_kinds(layout)
    mass = torch.ones(layout.num_tokens)
    mass[29] = 0.01
    shift, _ = shift_of(layout, buffer, range(10, 20), mass=mass)
    assert shift is not None
    told = shift.weights.abs().sum(dim=1)[torch.tensor([29, 31]) - shift.span.start]
    assert kinds[29] == kinds[31]
    assert 0 < told[0] < 0.7 * told[1]


def test_a_question_that_reads_no_chunk_shifts_all_rows():
    layout = chunks_of(30)
    buffer, _ = two_kinds(layout)
    shift, _ = shift_of(layout, buffer, range(10, 20), mass=torch.zeros(layout.num_tokens))
    assert shift is not None
    assert shift.weights.isfinite().all()
    assert shift.weights.abs().sum(dim=1).max() > 0


def test_heads_and_live_rows_say_nothing():
    layout = chunks_of(20)
    buffer, _ = two_kinds(layout)
    shift, rows = shift_of(layout, buffer, [3, 4, 6, 7, 12])
    assert shift is not None
    assert shift.at.tolist() == [7, 12]
    assert rows[shift.picked].tolist() == [7, 12]
    assert shift_of(layout, buffer, [3, 4, 5])[0] is None
    assert shift_of(layout, buffer, [7, 12], strength=0.0)[0] is None
    half, _ = shift_of(layout, buffer, [3, 4, 6, 7, 12], strength=0.5)
    assert half is not None
    torch.testing.assert_close(half.weights * 2, shift.weights)


def test_of_very_many_rows_some_are_counted(monkeypatch):
    monkeypatch.setattr(repairing, "SHIFT_MAX_ROWS", 10)
    layout = chunks_of(40)
    shift, _ = shift_of(layout, two_kinds(layout)[0], range(10, 35))
    assert shift is not None
    assert shift.at.tolist() == list(range(10, 35, 3))


def test_rows_that_tell_most_are_of_every_kind():
    """All have the same attention: one of each kind and chunk tells more than two of one."""
    layout = chunks_of(10, 10)
    buffer, kinds = two_kinds(layout)
    stale = rows_of(layout.stale)
    found = RowCovariance.of(buffer, layout).most_informative(stale, torch.ones(20), 4)
    assert {(int(kinds[row]), bool(row < 14)) for row in found} == {
        (0, True),
        (0, False),
        (1, True),
        (1, False),
    }


def test_rows_are_chosen_as_the_formula_says():
    """One at a time, each time the one that takes away most of the weighted variance: its own, and what it tells of the others."""
    torch.manual_seed(0)
    layout = chunks_of(9, 7)
    buffer = KVBuffer.empty(
        [LayerShape(HEADS, DIM, DIM)] * LAYERS,
        layout.num_tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensors in buffer.layers:
        for tensor in tensors:
            tensor.normal_()
    alike, stale = RowCovariance.of(buffer, layout), rows_of(layout.stale)
    mass = torch.rand(len(stale))
    at = stale - alike.span.start
    prior = kernel(*[alike.rows[at], alike.owner[at]] * 2).double()
    weight, chosen = mass.sqrt().double(), list[int]()

    def error(rows: list[int]) -> float:
        known, others = prior[rows][:, rows] + 1.5 * torch.eye(len(rows)), prior[:, rows]
        left = (prior - others @ torch.linalg.solve(known, others.T)).diagonal() + 1.5
        left[rows] = 0
        return float(weight @ left)

    for _ in range(5):
        chosen.append(
            min(
                (i for i in range(len(stale)) if i not in chosen), key=lambda i: error([*chosen, i])
            )
        )
    assert alike.most_informative(stale, mass, 5).tolist() == stale[chosen].tolist()


def test_a_large_budget_is_spent_by_attention_too(monkeypatch):
    monkeypatch.setattr(selecting, "POOL", 8)
    layout = chunks_of(20, 20)
    buffer, _ = two_kinds(layout)
    mass = torch.arange(float(layout.num_tokens))
    config = RepairConfig("query_gain", recompute_ratio=0.25, first_k=0)
    rows = select_rows(
        layout, config, mass=mass, covariance=RowCovariance.of(buffer, layout)
    ).tolist()
    best = rows_of(layout.stale)[-14:].tolist()
    assert len(set(rows)) == 10
    assert sum(row in best[-8:] for row in rows) >= 4, (
        "four of the eight with most attention, for what they tell"
    )
    assert set(rows) <= set(best), "and six more by attention"


def test_on_a_budget_of_nothing_only_heads_are_repaired():
    layout = chunks_of(40, 40)
    buffer, _ = two_kinds(layout)
    mass = torch.ones(layout.num_tokens)
    config = RepairConfig(recompute_ratio=0.02, first_k=4)
    rows = select_rows(layout, config, mass=mass, covariance=RowCovariance.of(buffer, layout))
    assert rows.tolist() == rows_of([s.head(4) for s in layout.stale]).tolist()


@pytest.mark.parametrize(
    ("selected", "strength", "expected"),
    [
        (None, 0.5, True),
        (None, 0.0, False),
        (0, 0.5, False),
        (3, 0.5, True),
        (9, 0.5, False),
        (3, 0.0, False),
    ],
)
def test_rows_may_be_shifted_where_some_are_repaired_and_some_are_not(selected, strength, expected):
    rows = None if selected is None else torch.arange(selected)
    assert may_shift(chunks_of(4, 5), rows, strength) is expected
    assert not may_shift(chunks_of(), rows, strength)


_NAMES = """
llama llama-yarn qwen3 gemma2 gemma3_text phi3 gpt_neox gptj glm cohere2 smollm3 gpt_oss nanochat
"""
NAMES = _NAMES.split()
"""One of each way to turn in pairs: with a magnitude, a part of the head, neighbours, some layers, the other way round."""


@pytest.fixture(scope="module")
def stored(tokenizer, tmp_path_factory):
    with engines(tokenizer, tmp_path_factory, CHUNKS) as get:
        yield get


@pytest.mark.parametrize("name", NAMES)
def test_the_promises_hold_with_launches(name, stored, monkeypatch):
    """Let the op stitch, as on a CUDA device; here its torch path computes."""
    launches, real = list[int](), kvrag_kernels.stitch
    monkeypatch.setattr(
        kvrag_kernels, "stitch", lambda *given, **how: (launches.append(1), real(*given, **how))
    )
    monkeypatch.setattr(stitching, "_has_kernel", lambda *_: True)
    engine = stored(name)
    for order in ((3, 1, 0, 2), (2, 2, 0)):
        assert (
            distance(engine, ask(order), mode="stitch", repair=RepairConfig(strategy="all"))
            < TOLERANCE
        )
    assert (
        distance(engine, ask((1,)), mode="stitch", repair=RepairConfig(strategy="none")) < TOLERANCE
    )
    assert change_before(engine) < 1e-5
    assert launches


def test_the_tiny_models_have_other_layers_to_compare_than_the_first():
    assert {int(share * tiny_model().config.num_hidden_layers) for share in covariance.LAYERS} == {
        1,
        3,
    }


@pytest.mark.parametrize("strategy", ["query", "query_gain"])
def test_requests_shift_by_what_their_question_reads(engine_of, monkeypatch, strategy):
    """The attention that was measured to choose rows serves the shift, too; rows are compared once a request."""
    engine, found, of = engine_of("llama"), [], RowCovariance.of
    texts = make_chunks(3, words=60, seed=5)
    engine.precompute(texts)
    monkeypatch.setattr(RowCovariance, "of", lambda *args, **_: found.append(args[2]) or of(*args))
    prompt = [{"role": "user", "content": "\n\n".join([texts[2], texts[0], texts[1], "Who?"])}]
    result = engine.prefill(
        prompt, mode="stitch", repair=RepairConfig(strategy=strategy, recompute_ratio=0.2)
    )
    assert result.repaired_tokens
    assert [mass.shape for mass in found] == [(result.prompt_tokens,)]
    assert found[0].sum() > 0
