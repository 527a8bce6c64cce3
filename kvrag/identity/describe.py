"""Texts that describe a loaded model for its fingerprint: config, RoPE, attention, quantisation, tokenizer."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_VOLATILE = frozenset(
    [
        "_name_or_path",
        "_attn_implementation",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "quantization_config",
    ]
)
"""Config entries that don't change KV or are fields of their own."""

_ROPE = [
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_dim",
    "no_rope_layers",
    "original_max_position_embeddings",
    "max_position_embeddings",
]
"""Config entries about RoPE, under their current and older names."""

_NO_EFFECT = frozenset({"training", "layer_idx", "attention_dropout", "dropout"})
"""Attributes of attention layers that don't change their output at inference."""


def config_text(config: Any) -> str:
    """Config as JSON, without volatile entries at any depth."""
    return _json(_settled(config.to_dict()))


def rope_text(config: Any) -> str:
    """RoPE parameters as JSON."""
    text = config.get_text_config()
    return _json({name: value for name in _ROPE if (value := getattr(text, name, None)) is not None})


def attention_text(model: torch.nn.Module) -> str:
    """Class and plain settings of each attention layer as they are in the model: windows, scales, soft caps, kinds."""
    layers = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Attention"):
            settings = {
                key: value
                for key, value in vars(module).items()
                if not key.startswith("_") and key not in _NO_EFFECT and isinstance(value, (bool, int, float, str))
            }
            layers.append([name, type(module).__name__, settings])
    return _json([type(model).__name__, layers])


def quantisation_text(config: Any) -> str:
    """Quantisation method and parameters as JSON; empty for plain weights."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return ""
    return _json(_settled(found if isinstance(found, dict) else found.to_dict()))


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 (hex) of everything in a tokenizer that decides the ids of a text.

    The chat template is not part of it: its output is text, whose ids are in the prefix.
    """
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "add_bos_token")}
    parts: dict[str, Any] = {"special": special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # the whole tokenizer, whatever Python class wraps it
        state = json.loads(backend.to_str())
        # Each call of the tokenizer sets these two.
        parts["backend"] = {name: value for name, value in state.items() if name not in ("padding", "truncation")}
    else:
        parts["class"] = type(tokenizer).__name__
        parts["vocabulary"] = tokenizer.get_vocab()
        parts["added"] = {str(index): repr(token) for index, token in tokenizer.added_tokens_decoder.items()}
        parts["files"] = _vocabulary_files(tokenizer)
    return hashlib.sha256(_json(parts).encode()).hexdigest()


def _vocabulary_files(tokenizer: Any) -> list[str]:
    """Digests of the files that a slow tokenizer saves, the only common form of its merges and sentence models."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_vocabulary(folder)
        except NotImplementedError:
            return []
        return sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(folder).iterdir())


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _settled(inner) for name, inner in value.items() if name not in _VOLATILE}
    return [_settled(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """JSON form of what JSON has none for: sets sorted, anything else as a string."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
