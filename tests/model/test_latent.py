"""Latent attention: the rotary key is kept as keys and the latent as values, and every request expands its own rows."""

from types import SimpleNamespace

import pytest
import torch
from kit import lm_of

from kvrag.blend import stitch
from kvrag.flash import flash_attention_tier
from kvrag.model.candidates import attention_modules, rotations
from kvrag.model.lm import CausalLM
from kvrag.model.rows import LayerShape, Rows
from kvrag.model.shared import Portion
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.testing.models import TINY, tiny_model

LATENT = sorted(name for name, options in TINY.items() if "kv_lora_rank" in options)
IDS = list(range(20, 60))


def computed(lm: CausalLM, ids: list[int]) -> dict[str, list[torch.Tensor]]:
    """Run a model by transformers alone and return its modules' outputs, layer by layer."""
    found: dict[str, list[torch.Tensor]] = {"kv_a_layernorm": [], "kv_a_proj_with_mqa": []}
    handles = []
    for name, module in lm.model.named_modules():
        if (kept := found.get(name.split(".")[-1])) is not None:
            note = lambda _m, _a, out, kept=kept: kept.append(out[0])  # noqa: E731
            handles.append(module.register_forward_hook(note))
    with torch.inference_mode():
        lm.model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", LATENT)
def test_a_layer_keeps_its_rotary_key_and_its_latent(name):
    lm = lm_of(name)
    assert all(trait.is_latent for trait in lm.traits)
    assert set(lm.shapes) == {LayerShape(1, 8, 32)}
    assert {trait.attended for trait in lm.traits} == {LayerShape(4, 24, 16)}
    assert lm.kv_bytes_per_token == lm.num_layers * (8 + 32) * 4


def test_no_other_model_keeps_a_latent():
    assert not any(
        t.is_latent for name in ("llama", "bloom", "gemma3_text") for t in lm_of(name).traits
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LATENT)
def test_a_chunk_is_stored_as_it_was_computed(name, dtype):
    """Both tensors come from before the rotation, so low precision rounds neither once more."""
    lm = CausalLM(tiny_model(name, dtype=dtype))
    assert all(trait.source is not None for trait in lm.traits)
    (chunk,) = encode_chunks(lm, encode_prefix(lm, [])[0], [IDS])
    own = computed(lm, IDS)
    order = [*range(0, 8, 2), *range(1, 8, 2)]
    is_gathered = "minicpm3" not in name and "v2" not in name and "halves" not in name
    first = own["kv_a_proj_with_mqa"][0][:, -8:]  # of the first layer: the rest differ by attention
    assert torch.equal(chunk.layers[0].keys[0], first[:, order] if is_gathered else first)
    latent = own["kv_a_layernorm"][0]
    scale = getattr(attention_modules(lm.model)[0], "mla_scale_kv_lora", 1.0)  # LongCat's
    assert torch.equal(chunk.layers[0].values[0], latent * scale)


@pytest.mark.parametrize("name", LATENT)
def test_requests_that_decode_together_expand_their_own_latents(name):
    lm = lm_of(name)
    if not lm.can_share_forwards:
        pytest.skip("its steps are computed one after the other")
    rows, alone = [], []
    for length in (3, 17, 8):
        kv = lm.buffer(length + 1)
        for keys, values in kv.layers:
            keys.fill_(torch.nan), values.fill_(torch.nan)
        lm.forward(torch.tensor(IDS[:length]), Rows.span(0, length), kv)
        token = torch.tensor([90 + length])
        alone.append(lm.forward(token, Rows.span(length, length + 1), kv)[0][0])
        for keys, values in kv.layers:
            keys[:, :, length], values[:, :, length] = torch.nan, torch.nan
        rows.append(Portion(token, Rows.span(length, length + 1), kv, logits=1))
    for found, expected in zip(lm.step(rows), alone, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_rotation_that_gathers_dimensions_first_is_put_in_order():
    """LongCat has no other function than that; a rotation must have an inverse."""
    lm = lm_of("longcat_flash")
    base, attention = lm.model.model, lm.model.model.layers[0].self_attn[0]
    turning = [r for r in rotations(base, attention, 8) if r.width == 8]
    assert turning
    keys, start = torch.randn(1, 3, 8), torch.zeros(3, dtype=torch.int64)
    for rotation in turning:
        assert torch.equal(rotation.at(start).rotate(keys, slice(0, 3)), keys)


def test_kernels_for_keys_as_wide_as_values_are_not_asked(monkeypatch):
    """What a kernel takes is told by the shapes that are attended to, not by those that are kept."""
    monkeypatch.setattr("kvrag_kernels.tier", lambda *_: "mma")
    monkeypatch.setattr("kvrag_kernels.has_stitch", lambda *_: True)
    assert flash_attention_tier(tiny_model("deepseek_v3")) == "torch"
    assert flash_attention_tier(tiny_model("llama")) == "mma"
    on_device = [SimpleNamespace(is_cuda=True, shape=(1, 1, 9, dim)) for dim in (8, 32)]
    buffer = SimpleNamespace(layers=[tuple(on_device)] * 4)
    assert not stitch._has_kernel(buffer, lm_of("deepseek_v3").rotary(9))


def test_a_whole_prompt_takes_the_fused_path_of_a_cpu(monkeypatch):
    """It needs values as wide as keys; without it, torch would hold the scores of all rows and keys."""
    widths, real = [], torch.nn.functional.scaled_dot_product_attention

    def attend(query, keys, values, **options):
        widths.append((keys.shape[-1], values.shape[-1]))
        return real(query, keys, values, **options)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    lm = lm_of("deepseek_v3")
    lm.forward(torch.tensor(IDS), Rows.span(0, len(IDS)), lm.buffer(len(IDS)))
    assert set(widths[:-1]) == {(24, 24)}, "but for the last layer, which attends for a single row"
