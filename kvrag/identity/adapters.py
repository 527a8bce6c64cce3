"""Adapters of the ``peft`` package as they are in a model now: which are active, and their content.

An adapter is identified by its tensors and scalings, never by its name: two names of one adapter share their KV, and a name that is
given to another adapter does not. ``peft`` is never imported here: where a model has its layers, it has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvrag.errors import UnsupportedModelError
from kvrag.identity.fingerprint import canonical, digest
from kvrag.identity.weights import tensor_bytes

PROVEN = ("ADALORA", "BOFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "OFT", "TRAINABLE_TOKENS", "VERA")
"""Values of ``peft_type`` whose layers treat each row independently of the others, each covered by ``tests/test_adapters.py``."""

BASE_CHILDREN = ("base_layer", "original_module", "token_adapter")
"""Names under which an adapter's layer keeps the module that it wraps."""

_STATE = ("training", "merged_adapters", "kwargs")
"""Attributes of an adapter's layer that are not settings of one adapter."""

PLAIN = (bool, int, float, str, tuple, list, type(None))
"""Types of settings whose repr is their value; that of other objects may contain an address."""


def unwrap(model: Any) -> Any:
    """Return the transformers model inside a ``PeftModel``, whose layers hold the adapters; anything else as it is.

    Raises
    ------
    UnsupportedModelError
        If the adapter works outside the layers (prompt tuning), or looks at more than one row.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    check_adapters(model)
    return model.base_model.model


def check_adapters(model: Any) -> None:
    """Raise :class:`UnsupportedModelError` unless reuse is proven for the kind of every adapter of a model."""
    configs = getattr(model, "peft_config", None) or {}
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None):
            kind = "activated LoRA (alora_invocation_tokens)"
        if kind not in PROVEN:
            raise UnsupportedModelError(
                f"the adapter {name!r} is of type {kind}, for which reuse is not proven exact; use one of {', '.join(PROVEN)}, or merge "
                "it into the weights first (merge_and_unload)"
            )


def layer_types() -> tuple[type, ...]:
    """Classes of peft's layers that wrap one of the model's; empty as long as peft is not imported."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return ()
    return (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper)


def adapter_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules of the adapters' layers."""
    if types := layer_types():
        yield from ((name, module) for name, module in model.named_modules() if isinstance(module, types))


def plain_name(name: str) -> str:
    """Name that a module or tensor has in the same model without adapters."""
    return ".".join(part for part in name.split(".") if part not in BASE_CHILDREN)


def state_of(layer: Any) -> tuple[tuple[str, ...], str]:
    """Return the adapters that a layer will apply in its next forward, in order, and ``"unmerges"`` if it will also unmerge.

    A merged adapter is part of the base weights and adds nothing. A layer that is disabled while merged unmerges in its next forward,
    so its weights are not those that it will compute with.
    """
    if layer.merged_adapters:
        return (), "unmerges" if layer.disable_adapters else ""
    return () if layer.disable_adapters else tuple(layer.active_adapters), ""


def adapters_digest(model: torch.nn.Module) -> str:
    """Digest of the active adapters' tensors, scalings and settings, layer by layer; empty if none is active.

    The order of the adapters counts, their names don't.
    """
    fields: dict[str, bytes] = {}
    for name, layer in adapter_layers(model):
        names, note = state_of(layer)
        parts = [content for adapter in names if (content := _content(layer, adapter))]
        if parts or note:
            entry = {str(index): part for index, part in enumerate(parts)}
            fields[plain_name(name)] = canonical(
                {**entry, "type": type(layer).__name__.encode(), "note": note.encode()}
            )
    return digest("adapters", fields) if fields else ""


def settings_of(layer: Any, adapter: str) -> Iterator[tuple[str, Any]]:
    """Yield everything that a layer keeps under an adapter's name: plain values, tensors and modules."""
    for name, value in vars(layer).items():
        if type(value) is dict and adapter in value and not name.startswith("_") and name not in _STATE:
            yield name, value[adapter]
    for name, value in layer._modules.items():
        if name not in BASE_CHILDREN and hasattr(value, "__contains__") and adapter in value:
            yield name, value[adapter]


def _content(layer: Any, adapter: str) -> bytes:
    """Canonical bytes of one adapter in one layer; empty if the layer has nothing of it."""
    fields: dict[str, bytes] = {}
    for name, value in settings_of(layer, adapter):
        if isinstance(value, torch.nn.Module):
            fields |= {f"{name}.{inner}": tensor_bytes(tensor) for inner, tensor in value.state_dict().items()}
        elif isinstance(value, torch.Tensor):
            fields[name] = tensor_bytes(value)
        else:  # other objects by their type, because their repr may contain an address
            fields[name] = (repr(value) if isinstance(value, PLAIN) else type(value).__qualname__).encode()
    if not fields:
        return b""
    for name, value in vars(layer).items():
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_") and name not in _STATE:
            fields[f"layer.{name}"] = repr(value).encode()
    return canonical(fields)
