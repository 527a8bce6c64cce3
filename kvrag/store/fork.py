"""What threads share, kept usable in a forked child.

A lock that another thread holds at the moment of a fork stays locked in the child for ever, and an SQLite connection
carried through a fork can damage its database. So every tracked object is quiet while the process forks.
"""

from __future__ import annotations

import os
import threading
import weakref

WAIT_S = 5.0
"""How long a fork waits for one object: a thread that hangs in a read of the index must not stop the process."""


class ForkAware:
    """Owner of a lock that a fork waits for and that is new in the child. No thread holds two of these at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held_for_fork = False
        _track(self)

    def _before_fork(self) -> None:
        """Let go of what must not be carried into the child; the lock is held."""

    def _in_child(self) -> None:
        """Let go of what is the parent's."""


_tracked: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_quiet: list[ForkAware] = []
_registered = False


def _track(item: ForkAware) -> None:
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
    _tracked.add(item)


def _before() -> None:
    _quiet[:] = list(_tracked)
    for item in _quiet:
        item._held_for_fork = item._lock.acquire(timeout=WAIT_S)
        if item._held_for_fork:
            item._before_fork()


def _after_in_parent() -> None:
    for item in _quiet:
        if item._held_for_fork:
            item._held_for_fork = False
            item._lock.release()
    _quiet.clear()


def _after_in_child() -> None:
    for item in _quiet:
        item._held_for_fork = False
        item._lock = threading.RLock()
        item._in_child()
    _quiet.clear()
