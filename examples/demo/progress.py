"""A sign of life every few seconds, on terminals and in logs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

EVERY_S = 5.0


class Progress:
    """Prints what goes on, with the seconds since the start.

    Parameters
    ----------
    console
        Where to.
    every_s
        Seconds between two signs of life of a long stage.
    """

    def __init__(self, console: Console, *, every_s: float = EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
        self._start = time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(
            f"[dim]{time.perf_counter() - self._start:5.0f} s[/dim]  {text}", highlight=False
        )

    @contextmanager
    def stage(self, text: str, far: Callable[[], str] | None = None) -> Iterator[None]:
        """Say that something is under way, every few seconds, and how far it is: on a terminal in one line that changes."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(self._every_s):
                now = f"{text}: {far()}" if far else text
                if self._console.is_terminal:
                    status.update(f"{now} ({time.perf_counter() - self._start:.0f} s)")
                else:
                    self.say(f"[dim]{now} ...[/dim]")

        thread = threading.Thread(target=tick, name="signs of life", daemon=True)
        with self._console.status(text) as status:
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
