"""Model loader of vLLM that remembers the model, so that kvrag can compute with its weights.

``--load-format kvrag`` loads as vLLM's default loader does. On a CPU, vLLM would pack the weights
for kernels that give wrong results when two threads run at a time; this loader leaves them as they
are, and runs them by oneDNN's kernels of torch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvrag.linear import linear

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LOAD_FORMAT = "kvrag"

_configs: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Config of each model that this process has loaded, newest last."""


def register() -> None:
    """Register the loader with vLLM; vLLM calls this in each of its processes."""
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return
    model_loader.register_model_loader(LOAD_FORMAT)(_loader_class())


def model_of(vllm_config: VllmConfig) -> torch.nn.Module | None:
    """Return the model that this process has loaded for a config, if it is still in use."""
    found = [model for model, config in _configs.items() if config() is vllm_config]
    return found[-1] if found else None


def _loader_class() -> type:
    from dataclasses import replace

    from vllm.config import LoadConfig
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader import DefaultModelLoader

    class KVRagLoader(DefaultModelLoader):
        """vLLM's default loader, which also remembers the model."""

        def __init__(self, load_config: LoadConfig) -> None:
            super().__init__(replace(load_config, load_format="auto"))

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            super().load_weights(model, model_config)
            for layer in model.modules():
                if isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod):
                    layer._cpu_skip_gemm_dispatch = True

        def load_model(
            self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
        ) -> torch.nn.Module:
            model = super().load_model(vllm_config, model_config, prefix)
            for layer in model.modules():
                if getattr(layer, "_cpu_skip_gemm_dispatch", False):
                    layer.cpu_linear = linear
            if model_config is vllm_config.model_config:  # else it is a draft model
                _configs[model] = weakref.ref(vllm_config)
            return model

    return KVRagLoader
