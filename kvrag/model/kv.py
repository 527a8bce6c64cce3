"""The stitched buffer, seen by transformers as a KV cache: rows are written in place, all keys are returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvrag.model.rope import Rows


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's KV: heads and the head dims of keys and of values."""

    num_heads: int
    key_dim: int
    value_dim: int


BeforeWrite = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``(layer, all keys, all values, fresh keys, fresh values)``, tensors ``(1, H_kv, ·, D)``: may change the buffers in place."""


class _BufferLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: preallocated ``(B, H_kv, capacity, D)``; ``update`` scatters rows instead of appending copies."""

    is_sliding = False
    is_croppable = False

    def __init__(self, owner: KVBuffer, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._owner, self._index = owner, index
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the buffer is allocated before the forward."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the fresh rows and return every row up to the forward's last."""
        owner = self._owner
        keys, values = self.keys[:, :, : owner.visible], self.values[:, :, : owner.visible]
        if owner.before_write is not None:
            owner.before_write(self._index, keys, values, key_states, value_states)
        keys[:, :, owner.rows] = key_states
        values[:, :, owner.rows] = value_states
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the visible length and offset 0: a row's index is its position."""
        return self._owner.visible, 0

    def get_seq_length(self) -> int | torch.Tensor:
        """Return the number of valid rows; or, for a model that tells positions by it, how many stand before the fresh rows."""
        return self._owner.offset

    def get_max_length(self) -> int:
        """Return the capacity."""
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length


class KVBuffer(Cache):  # type: ignore[misc]
    """Preallocated KV of one prompt (or of a batch of chunks), row index = position.

    Parameters
    ----------
    shapes
        One shape per layer.
    capacity
        Rows: prompt plus room for the answer.
    batch
        Batch size ``B``; 1 for a prompt.
    tells_offsets
        Whether a layer takes the positions of its fresh rows from the cache's length (Llama 4 scales queries by them): then the length
        that it is told is such that counting on from it gives the rows' own positions, scattered or not.
    dtype, device
        Of the tensors. Rows are uninitialised until written; no row is visible to attention before it is written.

    Attributes
    ----------
    length
        Rows that hold valid KV.
    rows, visible
        Rows that the next forward computes, and the rows that it can see (set by the forward).
    token_ids
        Int64 ``(capacity,)`` on the host for a model that may have to compute its rows anew, else ``None``; kept by its forwards.
    before_write
        Called in each layer of the next forward before its fresh rows are written, or ``None``.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch: int = 1,
        tells_offsets: bool = False,
    ) -> None:
        self._tells_offsets = tells_offsets
        self.token_ids: torch.Tensor | None = None
        self.length = 0
        self.visible = 0
        self.rows: Rows = slice(0, 0)
        self.before_write: BeforeWrite | None = None
        self.capacity = capacity
        layers = []
        for index, shape in enumerate(shapes):
            keys = torch.empty((batch, shape.num_heads, capacity, shape.key_dim), dtype=dtype, device=device)
            values = torch.empty((batch, shape.num_heads, capacity, shape.value_dim), dtype=dtype, device=device)
            layers.append(_BufferLayer(self, index, keys, values))
        super().__init__(layers=layers)

    @property
    def offset(self) -> int | torch.Tensor:
        """What the layers are told of the cache's length."""
        if not self._tells_offsets:
            return self.length
        if isinstance(self.rows, slice):
            return int(self.rows.start)
        return self.rows - torch.arange(len(self.rows), device=self.rows.device)

    def keys(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, ``(B, H_kv, capacity, D)``, rotated."""
        return cast(torch.Tensor, self.layers[layer].keys)

    def values(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, ``(B, H_kv, capacity, D_v)``."""
        return cast(torch.Tensor, self.layers[layer].values)
