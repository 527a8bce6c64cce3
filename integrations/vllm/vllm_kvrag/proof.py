"""Proof that vLLM's model computes for kvrag what it computes in its own steps, by the logits.

It runs once, when vLLM starts: no request has blocks in vLLM's cache yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvrag.adapters import Blending
from vllm_kvrag.own import VllmLM

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

NUM_TOKENS = 200  # more than a block of any backend, so that rows of two blocks are read
# Largest mean divergence (KL, in nats) of the next token's distribution, by dtype. Models that
# differ in a scale or a rotation are above 0.1.
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}
QUANTISED = 2e-2  # quantised activations amplify roundings


def why_different(lm: VllmLM, cache: KVCacheConfig, blending: Blending) -> str | None:
    """Return how the logits of vLLM's steps and of kvrag's forward differ; ``None`` if they don't.

    ``blending`` is of kvrag's engine on this model.
    """
    # vLLM's first block holds no prompt.
    count = min(NUM_TOKENS, (cache.num_blocks - 1) * lm.block_size)
    ids = torch.randint(lm.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    try:
        found, wanted = (
            logits.float().log_softmax(-1)
            for logits in (blending.logits(ids), lm.logits_of_step(cache, ids))
        )
    except Exception as error:
        return (
            "its logits could not be compared with vLLM's "
            f"({type(error).__name__}: {str(error)[:200]})"
        )
    limit = QUANTISED if lm.is_quantised else LIMITS[lm.dtype]
    loss = float(torch.nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True))
    if loss <= limit:
        return None
    return (
        f"its logits differ from vLLM's: a divergence of {loss:.1e} nats, "
        f"and {limit:.0e} is the limit in {lm.dtype}"
    )
