"""Work of several threads that one of them does for all: decode steps of requests that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from kvrag.threads import renew_after_fork

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[list[T]], Sequence[R]]

PATIENCE_S = 0.003  # how long work waits for those that asked the last time


@dataclass(slots=True, eq=False)
class _Wish(Generic[T, R]):
    """An item of :class:`Together`, and what came of it: a result or an error, once ``is_done``."""

    item: T
    is_done: bool = False
    result: R | None = None
    error: Exception | None = None


class Together(Generic[T, R]):
    """Lets one of several threads do the work of all: those that ask while it works are served together next.

    Threads in a loop come back one after the other, so who works waits until as many have asked as the last time, for :data:`PATIENCE_S`.

    ``limit``: most items at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._at_fork_reinit()
        renew_after_fork(self)

    def _at_fork_reinit(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._wishes: list[_Wish[T, R]] = []
        self._is_busy, self._usual = False, 1

    def do(self, item: T, work: Work[T, R]) -> R:
        """Have the work of an item done, by this thread or by another, whose ``work`` has to be the same.

        ``work`` takes items and returns their results, in order. If it fails for several items, it is asked for each of them, and what it
        raises then is raised where the item came from.
        """
        mine, batch = _Wish[T, R](item), list[_Wish[T, R]]()
        try:
            with self._changed:
                self._wishes.append(mine)
                self._changed.notify_all()
                self._changed.wait_for(lambda: mine.is_done or not self._is_busy)
                if not mine.is_done:
                    self._is_busy = True
                    batch = [mine]
                    self._changed.wait_for(lambda: len(self._wishes) >= self._usual, PATIENCE_S)
                    batch += [wish for wish in self._wishes if wish is not mine][: self._limit - 1]
                    self._wishes = [wish for wish in self._wishes if wish not in batch]
                    self._usual = len(batch)
            if batch:
                _serve(batch, work)
        finally:  # also when this thread is interrupted: the others of its batch find another one
            with self._changed:
                if batch:
                    self._is_busy = False
                    self._wishes += [wish for wish in batch if not wish.is_done]
                self._wishes = [wish for wish in self._wishes if wish is not mine]
                self._changed.notify_all()
        if mine.error is not None:
            raise mine.error
        return cast(R, mine.result)


def _serve(batch: Sequence[_Wish[T, R]], work: Work[T, R]) -> None:
    try:
        results = work([wish.item for wish in batch])
    except Exception as error:
        if len(batch) > 1:
            for wish in batch:
                _serve([wish], work)
        else:
            batch[0].error, batch[0].is_done = error, True
        return
    for wish, result in zip(batch, results, strict=True):
        wish.result, wish.is_done = result, True
