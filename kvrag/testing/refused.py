"""Tiny random models whose KV can't be reused, or need not be: each answers by plain generation, and says why."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrag.testing.tokenizers import VOCAB_SIZE

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}

REFUSED: dict[str, dict[str, Any]] = {
    # Positions that are learned, and belong to the row
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_bigcode": {"n_layer": 2, "n_embd": 32, "n_head": 2},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
    },
    # States instead of keys and values
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    # Both, in turns
    "jamba": {
        **_SMALL,
        "num_hidden_layers": 4,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 4,
    },
    "bamba": {
        **_SMALL,
        "num_hidden_layers": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "attn_layer_indices": [1],
    },
    "recurrent_gemma": {**_SMALL, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    "lfm2": {**_SMALL, "num_hidden_layers": 2, "full_attn_idxs": [1]},
    "qwen3_next": {
        **_SMALL,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    # Angles that depend on the prompt's length
    "llama-dynamic": {
        **_SMALL,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
}
"""Name → config options; the ``model_type`` is what stands before a hyphen."""


def refused_model(name: str, **options: Any) -> PreTrainedModel:
    """Build a random causal LM of :data:`REFUSED`, float32; its weights are larger than usual, so that answers vary.

    Parameters
    ----------
    name
        A key of :data:`REFUSED`.
    **options
        More config options.
    """
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(
        name.partition("-")[0], **{"vocab_size": VOCAB_SIZE, **ids, **REFUSED[name], **options}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model.eval()
