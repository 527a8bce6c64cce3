"""Linear layers of a CPU, for the threads of vLLM and kvrag at the same time."""

from __future__ import annotations

import torch

_ops = torch.library.Library("kvrag_vllm", "DEF")
_ops.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as ``torch.nn.functional.linear``.

    In float32 on a CPU, torch's oneDNN takes half the time of its MKL on some processors.
    """
    if HAS_ONEDNN and x.dtype is torch.float32 and x.device.type == "cpu":
        found: torch.Tensor = torch.ops.kvrag_vllm.linear(x, weight, bias)
        return found
    return torch.nn.functional.linear(x, weight, bias)


# An op of its own: torch.compile takes oneDNN's op with constant weights only.
@torch.library.impl(_ops, "linear", "CPU")
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


@torch.library.register_fake("kvrag_vllm::linear")
def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
