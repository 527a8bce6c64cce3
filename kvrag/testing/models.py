"""Tiny random models of every accepted architecture, built from a config without downloads."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvrag.testing.tokenizers import VOCAB_SIZE, tiny_tokenizer

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 2.0, 4.0, 8.0],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FALCON = {
    "model_type": "falcon",
    "head_dim": None,
    "new_decoder_architecture": False,
    "multi_query": True,
    "alibi": False,
}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA = {
    **_ROUTED_EXPERTS,
    "n_group": 2,
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_INDEXED = {**_MLA, "index_n_heads": 2, "index_head_dim": 16}
# Tables with a magnitude of 1.1: that of ``mscale`` over that of ``mscale_all_dim``.
_YARN_MLA = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.25}
_WINDOW = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}
_CAPPED = {"sliding_window": 48, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16}
_LAST_FULL = ["sliding_attention"] * 3 + ["full_attention"]
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# Two of six layers keep no KV: the first of them reads layer 2, the other layer 3.
_SHARED = {
    "layer_types": [*_ALTERNATING, "sliding_attention", "full_attention"],
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "sliding_window": 48,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_GEMMA4 = {"sliding_window": 48, "global_head_dim": 32, "final_logit_softcapping": 30.0}
_KEYS_AS_VALUES = {
    "layer_types": _ALTERNATING,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
}
_QWEN3_TOWER = {**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_IMAGE = {"image_token_id": 5}
_QWEN_IMAGE = {
    **_IMAGE,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
    }
}
_GEMMA3 = {
    "sliding_window": 48,
    "layer_types": _ALTERNATING,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}
_LLAMA4 = {
    **_LOCAL_EXPERTS,
    "intermediate_size_mlp": 96,
    "attention_chunk_size": 64,
    "no_rope_layers": [1, 1, 1, 0],
    "floor_scale": 256,
    "attn_scale": 0.5,
    "attn_temperature_tuning": True,
}

TINY: dict[str, dict[str, Any]] = {
    # Llama and its near relatives
    "llama": {},
    "llama-linear": {"model_type": "llama", "rope_parameters": _LINEAR},
    "llama-llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 512,
        },
    },
    "llama-yarn": {"model_type": "llama", "rope_parameters": _YARN},
    "mistral": {"sliding_window": 48},
    "ministral": {"sliding_window": 48, "layer_types": _ALTERNATING},
    "ministral3": {
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5, "max_position_embeddings": 4096}
    },
    "qwen2": {},
    "qwen2-linear": {"model_type": "qwen2", "rope_parameters": _LINEAR},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": _YARN},
    "qwen2-window": {"model_type": "qwen2", **_WINDOW},
    "qwen3": {},
    "gemma": {},
    "gemma2": {**_CAPPED, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {
        **_SHARED,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_text": {
        **_SHARED,
        **_GEMMA4,
        "use_double_wide_mlp": True,
    },
    "gemma4-key-values": {"model_type": "gemma4_text", **_GEMMA4, **_KEYS_AS_VALUES},
    "gemma4-experts": {
        "model_type": "gemma4_text",
        **_GEMMA4,
        **_KEYS_AS_VALUES,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_unified_text": {**_GEMMA4, **_KEYS_AS_VALUES},
    "vaultgemma": _CAPPED,
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": {"sliding_window": 48, "layer_types": _ALTERNATING},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {"sliding_window": 48},
    "seed_oss": {},
    "arcee": {},
    "apertus": {},
    "exaone4": {"sliding_window": 48, "layer_types": _LAST_FULL},
    "cwm": {"sliding_window": 48, "layer_types": _ALTERNATING},
    "nanochat": {},
    "jais2": {},
    "hunyuan_v1_dense": {},
    "bitnet": {},
    # Experts
    "mixtral": {**_LOCAL_EXPERTS, "sliding_window": 48},
    "qwen2_moe": {**_EXPERTS, **_WINDOW, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": _LOCAL_EXPERTS,
    "phimoe": {**_LOCAL_EXPERTS, "sliding_window": None},
    "gpt_oss": {
        **_LOCAL_EXPERTS,
        "sliding_window": 48,
        "rope_parameters": {
            **_YARN,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "llama4_text": _LLAMA4,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
    },
    "dots1": _ROUTED_EXPERTS,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "afmoe": {
        **_EXPERTS,
        "sliding_window": 48,
        "num_dense_layers": 1,
        "layer_types": _ALTERNATING,
    },
    "jetmoe": {**_LOCAL_EXPERTS, "kv_channels": 16},
    "dbrx": {
        "n_layers": 4,
        "d_model": 64,
        "n_heads": 4,
        "max_seq_len": 4096,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "glm4_moe": {**_ROUTED_EXPERTS, "use_qk_norm": True},
    # Keys with partial or interleaved RoPE, or from a fused projection
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {"sliding_window": None, "partial_rotary_factor": 0.5},
    "phi3-longrope": {
        "model_type": "phi3",
        "sliding_window": None,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 3000,
        "rope_parameters": {**_LONGROPE, "original_max_position_embeddings": 3000},
    },
    "gpt_neox": {"rotary_pct": 0.25, "num_key_value_heads": None},
    "stablelm": {"partial_rotary_factor": 0.25, "qk_layernorm": True},
    "persimmon": {"partial_rotary_factor": 0.5},
    "nemotron": {"partial_rotary_factor": 0.5},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"sliding_window": 48, "layer_types": _LAST_FULL, "logit_scale": 0.5},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "ernie4_5": {},
    "helium": {},
    # Latent attention
    "deepseek_v2": _MLA,
    "deepseek_v2-yarn": {"model_type": "deepseek_v2", **_MLA, "rope_parameters": _YARN_MLA},
    "deepseek_v3": _MLA,
    "deepseek_v3-halves": {"model_type": "deepseek_v3", **_MLA, "rope_interleave": False},
    "deepseek_v3-yarn": {"model_type": "deepseek_v3", **_MLA, "rope_parameters": _YARN_MLA},
    "glm4_moe_lite": _MLA,
    "minicpm3": _MLA,
    "minicpm3-longrope": {
        "model_type": "minicpm3",
        **_MLA,
        "rope_parameters": {
            **_LONGROPE,
            "factor": 4096 / 3000,
            "original_max_position_embeddings": 3000,
        },
    },
    "youtu": _MLA,
    "axk1": _MLA,
    "longcat_flash": {
        **_MLA,
        "head_dim": 8,
        "num_layers": 2,  # of two attentions
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    # Attention that takes only a mask
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "falcon": _FALCON,
    "falcon-new": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-multi-head": {**_FALCON, "multi_query": False},
    "bloom": {},
    "mpt": {},
    # Models that see, of which text alone is asked
    "gemma3": {
        **_IMAGE,
        "boi_token_index": 7,
        "eoi_token_index": 8,
        "mm_tokens_per_image": 4,
        "text_config": _GEMMA3,
        "vision_config": _TOWER,
    },
    "gemma4": {
        **_IMAGE,
        "text_config": {
            **_SHARED,
            **_GEMMA4,
            "use_double_wide_mlp": True,
        },
        "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16},
        "audio_config": None,
    },
    "qwen2_vl": {
        **_QWEN_IMAGE,
        "text_config": _MROPE,
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "num_heads": 2,
            "mlp_ratio": 1,
            "patch_size": 8,
            "hidden_size": 64,
        },
    },
    "qwen2_5_vl": {
        **_QWEN_IMAGE,
        "text_config": _MROPE,
        "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0], "window_size": 32},
    },
    "qwen3_vl": {**_QWEN_IMAGE, "text_config": _MROPE, "vision_config": _QWEN3_TOWER},
    "qwen3_vl_moe": {
        **_QWEN_IMAGE,
        "text_config": {**_MROPE, **_EXPERTS},
        "vision_config": _QWEN3_TOWER,
    },
    "mistral3": {
        **_IMAGE,
        "text_config": {"model_type": "mistral", "sliding_window": None},
        "vision_config": {**_TOWER, "model_type": "pixtral"},
    },
    "llama4": {
        **_IMAGE,
        "text_config": _LLAMA4,
        "vision_config": {
            **_TOWER,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "llava": {
        **_IMAGE,
        "text_config": {"model_type": "llama"},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
    },
    "internvl": {
        **_IMAGE,
        "text_config": {"model_type": "qwen2"},
        "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
    },
    "glm4v": {
        **_QWEN_IMAGE,
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            }
        },
        "vision_config": {**_QWEN_TOWER, "image_size": 16},
    },
}
"""Name → config options, in addition to the common options.

``None`` removes a common option; ``model_type`` defaults to the name. With a ``text_config``, the
common options are its.
"""

REFUSED: dict[str, dict[str, Any]] = {
    # Models whose KV can't be reused at other positions; every refusal has its own reason.
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon-alibi": {**_FALCON, "alibi": True},
    "llama-dynamic-ntk": {
        "model_type": "llama",
        "rope_parameters": {**_LINEAR, "rope_type": "dynamic"},
    },
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "deepseek_v4": {**_MLA, "num_key_value_heads": 1, "o_groups": 4},
    "inkling_text": {**_ROUTED_EXPERTS, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    "doge": {},
    "mamba": {},
    "rwkv": {"attention_hidden_size": 64, "context_length": 4096},
    "jamba": {
        **_LOCAL_EXPERTS,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen3_next": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5": {
        "text_config": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        "vision_config": _QWEN3_TOWER,
    },
}
"""Name → config options of refused models; :func:`tiny_model` builds them, too."""


def tiny_model(
    name: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build a random causal LM of about 0.2 M parameters, with a tower if it sees.

    Parameters
    ----------
    name
        A key of :data:`TINY` or :data:`REFUSED`.
    seed
        Seed of the weights. Weights are larger than usual, so that attention is far from uniform
        and a mistake shows.
    dtype
        Dtype of the weights.
    """
    own = (TINY | REFUSED)[name]
    sees = "text_config" in own
    text = {
        key: value
        for key, value in {**_COMMON, **(own["text_config"] if sees else own)}.items()
        if not (key in _COMMON and value is None)
    }
    options = {**own, "text_config": text} if sees else text
    model_type = options.pop("model_type", name)
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    config = AutoConfig.for_model(model_type, **options)
    return random_model(config, auto, seed=seed, dtype=dtype)


def random_model(
    config: PreTrainedConfig,
    auto: Any = AutoModelForCausalLM,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Build the model of a config by one of transformers' auto classes, with random weights."""
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
        for parameter in model.parameters():
            if parameter.dim() == 3:  # experts
                parameter.normal_(std=0.15)
            elif parameter.dim() == 1:  # norms and biases: ones and zeros would hide their effect
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def save_tiny_model(
    directory: str | os.PathLike[str], name: str = "llama", *, seed: int = 0
) -> str:
    """Write a tiny model and its tokenizer to a directory, and return the directory's path.

    The tokenizer is :func:`~kvrag.testing.tokenizers.tiny_tokenizer`.
    """
    tiny_model(name, seed=seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return os.fspath(directory)
