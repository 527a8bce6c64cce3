"""Proof that kvrag's forward computes what vLLM's does, by the logits of both.

It runs once, when vLLM starts: no request has blocks in vLLM's cache yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvrag.adapters import Blending

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NUM_TOKENS = 200  # more than a block of any backend, so that rows of two blocks are read
# Largest mean divergence (KL, in nats) of the next token's distribution, by dtype. Models that
# differ in a scale or a rotation are above 0.1.
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def why_different(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    model: torch.nn.Module,
    layers: Mapping[str, Any],
    blending: Blending,
) -> str | None:
    """Return how the logits of vLLM's model and of kvrag's forward differ; ``None`` if they don't.

    Parameters
    ----------
    model
        vLLM's model.
    layers
        vLLM's attention layers by name.
    blending
        Of kvrag's engine.
    """
    lm = blending.lm
    # vLLM's first block holds no prompt.
    room = (kv_cache_config.num_blocks - 1) * vllm_config.cache_config.block_size
    count = min(NUM_TOKENS, room)
    ids = torch.randint(lm.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    try:
        theirs = _logits(vllm_config, kv_cache_config, model, layers, ids.to(lm.device))
        ours = blending.logits(ids)
    except Exception as error:
        return (
            "its logits could not be compared with vLLM's "
            f"({type(error).__name__}: {str(error)[:200]})"
        )
    found, wanted = (x[..., : lm.vocab_size].float().log_softmax(-1) for x in (ours, theirs))
    loss = torch.nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
    limit = LIMITS[lm.dtype]
    if loss <= limit:
        return None
    return (
        f"its logits differ from vLLM's: a divergence of {float(loss):.1e} nats, "
        f"and {limit:.0e} is the limit in {lm.dtype}"
    )


@torch.inference_mode()
def _logits(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    model: Any,
    layers: Mapping[str, Any],
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return the logits of vLLM's model for a prompt in the first blocks of its cache."""
    device = ids.device
    count = len(ids)
    size = vllm_config.cache_config.block_size
    blocks = torch.arange(1, 2 + (count - 1) // size, dtype=torch.int32, device=device)
    positions = torch.arange(count, device=device)
    slots = blocks[positions // size].long() * size + positions % size
    starts = torch.tensor([0, count], dtype=torch.int32)
    lengths = torch.tensor([count], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=count,
        block_table_tensor=blocks[None],
        slot_mapping=slots,
        positions=positions,
        causal=True,
    )
    (group,) = kv_cache_config.kv_cache_groups
    with set_current_vllm_config(vllm_config):
        builder = layers[group.layer_names[0]].get_attn_backend().get_builder_cls()
        made = builder(group.kv_cache_spec, group.layer_names, vllm_config, device)
        metadata = made.build(0, common)
        context = set_forward_context(
            dict.fromkeys(group.layer_names, metadata),
            vllm_config,
            num_tokens=count,
            slot_mapping=dict.fromkeys(group.layer_names, slots),
            skip_compiled=True,
        )
        with context:
            hidden = model(input_ids=ids, positions=positions)
            logits: torch.Tensor = model.compute_logits(hidden)
    return logits
