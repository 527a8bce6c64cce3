"""Identity of a model in use, which follows switched or merged adapters and changed weights.

Hashing weights takes seconds, so a request first makes a cheap check: are these the same tensors as
last time, with the same counts of in-place changes in torch and the same values at a few places?
Only if not is anything hashed again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

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
from kvrag.identity.beside import kept_beside
from kvrag.identity.describe import (
    attention_text,
    config_text,
    quantisation_text,
    rope_text,
    tokenizer_digest,
)
from kvrag.identity.fingerprint import ModelIdentity, digest
from kvrag.identity.weights import content_digest, leaves

logger = logging.getLogger(__name__)

SAMPLES = 16  # values per tensor that :func:`sample` reads

UNKNOWN = "unknown:"  # weights that can't be read: a random number follows, so no KV is found by it

_NUM_REMEMBERED = 8
"""Number of states of a model with remembered digests.

Switching between adapters hashes every adapter only once.
"""


def describe(
    model: Any,
    tokenizer: Any,
    weights: str,
    *,
    regime: str = "",
    extra_keys: Mapping[str, str] | None = None,
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
        extra_keys=dict(extra_keys or {}),
    )


def dtype_text(model: Any) -> str:
    """Return a model's dtype, with the switches of torch that change its matrix products.

    They are switches of the process. At their defaults this is the dtype alone.
    """
    found = [str(model.dtype)]
    on_cuda: Any = torch.backends.cuda.matmul
    on_cpu: Any = torch.backends.mkldnn
    if model.dtype == torch.float32:
        products = {"cpu": on_cpu.matmul, "cuda": on_cuda}.get(model.device.type)
        precision = getattr(products, "fp32_precision", "none")
        if precision not in ("none", "ieee"):
            found.append(f"products in {precision}")
    elif model.device.type == "cuda":
        names = _REDUCTIONS.get(model.dtype, ())
        found += [name for name in names if getattr(on_cuda, name) != name.endswith("reduction")]
    return ", ".join(found)


_REDUCTIONS = {
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
}
"""Switches of CUDA's products; reductions are reduced by default, accumulation is not."""


def weights_digest(model: torch.nn.Module) -> str:
    """Return the digest of a model's weights and buffers in memory, ``tensors:...``.

    Attached adapters don't change it. It is cached, so only the first engine of a model pays for
    the hashing: seconds and, on a device, a copy of each weight in turn. Raises
    :class:`~kvrag.errors.UnsupportedModelError` for weights that can't be read.
    """
    start = time.perf_counter()
    added = tuple(f"{name}." for name in _added_by_adapters(model))
    moving = _moving_buffers(model)
    # Not by ``state_dict``: bitsandbytes' unpacks weights for it, and its next forward packs them.
    kept = {
        plain_name(name): tensor
        for name, tensor in {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
            **kept_beside(model),
        }.items()
        if name not in moving and not f"{name}.".startswith(added)
    }
    look = _Look(list(kept.values()))
    known = _HASHED.get(model)
    look.count()
    if known is not None and (found := known.get(look)):
        return found
    found = f"tensors:{content_digest({name: tensor.detach() for name, tensor in kept.items()})}"
    logger.info("hashed the model's weights in memory in %.2f s", time.perf_counter() - start)
    _HASHED[model] = _Digests(look, found)
    return found


def _added_by_adapters(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the modules and tensors that adapters added."""
    for name, module in adapter_layers(model):
        own = (*module._modules, *module._parameters, *module._buffers)
        yield from (f"{name}.{child}" for child in own if child not in BASE_CHILDREN)


def _moving_buffers(model: torch.nn.Module) -> set[str]:
    """Return the names of buffers that the forward itself changes.

    They hold the RoPE angles of models that choose them by the prompt's length.
    """
    found = set()
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", "default")
        if {"dynamic", "longrope"}.intersection(
            kinds.values() if isinstance(kinds, dict) else (kinds,)
        ):
            own = [
                buffer
                for buffer in module._buffers
                if buffer.endswith("inv_freq") and "original" not in buffer
            ]
            found |= {f"{name}.{buffer}" for buffer in own}
    return found


class LiveIdentity:
    """Current identity of a model.

    ``identity`` is the model's identity at load. Its ``weights`` hold until a weight changes; from
    then on, the digest of the weights' content replaces them.
    """

    def __init__(self, model: Any, identity: ModelIdentity) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._moving = _moving_buffers(model)
        self._identity = identity
        self._fingerprint = identity.fingerprint
        weights, adapters = self._look()
        self._weights = _Digests(weights, identity.weights)
        self._adapters = _Digests(adapters, identity.adapters)

    @property
    def fingerprint(self) -> str:
        """Current fingerprint; raises as :func:`~kvrag.identity.adapters.check_adapters`."""
        if self._identity.weights.startswith(UNKNOWN):
            return self._fingerprint
        with self._lock, torch.no_grad():
            base, added = self._look()
            weights = self._weights.get(base)
            adapters = self._adapters.get(added)
            if weights is None or adapters is None:
                check_adapters(self._model)
                weights = weights or self._weights.add(base, weights_digest(self._model))
                if adapters is None:
                    adapters = self._adapters.add(added, adapters_digest(self._model))
            dtype = dtype_text(self._model)
            was = self._identity
            if (weights, adapters, dtype) != (was.weights, was.adapters, was.dtype):
                self._identity = replace(was, weights=weights, adapters=adapters, dtype=dtype)
                self._fingerprint = self._identity.fingerprint
                logger.info(
                    "the model's weights, adapters or precision changed; its fingerprint is now %s",
                    self._fingerprint,
                )
            return self._fingerprint

    @property
    def portable(self) -> str:
        """Digest of the parts that no machine or version changes, as of the latest fingerprint."""
        names = ("weights", "dtype", "quantisation", "adapters")
        return digest("portable", {name: getattr(self._identity, name).encode() for name in names})

    def with_extra_keys(self, extra_keys: Mapping[str, str]) -> LiveIdentity:
        """Return the identity of the same model with other extra keys."""
        with torch.no_grad():
            _ = self.fingerprint  # updates the identity
            return LiveIdentity(self._model, replace(self._identity, extra_keys=dict(extra_keys)))

    def _look(self) -> tuple[_Look, _Look]:
        """Return the present state of the weights and of the adapters.

        It is a single loop without recursion, because it runs in every request.
        """
        types = layer_types() if "peft" in sys.modules else ()
        moving = self._moving
        weights = _Look()
        adapters = _Look()
        stack: list[tuple[str, torch.nn.Module, _Look]] = [("", self._model, weights)]
        while stack:
            name, module, side = stack.pop()
            inside = side
            if isinstance(module, types):
                inside = adapters
                adapters.notes.append(_note(module))
            for own in (module._parameters, module._buffers):
                for key, tensor in own.items() if own else ():
                    if tensor is not None and not (moving and f"{name}.{key}" in moving):
                        inside.tensors.append(tensor)
            for key, child in module._modules.items():
                if child is not None:
                    place = f"{name}.{key}" if moving and name else key
                    stack.append((place, child, side if key in BASE_CHILDREN else inside))
        weights.count()
        adapters.count()
        return weights, adapters


@dataclass(slots=True)
class _Look:
    """State of some tensors: the objects, and a sample of their values.

    ``notes`` has the counts of in-place changes, the addresses, and the use of adapters.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    notes: list[object] = field(default_factory=list)
    values: bytes = b""

    def count(self) -> None:
        """Note the counts of in-place changes, the addresses, and a sample of the values.

        Changes through ``.data`` are not counted.
        """
        plain: list[torch.Tensor] = []
        for tensor in self.tensors:
            plain += (
                [leaf for _, leaf in leaves(tensor)]
                if hasattr(tensor, "__tensor_flatten__") or tensor.is_quantized
                else (tensor,)
            )
        for leaf in plain:
            self.notes.append((0 if leaf.is_inference() else leaf._version, leaf.data_ptr()))
        self.values = sample(plain)


class _Digests:
    """Digests of the latest states of some tensors, and of the first state, at load."""

    def __init__(self, look: _Look, digest: str) -> None:
        self._known: list[tuple[list[weakref.ref[torch.Tensor]], _Look, str]] = []
        self.add(look, digest)

    def get(self, look: _Look) -> str | None:
        """Return the digest of a state if it is known and has the same, unchanged tensors."""
        tensors = [id(tensor) for tensor in look.tensors]
        for refs, known, found in reversed(self._known):
            is_alike = (known.notes, known.values) == (look.notes, look.values)
            # A dead reference gives None, which has no tensor's id.
            if is_alike and [id(ref()) for ref in refs] == tensors:
                return found
        return None

    def add(self, look: _Look, digest: str) -> str:
        """Remember a digest in place of the oldest but the first."""
        while len(self._known) >= _NUM_REMEMBERED:
            del self._known[1]
        self._known.append(([weakref.ref(tensor) for tensor in look.tensors], look, digest))
        look.tensors = []  # a state does not keep its tensors alive
        return digest


def _note(layer: Any) -> object:
    """Describe the use that a layer makes of its adapters, without tensors."""
    names, note = state_of(layer)
    found = (
        (key, value)
        for name in names
        for key, value in settings_of(layer, name)
        if isinstance(value, PLAIN)
    )
    plain = [(key, repr(value) if isinstance(value, list) else value) for key, value in found]
    return names, note, tuple(layer.merged_adapters), plain


_HASHED = weakref.WeakKeyDictionary[torch.nn.Module, _Digests]()
"""Latest digests of models' weights."""


def sample(tensors: list[torch.Tensor]) -> bytes:
    """Read a few values of every plain tensor, spread evenly.

    There is a single copy to the host per dtype and device.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        size = tensor.numel()
        if size:
            # Spread over its memory, in any layout: a copy of a transposed weight takes as much.
            if not tensor.is_contiguous():
                size = 1 + sum(
                    (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
                )
            count = min(SAMPLES, size)
            group = groups.setdefault((tensor.device, tensor.dtype), [])
            group.append(tensor.detach().as_strided((count,), (size // count,)))
    return b"".join(
        [torch.cat(group).view(torch.uint8).cpu().numpy().tobytes() for group in groups.values()]
    )
