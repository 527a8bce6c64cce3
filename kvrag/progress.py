"""Progress of long work: a bar on a terminal, a line now and then elsewhere.

::

    with Progress("precompute", total=117, unit="chunks") as progress:   # counted, with time left
        progress.advance(8)

    with Progress("loading Qwen2.5-0.5B"):                               # of unknown length
        ...

``show`` is the user's ``show_progress``. By default, only long work is shown, as a bar if stderr is
a terminal, else as lines (the first after :data:`FIRST_LINE_S`, then every :data:`LINE_S`).
``True`` shows a bar at once, wherever stderr goes. ``False`` shows nothing. Lines go to the logger
``kvrag.progress``, level INFO, or to stderr if logging is not configured at all. If
``TQDM_DISABLE`` is set in the environment, nothing is shown.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self
from weakref import WeakSet

from tqdm.auto import tqdm

from kvrag.errors import ConfigError
from kvrag.runtime import POOL

logger = logging.getLogger(__name__)

BAR_AFTER_S = 0.5  # a shorter wait needs no bar
BAR_S = 1.0  # seconds between updates of a bar's clock
FIRST_LINE_S = 5.0
LINE_S = 30.0

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
_CLOCK = "{desc}: {elapsed}"


def check_show(show: object) -> None:
    """Raise :class:`ConfigError` for an invalid ``show_progress``."""
    if show is not None and not isinstance(show, bool):
        raise ConfigError(
            f"show_progress is {show!r}; pass True, False, or None: shown if it takes long"
        )


class Progress:
    """Shows the progress of a piece of work within a ``with`` block. Any thread may advance it.

    Parameters
    ----------
    what
        Name of the work, for users.
    total, unit, done
        Amount of work, its unit (plural), and the amount already done. Without ``total``, only the
        time is shown.
    show
        ``None``: show long work, as a bar or as lines, whichever suits stderr; ``True``: show a
        bar; ``False``: show nothing.

    Raises
    ------
    ConfigError
        If ``show`` has another value.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        unit: str = "items",
        done: int = 0,
        show: bool | None = None,
    ) -> None:
        check_show(show)
        self._what = what
        self._total = total
        self._unit = unit
        self._first = done
        self._done = done
        self._is_asked = show is True
        self._is_bar = self._is_asked or _is_terminal()
        self._is_shown = (
            show is not False
            and not os.environ.get("TQDM_DISABLE")
            and (self._is_bar or _takes_lines())
        )
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._start = time.monotonic()
        self._bar: Any = None
        self._has_line = False

    def __enter__(self) -> Self:
        if not self._is_shown:
            return self
        if self._is_asked:
            self._show()
        with suppress(RuntimeError):  # without a thread, the bar moves only when work is done
            POOL.submit(self._watch, cancel=self._over)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        with self._lock:
            if self._bar is not None:
                self._bar.close()
            elif self._has_line:
                _say(self._line("ended early" if error else "done"))
            self._is_shown = False

    def advance(self, count: int = 1) -> None:
        """Count finished work."""
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.update(count)

    def _watch(self) -> None:
        """Update the display until the work ends."""
        wait_s = BAR_AFTER_S if self._is_bar else FIRST_LINE_S
        while not self._over.wait(wait_s):
            self._show()
            wait_s = BAR_S if self._is_bar else LINE_S

    def _show(self) -> None:
        with self._lock:
            if not self._is_shown or self._over.is_set():
                return
            if not self._is_bar:
                self._has_line = True
                _say(self._line("so far"))
            elif self._bar is None:
                self._bar = self._opened()
            else:
                self._bar.refresh()

    def _opened(self) -> Any:
        form = _CLOCK if self._total is None else _BAR
        bar = tqdm(
            desc=self._what,
            total=self._total,
            initial=self._first,
            unit=f" {self._unit}",
            bar_format=form,
        )
        bar.start_t -= time.monotonic() - self._start  # count the time before the bar was shown
        bar.update(self._done - self._first)
        bar.refresh()
        return bar

    def _line(self, state: str) -> str:
        """Format progress: ``precompute: 40 of 117 chunks after 132 s, about 254 s left``."""
        seconds = time.monotonic() - self._start
        if self._total is None:
            return f"{self._what}: {seconds:.0f} s {state}"
        line = f"{self._what}: {self._done} of {self._total} {self._unit} after {seconds:.0f} s"
        worked = self._done - self._first
        if state == "ended early":
            return f"{line}, {state}"
        if self._done >= self._total or not worked:
            return line
        return f"{line}, about {seconds / worked * (self._total - self._done):.0f} s left"


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _takes_lines() -> bool:
    """Whether to write lines: not if the application configured logging without INFO."""
    return not logger.hasHandlers() or logger.isEnabledFor(logging.INFO)


def _say(line: str) -> None:
    if logger.hasHandlers():
        logger.info("%s", line)
    elif sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def tell_short(store: object, short: Sequence[tuple[str, str]]) -> None:
    """Log the number of documents that are too short to have KV, and the first of them.

    ``short`` is :attr:`PrecomputeReport.short`. The first log per store (or client of one) is a
    warning, later logs are INFO.
    """
    if not short:
        return
    level = logging.INFO if store in _told else logging.WARNING
    _told.add(store)
    what = (
        "%d document(s) are too short to have KV and are computed with each prompt "
        "(PrecomputeReport.short): %r, %s"
    )
    logger.log(level, what, len(short), *short[0])


_told = WeakSet[object]()  # stores whose users have seen the warning
