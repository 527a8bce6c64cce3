"""Descriptions of a loaded model for its fingerprint, from config to tokenizer."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.identity.fingerprint import text_digest

if TYPE_CHECKING:
    import torch

# Config entries that don't change KV or are fields of their own.
_VOLATILE = {
    "_name_or_path",
    "_attn_implementation",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "gguf_file",
}

# Config entries about RoPE, under their current and older names.
_ROPE = (
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
)

# Attributes of attention layers that don't change their output at inference.
_NO_EFFECT = frozenset({"training", "layer_idx", "attention_dropout", "dropout"})


def config_text(config: Any) -> str:
    """Return the config as JSON, without volatile entries at any depth."""
    return _json(_settled(config.to_dict()))


def rope_text(config: Any) -> str:
    """Return the RoPE parameters as JSON."""
    text = config.get_text_config()
    return _json(
        {name: value for name in _ROPE if (value := getattr(text, name, None)) is not None}
    )


def attention_text(model: torch.nn.Module) -> str:
    """Return the class and plain settings of all attention layers as JSON.

    The settings are as they are in the model: windows, scales, soft caps, kinds.
    """
    layers = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Attention"):
            settings = {
                key: value
                for key, value in vars(module).items()
                if not key.startswith("_")
                and key not in _NO_EFFECT
                and isinstance(value, (bool, int, float, str))
            }
            layers.append([name, type(module).__name__, settings])
    return _json([type(model).__name__, layers])


def quantisation_text(config: Any) -> str:
    """Return quantisation method and parameters as JSON; empty for plain weights."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return ""
    entries = found if isinstance(found, dict) else found.to_dict()
    # The name of a GGUF file; its content is in the weights.
    return _json({name: value for name, value in entries.items() if name != "gguf_file"})


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256 (hex) of everything in a tokenizer that decides the ids of a text.

    The chat template is not part of it: its output is text, and the ids of that text are in the
    prefix.
    """
    names = ("bos_token_id", "eos_token_id", "add_bos_token")
    parts: dict[str, Any] = {"special": {name: getattr(tokenizer, name, None) for name in names}}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # the whole tokenizer, in any Python class
        state = json.loads(backend.to_str())
        del state["padding"], state["truncation"]  # each call of the tokenizer sets these two
        parts["backend"] = state
    else:
        parts["class"] = type(tokenizer).__name__
        parts["vocabulary"] = tokenizer.get_vocab()
        parts["added"] = {
            str(index): repr(token) for index, token in tokenizer.added_tokens_decoder.items()
        }
        parts["files"] = _vocabulary_files(tokenizer)
    return text_digest(_json(parts))


def _vocabulary_files(tokenizer: Any) -> list[str]:
    """Return digests of the files that a slow tokenizer saves.

    They are the only common form of its merges and sentence models.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_vocabulary(folder)
        except NotImplementedError:
            return []
        return sorted(
            hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(folder).iterdir()
        )


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(name): _settled(inner) for name, inner in value.items() if name not in _VOLATILE
        }
    if isinstance(value, (list, tuple)):
        return [_settled(inner) for inner in value]
    return value


def _json(value: Any) -> str:
    """Return JSON with sorted names; sets become sorted lists, other foreign values strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(map(str, value))
        return str(value)

    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=plain)
