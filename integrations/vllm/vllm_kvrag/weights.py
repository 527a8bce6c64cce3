"""The engine that blends: over vLLM's weights, or over a copy of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index

from kvrag import ConfigError, KVRagEngine, RepairConfig, StoreConfig, UnsupportedModelError
from kvrag.adapters import ModelSource
from vllm_kvrag.borrowed import load_borrowed

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

SHARED, COPY = "shared", "copy"


def engine_of(
    vllm_config: VllmConfig,
    theirs: torch.nn.Module,
    config: StoreConfig,
    repair: RepairConfig | None,
) -> KVRagEngine:
    """Return an engine on vLLM's model, loaded.

    Raises
    ------
    ConfigError
        If ``weights`` is neither ``"shared"`` nor ``"copy"``.
    UnsupportedModelError
        If vLLM's weights can't be shared.
    """
    option = vllm_config.kv_transfer_config.get_from_extra_config
    weights = option("weights", SHARED)
    if weights not in (SHARED, COPY):
        raise ConfigError(f"weights is {weights!r}; pass {SHARED!r} or {COPY!r}")
    model = vllm_config.model_config
    own: dict[str, Any] = {
        "tokenizer": None if model.tokenizer == model.model else model.tokenizer,
        "revision": model.revision,
        "dtype": model.dtype,
        "device": vllm_config.device_config.device,
    }
    shared = None
    if weights == SHARED:
        try:
            shared = load_borrowed(theirs, ModelSource(model.model, **own))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"vLLM's weights can't be shared: {error}; or pass 'weights': 'copy', to hold a "
                "second copy"
            ) from error
    engine = KVRagEngine.from_pretrained(
        model.model,
        kv_dir=option("kv_dir", None),
        prefix=option("prefix", None),
        context=option("context", "default"),
        repair=repair,
        namespace=option("namespace", "default"),
        store_config=config,
        **own,
    )
    assert shared is None or engine.loaded is shared
    return engine


def layers_of(vllm_config: VllmConfig) -> dict[int, Any]:
    """Return vLLM's attention layers by their index in the model."""
    layers = vllm_config.compilation_config.static_forward_context
    return {
        extract_layer_index(name): layer
        for name, layer in layers.items()
        if hasattr(layer, "kv_cache")
    }
