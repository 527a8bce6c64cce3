"""What the layers of a stitch have in common, found once: most look alike, and so do the calls of one prompt.

A call has thousands of tensors of a handful of forms. Reading a form costs a fraction of a microsecond, and all that follows from it
(checks, strides, what the kernel is compiled for) many times that; so forms are compared, and what follows is worked out for each distinct
layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import cycle
from operator import attrgetter, eq
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

Reader = Callable[[torch.Tensor], Hashable]

_READERS: tuple[Reader, ...] = (*map(attrgetter, ("dtype", "device", "shape")), torch.Tensor.stride)
"""What of a tensor everything but its address follows from."""


class Kind:
    """What layers that look alike have in common; a key that is hashed once, for it is long, and asked for several times a call.

    Parameters
    ----------
    parts
        Hashable; no tensors.
    """

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts: Hashable) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and self._hash == other._hash and self.parts == other.parts


Column = tuple[Sequence[torch.Tensor] | None, int]
"""One kind of tensor for all layers, ``None`` where a call has none, and how many of them a layer has."""


def alike(num_layers: int, columns: Iterable[Column], *beside: Hashable) -> dict[Kind, Sequence[int]]:
    """Group layers whose tensors have the same dtypes, devices, shapes and strides; ``beside`` goes into every key."""
    given = list(columns)
    present = tuple(tensors is not None for tensors, _ in given)
    readings = [(tensors, n, read) for tensors, n in given if tensors is not None for read in _READERS]

    def kind_of(layer: int) -> Kind:
        rows = ((tensors[n * layer : n * (layer + 1)], read) for tensors, n, read in readings)
        return Kind(beside, present, *(tuple(map(read, tensors)) for tensors, read in rows))

    # As a rule all look alike, and no other layer is read by itself.
    if num_layers == 1 or (num_layers and all(_repeats(*reading) for reading in readings)):
        return {kind_of(0): range(num_layers)}
    found: dict[Kind, list[int]] = {}
    for layer in range(num_layers):
        found.setdefault(kind_of(layer), []).append(layer)
    return dict(found)


def _repeats(tensors: Sequence[torch.Tensor], n: int, read: Reader) -> bool:
    """Whether what is read of the first ``n`` is read of each next ``n`` again.

    One at a time: thousands of tuples that live at once would set off the garbage collector, which takes longer than all else here.
    """
    return all(map(eq, map(read, tensors), cycle([read(x) for x in tensors[:n]])))


class Remembered(Generic[T]):
    """The newest answers by kind of layer; for what follows from the kind alone.

    Parameters
    ----------
    limit
        Answers to keep. Those of one prompt are few, but their starts, which no other prompt has, are part of the kind.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._answers: dict[Kind, T] = {}

    def get(self, key: Kind, make: Callable[[], T]) -> T:
        """Return the answer, made where it is not known; nothing is remembered where making it fails."""
        found = self._answers.get(key)
        if found is None:
            found = make()
            with self._lock:
                self._answers[key] = found
                if len(self._answers) > self._limit:
                    del self._answers[next(iter(self._answers))]
        return found

    def __len__(self) -> int:
        return len(self._answers)
