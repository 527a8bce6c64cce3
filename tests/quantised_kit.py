"""Quantised checkpoints as people load them, made by hand from a tiny model, without the libraries that usually make them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvrag.testing.tokenizers import VOCAB_SIZE, tiny_tokenizer

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
}
Encode = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""``name and weight of a layer -> its tensors in the checkpoint``."""


def save_base(place: str, kind: str = "llama", **sizes: Any) -> str:
    """A tiny model whose every width is a multiple of 64, the size of the groups that are quantised together."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def save_quantised(base: str, place: str, method: dict[str, Any], encode: Encode) -> str:
    """Copy a checkpoint, with the weights of its layers encoded."""
    shutil.copytree(base, place)
    file = Path(place, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": method}))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(Path(base, "model.safetensors")).items():
        is_layer = "layers" in name and name.endswith(("proj.weight", "_proj"))
        tensors |= encode(name, tensor) if is_layer else {name: tensor}
    save_file(tensors, Path(place, "model.safetensors"), metadata={"format": "pt"})
    return place


def fp8_blocks(base: str, place: str) -> str:
    """As DeepSeek's and Qwen's FP8 checkpoints: a scale per block of weights."""

    def encode(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {name: codes, name.replace(".weight", ".weight_scale_inv"): scale.reshape(1, 1)}

    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return save_quantised(base, place, method | {"activation_scheme": "dynamic"}, encode)


def mxfp4(base: str, place: str) -> str:
    """As gpt-oss: blocks of 32 numbers of 4 bits, with an exponent each, in the experts."""
    generator = torch.Generator().manual_seed(0)

    def encode(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if "experts" not in name:
            return {name: weight}
        experts, rows, columns = weight.shape
        shape = (experts, columns, rows // 32)
        codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        exponents = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        return {f"{name}_blocks": codes, f"{name}_scales": exponents}

    return save_quantised(base, place, {"quant_method": "mxfp4"}, encode)


GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def compressed(kind: str, activations: str | None) -> Callable[[str, str], str]:
    """Make a checkpoint of compressed-tensors: ``int`` or ``float`` weights, activations ``token``, ``tensor`` or None."""
    is_int = kind == "int"

    def encode(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / (127 if is_int else 448)
        codes = (weight / scale).round() if is_int else weight / scale
        if is_int and activations is None:  # four codes in an int32, without signs
            packed = (codes + 128).to(torch.uint8).contiguous().view(torch.int32)
            shape = torch.tensor(weight.shape)
            return {f"{name}_packed": packed, f"{name}_shape": shape, f"{name}_scale": scale}
        dtype = torch.int8 if is_int else torch.float8_e4m3fn
        return {name: codes.to(dtype), f"{name}_scale": scale}

    def save(base: str, place: str) -> str:
        common = {"num_bits": 8, "type": kind, "symmetric": True}
        group: dict[str, Any] = {"targets": ["Linear"]}
        group["weights"] = {**common, "strategy": "channel", "dynamic": False}
        if activations is not None:
            group["input_activations"] = {**common, "strategy": activations, "dynamic": True}
        form = "pack-quantized" if is_int and activations is None else f"{kind}-quantized"
        method: dict[str, Any] = {"quant_method": "compressed-tensors", "format": form}
        method |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
        return save_quantised(base, place, method | {"quantization_status": "compressed"}, encode)

    return save
