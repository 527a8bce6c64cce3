"""Identity of a model in use, which follows switched or merged adapters and changed weights.

Hashing weights takes seconds, so a request first makes a cheap check: are these the same tensors as
last time, at the same addresses and with the same counts of in-place changes in torch? Only if not
is anything hashed again. No request reads values, because it would wait for the device. So changes
that bypass the counts are not noticed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, filterfalse
from operator import attrgetter, call, is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from kvrag.identity.adapters import (
    BASE_CHILDREN,
    PLAIN,
    adapter_layers,
    adapters_digest,
    check_adapters,
    layer_types,
    plain_name,
    settings_of,
    state_of,
)
from kvrag.identity.beside import Tensors, kept_beside
from kvrag.identity.describe import (
    attention_text,
    config_text,
    quantisation_text,
    rope_text,
    tokenizer_digest,
)
from kvrag.identity.fingerprint import ModelIdentity, digest
from kvrag.identity.weights import content_digest, leaves, raw

logger = logging.getLogger(__name__)

SAMPLES = 16  # values per tensor that :func:`sample` reads

UNKNOWN = "unknown:"  # weights that can't be read: a random number follows, so no KV is found by it

# Number of states of a model with remembered digests.
# Switching between adapters hashes every adapter only once.
_NUM_REMEMBERED = 8


def describe(
    model: Any,
    tokenizer: Any,
    weights: str,
    *,
    regime: str = "",
) -> ModelIdentity:
    """Identify a loaded model and its tokenizer.

    ``weights`` is the identity of the weights without adapters.
    """
    return ModelIdentity(
        weights=weights,
        config=config_text(model.config),
        tokenizer=tokenizer_digest(tokenizer),
        rope=rope_text(model.config),
        regime=regime,
        attention=attention_text(model),
        dtype=dtype_text(model),
        quantisation=quantisation_text(model.config),
        adapters=adapters_digest(model),
    )


def dtype_text(model: Any) -> str:
    """Return a model's dtype, with the switches of torch that change its matrix products.

    They are switches of the process. At their defaults this is the dtype alone.
    """
    found = [str(model.dtype)]
    on_cuda: Any = torch.backends.cuda.matmul
    on_cpu: Any = torch.backends.mkldnn
    if model.dtype == torch.float32:
        products = {"cpu": on_cpu.matmul, "cuda": on_cuda}
        precision = getattr(products.get(model.device.type), "fp32_precision", "none")
        if precision not in ("none", "ieee"):
            found.append(f"products in {precision}")
    elif model.device.type == "cuda":
        names = _REDUCTIONS.get(model.dtype, ())
        found += [name for name in names if getattr(on_cuda, name) != name.endswith("reduction")]
    return ", ".join(found)


# Switches of CUDA's products; reductions are reduced by default, accumulation is not.
_REDUCTIONS = {
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
}


def weights_digest(model: Module) -> str:
    """Return the digest of a model's weights and buffers in memory, ``tensors:...``.

    Attached adapters don't change it. It is cached, so only the first engine of a model pays for
    the hashing: seconds and, on a device, a copy of each weight in turn. Raises
    :class:`~kvrag.errors.UnsupportedModelError` for weights that can't be read.
    """
    kept = {**_own_and_added(model)[0], **kept_beside(model)}

    def hashed() -> str:
        start = time.perf_counter()
        found = content_digest({name: tensor.detach() for name, tensor in kept.items()})
        logger.info("hashed the model's weights in memory in %.2f s", time.perf_counter() - start)
        return f"tensors:{found}"

    return _HASHED.setdefault(model, _Digests()).of(
        _Look(kept.values(), sample(kept.values())), hashed
    )


def _own_and_added(model: Module) -> tuple[Tensors, list[Tensor]]:
    """Return the tensors of a model without adapters, by name, and the tensors of its adapters.

    Leaves out the buffers that forwards move.
    """
    added = tuple(f"{name}." for name in _added_by_adapters(model))
    moving = _moving_buffers(model)
    own = Tensors()
    others: list[Tensor] = []
    # Not by ``state_dict``: bitsandbytes' unpacks weights for it, and its next forward packs them.
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if f"{name}.".startswith(added):
            others.append(tensor)
        elif name.rpartition(".")[2] not in moving:
            own[plain_name(name)] = tensor
    return own, others


def _added_by_adapters(model: Module) -> Iterator[str]:
    """Yield the names of the modules and tensors that adapters added."""
    for name, module in adapter_layers(model):
        own = (*module._modules, *module._parameters, *module._buffers)
        yield from (f"{name}.{child}" for child in own if child not in BASE_CHILDREN)


def _moving_buffers(model: Module) -> set[str]:
    """Return the last names of buffers that the forward itself changes.

    They hold the RoPE angles of models that choose them by the prompt's length.
    """
    kinds = [(str(getattr(m, "rope_type", "")), m._buffers) for m in model.modules()]
    moving = [buffers for kind, buffers in kinds if "dynamic" in kind or "longrope" in kind]
    names = {name for buffers in moving for name in buffers}
    return {name for name in names if name.endswith("inv_freq") and "original" not in name}


class LiveIdentity:
    """Current identity of a model.

    ``identity`` is the model's identity at load. Its ``weights`` hold until a weight changes; from
    then on, the digest of the weights' content replaces them. ``seen`` is the model's look at the
    latest fingerprint.
    """

    def __init__(self, model: Any, identity: ModelIdentity) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._moving = _moving_buffers(model)
        self._identity = identity
        self._fingerprint = identity.fingerprint
        self.seen = _look_at(model, self._moving)
        self._weights, self._adapters = _Digests(), _Digests()
        weights, adapters = _sides(model)
        self._weights.of(weights, lambda: identity.weights)
        self._adapters.of(adapters, lambda: identity.adapters)

    @property
    def fingerprint(self) -> str:
        """Current fingerprint; raises as :func:`~kvrag.identity.adapters.check_adapters`."""
        if self._identity.weights.startswith(UNKNOWN):
            return self._fingerprint
        with self._lock, torch.no_grad():
            seen, was = _look_at(self._model, self._moving), self._identity
            dtype = dtype_text(self._model)
            if dtype != was.dtype or not seen.is_as(self.seen):
                check_adapters(self._model)
                base, added = _sides(self._model)
                weights = self._weights.of(base, lambda: weights_digest(self._model))
                adapters = self._adapters.of(added, lambda: adapters_digest(self._model))
                self._identity = replace(was, weights=weights, adapters=adapters, dtype=dtype)
                self.seen = seen
                if self._identity != was:
                    self._fingerprint = self._identity.fingerprint
                    logger.info(
                        "the model's weights, adapters or precision changed; "
                        "its fingerprint is now %s",
                        self._fingerprint,
                    )
            return self._fingerprint

    @property
    def portable(self) -> str:
        """Digest of the parts that no machine or version changes, as of the latest fingerprint."""
        names = ("weights", "dtype", "quantisation", "adapters")
        return digest("portable", {name: getattr(self._identity, name) for name in names})

    def with_extra_keys(self, extra_keys: Mapping[str, str]) -> LiveIdentity:
        """Return the identity of the same model with other extra keys."""
        _ = self.fingerprint  # updates the identity
        return LiveIdentity(self._model, replace(self._identity, extra_keys=dict(extra_keys)))


class _Look:
    """Objects of a model at a time, and ``notes`` on them. It keeps no object alive.

    ``tensors`` are noted by their addresses, and by their counts of in-place changes, which don't
    have changes through ``.data`` and of tensors that were made in inference mode.
    """

    def __init__(self, tensors: Iterable[Tensor], *notes: object, beside: Any = ()) -> None:
        plain = [*tensors]
        self._refs = [*map(weakref.ref, chain(plain, beside))]
        if any([hasattr(kind, "__tensor_flatten__") for kind in set(map(type, plain))]):
            plain = [leaf for tensor in plain for _, leaf in leaves(tensor)]
        counted = filterfalse(Tensor.is_inference, plain)
        self.notes = [*notes, *map(Tensor.data_ptr, plain), *map(attrgetter("_version"), counted)]

    def is_as(self, other: _Look) -> bool:
        """Whether the other had the same objects, with the same notes."""
        if self.notes != other.notes or len(self._refs) != len(other._refs):
            return False
        return all(map(is_, map(call, self._refs), map(call, other._refs)))


def _look_at(model: Module, moving: set[str]) -> _Look:
    """Look at all modules and tensors of a model, but for the buffers that forwards move.

    Every request does, so no step of Python is taken for each of them.
    """
    modules, level = list[Any](), [model]
    while level:
        modules += level
        level = _inside(level, "_modules", ())
    tensors = [*_inside(modules, "_parameters", ()), *_inside(modules, "_buffers", moving)]
    return _Look(tensors, *_uses_of_adapters(modules), beside=modules)


def _inside(modules: Iterable[Any], table: str, hidden: Collection[str]) -> list[Any]:
    """Return what modules have in one of their tables, but for some names."""
    filled = filter(None, map(attrgetter(table), modules))
    items = chain.from_iterable(map(methodcaller("items"), filled))
    return [each for name, each in items if each is not None and name not in hidden]


def _uses_of_adapters(modules: list[Any]) -> list[object]:
    """Describe the use of adapters by those of the modules that have some."""
    types = layer_types() if "peft" in sys.modules else ()
    return [_note(module) for module in modules if isinstance(module, types)] if types else []


def _sides(model: Module) -> tuple[_Look, _Look]:
    """Look at the weights and at the adapters of a model, and at some of their values.

    Merging an adapter writes past the counts.
    """
    own, added = _own_and_added(model)
    return (
        _Look(own.values(), sample(own.values())),
        _Look(added, sample(added), *_uses_of_adapters([*model.modules()])),
    )


class _Digests:
    """Digests of the latest states of some tensors, and of the first state, at load."""

    def __init__(self) -> None:
        self._known: list[tuple[_Look, str]] = []

    def of(self, look: _Look, digest: Callable[[], str]) -> str:
        """Return the digest of a state; a new one takes the place of the oldest but the first."""
        for known, found in reversed(self._known):
            if look.is_as(known):
                return found
        found = digest()
        if len(self._known) == _NUM_REMEMBERED:
            del self._known[1]
        self._known.append((look, found))
        return found


def _note(layer: Any) -> object:
    """Describe the use that a layer makes of its adapters, without tensors."""
    names, note = state_of(layer)
    settings = [setting for name in names for setting in settings_of(layer, name)]
    plain = [(key, repr(value)) for key, value in settings if isinstance(value, PLAIN)]
    return names, note, tuple(layer.merged_adapters), plain


# Latest digests of models' weights.
_HASHED = weakref.WeakKeyDictionary[Module, _Digests]()


def sample(tensors: Iterable[Tensor]) -> bytes:
    """Read a few values of every plain tensor in some, spread evenly."""
    plain = [leaf.detach() for tensor in tensors for _, leaf in leaves(tensor)]
    return b"".join([raw(x.reshape(-1)[:: 1 + x.numel() // SAMPLES]) for x in plain])
