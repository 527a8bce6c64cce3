"""Adapters of the ``peft`` package, as they stand in a model now: which are at work, and what they are.

An adapter is known by its tensors and scalings, never by its name: two names for one adapter share their KV, and a name that now
means another adapter does not. ``peft`` itself is never imported here: a model that holds its layers has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvrag.errors import UnsupportedModelError
from kvrag.identity.fingerprint import canonical, digest
from kvrag.identity.tensors import tensor_bytes

PROVEN = ("ADALORA", "BOFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "OFT", "TRAINABLE_TOKENS", "VERA")
"""Values of ``peft_type`` whose layers do the same to a row whatever the rows around it, each run by ``tests/test_adapters.py``."""

BASE_CHILDREN = ("base_layer", "original_module", "token_adapter")
"""Names under which an adapter's layer keeps the module that it wraps."""

_STATE = ("training", "merged_adapters", "kwargs")
"""Attributes of an adapter's layer that say nothing about one adapter, or are looked at by themselves."""

PLAIN = (bool, int, float, str, tuple, list, type(None))
"""Types of settings whose repr says what they are; that of other objects may hold an address."""


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
    """Raise :class:`UnsupportedModelError` unless every adapter of a model is of a kind that reuse is proven for."""
    configs = getattr(model, "peft_config", None) or {}
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None):
            kind = "activated LoRA (alora_invocation_tokens)"
        if kind not in PROVEN:
            raise UnsupportedModelError(
                f"the adapter {name!r} is of type {kind}, which kvrag has not proven exact; use one of {', '.join(PROVEN)}, or merge it "
                "into the weights first (merge_and_unload)"
            )


_is_layer_type: dict[type, bool] = {}
"""Answers for each class of module seen: a model has thousands of modules of a few classes."""


def is_adapter_layer(module: torch.nn.Module) -> bool:
    """Whether a module is a layer of peft that wraps one of the model's."""
    peft, kind = sys.modules.get("peft"), type(module)
    if peft is None:
        return False
    if kind not in _is_layer_type:
        layers = (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper)
        _is_layer_type[kind] = issubclass(kind, layers)
    return _is_layer_type[kind]


def adapter_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the adapters' layers by the names that the modules they wrap have without them."""
    if "peft" in sys.modules:
        for name, module in model.named_modules():
            if is_adapter_layer(module):
                yield plain_name(name), module


def plain_name(name: str) -> str:
    """Name that a module or tensor has in the same model without adapters."""
    return ".".join(part for part in name.split(".") if part not in BASE_CHILDREN)


def state_of(layer: Any) -> tuple[tuple[str, ...], str]:
    """Return the adapters that a layer adds in its next forward, in their order, and a note on what it does besides.

    What is merged is part of the base weights and adds nothing. A layer that is disabled while merged takes the merged weights out
    again in its next forward: until then the weights are not those that it will compute with, which the note tells apart.
    """
    if layer.merged_adapters:
        return (), "unmerges" if layer.disable_adapters else ""
    return () if layer.disable_adapters else tuple(layer.active_adapters), ""


def adapters_digest(model: torch.nn.Module) -> str:
    """Digest of the adapters at work: layer by layer, their tensors, scalings and settings; empty if none is.

    Names of adapters don't take part, their order does.
    """
    fields: dict[str, bytes] = {}
    for name, layer in adapter_layers(model):
        names, note = state_of(layer)
        parts = [content for adapter in names if (content := _content(layer, adapter))]
        if parts or note:
            entry = {str(index): part for index, part in enumerate(parts)}
            fields[name] = canonical({**entry, "type": type(layer).__name__.encode(), "note": note.encode()})
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
            for inner, tensor in value.state_dict().items():
                fields[f"{name}.{inner}"] = tensor_bytes(tensor)
        elif isinstance(value, torch.Tensor):
            fields[name] = tensor_bytes(value)
        else:
            fields[name] = _spelling(value)
    if fields:
        shared = {name: value for name, value in vars(layer).items() if isinstance(value, (bool, int, float, str))}
        for name, value in shared.items():
            if not name.startswith("_") and name not in _STATE:
                fields[f"layer.{name}"] = repr(value).encode()
    return canonical(fields) if fields else b""


def _spelling(value: Any) -> bytes:
    """Plain values by their repr; objects by their type, because their repr may hold an address."""
    return (repr(value) if isinstance(value, PLAIN) else type(value).__qualname__).encode()
