"""Linear layers of a CPU, for the threads of vLLM and kvrag at the same time."""

from __future__ import annotations

import torch

from kvrag.adapters import linear as multiply

# An operator of our own, because torch's compiler takes oneDNN's for constant weights alone.
torch.library.define("kvrag::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("kvrag::linear", "cpu", multiply)
torch.library.register_fake("kvrag::linear", torch.nn.functional.linear)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as ``torch.nn.functional.linear``."""
    if x.device.type == "cpu":
        found: torch.Tensor = torch.ops.kvrag.linear(x, weight, bias)
        return found
    return torch.nn.functional.linear(x, weight, bias)
