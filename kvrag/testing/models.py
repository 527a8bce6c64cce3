"""Tiny random models of each accepted architecture, built from a config in a moment: no weights are fetched."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrag.testing.tokenizers import VOCAB_SIZE, tiny_tokenizer

_COMMON: dict[str, Any] = {
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

TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 48},
    "gemma2": {
        "sliding_window": 48,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"sliding_window": None, "partial_rotary_factor": 0.5},
}
"""Name → config options beside the common ones; ``model_type`` defaults to the name."""


def tiny_model(name: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a random causal LM of about 0.2 M parameters.

    Parameters
    ----------
    name
        A key of :data:`TINY`.
    seed
        Seed of the weights. Weights are larger than usual, so that attention is far from uniform and a mistake shows.
    dtype
        Of the weights.
    """
    options = {**_COMMON, **TINY[name]}
    model_type = options.pop("model_type", name)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model.eval()


def save_tiny_model(directory: str | os.PathLike[str], name: str = "llama", *, seed: int = 0) -> str:
    """Write a tiny model and :func:`~kvrag.testing.tokenizers.tiny_tokenizer` to a directory, as users have models; returns its path."""
    tiny_model(name, seed=seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return os.fspath(directory)
