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

from kvrag.identity.adapters import (
    BASE_CHILDREN,
    PLAIN,
    adapters_digest,
    check_adapters,
    is_adapter_layer,
    plain_name,
    settings_of,
    state_of,
)
from kvrag.identity.describe import attention_text, config_text, quantisation_text, rope_text, tokenizer_digest
from kvrag.identity.fingerprint import ModelIdentity
from kvrag.identity.tensors import content_digest, is_packed, leaves, sample, version

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
        As in :class:`~kvrag.identity.fingerprint.ModelIdentity`.
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


_Look = tuple[list[torch.Tensor], tuple[object, ...], bytes]
"""Tensors, notes on what is done with them, and a sample of their values."""


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
        self._identity, self._fingerprint = identity, identity.fingerprint
        base, adapters = self._look()
        self._weights = [(_marks(*base), identity.weights)]
        self._adapters = [(_marks(*adapters), identity.adapters)]

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
            weights, content = _recall(self._weights, base), _recall(self._adapters, adapters)
            if weights is None or content is None:
                check_adapters(self._model)
            if weights is None:
                weights = _remember(self._weights, base, weights_digest(self._model))
            if content is None:
                content = _remember(self._adapters, adapters, adapters_digest(self._model))
            if (weights, content) != (self._identity.weights, self._identity.adapters):
                self._identity = replace(self._identity, weights=weights, adapters=content)
                self._fingerprint = self._identity.fingerprint
                logger.info("the model's weights or adapters changed; its fingerprint is %s now", self._fingerprint)
            return self._fingerprint

    def with_extra_keys(self, extra_keys: Mapping[str, str]) -> LiveIdentity:
        """Return the identity of the same model with other extra keys."""
        with torch.no_grad():
            _ = self.fingerprint  # bring it up to date
            return LiveIdentity(self._model, replace(self._identity, extra_keys=dict(extra_keys)))

    def _look(self) -> tuple[_Look, _Look]:
        """Return tensors, notes and sampled values of the weights, and of the adapters."""
        weights, adapters = _Seen(), _Seen()
        stack: list[tuple[str, torch.nn.Module, _Seen]] = [("", self._model, weights)]
        while stack:
            name, module, side = stack.pop()
            inside = side
            if is_adapter_layer(module):
                inside = adapters
                adapters.notes.append(_note(module))
            for own in (module._parameters, module._buffers):
                if own:
                    tensors = own.items() if self._moving else ((None, tensor) for tensor in own.values())
                    inside.tensors += [t for key, t in tensors if t is not None and f"{name}.{key}" not in self._moving]
            for key, child in module._modules.items():
                if child is not None:
                    place = f"{name}.{key}" if self._moving and name else key
                    stack.append((place, child, side if key in BASE_CHILDREN else inside))
        return weights.look(), adapters.look()


class _Seen:
    """Tensors of one side, weights or adapters, and notes on what is done with them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.notes: list[object] = []

    def look(self) -> _Look:
        """Return the tensors, what is noted and counted, and a sample of their values."""
        plain: list[torch.Tensor] = []
        for tensor in self.tensors:
            plain += [leaf for _, leaf in leaves(tensor)] if is_packed(tensor) else [tensor]
        counts = [(version(leaf), leaf.data_ptr()) for leaf in plain]
        return self.tensors, (*self.notes, *counts), sample(plain)


_NUM_REMEMBERED = 8
"""States of a model whose digests are kept, so that switching adapters to and fro hashes each of them once."""


def _recall(known: list[tuple[_Marks, str]], seen: _Look) -> str | None:
    return next((digest for marks, digest in reversed(known) if marks.same_as(*seen)), None)


def _remember(known: list[tuple[_Marks, str]], seen: _Look, digest: str) -> str:
    """Keep a digest in place of the oldest but the first, which is the model as it was loaded."""
    while len(known) >= _NUM_REMEMBERED:
        del known[1]
    known.append((_marks(*seen), digest))
    return digest


def _marks(tensors: list[torch.Tensor], notes: tuple[object, ...], values: bytes) -> _Marks:
    return _Marks(tuple(weakref.ref(tensor) for tensor in tensors), notes, values)


def _note(layer: Any) -> object:
    """Note what a layer does with its adapters, tensors left out."""
    names, note = state_of(layer)
    found = ((key, value) for name in names for key, value in settings_of(layer, name) if isinstance(value, PLAIN))
    plain = [(key, repr(value) if isinstance(value, list) else value) for key, value in found]
    return names, note, tuple(layer.merged_adapters), plain
