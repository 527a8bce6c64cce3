"""Weights packed in float16 under a float32 model: its answers, reuse and fingerprint, and what can't change them unnoticed."""

import pytest
import torch
import torch.nn.functional as F
from kit import assert_reuse_is_exact
from quantised_kit import save_base
from transformers import AutoModelForCausalLM

from kvrag import ConfigError, KVRagEngine
from kvrag.identity.model import weights_digest
from kvrag.model import load as loading
from kvrag.model.linear import WEIGHTS_VARIABLE, use_own_products
from kvrag.model.lm import CausalLM
from kvrag.model.load import load
from kvrag.model.source import ModelSource


@pytest.fixture
def asked(monkeypatch):
    """The user asks for weights in float16, and every engine loads anew."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        pytest.skip("torch has no FBGEMM here")
    monkeypatch.setenv(WEIGHTS_VARIABLE, "float16")
    monkeypatch.setattr(loading, "LOADED", {})


@pytest.fixture(scope="module")
def rounded_dir(tmp_path_factory):
    """A tiny model with the weights of a bfloat16 checkpoint."""
    place = save_base(str(tmp_path_factory.mktemp("rounded")))
    AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).save_pretrained(place)
    return place


def layer(*sizes, scale=1.0, **options):
    """A linear layer with weights of a bfloat16 checkpoint."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(*sizes, **options))
    with torch.no_grad():
        made[0].weight.copy_((made[0].weight * scale).bfloat16())
    return made


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 32), (7, 32), (2, 131, 32), (0, 32)])
def test_products_are_those_of_the_weights(shape, has_bias, asked):
    module = layer(32, 9, bias=has_bias)
    weight, bias = module[0].weight.detach().clone(), module[0].bias
    use_own_products(module)
    x = torch.randn(shape)
    with torch.inference_mode():
        found = module(x)
        assert found.shape == (*shape[:-1], 9)
        assert torch.allclose(found, F.linear(x, weight, bias), atol=1e-6)
    assert not sum(parameter.numel() for parameter in module.parameters())
    assert "Linear" in repr(module)


def test_a_small_bfloat16_is_off_by_the_stated_step(asked):
    module = layer(32, 8, scale=1e-4)
    weight = module[0].weight.detach().clone()
    use_own_products(module)
    with torch.inference_mode():
        off = (module(torch.eye(32)) - module[0](torch.zeros(1, 32))).T - weight
    assert 0 < off.abs().max() <= 2**-25
    assert not off[weight.abs() >= 2**-17].any()


def test_others_stay(asked, monkeypatch):
    """Weights of another dtype, and all weights unless the user asks."""
    for dtype in (torch.float64, torch.bfloat16):
        module = layer(32, 8).to(dtype)
        use_own_products(module)
        assert module[0].weight.shape == (8, 32)
    adapted = layer(32, 8)
    adapted.peft_config = {"default": None}  # adapters are identified by their parameters
    use_own_products(adapted)
    assert adapted[0].weight.shape == (8, 32)
    monkeypatch.setenv(WEIGHTS_VARIABLE, "")
    module = layer(32, 8)
    use_own_products(module)
    assert module[0].weight.shape == (8, 32)


def test_changes_that_would_be_lost_are_errors(asked):
    module = layer(32, 8)
    use_own_products(module)
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        module[0].weight.add_(torch.ones(8, 32))
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        module[0].weight.data += torch.ones(8, 32)


def test_a_models_answers_are_those_of_float32(rounded_dir, asked, monkeypatch):
    found = load(ModelSource(rounded_dir)).lm.model
    monkeypatch.setattr(loading, "LOADED", {})
    monkeypatch.delenv(WEIGHTS_VARIABLE)
    plain = load(ModelSource(rounded_dir)).lm.model
    ids = torch.arange(4, 60)[None]
    assert not found.lm_head.weight.numel()
    assert found.get_input_embeddings().weight.numel()
    with torch.inference_mode():
        assert torch.allclose(found(ids).logits, plain(ids).logits, atol=1e-4)


def test_reuse_is_proven_exact_and_has_keys_of_its_own(rounded_dir, asked, monkeypatch):
    engine = KVRagEngine.from_pretrained(rounded_dir, context=None)
    assert isinstance(engine.loaded.lm, CausalLM)
    assert engine.loaded.lm.dtype is torch.float32
    assert_reuse_is_exact(engine)
    found = engine.loaded.fingerprint
    engine.close()
    monkeypatch.setattr(loading, "LOADED", {})
    assert load(ModelSource(rounded_dir)).fingerprint == found
    monkeypatch.setattr(loading, "LOADED", {})
    monkeypatch.delenv(WEIGHTS_VARIABLE)
    assert load(ModelSource(rounded_dir)).fingerprint != found


def test_packed_weights_are_a_part_of_the_digest_in_memory(asked):
    """It takes the place of the files' once another weight, as a norm's, changes in place."""
    first, second, third = layer(32, 8), layer(32, 8), layer(32, 8)
    with torch.no_grad():
        third[0].weight[0, 0] += 1
    for module in (first, second, third):
        use_own_products(module)
    assert weights_digest(first) == weights_digest(second) != weights_digest(third)


def test_an_unknown_type_is_refused_in_a_sentence(monkeypatch, rounded_dir):
    monkeypatch.setattr(loading, "LOADED", {})
    monkeypatch.setenv(WEIGHTS_VARIABLE, "int3")
    with pytest.raises(ConfigError, match="KVRAG_WEIGHTS is 'int3'; set it to float16 on x86-64"):
        load(ModelSource(rounded_dir))
