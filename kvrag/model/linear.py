"""Products of float32 matrices on a CPU: by oneDNN on AMD's processors, or of float16 weights.

On AMD's torch takes MKL, which is slow there, for the rows of a prompt and for the row of a decode
step. With weights in float16, FBGEMM widens them as it multiplies.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from kvrag.errors import ConfigError

WEIGHTS_VARIABLE = "KVRAG_WEIGHTS"  # environment: float16 packs the weights of linear layers
# Beyond so many rows, oneDNN is slower for many odd numbers than for the next multiple of 8.
MAX_ODD_ROWS = 256
# A quantised weight is of a type of its own.
_PLAIN = (Tensor, torch.nn.Parameter)


class Linear(torch.nn.Linear):
    """Linear layer that multiplies as :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply rows ``(·, in_features)`` by the weight."""
        return linear(input, self.weight, self.bias)


@torch.no_grad()
def use_own_products(model: Module) -> None:
    """Let the plain linear layers of a model multiply as :func:`linear`.

    If the user asks for it, float32 weights on a CPU are packed in float16 and multiply float32
    rows by FBGEMM: a step of decoding reads half the bytes. A packed weight is an attribute of its
    parameter, which is empty. So the model's identity finds it there, and whoever reads or changes
    the parameter's values gets an error. Raises ``ConfigError`` if they can't be packed so.
    """
    given = os.environ.get(WEIGHTS_VARIABLE)
    if given and (given != "float16" or "fbgemm" not in torch.backends.quantized.supported_engines):
        raise ConfigError(
            f"{WEIGHTS_VARIABLE} is {given!r}; set it to float16 on x86-64, or unset it"
        )
    # Adapters are identified by their parameters.
    is_asked = given and not getattr(model, "peft_config", None)
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear
            if is_asked and module.weight.type() == "torch.FloatTensor":
                packed = torch.ops.quantized.linear_prepack_fp16(module.weight, module.bias)
                vars(module)["forward"] = partial(
                    torch.ops.quantized.linear_dynamic_fp16, W_prepack=packed
                )
                module.register_parameter("bias", None)
                module.weight = torch.nn.Parameter(torch.empty(0))
                vars(module.weight)["packed"] = packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as ``torch.nn.functional.linear``: ``x`` ``(·, K)``, ``weight`` ``(N, K)``.

    oneDNN takes float32 on a CPU, without gradients or autocast.
    """
    is_plain = weight.dtype is x.dtype is torch.float32 and type(weight) in _PLAIN
    if not is_plain or not (FORWARD.is_plain or may_be_plain(x.device)):
        return F.linear(x, weight, bias)
    rows = x.shape[:-1].numel()
    spare = -rows % 8 if rows > MAX_ODD_ROWS else 0
    padded = F.pad(x.flatten(0, -2), (0, 0, 0, spare)) if spare else x
    out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return out[:rows].view(*x.shape[:-1], len(weight)) if spare else out


class _Forward(threading.local):
    is_plain = False


# Forward of this thread: whether oneDNN may take its products, so that none of them has to ask.
FORWARD = _Forward()


def may_be_plain(device: torch.device) -> bool:
    """Whether oneDNN may multiply; torch's compiler knows it for constant weights alone."""
    return (
        not torch.compiler.is_compiling()
        and device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and has_onednn()
    )


def has_onednn() -> bool:
    """Whether oneDNN is there and faster on this processor, and torch's switch for it is on."""
    return _is_faster() and bool(torch.backends.mkldnn.enabled)


@cache
def _is_faster() -> bool:
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_there and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _is_amd()


def _is_amd() -> bool:
    about = platform.processor()  # on Windows
    with suppress(OSError):
        about += Path("/proc/cpuinfo").read_text()
    return "AuthenticAMD" in about


_MIXED = (
    "no layer mixes rows; {} does, as layers do that round activations by all rows: quantise "
    "weights alone, or activations per token (bitsandbytes: llm_int8_threshold=0.0)"
)


def mixing_layer(model: Module, run: Callable[[], object]) -> tuple[str, float]:
    """Claim that no layer's rows depend on later rows; return the claim, and by how much they do.

    While ``run`` runs the model, each layer that takes one tensor gets it a second time, with other
    rows in its second half. The difference is relative to the layer's largest output. It is 0 but
    for layers that scale their input over all rows; the claim then names the worst, and a remedy.
    """
    worst = ("", 0.0)

    def hook(name: str, module: Module, given: tuple[Any, ...], out: Any) -> None:
        nonlocal worst
        if len(given) != 1 or not all(isinstance(t, Tensor) for t in (*given, out)):
            return
        (rows,) = given
        half = rows.shape[-2] // 2 if rows.dim() > 1 and rows.is_floating_point() else 0
        if not half or out.shape[:-1] != rows.shape[:-1]:
            return
        other = torch.cat([rows[..., :half, :], rows[..., : rows.shape[-2] - half, :]], dim=-2)
        gap = (module.forward(other) - out)[..., :half, :]
        error = float((gap.abs().max() / out.abs().max()).detach())
        if error > worst[1]:
            worst = (name, error)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            # A layer; its children may hold no more than packed weights.
            if not any(True for child in module.children() for _ in child.parameters()):
                stack.enter_context(module.register_forward_hook(partial(hook, name)))
        run()
    if not worst[0]:
        return "no layer mixes rows", 0.0
    return _MIXED.format(worst[0]), worst[1]
