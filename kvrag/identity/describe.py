"""What a loaded model is, field by field, for its fingerprint: config, RoPE, attention, quantisation, tokenizer."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

_VOLATILE = frozenset(
    {
        *("_name_or_path", "_attn_implementation", "transformers_version", "dtype", "torch_dtype", "use_cache"),
        *("output_attentions", "output_hidden_states", "return_dict", "quantization_config"),
    }
)
"""Config entries that don't change KV, or are a field of their own."""

_NO_EFFECT = frozenset({"training", "layer_idx", "attention_dropout", "dropout"})
"""Attributes of attention layers that don't change what they compute in a forward of ours."""


def config_text(config: Any) -> str:
    """Config as JSON, without volatile entries at any depth."""
    return _json(_settled(config.to_dict()))


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _settled(inner) for name, inner in value.items() if name not in _VOLATILE}
    return [_settled(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def rope_text(config: Any) -> str:
    """RoPE parameters as JSON, under today's name and the older ones, with what older configs keep beside them."""
    text = config.get_text_config()
    names = (
        *(
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
            "rope_local_base_freq",
            "partial_rotary_factor",
            "rotary_pct",
        ),
        *("rotary_dim", "no_rope_layers", "original_max_position_embeddings", "max_position_embeddings"),
    )
    return _json({name: getattr(text, name) for name in names if getattr(text, name, None) is not None})


def attention_text(model: torch.nn.Module) -> str:
    """Class and plain settings of each attention layer as they stand in the model: windows, scales, soft caps, kinds."""
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
    """SHA-256 (hex) of everything about a tokenizer that makes ids from text.

    The chat template is left out: it makes text, and what it renders is in the prefix's ids.
    """
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "add_bos_token")}
    parts: dict[str, Any] = {"class": type(tokenizer).__name__, "special": special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # Set by each call of the tokenizer, and so by whoever used it last.
        parts["backend"] = {name: value for name, value in state.items() if name not in ("padding", "truncation")}
        del parts["class"]  # the backend is the tokenizer, whatever the class around it
    else:
        parts["vocabulary"] = tokenizer.get_vocab()
        parts["added"] = {str(index): repr(token) for index, token in tokenizer.added_tokens_decoder.items()}
        parts["files"] = _vocabulary_files(tokenizer)
    return hashlib.sha256(_json(parts).encode()).hexdigest()


def _vocabulary_files(tokenizer: Any) -> list[str]:
    """Digests of the files that a slow tokenizer saves: merges and sentence models are nowhere else in a common form."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_vocabulary(folder)
        except NotImplementedError:
            return []
        return sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(folder).iterdir())


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_spelling)


def _spelling(value: Any) -> Any:
    """Spell what JSON has no form for: sets in order, the rest by name."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
