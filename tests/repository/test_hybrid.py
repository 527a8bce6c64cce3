"""Reuse in hybrids, as the benchmark does it: exact where it says so, and its arithmetic."""

import json
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import hybrid
import hybrid_costs as costs
import hybrid_model as task
from hybrid_compose import Hybrid, chunk_map, compose, cut, delta_map, mixers, stitch

FOLDER = Path(__file__).parents[2] / "benchmarks"
TOLERANCE = 1e-5
SHAPES = json.loads((FOLDER / "hybrid_shapes.json").read_text())


def known(kind):
    """Skip what an older transformers has not."""
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")


@pytest.mark.parametrize("kind", hybrid.TINY)
def test_composed_pairs_give_the_state_that_the_forward_leaves(kind):
    known(kind)
    found = hybrid.states(kind)
    assert found["error"] < TOLERANCE * found["largest"]
    assert found["without_first"] > 1000 * found["error"], "what stands before does not show"


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_reuse_is_exact_where_nothing_is_missing(kind):
    errors = hybrid.reuse_errors(kind)
    assert errors.pop("nothing") > 1e-3, "the context does not show"
    assert max(errors.values()) < TOLERANCE


def test_short_convolutions_are_exact_with_the_rows_at_their_seams():
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention", "conv"],
    )
    model = transformers.Lfm2ForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
    ids = torch.randint(0, 48, (1, 40))
    want = model(ids, use_cache=False).logits[:, -1]
    run = Hybrid(model).run
    stored = stitch([run(ids[:, :20]).stored, run(ids[:, 20:]).stored])
    assert (run(ids, stored=stored).logits - want).abs().max() < TOLERANCE
    behind = torch.arange(20, 40)[None]
    assert (run(ids, behind, stored).logits - want).abs().max() < TOLERANCE
    last = torch.arange(30, 40)[None]
    assert (run(ids, last, stored).logits - want).abs().max() > 1e-3


def test_a_pair_holds_behind_any_context_but_for_the_rows_at_its_seam():
    """Within its stored inputs: the convolution's first rows are all that what stands before changes."""
    model = hybrid.tiny("qwen3_next")
    part = mixers(model)[0]
    seam = part.conv_kernel_size - 1
    hidden = torch.randn(1, 30, 64)
    whole, alone = hybrid.delta_rows(part, hidden)[0], hybrid.delta_rows(part, hidden[:, 10:])[0]
    for stored, here in zip(
        chunk_map(part, alone, seam, 20), chunk_map(part, whole, 10 + seam, 30), strict=True
    ):
        torch.testing.assert_close(stored, here, atol=1e-6, rtol=1e-5)  # sums in another order
    assert not torch.allclose(chunk_map(part, alone, 0, 20)[1], chunk_map(part, whole, 10, 30)[1])


def test_a_repaired_row_is_a_correction_of_rank_one_only_while_its_decay_stays():
    """A new value changes B by one rank; a new decay or key by all that stood before the row: a pair alone can't be repaired."""
    torch.manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(20, 8, dtype=torch.float64), dim=-1)
    value, beta = torch.randn(20, 6, dtype=torch.float64), torch.rand(20, dtype=torch.float64)
    decay = -0.1 * torch.rand(20, dtype=torch.float64)
    before = delta_map(key, value, beta, decay)

    def ranks(**changed):
        now = delta_map(
            *(changed.get(n, t) for n, t in zip("kvbg", (key, value, beta, decay), strict=True))
        )
        return [
            int(torch.linalg.matrix_rank(a - b, atol=1e-9))
            for a, b in zip(now, before, strict=True)
        ]

    def changed(tensor):
        out = tensor.clone()
        out[12] = out[12] * 0.5
        return out

    assert ranks(v=changed(value)) == [0, 1]
    assert ranks(b=changed(beta)) == [1, 1]
    assert ranks(g=changed(decay)) == [8, 6]


def test_transformers_own_forward_continues_from_composed_states():
    """Nothing repaired: stored keys, values and pairs, put into transformers' cache, give the same logits as the benchmark's reuse."""
    model = task.build("delta").eval()
    for part in mixers(model).values():
        part.dt_bias.data.uniform_(-6.0, -2.0)
    ours = Hybrid(model)
    ids = torch.randint(0, 48, (1, 40))
    chunks = [(0, 15), (15, 33)]
    parts = [ours.run(ids[:, :15]).stored]
    parts += [cut(ours.run(torch.cat([ids[:, :1], ids[:, 15:33]], 1)).stored, 1, 19)]
    stored = stitch([*parts, ours.run(ids[:, 33:]).stored])
    rows = torch.arange(33, 40)[None]
    want = ours.run(ids, rows, stored).logits
    out = model(ids[:, :33], use_cache=True)
    cache = out.cache if "cache" in out else out.past_key_values
    cos, sin = model.model.rotary_emb(out.logits, torch.arange(33)[None])
    for number, layer in enumerate(cache.layers):
        put = {name: t[:, :33] for name, t in stored[number].items()}
        if number in mixers(model):
            part = mixers(model)[number]
            maps = [chunk_map(part, put, *chunk) for chunk in chunks]
            layer.recurrent_states[0] = compose(maps, torch.zeros_like(maps[0][1]))
            tail = put["rows"][:, -layer.conv_states[0].shape[-1] :].mT
            layer.conv_states[0] = tail.contiguous()
        else:
            keys = put["key"].transpose(1, 2)
            layer.keys = ours.functions.apply_rotary_pos_emb(keys, keys, cos, sin)[1]
            layer.values = put["value"].transpose(1, 2)
    named = {"cache" if "cache" in out else "past_key_values": cache}
    got = model(ids[:, 33:], position_ids=rows, **named).logits[:, -1]
    assert (got - want).abs().max() < TOLERANCE


def test_questions_have_the_answers_that_their_documents_give():
    rng = random.Random(3)
    for _ in range(50):
        prompt = task.make_prompt(rng)
        said, last = {}, None
        for document in prompt.documents:
            for fact in range(task.FACTS):
                subject, relation, thing, _ = document[1 + 4 * fact : 5 + 4 * fact]
                subject = last if subject == task.IT else subject
                said[subject, relation] = thing
                last = subject
        for kind in task.KINDS:
            for subject, answer, rows in prompt.asked[kind]:
                if kind == "two":
                    assert said[said[subject, task.IS], task.IS] == answer
                else:
                    assert said[subject, task.RELATIONS[kind]] == answer
                assert answer in [prompt.context[row + 2] for row in rows]


def test_the_costs_are_of_these_shapes():
    written = json.loads((FOLDER / "results" / "hybrid_costs.json").read_text())
    assert json.loads(json.dumps(costs.measure(SHAPES))) == written, (
        "run `python benchmarks/hybrid_costs.py`"
    )


def test_the_costs_of_one_shape_worked_out_by_hand():
    (shape,) = (s for s in SHAPES["hybrids"] if s["name"] == "Qwen3-Next-80B-A3B")
    assert costs.kv_bytes(shape) == 24_576
    assert costs.conv_width(shape) == 8192
    assert costs.row_bytes(shape) == 36 * (8192 + 64) * 2
    maps = costs.map_bytes(shape)
    assert maps["a"] == maps["b"] == 36 * 32 * 128 * 128 * 4
    assert costs.map_bytes(shape, rows=32)["a"] == 36 * 32 * 2 * 32 * 128 * 4  # factors are smaller
    # "3B active", with the head's and without embeddings.
    assert 3.0e9 < costs.weights(shape) < 3.4e9


@pytest.mark.parametrize("shape", SHAPES["hybrids"], ids=lambda shape: shape["name"])
def test_weights_of_public_models_are_about_what_their_names_say(shape):
    named = shape["name"].split("-")[-1]
    said = {
        "A3B": 3.0, "0.8B": 0.8, "2B": 1.9, "4B": 4.2, "9B": 9.0, "0.5B": 0.52, "1.5B": 1.55,
        "7B": 7.6, "h": 0.34, "micro": 3.2, "tiny": 1.4, "350M": 0.354, "1.2B": 1.17, "A1B": 1.5,
    }[named]  # fmt: skip
    assert 0.6 * said < costs.weights(shape) / 1e9 < 1.1 * said


def test_the_length_of_a_seam_is_that_of_the_edges():
    """Stretches of rows, one of them a single row, compose to the whole stretch."""
    model = hybrid.tiny("bamba")
    part = mixers(model)[1]
    put, _ = hybrid.scan_rows(part, torch.randn(1, 20, 64))
    whole = chunk_map(part, put, 0, 20)[1]
    maps = [chunk_map(part, put, *pair) for pair in pairwise([0, 7, 8, 20])]
    assert (compose(maps, torch.zeros_like(whole)) - whole).abs().max() < TOLERANCE
