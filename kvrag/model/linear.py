"""Products of float32 matrices on a CPU, by oneDNN where torch has it.

By itself, torch takes MKL. On processors that MKL does not favour, oneDNN is twice as fast for the
rows of a prompt, and two to four times for the single row of a decode step.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
import torch.nn.functional as F

# Beyond so many rows, oneDNN takes a third longer for an odd number than for a multiple of 8.
MAX_ODD_ROWS = 256


class Linear(torch.nn.Linear):
    """Linear layer that multiplies as :func:`linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply rows ``(·, in_features)`` by the weight."""
        return linear(input, self.weight, self.bias)


def use_onednn(model: torch.nn.Module) -> None:
    """Let the plain linear layers of a model multiply as :func:`linear`."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as ``torch.nn.functional.linear``: ``x`` ``(·, R, K)``, ``weight`` ``(N, K)``.

    oneDNN takes float32 on a CPU, where no gradient is wanted.
    """
    is_plain = type(weight) in _PLAIN and weight.dtype is x.dtype is torch.float32
    if not is_plain or x.device.type != "cpu" or torch.is_grad_enabled() or not has_onednn():
        return F.linear(x, weight, bias)
    rows = x.shape[-2] if x.dim() > 1 else 1
    spare = -rows % 8 if rows > MAX_ODD_ROWS else 0
    padded = F.pad(x, (0, 0, 0, spare)) if spare else x
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return out[..., :rows, :] if spare else out


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of weights that are what they seem: a quantised weight is of a type of its own."""


@cache
def has_onednn() -> bool:
    """Whether torch has oneDNN for this processor, and the process has not switched it off."""
    return (
        platform.machine() in {"x86_64", "AMD64"}
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
