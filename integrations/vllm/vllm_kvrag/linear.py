"""Linear layers of a CPU, for the threads of vLLM and kvrag at the same time."""

from __future__ import annotations

import torch

# An operator of our own, because torch's compiler takes oneDNN's for constant weights alone.
torch.library.define("kvrag::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as ``torch.nn.functional.linear``.

    In float32 on a CPU, torch's oneDNN is faster than its MKL on some processors.
    """
    if x.dtype is torch.float32 and x.device.type == "cpu":
        found: torch.Tensor = torch.ops.kvrag.linear(x, weight, bias)
        return found
    return torch.nn.functional.linear(x, weight, bias)


@torch.library.impl("kvrag::linear", "cpu")
def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return torch.nn.functional.linear(x, weight, bias)
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


torch.library.register_fake("kvrag::linear", torch.nn.functional.linear)
