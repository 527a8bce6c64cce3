"""What can't be stored and moved, said before any weight is loaded where the config shows it, and from the module tree where it doesn't.

A deny list with reasons, not a list of names to accept: what passes here is then proven or refused by :mod:`.probe`.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from kvrag.errors import UnsupportedModelError

_LEARNED = (
    "adds a learned embedding of the absolute position to each token, so a chunk's KV fits one position only: reuse is possible "
    "there alone, as a prefix"
)
_STATE = "keeps a running state instead of keys and values per token, so a chunk's part of it can't be stored and moved"
_MIXED = "mixes attention with layers that keep a running state over all tokens before, so a chunk's part of it can't be stored and moved"

_BY_NAME: dict[str, str] = {
    **dict.fromkeys(("biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "xglm"), _LEARNED),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(("bamba", "jamba", "nemotron_h", "recurrent_gemma", "zamba", "zamba2"), _MIXED),
}
"""Known families that would fail the proof at load anyway, but only after their weights have been read."""

_STATEFUL_LAYERS = ("linear_attention", "mamba", "conv", "recurrent", "moe_mamba", "ssm")
_OTHER_INPUTS = ("vision_config", "audio_config", "image_token_id", "image_token_index", "audio_token_id")


def check_supported(config: Any) -> None:
    """Raise :class:`UnsupportedModelError` if the config shows that this model's KV can't be moved; the message gives the reason."""
    reason = refusal(config)
    if reason is not None:
        raise UnsupportedModelError(f"architecture {config.model_type!r} {reason}")


def refusal(config: Any) -> str | None:
    """Return why a model of this config is refused, as the rest of a sentence about it, or ``None``."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder: its decoder attends to an encoded input, not to a prompt's own keys and values"
    if config.get_text_config() is not config or any(getattr(config, name, None) is not None for name in _OTHER_INPUTS):
        return "takes images or sound beside text, and those attend in both directions; load its text model on its own, as a causal LM"
    if config.model_type == "falcon" and config.alibi:
        return "adds ALiBi once in one of transformers' own attentions and twice in the one that takes a mask; kvrag can run only that"
    if config.model_type in _BY_NAME:
        return _BY_NAME[config.model_type]
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    stateful = sorted(kind for kind in kinds if kind.startswith(_STATEFUL_LAYERS))
    if stateful:
        return f"{_MIXED} (layer types: {', '.join(stateful)})"
    return _rope_refusal(config)


def _rope_refusal(config: Any) -> str | None:
    for rope in rope_parameters(config):
        if "dynamic" in str(rope.get("rope_type", "default")):
            return (
                f"has RoPE type {rope['rope_type']!r}, which changes its angles with the prompt's length, so stored keys can't be moved "
                "exactly; set another rope_type, such as 'yarn'"
            )
    return None


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE parameters of a config: one set, or one per layer type."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def regime_limit(config: Any) -> int | None:
    """Return the longest prompt whose angles are those of shorter ones, or ``None`` where the length doesn't matter.

    Longrope (Phi 3) turns prompts beyond the original context by other angles than shorter ones.
    """
    limits = [
        int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
        for rope in rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def check_placement(model: PreTrainedModel) -> None:
    """Raise :class:`UnsupportedModelError` unless all of a model's weights are on one device: KV is kept in one buffer there.

    Parameters
    ----------
    model
        Loaded, with or without a ``device_map``.
    """
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {str(parameter.device) for parameter in model.parameters()}
    is_sharded = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if len(places) > 1 or "disk" in places or len(devices) > 1 or "meta" in devices or is_sharded:
        where = ", ".join(sorted(places or devices))
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} are spread over several places ({where}), and kvrag keeps KV on one device; load the "
            'whole model onto one with device="cuda" or device_map={"": 0}, in a smaller dtype or quantised if it does not fit'
        )


def context_window(config: Any) -> int:
    """Return the largest number of tokens of prompt and answer together; a large number where the config sets none (ALiBi)."""
    for name in ("max_position_embeddings", "max_seq_len", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return UNLIMITED


UNLIMITED = 2**20
"""Context window of a model whose config names none."""
