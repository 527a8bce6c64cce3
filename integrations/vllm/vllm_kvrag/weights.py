"""The model that blends: kvrag's engine over vLLM's weights, or over a copy of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index

from kvrag import KVRagEngine, RepairConfig, StoreConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_of(
    vllm_config: VllmConfig, config: StoreConfig, repair: RepairConfig | None
) -> KVRagEngine:
    """Return an engine on vLLM's model."""
    model = vllm_config.model_config
    option = vllm_config.kv_transfer_config.get_from_extra_config
    return KVRagEngine.from_pretrained(
        model.model,
        tokenizer=None if model.tokenizer == model.model else model.tokenizer,
        kv_dir=option("kv_dir", None),
        context=option("context", "default"),
        repair=repair,
        dtype=model.dtype,
        device=vllm_config.device_config.device,
        namespace=option("namespace", "default"),
        store_config=config,
    )


def layers_of(vllm_config: VllmConfig) -> dict[int, Any]:
    """Return vLLM's attention layers by their index in the model."""
    layers = vllm_config.compilation_config.static_forward_context
    return {
        extract_layer_index(name): layer
        for name, layer in layers.items()
        if hasattr(layer, "kv_cache")
    }
