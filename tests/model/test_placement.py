"""Weights on one device are accepted however they came there; weights in several places are refused with a sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrag import KVRagEngine, UnsupportedModelError
from kvrag.model.load import check_placement
from kvrag.testing.models import tiny_model

accelerate = pytest.importorskip(
    "accelerate", reason="the package accelerate is not installed: no device_map here"
)


PLACES = dict.fromkeys(
    ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"), "cpu"
)
PLACES |= {f"model.layers.{i}": "disk" for i in (1, 2, 3)}


def fake(*devices: str, device_map: dict[str, Any] | None = None) -> Any:
    parameters = [SimpleNamespace(device=device) for device in devices]
    return SimpleNamespace(hf_device_map=device_map, parameters=lambda: iter(parameters))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_map_to_one_device_is_accepted(is_loaded, tokenizer, tiny_dir):
    if is_loaded:
        model = accelerate.dispatch_model(tiny_model(), {"": "cpu"}, force_hooks=True)
        engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer)
    else:
        engine = KVRagEngine.from_pretrained(tiny_dir, device_map={"": "cpu"}, namespace="mapped")
    assert engine.prefill("The archive opens at nine.").prompt_tokens > 0
    engine.close()


def test_a_model_that_is_partly_on_disk_is_refused(tokenizer, tmp_path):
    model = accelerate.dispatch_model(
        tiny_model(), PLACES, offload_dir=str(tmp_path), force_hooks=True
    )
    with pytest.raises(UnsupportedModelError, match=r"several places \(cpu, disk\).*device_map"):
        KVRagEngine.from_pretrained(model, tokenizer=tokenizer)


def test_a_model_that_is_offloaded_between_forwards_is_refused(tokenizer):
    model = accelerate.cpu_offload(tiny_model(), torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="several places"):
        KVRagEngine.from_pretrained(model, tokenizer=tokenizer)


def test_a_model_loaded_in_several_places_is_refused_after_loading(tiny_dir, tmp_path):
    engine = KVRagEngine.from_pretrained(
        tiny_dir, device_map=PLACES, offload_folder=str(tmp_path), namespace="x"
    )
    with pytest.raises(UnsupportedModelError, match="several places"):
        engine.prefill("The archive opens at nine.")


@pytest.mark.parametrize(
    "model",
    [
        fake("cuda:0", "cuda:1", device_map={"a": 0, "b": 1}),
        fake("cuda:0", device_map={"a": 0, "b": "cpu"}),
        fake("cuda:0", "cpu"),
        fake("cuda:0", "meta"),
        fake("cpu", device_map={"": "disk"}),
    ],
)
def test_every_spread_is_refused(model):
    with pytest.raises(UnsupportedModelError, match="one device"):
        check_placement(model)


@pytest.mark.parametrize(
    "model", [fake("cuda:0", "cuda:0"), fake("cuda:0", device_map={"": 0, "x": 0}), fake("cpu")]
)
def test_one_place_is_accepted(model):
    check_placement(model)
