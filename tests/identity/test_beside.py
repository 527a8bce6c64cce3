"""Quantised weights are part of the identity wherever a library keeps them, or the model is refused."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from texts import make_chunks

from kvrag.identity.beside import kept_beside
from kvrag.identity.describe import quantisation_text
from kvrag.identity.model import weights_digest
from kvrag.identity.weights import described, tensor_bytes
from kvrag.model.load import load
from kvrag.model.plain import PlainLM
from kvrag.model.source import ModelSource
from kvrag.testing.models import tiny_model


class Scales:
    def __init__(self, scale: torch.Tensor, axis: int) -> None:
        self.scale, self.axis, self.address = scale, axis, id(self) + 2**32


class Rounded(torch.nn.Module):
    """A layer of a library: codes in a parameter, the rest wherever ``place`` says."""

    def __init__(self, weight: torch.Tensor, place: str, *, scale: float = 0.05, axis: int = 0):
        super().__init__()
        codes = (weight / 0.05).round().to(torch.int8)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.place = place
        kept: Any = torch.tensor(scale)
        if place == "object":
            kept = Scales(kept, axis)
        elif place == "array":
            kept = {"scale": np.array(scale), "axis": axis}
        elif place != "attribute":
            kept = {"nested": [{"scale": kept, "axis": axis}], "self": self}
        (self.codes if place == "parameter" else self).kept = kept

    @property
    def scale(self) -> torch.Tensor:
        kept = (self.codes if self.place == "parameter" else self).kept
        if self.place == "attribute":
            return kept
        if self.place == "object":
            return kept.scale
        return torch.as_tensor(
            kept["scale"] if self.place == "array" else kept["nested"][0]["scale"]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.codes.float() * self.scale.float())


PLACES = ["attribute", "dict", "object", "array", "parameter"]


def rounded(place: str, **options: Any) -> Any:
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    attention.k_proj = Rounded(attention.k_proj.weight.detach(), place, **options)
    return model


@pytest.mark.parametrize("place", PLACES)
def test_scales_are_part_of_the_digest_wherever_a_layer_keeps_them(place):
    digest = weights_digest(rounded(place))
    assert digest == weights_digest(rounded(place))
    assert digest != weights_digest(rounded(place, scale=0.06))
    if place != "attribute":
        assert digest != weights_digest(rounded(place, axis=1)), "a setting beside the scales"


@pytest.mark.parametrize("place", PLACES)
def test_reuse_over_them_is_proven(place, engine_of):
    engine = engine_of(rounded(place))
    engine.precompute(make_chunks(1))
    assert engine.loaded.lm.__class__ is not PlainLM


def test_a_plain_model_keeps_nothing_beside():
    model = tiny_model()
    model.model.rotary_emb.cached = torch.ones(3)  # the model's own code: a cache
    assert kept_beside(model) == {}


def test_weights_inside_an_object_of_c_are_read():
    """torch's own dynamic quantisation leaves neither parameters nor buffers."""
    digests = []
    for scale in (1.0, 1.0, 2.0):
        model = tiny_model()
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(scale)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.ao.quantization.quantize_dynamic(
                model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
            )
        digests.append(weights_digest(model))
    assert digests[0] == digests[1] != digests[2]


def test_a_model_that_hides_its_weights_answers_without_reuse(tokenizer, engine_of):
    """It has no fingerprint, so nothing may be stored for it, nor found."""
    model = rounded("attribute")
    model.model.layers[0].self_attn.k_proj.handle = memoryview(b"weights")
    found = [load(ModelSource(model, tokenizer)) for _ in range(2)]
    assert found[0].fingerprint != found[1].fingerprint
    assert "the weights of model.layers.0.self_attn.k_proj (Rounded) can't be identified" in (
        found[0].lm.refusal
    )
    answer = engine_of(model).generate("Who keeps the ledger?", max_new_tokens=3)
    assert len(answer.token_ids) == 3
    assert "can't be identified" in answer.fallback_reason


def test_settings_of_packed_weights_are_part_of_their_digest():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    digests = set()
    for config in (
        quantization.Int8WeightOnlyConfig(),
        quantization.Int8DynamicActivationInt8WeightConfig(),
    ):
        layer = torch.nn.Linear(64, 64, bias=False)
        torch.nn.init.eye_(layer.weight)
        quantization.quantize_(layer, config)
        digests.add(tensor_bytes(layer.weight))
    assert len(digests) == 2, "the values are the same, but only one rounds activations"


def test_settings_are_told_without_addresses_and_devices():
    text = described({"b": Scales(torch.ones(1), 1).axis, "a": [object(), torch.device("cuda")]})
    assert text == "{a=[object{},],b=int 1}"


def test_the_name_of_a_file_is_no_part_of_the_method():
    configs = [
        type("Config", (), {"quantization_config": {"quant_method": "gguf", "gguf_file": name}})
        for name in ("a.gguf", "b.gguf")
    ]
    assert len({quantisation_text(config) for config in configs}) == 1


def test_the_dtype_of_codes_is_part_of_the_method():
    configs = [
        type(
            "Config", (), {"quantization_config": {"quant_method": "x", "weight": {"dtype": name}}}
        )
        for name in ("int4", "uint4")
    ]
    assert len({quantisation_text(config) for config in configs}) == 2
