"""Model loader of vLLM, ``--load-format kvrag``: the default one, but it remembers the model.

On a CPU, vLLM packs weights for kernels that give wrong results if two threads run them at a time,
whichever weights they use. This loader leaves the weights as they are.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from vllm_kvrag.linear import linear

LOAD_FORMAT = "kvrag"

_configs = weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[VllmConfig]]()
"""Configs of the models that this process has loaded, the newest last."""


@cache
def register() -> None:
    """Register the loader; vLLM calls this in each of its processes, as a plugin."""
    register_model_loader(LOAD_FORMAT)(KVRagLoader)


def model_of(vllm_config: VllmConfig) -> torch.nn.Module | None:
    """Return the model that this process has loaded for a config, if it is still in use."""
    found = [model for model, config in _configs.items() if config() is vllm_config]
    return found[-1] if found else None


class KVRagLoader(DefaultModelLoader):
    """vLLM's default loader; it remembers the model, and packs no weights on a CPU."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Load the weights, and mark the layers that vLLM would pack next."""
        super().load_weights(model, model_config)
        for layer in _linears(model):
            layer._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Load a model, and remember it unless it is a draft model."""
        model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        for layer in _linears(model):
            layer.cpu_linear = linear  # type: ignore[assignment]
        if model_config is vllm_config.model_config:
            _configs[model] = weakref.ref(vllm_config)
        return model


def _linears(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [
        layer
        for layer in model.modules()
        if isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod)
    ]
