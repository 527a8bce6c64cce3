"""Ask something that may be slow or broken, and go on without its answer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
Jobs = SimpleQueue[tuple[Callable[[], None], threading.Lock]]
"""What a thread waits for: something to do, and what to release when it is over."""

MOST_IDLE = 4
"""Most threads that wait for the next question; to start one takes longer than to ask most questions."""


class Deadline:
    """A time budget over several questions; once it is spent, or a question failed, the rest get their defaults at once.

    Parameters
    ----------
    seconds
        The budget. What counts is the time that answers are waited for, not what the asker does between its questions.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.left_s = float(seconds)
        """What is left of the budget, in seconds."""
        self.fault: str | None = None
        """Why the rest gets no answers, in words; ``None`` as long as it does."""

    def ask(self, action: Callable[[], T], default: T, *, what: str) -> T:
        """Run an action in another thread and return its result, or the default when it is late, raises, or there is no thread.

        A thread that hangs in a read is left behind: it is a daemon and holds nothing that a request needs.
        """
        if self.fault is not None:
            return default
        answer: list[Any] = []
        failure: list[str] = []

        def run() -> None:
            try:
                answer.append(action())
            except Exception as error:  # a fault of the store must not break the answer
                logger.warning("%s failed (%s); computing instead", what, error)
                failure.append(f"the store failed ({error})")

        start = time.monotonic()
        try:
            over = ASKERS.begin(run)
        except RuntimeError as error:  # too many threads, or the interpreter is about to exit
            logger.warning("%s could not be asked (%s); computing instead", what, error)
            self.fault = f"the store could not be asked ({error})"
            return default
        over.acquire(timeout=min(self.left_s, threading.TIMEOUT_MAX))
        self.left_s = max(0.0, self.left_s - (time.monotonic() - start))
        if answer:
            return answer[0]  # type: ignore[no-any-return]
        if failure:
            self.fault = failure[0]
        else:
            self.left_s = 0.0
            self.fault = f"the store did not answer within {self._seconds:g} s"
            logger.warning("%s did not answer in time; computing instead", what)
        return default


class Askers:
    """The threads of a process that ask: one for each question under way, and a few that wait for the next.

    What hangs keeps its thread, and nobody else's question waits behind it. A forked child has none of its parent's.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        # Nothing but pop and append, each of which is one step for all threads: there is no lock that a fork could find taken.
        self._idle: list[Jobs] = []
        self._pid = os.getpid()  # last: until then, the child's other threads don't take the parent's for theirs

    def begin(self, action: Callable[[], None]) -> threading.Lock:
        """Run an action in another thread, and return a lock that can be had once it is over.

        Raises
        ------
        RuntimeError
            If no thread is idle and none can be started.
        """
        if self._pid != os.getpid():
            self._reset()
        over = threading.Lock()
        over.acquire()
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = Jobs()
            threading.Thread(target=self._serve, args=(jobs, self._idle), name="kvrag-ask", daemon=True).start()
        jobs.put((action, over))
        return over

    @staticmethod
    def _serve(jobs: Jobs, idle: list[Jobs]) -> None:
        stays = True
        while stays:
            action, over = jobs.get()
            stays = False
            try:
                action()
                stays = len(idle) < MOST_IDLE
            finally:
                del action  # it may hold chunks, and the next question may be long in coming
                if stays:  # first: who asks again at once finds this one
                    idle.append(jobs)
                over.release()


ASKERS = Askers()
"""Those of this process."""
