"""Precompute of many chunks in one forward beside one chunk at a time: random weights of an 8B shape, some of its layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,  # of 32: all cost the same
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
}
DRY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 400,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
CHUNKS, TOKENS, PREFIX = 16, 512, 64


def precompute_row(device: torch.device, dtype: torch.dtype, is_dry: bool) -> dict[str, Any]:
    """Time one batch of chunks: padded, one at a time by transformers, and as one causal prefill of as many tokens.

    The batch copies the chunks' KV to the host, as precompute does; the others copy nothing.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    from kvrag.model import CausalLM
    from kvrag.precompute.encode import encode_chunks, encode_prefix

    count, tokens = (3, 24) if is_dry else (CHUNKS, TOKENS)
    with torch.device(device):
        config = LlamaConfig(**SHAPE | (DRY if is_dry else {}))
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    ids = torch.randint(300, (count, PREFIX + tokens), generator=torch.Generator().manual_seed(0))
    ids[:, :PREFIX] = ids[0, :PREFIX]
    lm = CausalLM(model)
    prefix, _ = encode_prefix(lm, ids[0, :PREFIX].tolist())
    chunks = ids[:, PREFIX:].tolist()
    on_device = ids.to(device)
    stream = on_device[:, PREFIX:].reshape(1, -1)

    def one_at_a_time() -> None:
        for row in on_device:
            model(row[None], use_cache=True, logits_to_keep=1)

    with torch.inference_mode():
        return {
            "model": f"llama-3.1-8b shape, {model.config.num_hidden_layers} layers, random weights",
            "chunks": count,
            "tokens": tokens,
            "batch_ms": median_ms(lambda: encode_chunks(lm, prefix, chunks), device),
            "one_at_a_time_ms": median_ms(one_at_a_time, device),
            "causal_prefill_ms": median_ms(
                lambda: model(stream, use_cache=True, logits_to_keep=1), device
            ),
        }


def median_ms(run: Callable[[], object], device: torch.device) -> float:
    """Median of three calls after one, each from the device's rest to its rest."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[1:])[1]
