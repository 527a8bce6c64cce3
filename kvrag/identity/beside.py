"""State that quantised layers keep beside parameters and buffers.

Scales and zero points may be attributes of a parameter (bitsandbytes), entries of a layer's dict
(HQQ), or inside an object of a C++ class (torch's own dynamic quantisation). Layers of torch and
of the model's own code keep nothing there but caches, so they are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from kvrag.errors import UnsupportedModelError
from kvrag.identity.weights import SIMPLE, described, is_packed

# Modules of classes that keep their state in parameters and buffers, or are known otherwise.
_ORDINARY = (
    "torch.nn.",
    "transformers.models.",
    "transformers.activations",
    "peft.",
    "kvrag.model.linear",
)

_ADDRESSES = 2**32  # larger integers may be addresses of objects, which differ between processes
_STANDARD = sys.stdlib_module_names - {"builtins"}
_OF_MODULES = frozenset(vars(Module()))

Tensors = dict[str, Tensor]  # by the place where a model keeps them


def kept_beside(model: Module) -> Tensors:
    """Return the tensors beside parameters and buffers, with the settings that stand beside them.

    The settings of an object are a tensor of their text. Raises :class:`UnsupportedModelError` for
    an object that can't be looked into.
    """
    home = type(model).__module__.rpartition(".")[0] or type(model).__module__
    found = Tensors()
    seen: dict[int, Any] = {}  # by id; the objects are kept, so that no id is reused
    for name, module in model.named_modules():
        places = {
            key: vars(tensor)
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and not is_packed(tensor)
        }
        if not f"{type(module).__module__}.".startswith((*_ORDINARY, f"{home}.")):
            places[""] = {
                key: value for key, value in vars(module).items() if key not in _OF_MODULES
            }
        for place, values in places.items():
            try:
                for key, value in values.items():
                    found |= _reached(value, f"{name}.{place}.{key}", seen)
            except _OpaqueError as error:
                raise UnsupportedModelError(
                    f"the weights of {name} ({type(module).__name__}) can't be identified: "
                    f"{error} hides a part of them; "
                    "quantise them another way, or load them without quantisation"
                ) from None
    return found


class _OpaqueError(Exception):
    """An object can't be looked into; the message names it."""


def _reached(value: Any, path: str, seen: dict[int, Any]) -> Tensors:
    """Return the tensors that an object leads to, by their paths."""
    if isinstance(value, Tensor):
        return {path: value.detach()}
    if isinstance(value, np.ndarray):
        return {path: torch.from_numpy(value)}
    if _is_simple(value) or _leads_nowhere(value) or id(value) in seen:
        return {}
    seen[id(value)] = value
    parts = dict(_parts(value, path))
    seen[id(parts)] = parts
    found = Tensors()
    for key, part in parts.items():
        found |= _reached(part, f"{path}.{key}", seen)
    if found:
        settings = {
            key: part
            for key, part in parts.items()
            if _is_simple(part) and not (isinstance(part, int) and part >= _ADDRESSES)
        }
        found[f"{path}:"] = torch.tensor(list(described(settings).encode()), dtype=torch.uint8)
    return found


def _is_simple(value: Any) -> bool:
    """Whether a value's text is all of it."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_simple, value))
    return isinstance(value, SIMPLE)


def _leads_nowhere(value: Any) -> bool:
    """Whether an object is code, another layer, or of a library without weights of its own."""
    if isinstance(value, (Mapping, tuple, list, set, frozenset, torch.ScriptObject)):
        return False
    home = type(value).__module__.partition(".")[0]
    is_code = isinstance(value, (type, ModuleType, Module)) or callable(value)
    return is_code or home in ("torch", *_STANDARD)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container, or the attributes of an object.

    An object of a C++ or Rust class has none; it may give its state, as for a copy.
    """
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (tuple, list, set, frozenset)):
        yield from ((str(index), part) for index, part in enumerate(value))
    else:
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        attributes |= getattr(value, "__dict__", {})
        if not attributes:
            try:
                is_script = isinstance(value, torch.ScriptObject)
                state = value.__getstate__() if is_script else value.__reduce_ex__(2)[2:]
            except (TypeError, RuntimeError):
                raise _OpaqueError(f"{path} of type {type(value).__name__}") from None
            attributes["state"] = state
        yield from attributes.items()
