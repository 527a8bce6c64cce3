"""Linear layers of a CPU, for the threads of vLLM and kvrag at the same time."""

from __future__ import annotations

import torch

from kvrag.adapters import linear as multiply

# An operator of our own, because torch's compiler takes oneDNN's for constant weights alone.
torch.library.define("kvrag::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.register_fake("kvrag::linear", torch.nn.functional.linear)


@torch.library.impl("kvrag::linear", "cpu")
def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # vLLM's weights are of a class that loads them; it means nothing to a product.
    return multiply(x, weight.as_subclass(torch.Tensor), bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as ``torch.nn.functional.linear``."""
    if x.dtype is torch.float32 and x.device.type == "cpu":
        found: torch.Tensor = torch.ops.kvrag.linear(x, weight, bias)
        return found
    return torch.nn.functional.linear(x, weight, bias)
