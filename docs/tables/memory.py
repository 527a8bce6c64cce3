"""What models of seven and eight billion parameters need: arithmetic from their published configs, nothing is measured."""

from __future__ import annotations

from typing import Any

from kvrag.evaluate.estimate import kept_bytes_per_token, kv_bytes_per_token, shape_from_config
from kvrag.generate.scheduler import SHARE

from .core import Result, Tables, table

MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Entries of each ``config.json`` that set sizes; none of them ties its head to its embedding."""
WIDTHS = {"bf16": 16.0, "8 bits": 8.0, "4 bits": 4.5}
"""Bits of a weight in a layer; of 4.5, half a bit is a float32 scale for 64 weights."""
CARDS = (16, 24, 48, 80)
PROMPTS = (4096, 16384, 32768)
CHUNK = 512


def weights(config: dict[str, Any]) -> tuple[int, int]:
    """Return the parameters in the layers' matrices, and all others (embedding, head, norms, biases)."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = hidden // config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    matrices = layers * hidden * (2 * hidden + 2 * keys + 3 * config["intermediate_size"])
    norms = hidden * (2 * layers + 1)
    biases = layers * (hidden + 2 * keys) * (config["model_type"] == "qwen2")
    return matrices, 2 * config["vocab_size"] * hidden + norms + biases


def weight_bytes(config: dict[str, Any], width: str) -> float:
    """Return the bytes of the weights; what is in no layer's matrix stays in bfloat16."""
    matrices, others = weights(config)
    return matrices * WIDTHS[width] / 8 + others * 2


def models(_: Result) -> str:
    """Set weights and KV of each model."""
    header = ["model", "parameters", *(f"weights, {width}" for width in WIDTHS), "KV of a token"]
    header += [f"of {tokens:,} tokens" for tokens in PROMPTS]
    rows = []
    for name, config in MODELS.items():
        token = kv_bytes_per_token(shape_from_config(config))
        rows.append([name, f"{sum(weights(config)) / 1e9:.2f} billion"])
        rows[-1] += [_gib(weight_bytes(config, width)) for width in WIDTHS]
        rows[-1] += [f"{token / 2**10:.0f} KiB", *(_gib(token * tokens) for tokens in PROMPTS)]
    return table(header, rows)


def cards(_: Result) -> str:
    """Set what weights leave of a card, and the tokens whose KV kvrag admits at a time."""
    rows = []
    for name, config in MODELS.items():
        token = kv_bytes_per_token(shape_from_config(config))
        for width in WIDTHS:
            left = [card * 2**30 - weight_bytes(config, width) for card in CARDS]
            cells = [f"{_gib(rest)}: {SHARE * rest / token / 1000:,.0f}k tokens" for rest in left]
            cells = [cell if rest > 0 else "–" for cell, rest in zip(cells, left, strict=True)]
            rows.append([f"{name}, {width}", *cells])
    return table(["weights", *(f"{card} GB" for card in CARDS)], rows)


def chunk(_: Result) -> str:
    """Set a stored chunk's bytes by the type of its KV."""
    kinds = {"auto on a CPU (float32)": ("auto", "float32"), "auto on a GPU (bf16)": ("auto", None)}
    kinds |= {f"`{kind}`": (kind, None) for kind in ("int8", "fp8", "int4")}
    rows = []
    for name, config in MODELS.items():
        shape = shape_from_config(config)
        sizes = [
            CHUNK * kept_bytes_per_token(shape, kind, chunk_tokens=CHUNK, dtype=dtype)
            for kind, dtype in kinds.values()
        ]
        rows.append([name, *(f"{size / 2**20:.1f} MiB" for size in sizes)])
    return table(["model", *kinds], rows)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


TABLES: Tables = {
    "memory-models": ("", models),
    "memory-cards": ("", cards),
    "memory-chunk": ("", chunk),
}
