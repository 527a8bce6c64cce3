"""Ask something that may be slow or broken, and go on without its answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        """Run an action in a thread of its own and return its result, or the default when it is late or raises.

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

        thread = threading.Thread(target=run, name="kvrag-ask", daemon=True)
        start = time.monotonic()
        thread.start()
        thread.join(min(self.left_s, threading.TIMEOUT_MAX))
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
