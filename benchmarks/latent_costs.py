"""What latent attention keeps and saves, from shapes alone: bytes per token, and the arithmetic of a prompt with and without reuse.

    python benchmarks/latent_costs.py

Nothing runs: models are built without weights, from the configs that transformers has for the named checkpoints. Parameters are counted as
they act on a token: of routed experts only those that a token is sent to, and no embedding. Writes ``results/latent_costs.json`` for
docs/support.md. A few seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from common import machine, write_result
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrag.evaluate.estimate import (
    PRESETS,
    ModelShape,
    kept_bytes_per_token,
    kv_bytes_per_token,
    shape_from_config,
)

MODELS = {
    "DeepSeek-V3": "deepseek_v3",
    "GLM-4.7-Flash": "glm4_moe_lite",
    "MiniCPM3-4B": "minicpm3",
}
"""Checkpoint, also a preset of ``kvrag estimate`` → model type, whose default config has its shape."""
GQA_HEADS, GQA_DIM = 8, 128  # of Llama 3, Qwen 3 and many others
TOKENS, REPAIRED = 8000, 0.1  # of the prompt, all reused; share of its rows that are repaired
CHUNK = 250  # tokens, for the scales of int8
FLOPS = 100e12  # per second that a prefill gets, assumed: times and bandwidths scale with it


def active_parameters(model: PreTrainedModel) -> float:
    """Count the parameters that act on every row of a prompt: without embeddings and the head."""
    config = model.config
    outside = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    share = getattr(config, "num_experts_per_tok", 0) / getattr(config, "n_routed_experts", 1)
    return sum(
        parameter.numel() * (share if ".experts." in name else 1)
        for name, parameter in model.named_parameters()
        if all(parameter is not one for one in outside)
    )


def costs(name: str) -> dict[str, Any]:
    """Sizes and arithmetic of a model; FLOPs count a multiplication and an addition as two."""
    config = AutoConfig.for_model(MODELS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(config.to_dict())
    assert shape == PRESETS[name.lower()], f"the preset {name} has another shape"
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    widths = config.qk_head_dim + config.v_head_dim
    active = active_parameters(model)
    pair = 2 * layers * heads * widths  # FLOPs of a row and a key that it sees
    expansion = 2 * sum(
        p.numel() for n, p in model.named_parameters() if n.endswith("kv_b_proj.weight")
    )
    rows = REPAIRED * TOKENS
    full = 2 * active * TOKENS + pair * TOKENS**2 / 2
    # Every reused row is expanded to keys and values again, in every layer.
    reused = 2 * active * rows + pair * rows * TOKENS / 2 + expansion * (TOKENS - rows)
    bf16 = kv_bytes_per_token(shape, "bfloat16")
    gqa = kv_bytes_per_token(ModelShape(layers, GQA_HEADS, GQA_DIM), "bfloat16")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "active": active,
        "layers": layers,
        "latent": shape.value_dim,
        "rotary_key": shape.head_dim,
        "bytes_per_token": {
            "bfloat16": bf16,
            "int8": kept_bytes_per_token(shape, "int8", chunk_tokens=CHUNK),
            "gqa": gqa,
            "expanded": layers * heads * widths * 2,
        },
        "flops": {"full": full, "reused": reused, "expansion": expansion * (TOKENS - rows)},
        "prompt_bytes": bf16 * TOKENS,
        "break_even_bytes_per_s": bf16 * FLOPS * TOKENS / full,
    }


def main() -> None:
    """Write the result."""
    rows = {name: costs(name) for name in MODELS}
    constants = {"tokens": TOKENS, "repaired": REPAIRED, "flops_per_s": FLOPS, "chunk": CHUNK}
    gqa = {"heads": GQA_HEADS, "dim": GQA_DIM}
    write_result(
        "latent_costs", {"machine": machine(), "constants": constants, "gqa": gqa, "models": rows}
    )
    for name, row in rows.items():
        print(name, row)


if __name__ == "__main__":
    main()
