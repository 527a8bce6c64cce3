"""Model of transformers whose weights are views of vLLM's, so that none is held twice.

It needs nothing of vLLM to run: kvrag prefills with it in another thread while vLLM decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvrag import UnsupportedModelError
from kvrag.adapters import ModelSource, load_made

EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")  # kernels that take experts as they are in the files


def load_borrowed(model: torch.nn.Module, source: ModelSource) -> object:
    """Accept, identify and prove a model with vLLM's weights, as if kvrag had loaded its files.

    Engines of this process with the same source use it while the result is in use. Raises as
    :func:`borrow`, and as :func:`kvrag.model.load.load`.
    """
    return load_made(source, borrow(model, source.load_config()))


def borrow(model: torch.nn.Module, config: PreTrainedConfig) -> PreTrainedModel:
    """Return transformers' model of a config, with views of a vLLM model's weights.

    Raises ``UnsupportedModelError`` that names a weight without a view: of a quantised, repacked
    or split layer, or in an architecture that vLLM arranges in another way.
    """
    like = next(model.parameters())
    with _uncompiled(model):
        own = _without_weights(config, like.dtype)
    weights = _Weights(model, own)
    views = dict[torch.nn.Parameter, torch.nn.Parameter]()  # tied weights share one
    for path, module in own.named_modules():
        for name, place in module._parameters.items():
            if place is not None:
                if place not in views:
                    views[place] = weights.view(f"{path}.{name}")
                setattr(module, name, views[place])
    return own.to(like.device).eval()


@contextmanager
def _uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Build models of transformers without vLLM's compilation.

    Where vLLM runs a model of transformers, its class compiles what is built from it, too.
    """
    vllm_config = copy(getattr(model, "vllm_config", None))
    if vllm_config is None:
        yield
        return
    from vllm.config import CompilationMode, set_current_vllm_config

    vllm_config.compilation_config = copy(vllm_config.compilation_config)
    vllm_config.compilation_config.mode = CompilationMode.NONE
    with set_current_vllm_config(vllm_config):
        yield


def _without_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model with all buffers, and with parameters that take no memory."""

    def emptied(_: object, __: object, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        found: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        hook.remove()
    return found


class _Weights:
    """Weights of a vLLM model by their names in transformers' model."""

    def __init__(self, model: torch.nn.Module, own: PreTrainedModel) -> None:
        self._model = model
        self._shapes = {
            name: each.shape for name, each in own.named_parameters(remove_duplicate=False)
        }
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._merged = {
            part: (merged, parts[: parts.index(part)])
            for merged, parts in getattr(model, "packed_modules_mapping", {}).items()
            for part in parts
        }

    def view(self, path: str) -> torch.nn.Parameter:
        """Return a view of the rows that a weight has in vLLM's."""
        place, first = self._place(path)
        wanted = self._shapes[path]
        if place not in self._parameters:
            raise UnsupportedModelError(
                f"vLLM's {type(self._model).__name__} has no weight {place}, "
                f"which transformers' model reads as {path}"
            )
        layer = self._model.get_submodule(place.rpartition(".")[0])
        method = getattr(layer, "quant_method", None)
        backend = getattr(method, "unquantized_backend", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            raise UnsupportedModelError(f"{place} is quantised ({type(method).__name__})")
        if backend is not None and backend.name not in PLAIN_EXPERTS:
            raise UnsupportedModelError(
                f"{place} is repacked for the kernels of {backend.name}; "
                f"--moe-backend triton leaves experts as they are"
            )
        held = self._parameters[place].detach().as_subclass(torch.Tensor)
        rows = held[first : first + wanted[0]]
        if rows.shape != wanted:
            remedy = "it may be split among devices"
            if not held.numel():
                remedy = "vLLM has repacked it: load with --load-format kvrag"
            raise UnsupportedModelError(
                f"{place} holds {tuple(held.shape)} where transformers' {path} is "
                f"{tuple(wanted)}; {remedy}"
            )
        return torch.nn.Parameter(rows, requires_grad=False)

    def _place(self, path: str) -> tuple[str, int]:
        """Return the name of vLLM's weight that holds a weight, and the first row there."""
        stem, _, name = path.rpartition(".")
        above, _, layer = stem.rpartition(".")
        if path in self._parameters:
            return path, 0
        if layer in self._merged:
            merged, before = self._merged[layer]
            rows = [self._shapes[f"{above}.{part}.weight"][0] for part in before]
            return f"{above}.{merged}.{name}", sum(rows)
        if name in EXPERTS:
            return f"{stem}.routed_experts.{EXPERTS[name]}", 0
        return path, 0
