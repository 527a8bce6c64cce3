"""Erasures of documents, counted: a chunk that was missed before one is not stored after it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

EVERYWHERE = "*"  # stands for all namespaces; it is not a digest


class Stopped(Exception):
    """The engine was closed, or documents were erased, after the chunks were missed."""


class Erasures:
    """Count erasures per namespace, so chunks missed before an erasure are not stored after it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, namespace: str) -> int:
        """Return the number of erasures of a namespace so far."""
        return self._counts[namespace] + self._counts[EVERYWHERE]

    @contextmanager
    def erasing(self, namespace: str) -> Iterator[None]:
        """Count an erasure and block writes during it, so that it finds all written chunks.

        ``namespace`` is a digest or :data:`EVERYWHERE`.
        """
        with self._lock:
            self._counts[namespace] += 1
            yield

    @contextmanager
    def unless_any_since(self, namespace: str, count: int) -> Iterator[None]:
        """Block erasures; raise :class:`Stopped` if there were any since ``count``."""
        with self._lock:
            if self.count(namespace) != count:
                raise Stopped
            yield


_erasures: weakref.WeakValueDictionary[str, Erasures] = weakref.WeakValueDictionary()
_erasures_lock = threading.Lock()


def erasures_of(kv_dir: str | None) -> Erasures:
    """Return the counter that all engines of this process share for a directory.

    A store in memory gets a new counter.
    """
    if kv_dir is None:
        return Erasures()
    with _erasures_lock:
        return _erasures.setdefault(os.path.realpath(kv_dir), Erasures())
