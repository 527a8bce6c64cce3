"""Distances between next-token distributions, and the thresholds on them."""

from __future__ import annotations

import torch
from torch import Tensor

# Default thresholds of ``verify`` and of the check of quantised KV: mean KL from the reference, in
# nats per token, and the share of tokens with the same most likely next token.
MAX_MEAN_KL = 0.1
MIN_TOP1 = 0.8


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """Return KL(reference ‖ other) in nats between next-token distributions.

    Both are given as logits ``(..., vocab)``.
    """
    p = torch.log_softmax(reference.double(), -1)
    q = torch.log_softmax(other.double(), -1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
