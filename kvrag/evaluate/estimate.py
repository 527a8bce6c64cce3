"""Estimate the size of KV from a model's shape.

No weights, no torch. Tensor letters as in :mod:`kvrag.types`; ``KiB`` is 2^10 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvrag.errors import ConfigError, ModelError
from kvrag.types import KVDtype

# Bytes per element of the dtypes that kvrag runs in.
ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
}


# Options of layers that keep more than keys and values.
KEEP_MORE = (
    "conv_L_cache",
    "index_head_dim",
    "layer_group_size",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "ssm_cfg",
    "state_size",
)
KEEP_STATES = ("linear", "mamba", "conv", "recurrent")  # beginnings of such layers' types


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a config that determines the size of KV.

    ``dtype`` is the checkpoint's, a key of :data:`ITEMSIZE`. Latent attention keeps a rotary key
    and a latent per token: one head of ``head_dim`` and ``value_dim`` elements.
    ``others`` are the layers with other head counts or head dims (Gemma 4).
    """

    num_layers: int  # L, those that keep KV
    num_kv_heads: int  # H_kv, per layer
    head_dim: int  # D, elements of a key, and of a value
    dtype: str = "bfloat16"
    value_dim: int | None = None  # D_v, elements of a value; None is head_dim
    others: tuple[ModelShape, ...] = ()

    def __str__(self) -> str:
        width = f"{self.head_dim}"
        if self.value_dim:
            width = f"(rotary key of {self.head_dim} + latent of {self.value_dim})"
        own = f"{self.num_layers} layers × {self.num_kv_heads} KV heads × {width}"
        return " + ".join([own, *map(str, self.others)])


PRESETS = {
    "deepseek-r1": ModelShape(61, 1, 64, value_dim=512),
    "deepseek-v3": ModelShape(61, 1, 64, value_dim=512),
    "gemma-2-2b": ModelShape(26, 4, 256),
    "gemma-2-9b": ModelShape(42, 8, 256),
    "glm-4.7-flash": ModelShape(47, 1, 64, value_dim=512),
    "llama-3.1-70b": ModelShape(80, 8, 128),
    "llama-3.1-8b": ModelShape(32, 8, 128),
    "llama-3.2-1b": ModelShape(16, 8, 64),
    "llama-3.2-3b": ModelShape(28, 8, 128),
    "minicpm3-4b": ModelShape(62, 1, 32, value_dim=256),
    "mistral-7b": ModelShape(32, 8, 128),
    "phi-3-mini": ModelShape(32, 32, 96),
    "qwen2.5-0.5b": ModelShape(24, 2, 64),
    "qwen2.5-3b": ModelShape(36, 2, 128),
    "qwen2.5-7b": ModelShape(28, 4, 128),
    "qwen3-0.6b": ModelShape(28, 8, 128),
    "qwen3-8b": ModelShape(36, 8, 128),
    "smollm2-1.7b": ModelShape(24, 32, 64),
    "smollm2-135m": ModelShape(30, 3, 64),
    "smollm2-360m": ModelShape(32, 5, 64),
}
"""Shapes of known checkpoints, so that an estimate needs no files and no network."""


def preset(name: str) -> ModelShape | None:
    """Return the preset of a model name, or ``None``.

    Case, the organisation and the endings "-instruct", "-it" and "-chat" are ignored.
    """
    plain = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    for ending in ("-instruct", "-it", "-chat"):
        plain = plain.removesuffix(ending)
    return PRESETS.get(plain)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from a parsed ``config.json``, or from its text part if it is multimodal.

    Raises
    ------
    ModelError
        If the config lacks the needed sizes, or its layers keep more than keys and values (state
        spaces, linear attention, the keys of a sparse indexer).
    """
    text = config.get("text_config") or config
    has_states = any(str(kind).startswith(KEEP_STATES) for kind in text.get("layer_types") or ())
    if has_states or any(text.get(name) for name in KEEP_MORE):
        raise ModelError(
            f"architecture {text.get('model_type')!r} does not keep plain keys and values; kvrag "
            "can't hold its KV"
        )
    try:
        num_kept = int(text["num_hidden_layers"]) - int(text.get("num_kv_shared_layers") or 0)
        if num_kept < 1:
            raise ValueError(f"{num_kept} of its layers keep KV")
        kinds = Counter(_kv_of_layer(text, layer) for layer in range(num_kept)).most_common()
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"the config does not give the shape of its KV ({error}); it needs num_hidden_layers, "
            "num_attention_heads "
            "and hidden_size"
        ) from error
    # Transformers renamed torch_dtype to dtype.
    given = config.get("dtype") or config.get("torch_dtype") or text.get("dtype")
    dtype = str(given).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        dtype = "bfloat16"
    first, *others = (
        ModelShape(count, heads, dim, dtype, value_dim) for (heads, dim, value_dim), count in kinds
    )
    return replace(first, others=tuple(others))


def _kv_of_layer(text: Mapping[str, Any], layer: int) -> tuple[int, int, int | None]:
    """Return a layer's KV heads and head dims, by its own options first.

    The head dims are of keys and of values: ``None`` where they are equal.
    """
    latent_dim = text.get("kv_lora_rank")
    if latent_dim:  # latent attention: all heads share a rotary key and a latent
        return 1, int(text["qk_rope_head_dim"]), int(latent_dim)
    by_layer = text.get("per_layer_config") or {}
    own = by_layer.get(str(layer)) or {}
    # Released configs of Gemma 4 name the options of full layers.
    if not by_layer and (text.get("layer_types") or [])[layer : layer + 1] == ["full_attention"]:
        own = {"head_dim": text.get("global_head_dim")}
        if text.get("attention_k_eq_v", True):
            own["num_key_value_heads"] = text.get("num_global_key_value_heads")
    options = {**text, **{name: value for name, value in own.items() if value}}
    num_heads = int(options["num_attention_heads"])
    head_dim = options.get("head_dim") or options["hidden_size"] // num_heads
    return int(options.get("num_key_value_heads") or num_heads), int(head_dim), None


def itemsize(dtype: str) -> int:
    """Return the bytes per element; raises :class:`ConfigError` if kvrag can't run in ``dtype``."""
    if dtype not in ITEMSIZE:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of auto, {', '.join(ITEMSIZE)}")
    return ITEMSIZE[dtype]


def kv_bytes_per_token(shape: ModelShape, dtype: str | None = None) -> int:
    """Return the bytes of KV per token over all layers, each ``H_kv · (D + D_v) · itemsize``.

    Default dtype: the checkpoint's.
    """
    width = shape.head_dim + (shape.value_dim or shape.head_dim)
    own = shape.num_layers * shape.num_kv_heads * width
    others = sum(kv_bytes_per_token(other, dtype) for other in shape.others)
    return own * itemsize(dtype or shape.dtype) + others


def kept_bytes_per_token(
    shape: ModelShape, kv_dtype: KVDtype, *, chunk_tokens: int, dtype: str | None = None
) -> float:
    """Return the bytes of stored KV per token.

    With rounded types, these are the codes and the token's share of the scales.

    Parameters
    ----------
    shape, kv_dtype
        Shape of the model; type of the stored KV as in :class:`kvrag.StoreConfig`.
    chunk_tokens
        Tokens per chunk, which share scales.
    dtype
        Dtype of the computed KV; default: the checkpoint's.

    Raises
    ------
    StoreError
        If the type can't hold this shape.
    """
    if kv_dtype == "auto":
        return kv_bytes_per_token(shape, dtype)
    import torch  # only here: the layout of codes and scales is defined once, in kvrag.kv.layers

    from kvrag.kv.layers import parts

    keys = (shape.num_kv_heads, chunk_tokens, shape.head_dim)
    values = (*keys[:2], shape.value_dim or shape.head_dim)
    size = sum(part.num_bytes for part in parts(kv_dtype, torch.bfloat16, keys, values))
    others = (
        kept_bytes_per_token(other, kv_dtype, chunk_tokens=chunk_tokens, dtype=dtype)
        for other in shape.others
    )
    return shape.num_layers * size / chunk_tokens + sum(others)


def human_bytes(number: float) -> str:
    """Format bytes with three digits and a binary unit.

    Examples
    --------
    >>> human_bytes(131072)
    '128 KiB'
    >>> human_bytes(23040)
    '22.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            break
        number /= 1024
    if number < 1000:
        return f"{number:.3g} {unit}"
    return f"{number:.0f} {unit}"
