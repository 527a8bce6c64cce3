"""Quantised weights: what loads here is reused exactly and has a fingerprint of its own; the rest is told apart by its config."""

from typing import Any

import pytest
import torch
from kit import assert_reuse_is_exact
from quantised_kit import GPT_OSS, compressed, fp8_blocks, mxfp4, save_base
from texts import make_chunks
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FbgemmFp8Config,
    HqqConfig,
    QuantoConfig,
    TorchAoConfig,
)

from kvrag import Chunk, KVRagEngine, ModelError, UnsupportedModelError
from kvrag.identity.model import describe, weights_digest
from kvrag.identity.weights import is_packed, leaves
from kvrag.model.linear import mixing_layer
from kvrag.model.lm import CausalLM
from kvrag.model.load import load
from kvrag.model.source import ModelSource
from kvrag.testing.models import tiny_model

CHUNKS = make_chunks(3, words=30)
QUESTION = "\n\nWho keeps the ledger?"
TOLERANCE = 1e-3


def torchao(bits: int) -> Any:
    pytest.importorskip("torchao", reason="the package torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig() if bits == 8 else IntxWeightOnlyConfig(torch.int4))


def quanto(bits: int) -> Any:
    pytest.importorskip("optimum.quanto", reason="the package optimum-quanto is not installed")
    return QuantoConfig(weights=f"int{bits}")


def bitsandbytes(bits: int, threshold: float = 0.0) -> Any:
    pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")
    return BitsAndBytesConfig(
        load_in_8bit=bits == 8, load_in_4bit=bits == 4, llm_int8_threshold=threshold
    )


def rounded(granularity: str) -> Any:
    """Weights and activations in int8, with a scale per token or for the whole prompt."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    scale = getattr(quantization, granularity)()
    return TorchAoConfig(quantization.Int8DynamicActivationInt8WeightConfig(granularity=scale))


def outliers(_: Any) -> Any:
    """LLM.int8 as it is by default: a column is not rounded if a row's value in it is large."""
    return bitsandbytes(8, threshold=1.0)


WAYS = pytest.mark.parametrize("method", [torchao, quanto, bitsandbytes])
EXACT_HERE = [(torchao, 8), (torchao, 4), (quanto, 8)]
"""Those whose layers run on the CPU in inference mode, and keep activations as they are."""


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    return save_base(str(tmp_path_factory.mktemp("base")))


@pytest.fixture
def engine_for(base_dir):
    made: list[KVRagEngine] = []

    def make(method, bits):
        made.append(
            KVRagEngine.from_pretrained(base_dir, quantization_config=method(bits), context=None)
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize(("method", "bits"), [(torchao, 8), (quanto, 8), (bitsandbytes, 8)])
def test_each_method_and_width_has_its_own_fingerprint(method, bits, base_dir):
    """Weights come from the same file: only the config tells what was made of them."""
    plain = load(ModelSource(base_dir))
    eight = load(ModelSource(base_dir, hf_kwargs={"quantization_config": method(8)}))
    assert eight.lm is not plain.lm
    config = eight.lm.model.config
    prints = {plain.fingerprint, eight.fingerprint}
    for other in (
        method(4).to_dict(),
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
    ):
        config.quantization_config = other
        prints.add(describe(eight.lm.model, eight.encoder, "files:1").fingerprint)
    assert len(prints) == 5


def test_configs_that_look_alike_are_not_one_loaded_model(base_dir):
    """A config's repr may leave out what it holds; two models must not become one by it."""
    keys = {
        ModelSource(base_dir, hf_kwargs={"quantization_config": QuantoConfig(weights=w)}).key
        for w in ("int8", "int4")
    }
    assert len(keys) == 2


@pytest.mark.parametrize(("method", "bits"), EXACT_HERE)
def test_reuse_is_exact(method, bits, engine_for):
    assert_reuse_is_exact(engine_for(method, bits))


@pytest.mark.parametrize("bits", [8, 4])
def test_reuse_is_exact_up_to_the_rounding_of_activations(bits, engine_for):
    """bitsandbytes rounds activations on a CPU: a last bit may become a visible step, in transformers' own forward as here."""
    engine = engine_for(bitsandbytes, bits)
    ids = torch.tensor([engine.prefill(CHUNKS[0] + QUESTION, mode="full").prompt_ids])
    model = engine.loaded.lm.model
    with torch.no_grad():
        whole = model(ids).logits[0, -1]
        first = model(ids[:, :40], use_cache=True)
        pieces = model(ids[:, 40:], past_key_values=first.past_key_values).logits[0, -1]
        model.set_attn_implementation("eager")
        eager = model(ids).logits[0, -1]
        model.set_attn_implementation("sdpa")
    noise = float(torch.stack([pieces - whole, eager - whole]).abs().max())
    assert_reuse_is_exact(engine, max(TOLERANCE, 5 * noise))


@pytest.mark.parametrize(("method", "how"), [(rounded, "PerTensor"), (outliers, 8)])
def test_layers_that_round_by_all_rows_are_refused_with_the_remedy(method, how, engine_for):
    """Their rows change with a later token, far less than by any mistake, so limits that allow for rounding let it pass."""
    lm = engine_for(method, how).loaded.lm
    assert "no layer mixes rows; model.layers." in lm.refusal
    assert "quantise weights alone, or activations per token" in lm.refusal


@pytest.mark.parametrize(("method", "how"), [(rounded, "PerRow"), (bitsandbytes, 8)])
def test_layers_that_round_each_row_alone_are_accepted(method, how, engine_for):
    model = engine_for(method, how).loaded.lm.model
    ids = torch.arange(4, 40)[None]
    assert mixing_layer(model, lambda: model(ids)) == ("no layer mixes rows", 0.0)


def test_a_method_that_does_not_run_here_is_refused_with_a_sentence(engine_for):
    with pytest.raises(
        UnsupportedModelError, match=r"quantised by quanto fails in its first forward on cpu"
    ):
        _ = engine_for(quanto, 4).loaded


@WAYS
def test_quantised_weights_are_known_by_content(method, base_dir, tokenizer):
    """The same file quantised twice is the same model when handed in; other weights are not."""

    def quantised(scale=1.0):
        model = AutoModelForCausalLM.from_pretrained(
            base_dir, dtype=torch.float32, quantization_config=method(8)
        )
        if scale != 1.0:
            for parameter in model.model.norm.parameters():
                parameter.data.mul_(scale)
        return model

    one, same, other = (
        load(ModelSource(m, tokenizer)).fingerprint
        for m in (quantised(), quantised(), quantised(2.0))
    )
    assert one == same != other


def test_weights_quantised_in_place_are_other_weights(engine_of):
    pytest.importorskip("torchao", reason="the package torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny_model()
    engine = engine_of(model)
    engine.precompute(CHUNKS)
    before, digest = engine.loaded.fingerprint, weights_digest(model)
    quantize_(model, Int8WeightOnlyConfig())
    weight = model.model.layers[0].self_attn.k_proj.weight
    assert is_packed(weight)
    assert {name.rstrip(".") for name, _ in leaves(weight)} >= {"qdata", "scale"}
    assert weights_digest(model) != digest
    assert engine.loaded.fingerprint != before
    assert engine.explain(CHUNKS[0] + QUESTION).hits == 0
    inside = next(leaf for name, leaf in leaves(weight) if name == "qdata.")
    changed = engine.loaded.fingerprint
    with torch.no_grad():
        inside[0, 0] += 1
    assert engine.loaded.fingerprint != changed


def test_an_adapter_over_quantised_weights_is_exact(base_dir, engine_of):
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    model = AutoModelForCausalLM.from_pretrained(
        base_dir, dtype=torch.float32, quantization_config=torchao(8)
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
        ),
    ).eval()
    engine = engine_of(adapted)
    assert_reuse_is_exact(engine)
    alone = [engine.prefix_text, Chunk(CHUNKS[1]), QUESTION]
    before = engine.loaded.fingerprint
    with adapted.disable_adapter():
        assert engine.loaded.fingerprint != before
        assert engine.explain(alone).hits == 0


def test_fp8_and_mxfp4_checkpoints_are_exact(base_dir, tmp_path):
    """transformers unpacks them on a CPU; the fingerprint is of the files."""
    experts = save_base(str(tmp_path / "gpt-oss"), "gpt_oss", **GPT_OSS)
    for place in (
        fp8_blocks(base_dir, str(tmp_path / "fp8")),
        mxfp4(experts, str(tmp_path / "mxfp4")),
    ):
        engine = KVRagEngine.from_pretrained(place, context=None, kv_dir=tmp_path / "kv")
        assert_reuse_is_exact(engine)
        engine.close()


@pytest.mark.parametrize("kind", ["int", "float"])
def test_weights_that_unpack_in_the_first_run_are_exact(kind, base_dir, tmp_path):
    """A look at single layers before the first run would find packed weights, and refuse them."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    place = compressed(kind, None)(base_dir, str(tmp_path / "packed"))
    engine = KVRagEngine.from_pretrained(place, context=None)
    assert_reuse_is_exact(engine)
    unpacked, plain = (
        found.lm.model.model.layers[2].mlp.up_proj.weight
        for found in (engine.loaded, load(ModelSource(base_dir)))
    )
    assert torch.allclose(unpacked, plain, atol=float(plain.abs().max()) / 16)
    engine.close()


def test_activations_of_compressed_tensors_count(base_dir, tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    ways = {name: compressed("int", name) for name in ("token", "tensor")}
    found = {
        name: load(ModelSource(save(base_dir, str(tmp_path / name)))) for name, save in ways.items()
    }
    assert found["token"].fingerprint != found["tensor"].fingerprint
    assert "no layer mixes rows" in found["tensor"].lm.refusal
    assert isinstance(found["token"].lm, CausalLM)


@pytest.mark.parametrize("config", [FbgemmFp8Config, HqqConfig])
def test_what_does_not_load_here_is_an_error_that_names_the_quantisation(config, base_dir):
    try:
        method = config()
    except ImportError:
        pytest.skip("this config needs its package")
    source = ModelSource(base_dir, hf_kwargs={"quantization_config": method})
    with pytest.raises(
        ModelError,
        match=rf"its quantisation \({method.quant_method.value}\) may need another device",
    ):
        load(source)


def test_every_setting_of_torchao_has_its_own_fingerprint_and_keeps_it(base_dir):
    ao = pytest.importorskip("torchao.quantization", reason="the package torchao is not installed")

    def ways():
        yield ao.Int8WeightOnlyConfig()
        yield ao.IntxWeightOnlyConfig(torch.int4)
        yield ao.IntxWeightOnlyConfig(torch.int4, granularity=ao.PerGroup(32))
        yield ao.IntxWeightOnlyConfig(torch.int2, granularity=ao.PerGroup(32))
        yield ao.Float8WeightOnlyConfig()
        yield ao.Int8DynamicActivationInt8WeightConfig()

    def prints(**options):
        sources = (
            ModelSource(
                base_dir,
                hf_kwargs={"quantization_config": TorchAoConfig(way, **options)},
                prove="off",
            )
            for way in ways()
        )
        return [load(source).fingerprint for source in sources]

    whole, partly = prints(), prints(modules_to_not_convert=["lm_head", "k_proj"])
    assert len({*whole, *partly}) == 12
    assert prints() == whole


def test_weights_quantised_at_load_are_known_by_their_content(base_dir, tmp_path):
    """Another version of the library may round otherwise, though file and config are the same."""
    at_load = load(ModelSource(base_dir, hf_kwargs={"quantization_config": torchao(8)}))
    before = load(ModelSource(fp8_blocks(base_dir, str(tmp_path / "fp8"))))
    origins = [loaded.identity._identity.weights for loaded in (at_load, before)]
    assert [origin.partition(":")[0] for origin in origins] == ["tensors", "sha256"]


def test_a_digest_leaves_packed_weights_as_they_are(base_dir):
    """bitsandbytes' ``state_dict`` unpacks them on some CPUs, and the next forward packs them anew."""
    loaded = load(ModelSource(base_dir, hf_kwargs={"quantization_config": bitsandbytes(4)}))
    model = loaded.lm.model
    places = [parameter.data_ptr() for parameter in model.parameters()]
    weights_digest(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
