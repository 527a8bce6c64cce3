"""Erasures that are tried again: with the ballast's room on a full disk, and in the new database where the old one was lost meanwhile."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from kvrag.errors import StoreError
from kvrag.store.store_index import StoreIndex
from kvrag.types import ChunkKey

T = TypeVar("T")


class Erasing:
    """Erases a file as often as it is called, and remembers whether it was there in any of the tries.

    Parameters
    ----------
    erase
        Erases it, and returns whether it was there.
    """

    def __init__(self, erase: Callable[[], bool]) -> None:
        self._erase = erase
        self.found = False

    def __call__(self) -> bool:
        """Erase it, and return :attr:`found`."""
        self.found |= self._erase()
        return self.found


class ErasureIndex(StoreIndex):
    """An index whose erasures are tried again where they failed."""

    def __init__(self) -> None:
        super().__init__()
        self.make_room: Callable[[], bool] = lambda: False
        """Called when the disk is full in the middle of an erasure; returns whether it may be tried again."""

    @abstractmethod
    def _is_reopened(self, generation: int) -> bool:
        """Whether the rows are others than those of ``generation``; what can be opened in the place of a lost database is opened."""

    def unlink(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Drop document ``doc_id``; return and remove the keys of the texts that no document references any more."""
        return self._again(lambda: super(ErasureIndex, self).unlink(namespace, doc_id))

    def unlink_text(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Drop every reference to the text with this digest; return and remove all its keys."""
        return self._again(lambda: super(ErasureIndex, self).unlink_text(namespace, digest))

    def remove(self, key: ChunkKey) -> None:
        """Remove one row; unknown keys are fine."""
        self._again(lambda: super(ErasureIndex, self).remove(key))

    def settle(self, names: tuple[str, ...], erase: Callable[[], bool]) -> bool:
        """Erase the file of a chunk or of a reference if it still is to go, and return whether it was there; see :class:`StoreIndex`."""
        erasing = Erasing(erase)
        self._again(lambda: super(ErasureIndex, self).settle(names, erasing))
        return erasing.found

    def drop(self, key: ChunkKey, erase: Callable[[], bool], *, is_erasure: bool = False) -> bool:
        """Erase a chunk's file and remove its row in one step, and return whether the file was there."""
        erasing = Erasing(erase)
        self._again(lambda: super(ErasureIndex, self).drop(key, erasing, is_erasure=is_erasure))
        return erasing.found

    def _again(self, work: Callable[[], T]) -> T:
        generation = self.generation
        try:
            return work()
        except StoreError:
            if not self._is_reopened(generation) and not self.make_room():
                raise
        return work()
