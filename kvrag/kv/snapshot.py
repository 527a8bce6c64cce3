"""Copies of transformers' caches, by which a model goes on behind tokens that it has read before.

A layer of a cache keeps rows (keys and values of every token, to which later tokens add) or a state
(inputs of a convolution, a recurrent state, the rows of a window), which later tokens change in
place. A snapshot is a copy of the state. Rows are kept apart from it, once for all snapshots of a
prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvrag.errors import UnsupportedModelError

# Keys and values of every layer that keeps rows, ``(1, H_kv, T, D)``.
Layers = Sequence[tuple[Tensor, Tensor]]

_PLAIN = (type(None), bool, int, float, str, type, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """State of a model behind the first tokens of a prompt: its cache, without rows."""

    cache: DynamicCache
    num_bytes: int

    @classmethod
    def of(cls, cache: object, num_rows: int) -> Snapshot:
        """Copy the state of a cache behind ``num_rows`` rows.

        Raises ``UnsupportedModelError`` for a cache of an unknown kind.
        """
        # A subclass may hold what a copy by attributes would share or miss.
        if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
            raise UnsupportedModelError(
                f"it keeps its state in a {type(cache).__name__}, and only transformers' "
                "DynamicCache on the model's device is copied"
            )
        sides = [side for pair in rows_of(cache) for side in pair]
        if any(side.dim() != 4 or side.shape[2] != num_rows for side in sides):
            raise UnsupportedModelError("its cache doesn't keep a row per token")
        rows = {id(side) for side in sides}
        sizes = list[int]()

        def kept(tensor: Tensor) -> Tensor:
            own = tensor.new_empty(0) if id(tensor) in rows else tensor.clone()
            sizes.append(own.nbytes)
            return own

        return cls(_copied(cache, kept), sum(sizes))

    def restored(self, rows: Layers) -> DynamicCache:
        """Return a cache of its own with this state, behind rows that are not copied."""
        cache: DynamicCache = _copied(self.cache, torch.clone)
        for layer, (keys, values) in zip(_growing(cache), rows, strict=True):
            layer.keys = keys
            layer.values = values
        return cache


def rows_of(cache: DynamicCache) -> Layers:
    """Return the keys and values of the layers that keep every row."""
    return [(layer.keys, layer.values) for layer in _growing(cache)]


def _growing(cache: DynamicCache) -> list[Any]:
    return [
        layer
        for layer in cache.layers
        if getattr(type(layer), "update", None) is DynamicLayer.update and layer.is_initialized
    ]


def _copied(value: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    """Copy a value of a cache; ``copied`` copies tensors."""
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, _PLAIN):
        return value
    if type(value) is dict:
        return {name: _copied(each, copied) for name, each in value.items()}
    if type(value) is list:
        return [_copied(each, copied) for each in value]
    if type(value).__module__ != DynamicCache.__module__:  # of the cache itself and its layers
        raise UnsupportedModelError(
            f"its cache holds a {type(value).__name__}, which can't be copied safely"
        )
    own = copy.copy(value)
    vars(own).update(_copied(vars(value), copied))
    return own
