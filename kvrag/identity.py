"""The identity of a model in use, which follows what is done to it: adapters switched or merged, weights changed in place.

Hashing weights takes seconds and requests take less, so each request asks a cheap question first: are these the tensors of last time,
unchanged as far as torch counts changes, with the same values at a few places? Only if not is anything hashed again.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvrag.adapters import (
    BASE_CHILDREN,
    adapters_digest,
    check_adapters,
    is_adapter_layer,
    plain_name,
    settings_of,
    state_of,
)
from kvrag.describe import attention_text, config_text, quantisation_text, rope_text, tokenizer_digest
from kvrag.fingerprint import ModelIdentity
from kvrag.tensors import content_digest, leaves, sample, version

logger = logging.getLogger(__name__)


def describe(
    model: Any, tokenizer: Any, weights: str, *, regime: str = "", extra_keys: Mapping[str, str] | None = None
) -> ModelIdentity:
    """Look at a loaded model and its tokenizer.

    Parameters
    ----------
    model, tokenizer
        The pair.
    weights
        Identity of the weights without adapters.
    regime, extra_keys
        As in :class:`~kvrag.fingerprint.ModelIdentity`.
    """
    return ModelIdentity(
        weights=weights,
        config=config_text(model.config),
        tokenizer=tokenizer_digest(tokenizer),
        rope=rope_text(model.config),
        regime=regime,
        attention=attention_text(model),
        dtype=str(model.dtype),
        quantisation=quantisation_text(model.config),
        adapters=adapters_digest(model),
        extra_keys=dict(extra_keys or {}),
    )


def weights_digest(model: torch.nn.Module) -> str:
    """Digest of a model's weights and buffers in memory, without its adapters, ``tensors:...``.

    A model has the same one with adapters attached as without: what they wrap counts under the name that it has without them.
    """
    start = time.perf_counter()
    tensors: dict[str, torch.Tensor] = {}
    skipped = tuple(f"{name}." for name in _adapter_parts(model))
    moving = _moving_buffers(model)
    for name, tensor in {**dict(model.named_buffers()), **model.state_dict()}.items():
        if isinstance(tensor, torch.Tensor) and not f"{name}.".startswith(skipped) and name not in moving:
            tensors[plain_name(name)] = tensor
    found = "tensors:" + content_digest(tensors.items())
    logger.info("hashed the model's weights in memory in %.2f s", time.perf_counter() - start)
    return found


def _adapter_parts(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the modules and tensors that adapters added."""
    for name, module in model.named_modules():
        if is_adapter_layer(module):
            own = (*module._modules, *module._parameters, *module._buffers)
            yield from (f"{name}.{child}" for child in own if child not in BASE_CHILDREN)


def _moving_buffers(model: torch.nn.Module) -> set[str]:
    """Names of buffers that the forward itself changes: RoPE angles of models that choose them by the prompt's length."""
    found = set()
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", "default")
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in ("dynamic", "longrope"):
                own = [b for b in module._buffers if b.endswith("inv_freq") and "original" not in b]
                found |= {f"{name}.{buffer}" for buffer in own}
    return found


@dataclass(frozen=True, slots=True)
class _Marks:
    """What the tensors of a model looked like: the objects, and the counts and values that change with them."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    notes: tuple[object, ...]
    values: bytes

    def same_as(self, tensors: list[torch.Tensor], notes: tuple[object, ...], values: bytes) -> bool:
        """Whether the tensors are these very objects, and unchanged."""
        return (
            len(tensors) == len(self.tensors)
            and all(ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True))
            and (self.notes, self.values) == (notes, values)
        )


class LiveIdentity:
    """The fingerprint of a model as it is now.

    Parameters
    ----------
    identity
        What the model was when it was loaded. Its ``weights`` hold for as long as no weight is changed; from then on it is the content
        of the weights.
    model
        The model.
    """

    def __init__(self, model: Any, identity: ModelIdentity) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._moving = _moving_buffers(model)
        self._origin = self._identity = identity
        base, adapters = self._look()
        self._first = self._base = _marks(*base)
        self._adapters = _marks(*adapters)
        self._fingerprint = identity.fingerprint

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model as it is now.

        Raises
        ------
        UnsupportedModelError
            If an adapter was added of a kind that reuse is not proven for.
        """
        with self._lock, torch.no_grad():
            base, adapters = self._look()
            same_base, same_adapters = self._base.same_as(*base), self._adapters.same_as(*adapters)
            if same_base and same_adapters:
                return self._fingerprint
            check_adapters(self._model)
            weights = self._identity.weights
            if not same_base:
                is_origin = self._first.same_as(*base)
                weights = self._origin.weights if is_origin else weights_digest(self._model)
            self._identity = replace(self._identity, weights=weights, adapters=adapters_digest(self._model))
            self._fingerprint = self._identity.fingerprint
            self._base, self._adapters = _marks(*base), _marks(*adapters)
            logger.info("the model's weights or adapters changed; its fingerprint is %s now", self._fingerprint)
            return self._fingerprint

    def with_extra_keys(self, extra_keys: Mapping[str, str]) -> LiveIdentity:
        """Return the identity of the same model with other extra keys."""
        with torch.no_grad():
            _ = self.fingerprint  # bring it up to date
            return LiveIdentity(self._model, replace(self._identity, extra_keys=dict(extra_keys)))

    def _look(self) -> tuple[tuple[list[torch.Tensor], tuple[object, ...], bytes], ...]:
        """Return tensors, notes and sampled values of the weights, and of the adapters."""
        tensors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        notes: tuple[list[object], list[object]] = ([], [])
        for name, module, in_adapter in _walk(self._model):
            is_layer = is_adapter_layer(module)
            side = int(in_adapter or is_layer)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and not (self._moving and f"{name}.{key}" in self._moving):
                    tensors[side].append(tensor)
            if is_layer:
                notes[1].append(_note(module))
        found = []
        for own, noted in zip(tensors, notes, strict=True):
            plain = [leaf for tensor in own for _, leaf in leaves(tensor)]
            noted += [(version(leaf), leaf.data_ptr()) for leaf in plain]
            found.append((own, tuple(noted), sample(plain)))
        return tuple(found)


def _marks(tensors: list[torch.Tensor], notes: tuple[object, ...], values: bytes) -> _Marks:
    return _Marks(tuple(weakref.ref(tensor) for tensor in tensors), notes, values)


def _walk(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """Yield every module, its name, and whether an adapter brought it."""
    stack: list[tuple[str, torch.nn.Module, bool]] = [("", model, False)]
    while stack:
        name, module, in_adapter = stack.pop()
        yield name, module, in_adapter
        is_layer = is_adapter_layer(module)
        for key, child in module._modules.items():
            if child is not None:
                stack.append(
                    (f"{name}.{key}" if name else key, child, in_adapter or (is_layer and key not in BASE_CHILDREN))
                )


def _note(layer: Any) -> object:
    """Note what a layer does with its adapters, tensors left out."""
    names, note = state_of(layer)
    plain = [
        (adapter, key, repr(value))
        for adapter in names
        for key, value in settings_of(layer, adapter)
        if isinstance(value, (bool, int, float, str, tuple, list))
    ]
    return names, note, tuple(layer.merged_adapters), tuple(plain)
