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
        The budget, counted from here.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._is_over = False

    def ask(self, action: Callable[[], T], default: T, *, what: str) -> T:
        """Run an action in a thread of its own and return its result, or the default when it is late or raises.

        A thread that hangs in a read is left behind: it is a daemon and holds nothing that a request needs.
        """
        if self._is_over:
            return default
        answer: list[Any] = []

        def run() -> None:
            try:
                answer.append(action())
            except Exception as error:  # a fault of the store must not break the answer
                logger.warning("%s failed (%s); computing instead", what, error)

        thread = threading.Thread(target=run, name="kvrag-ask", daemon=True)
        thread.start()
        thread.join(max(0.0, self._until - time.monotonic()))
        if answer:
            return answer[0]  # type: ignore[no-any-return]
        self._is_over = True
        if thread.is_alive():
            logger.warning("%s did not answer in time; computing instead", what)
        return default
