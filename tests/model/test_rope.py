"""Rotations: the model's own function, in float32, invertible, for every kind of RoPE that is accepted."""

from dataclasses import replace

import pytest
import torch
from kit import lm_of

from kvrag.model import CausalLM
from kvrag.model.candidates import rotations
from kvrag.model.proof import prove
from kvrag.model.rows import Rows
from kvrag.testing.models import TINY, tiny_model

KINDS = """
bloom cohere deepseek_v2-yarn deepseek_v3-halves ernie4_5 gemma3_text gemma4_text glm gpt_neox
gpt_oss gptj hunyuan_v1_dense llama llama-linear llama-llama3-rope llama-yarn llama4_text mpt olmo2
phi phi3-longrope qwen2-window qwen2_vl smollm3
"""
"""A model of every kind of rotation, and some that have none."""
MODELS = [
    pytest.param(name, marks=[] if name in KINDS.split() else pytest.mark.slow)
    for name in sorted(TINY)
]
SCALED = {"hunyuan_v1_dense", "hunyuan_v1_moe"}  # a norm's weights scale keys after the rotation


@pytest.mark.parametrize("name", MODELS)
def test_unrotate_inverts_rotate_at_any_rows(name):
    table = lm_of(name).rotary(2000)[0]
    rows = torch.tensor([0, 1, 7, 1500, 1999])
    vectors = torch.randn(2, 5, 16)
    there = torch.zeros_like(vectors)
    table.add_unit_rotated(there, vectors, rows=rows)
    assert torch.allclose(table.unit_unrotate(there, rows), vectors, atol=1e-5)
    if name not in SCALED:
        assert torch.allclose(there.norm(dim=-1), vectors.norm(dim=-1), atol=1e-4)
    assert torch.allclose(table.unrotate(table.rotate(vectors, rows), rows), vectors, atol=1e-5)


@pytest.mark.parametrize("name", [one for one in MODELS if one.values[0] not in SCALED])
def test_rotation_depends_on_the_distance_only(name):
    """A key moved with its query scores the same: what makes moving a chunk possible at all."""
    table = lm_of(name).rotary(3000)[0]
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    scores = [
        float(
            (table.rotate(q, torch.tensor([at + 37])) * table.rotate(k, torch.tensor([at]))).sum()
        )
        for at in (0, 900, 2900)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=2e-3)
    assert scores[0] == pytest.approx(scores[2], abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_added_to_keys_is_rotated_as_they_are(name, dtype):
    table = lm_of(name).rotary(500)[0]
    target, vectors, rows = (
        torch.randn(2, 40, 16).to(dtype),
        torch.randn(2, 40, 16),
        slice(300, 340),
    )
    expected = (target.float() + table.rotate(vectors, rows) / table.magnitude).to(dtype)
    if table.start or table.width < 16:  # what does not rotate has no magnitude
        turning = table.rotating
        expected = target.float() + vectors
        expected[..., turning] = (
            target.float()[..., turning]
            + table.rotate(vectors, rows)[..., turning] / table.magnitude
        )
        expected = expected.to(dtype)
    given = target.clone()
    table.add_unit_rotated(target, vectors, rows=rows)
    table.add_unit_rotated(given, vectors, table.partner(vectors), rows=rows)
    assert torch.equal(given, target)
    assert torch.allclose(
        target.float(), expected.float(), atol=1e-5 if dtype == torch.float32 else 2**-6
    )


@torch.no_grad()
def test_scales_after_the_rotation_are_those_of_the_weights_now():
    """Weights may change in place: keys stored and moved after that are scaled by the new ones."""
    model = tiny_model("hunyuan_v1_dense")
    lm = CausalLM(model)
    for layer in model.model.layers:
        layer.self_attn.key_layernorm.weight.mul_(torch.linspace(0.5, 2, 16))
    assert prove(lm).passed


def test_yarn_keeps_its_magnitude_once():
    table = lm_of("llama-yarn").rotary(10)[0]
    assert table.magnitude > 1.0
    k = torch.randn(2, 3, 16)
    there = torch.zeros_like(k)
    table.add_unit_rotated(there, k, rows=slice(4, 7))
    assert torch.allclose(table.rotate(k, slice(4, 7)), there * table.magnitude, atol=1e-5)


def test_each_layer_rotates_by_its_own_table():
    gemma = lm_of("gemma3_text").rotary(100)
    assert gemma[0] is gemma[2]
    assert gemma[1] is gemma[3]
    assert not torch.allclose(gemma[0].cos, gemma[1].cos)
    smollm = lm_of("smollm3").rotary(100)
    keys = torch.randn(2, 5, 16)
    assert torch.equal(smollm[3].rotate(keys, slice(50, 55)), keys)
    assert not torch.allclose(smollm[2].rotate(keys, slice(50, 55)), keys)
    assert len(lm_of().rotary(100)) == 4
    assert len(set(map(id, lm_of().rotary(100)))) == 1


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "phi", "glm", "gptj", "falcon-new"])
def test_cached_keys_rotated_back_are_the_captured_ones(name):
    """The way that is taken where no submodule gives position-free keys."""
    lm = CausalLM(tiny_model(name))
    ids = torch.arange(5, 45)

    def captured():
        with lm.capture() as keys:
            lm.forward(ids, Rows.span(0, 40), lm.buffer(40), logits=0)
        return keys

    hooked = captured()
    assert all(trait.source is not None for trait in lm.traits)
    lm.traits = [replace(trait, source=None) for trait in lm.traits]
    rotated_back = captured()
    assert all(
        torch.allclose(hooked[layer], rotated_back[layer], atol=1e-5)
        for layer in range(lm.num_layers)
    )


@pytest.mark.parametrize("name", ["olmo", "nanochat", "llama4_text", "codegen"])
def test_keys_that_are_changed_after_the_projection_are_read_at_the_cache(name):
    """Clipping shows on large keys only, so a comparison on the probe's few keys must not decide: OLMo."""
    assert lm_of(name).traits[0].source is None


def test_low_precision_is_rounded_once():
    table = lm_of().rotary(3000)[0]
    k = torch.randn(2, 50, 16).bfloat16()
    exact = table.rotate(k.double().float(), slice(2900, 2950))
    assert torch.equal(table.rotate(k, slice(2900, 2950)), exact.bfloat16())


def test_rotations_are_found_whatever_torchs_default_device_is():
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    outside = rotations(model.model, attention, attention.head_dim)
    with torch.device("meta"):
        inside = rotations(model.model, attention, attention.head_dim)
    assert [(r.name, r.width, r.start) for r in inside] == [
        (r.name, r.width, r.start) for r in outside
    ]
    assert len(inside) > 1
