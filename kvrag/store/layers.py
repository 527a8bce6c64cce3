"""A chunk's layers one by one, whoever holds them: what computes with layer 0 need not wait for the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

from kvrag.types import ChunkKV, KVDtype, LayerKV


class Layers(Protocol):
    """Layers of a chunk in order, each proven when it is given; an iterator and a context manager.

    It ends early at the first layer that can't be had: those before it may be used, and the rest is to be computed. It may hold a file
    open, and must be exhausted or closed.
    """

    num_layers: int
    """Layers of the chunk; fewer may come."""
    num_bytes: int
    """Bytes of the chunk where it comes from."""
    kv_dtype: KVDtype
    """What the values have been rounded to; see :class:`~kvrag.types.ChunkKV`."""

    def __iter__(self) -> Self:
        """Return the stream itself."""

    def __next__(self) -> LayerKV:
        """Return the next layer, or raise ``StopIteration``."""

    def close(self) -> None:
        """Give the rest up; idempotent."""

    def __enter__(self) -> Self:
        """Return the stream itself."""

    def __exit__(self, *_: object) -> None:
        """Close the stream."""


class HeldLayers:
    """Layers of a chunk that is in memory: all are there at once.

    Parameters
    ----------
    kv
        The chunk; its tensors are shared and must not be written to.
    """

    def __init__(self, kv: ChunkKV) -> None:
        self.num_layers, self.num_bytes, self.kv_dtype = len(kv.layers), kv.num_bytes, kv.kv_dtype
        self._layers = iter(kv.layers)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LayerKV:
        return next(self._layers)

    def close(self) -> None:
        """Give the rest up; idempotent."""
        self._layers = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Bring = Callable[[ChunkKV], tuple[ChunkKV, bool] | None]
"""Gives a chunk as a tier keeps it, and whether it may be kept; ``None`` if it can't be given so."""


class PromotedLayers:
    """Layers that come from the tier below, as this one keeps them; with the last one the chunk is promoted, and not before.

    Parameters
    ----------
    below
        The lower tier's stream; it is closed with this one.
    kv_dtype
        How the chunk is kept here.
    bring
        Called with each layer, as a chunk of one.
    keep
        Called with the chunk when all layers have come and may be kept.
    """

    def __init__(self, below: Layers, kv_dtype: KVDtype, bring: Bring, keep: Callable[[ChunkKV], object]) -> None:
        self.num_layers, self.num_bytes, self.kv_dtype = below.num_layers, below.num_bytes, kv_dtype
        self._below, self._bring, self._keep = below, bring, keep
        self._given: list[LayerKV] = []
        self._is_whole = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LayerKV:
        below = next(self._below)
        try:
            brought = self._bring(ChunkKV((below,), self._below.kv_dtype))
        except BaseException:
            self.close()  # no other layer will come
            raise
        if brought is None:
            self.close()
            raise StopIteration
        layer, may_keep = brought[0].layers[0], brought[1]
        self._is_whole &= may_keep
        if self._is_whole:
            self._given.append(layer)
            if len(self._given) == self.num_layers:
                self._keep(ChunkKV(tuple(self._given), self.kv_dtype))
        return layer

    def close(self) -> None:
        """Give the rest up; idempotent."""
        self._is_whole = False
        self._given.clear()
        self._below.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
