"""Active adapters of a model (``peft``), and their content.

An adapter is identified by its tensors and scalings, never by its name. ``peft`` is not imported
here: if a model has its layers, it has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from kvrag.errors import UnsupportedModelError
from kvrag.identity.fingerprint import canonical, digest
from kvrag.identity.weights import tensor_bytes

# Values of ``peft_type`` whose layers treat each row independently.
# ``tests/identity/test_adapters.py`` covers all of them.
PROVEN = (
    "ADALORA",
    "BOFT",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "LORA",
    "OFT",
    "TRAINABLE_TOKENS",
    "VERA",
)

# Names under which an adapter's layer keeps the module that it wraps.
BASE_CHILDREN = ("base_layer", "original_module", "token_adapter")

# Attributes of an adapter's layer that are not settings of one adapter.
_STATE = ("training", "merged_adapters", "kwargs")

# Types of settings with a repr that is their value; other reprs may contain an address.
PLAIN = (bool, int, float, str, tuple, list, type(None))


def unwrap(model: Any) -> Any:
    """Return the transformers model inside a ``PeftModel``, and anything else as it is.

    Raises as :func:`check_adapters`.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    check_adapters(model)
    return model.base_model.model


def check_adapters(model: Any) -> None:
    """Raise :class:`UnsupportedModelError` if reuse is not proven for a type of adapter.

    An example is an adapter that sees more than a single row.
    """
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None):
            kind = "activated LoRA (alora_invocation_tokens)"
        if kind not in PROVEN:
            raise UnsupportedModelError(
                f"the adapter {name!r} is of type {kind}, for which reuse is not proven exact; "
                f"use one of {', '.join(PROVEN)}, or merge "
                "it into the weights first (merge_and_unload)"
            )


def layer_types() -> tuple[type, ...]:
    """Return the classes of peft's layers that wrap a model's layer; peft must be imported."""
    peft: Any = sys.modules["peft"]
    return (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper)


def adapter_layers(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules of the adapters' layers."""
    if "peft" in sys.modules:
        types = layer_types()
        yield from (
            (name, module) for name, module in model.named_modules() if isinstance(module, types)
        )


def plain_name(name: str) -> str:
    """Return the name that a module or tensor has in the same model without adapters."""
    return ".".join(part for part in name.split(".") if part not in BASE_CHILDREN)


def state_of(layer: Any) -> tuple[tuple[str, ...], str]:
    """Return the adapters that a layer will apply in its next forward, in order, and a note.

    The note is ``"unmerges"`` if the layer will also unmerge. A merged adapter is part of the base
    weights. A layer that is disabled while merged unmerges in its next forward, so it will compute
    with other weights.
    """
    if layer.merged_adapters:
        return (), "unmerges" if layer.disable_adapters else ""
    return () if layer.disable_adapters else tuple(layer.active_adapters), ""


def adapters_digest(model: Module) -> str:
    """Return a digest of the active adapters' tensors, scalings and settings.

    Their order counts, their names don't. It is empty if no adapter is active.
    """
    fields = dict[str, bytes | str]()
    for name, layer in adapter_layers(model):
        names, note = state_of(layer)
        parts = [content for adapter in names if (content := _content(layer, adapter))]
        if parts or note:
            entry = {str(index): part for index, part in enumerate(parts)}
            fields[plain_name(name)] = canonical(
                {**entry, "type": type(layer).__name__, "note": note}
            )
    if fields:
        return digest("adapters", fields)
    return ""


def settings_of(layer: Any, adapter: str) -> Iterator[tuple[str, Any]]:
    """Yield everything that a layer keeps under an adapter's name: values, tensors and modules."""
    for name, value in vars(layer).items():
        if (
            type(value) is dict
            and adapter in value
            and not name.startswith("_")
            and name not in _STATE
        ):
            yield name, value[adapter]
    for name, value in layer._modules.items():
        if name not in BASE_CHILDREN and hasattr(value, "__contains__") and adapter in value:
            yield name, value[adapter]


def _content(layer: Any, adapter: str) -> bytes:
    """Return the canonical bytes of an adapter in a layer; empty if the layer has no part of it."""
    fields = dict[str, bytes | str]()
    for name, value in settings_of(layer, adapter):
        if isinstance(value, Module):
            fields |= {
                f"{name}.{inner}": tensor_bytes(tensor)
                for inner, tensor in value.state_dict().items()
            }
        elif isinstance(value, Tensor):
            fields[name] = tensor_bytes(value)
        else:  # other objects by their type, because their repr may contain an address
            fields[name] = repr(value) if isinstance(value, PLAIN) else type(value).__qualname__
    if not fields:
        return b""
    for name, value in vars(layer).items():
        if (
            isinstance(value, (bool, int, float, str))
            and not name.startswith("_")
            and name not in _STATE
        ):
            fields[f"layer.{name}"] = repr(value)
    return canonical(fields)
