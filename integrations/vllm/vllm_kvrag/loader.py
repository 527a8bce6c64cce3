"""Model loader of vLLM, ``--load-format kvrag``: the default one, but it remembers the model.

vLLM hands a connector its config and its cache, and no model.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

LOAD_FORMAT = "kvrag"

_models = weakref.WeakValueDictionary[int, torch.nn.Module]()
"""Models in use that this process has loaded, by the ``id`` of their config, which they hold."""


@cache
def register() -> None:
    """Register the loader; vLLM calls this in each of its processes, as a plugin."""
    register_model_loader(LOAD_FORMAT)(KVRagLoader)


def model_of(vllm_config: VllmConfig) -> torch.nn.Module | None:
    """Return the model that this process has loaded for a config, if it is still in use."""
    return _models.get(id(vllm_config))


class KVRagLoader(DefaultModelLoader):
    """vLLM's default loader; it remembers the model."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Load a model, and remember it unless it is a draft model."""
        model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        if model_config is vllm_config.model_config:
            _models[id(vllm_config)] = model
        return model
