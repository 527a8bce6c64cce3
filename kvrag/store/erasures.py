"""Erasures of documents, counted: a chunk that was missed before one is not stored after it."""

from __future__ import annotations

import os
import threading
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


ERASURES = Erasures()
"""Counter of all engines of this process: those of a directory must share one."""
# The thread that holds the lock may be the parent's.
os.register_at_fork(after_in_child=lambda: vars(ERASURES).update(vars(Erasures())))
