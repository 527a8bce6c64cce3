"""What the layers of a stitch have in common, found once: most look alike, and so do the calls of one prompt.

A call has thousands of tensors of a handful of forms. Reading a form costs a fraction of a microsecond, and all that follows from it (checks,
strides, the kernel's form) a hundred times that; so forms are compared as lists, and what follows is worked out for each distinct layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

_READERS: tuple[Callable[[torch.Tensor], Hashable], ...] = (
    *(attrgetter(name) for name in ("dtype", "device", "shape")),
    torch.Tensor.stride,
)
"""What of a tensor everything but its address follows from."""

Column = tuple[Sequence[torch.Tensor] | None, int]
"""One kind of tensor for all layers, ``None`` where a call has none, and how many of them a layer has."""


def alike(num_layers: int, columns: Iterable[Column]) -> dict[Hashable, Sequence[int]]:
    """Group layers whose tensors have the same dtypes, devices, shapes and strides; the keys say which, and hold no tensors."""
    columns = list(columns)
    present = tuple(tensors is not None for tensors, _ in columns)
    forms = [(list(map(read, tensors)), n) for tensors, n in columns if tensors is not None for read in _READERS]
    if num_layers and all(form == form[:n] * num_layers for form, n in forms):  # as a rule; no layer is read by itself
        return {(present, *(tuple(form[:n]) for form, n in forms)): range(num_layers)}
    found: dict[Hashable, list[int]] = {}
    for i in range(num_layers):
        key = (present, *(tuple(form[n * i : n * (i + 1)]) for form, n in forms))
        found.setdefault(key, []).append(i)
    return dict(found)


class Remembered(Generic[T]):
    """The newest answers by layer key; for what follows from the key alone.

    Parameters
    ----------
    limit
        Answers to keep. Those of one prompt are few, but their starts, which no other prompt has, are part of the key.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._answers: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
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
