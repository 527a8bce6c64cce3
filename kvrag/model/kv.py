"""Keys and values on the model's device: an arena of slots, and the buffers of requests as views of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's KV: heads and the head dims of keys and of values."""

    num_heads: int
    key_dim: int
    value_dim: int


class KVBuffer:
    """The KV of one request (or of a batch of chunks), row index = position: consecutive slots of an arena.

    Parameters
    ----------
    layers
        Keys ``(B, H_kv, capacity, D)`` and values ``(B, H_kv, capacity, D_v)`` of each layer.
    start
        Slot of the arena at which it begins.
    token_ids
        Int64 ``(capacity,)`` on the host for a model that may have to compute its rows again, else ``None``; kept by its forwards.
    """

    def __init__(
        self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], start: int = 0, token_ids: torch.Tensor | None = None
    ) -> None:
        self.layers, self.start, self.token_ids = layers, start, token_ids

    @property
    def capacity(self) -> int:
        """Number of rows: prompt plus room for the answer."""
        return int(self.layers[0][0].shape[2])

    def keys(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, ``(B, H_kv, capacity, D)``, rotated."""
        return self.layers[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, ``(B, H_kv, capacity, D_v)``."""
        return self.layers[layer][1]


class KVArena(KVBuffer):
    """Preallocated KV in slots, which requests share; each request's buffer is a :meth:`view`.

    Parameters
    ----------
    shapes
        One shape per layer.
    slots
        Number of slots.
    dtype, device
        Of the tensors. Slots are uninitialised until written; no slot is visible to attention before it is written.
    batch
        Batch size ``B``; 1 for prompts.
    keeps_ids
        Whether views keep their token ids.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch: int = 1,
        keeps_ids: bool = False,
    ) -> None:
        layers = []
        for shape in shapes:
            keys = torch.empty((batch, shape.num_heads, slots, shape.key_dim), dtype=dtype, device=device)
            values = torch.empty((batch, shape.num_heads, slots, shape.value_dim), dtype=dtype, device=device)
            layers.append((keys, values))
        super().__init__(layers)
        self._keeps_ids = keeps_ids

    def view(self, start: int, capacity: int) -> KVBuffer:
        """Return the buffer of a request in slots ``start`` to ``start + capacity - 1``."""
        rows = slice(start, start + capacity)
        layers = [(keys[:, :, rows], values[:, :, rows]) for keys, values in self.layers]
        token_ids = torch.zeros(capacity, dtype=torch.int64) if self._keeps_ids else None
        return KVBuffer(layers, start, token_ids)
