"""A few threads that stay and help a caller with its work: hashing beside writing, reading beside reading.

A thread made for one chunk comes too late for it, so these wait for the next one. They are daemons: a read that hangs holds up
neither the interpreter's exit nor anyone but its own caller.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)

MOST = 3
"""Most threads: with one more they would wait for memory and not for each other."""

MOST_WAITING = 64
"""Most jobs that wait for a thread: where so many do, reads hang, and those that come next would wait for ever."""

HELPED_BYTES = 2**20
"""Shorter blobs are written and read by the caller alone: a helper would come when all is done."""

Job = Callable[[], None]


def num_helpers() -> int:
    """Threads that can run beside the caller's own on this machine; none where there is one processor."""
    affinity = getattr(os, "sched_getaffinity", None)
    processors = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(MOST, processors - 1)


class Help:
    """A job that a helper may take up; a context manager at whose end nobody works on it any more.

    The caller must be able to do the whole job: a helper may come late, or never. Only where it has begun is it waited for.
    """

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._pid = os.getpid()
        self._claim, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()

    def run(self) -> None:
        """Do the job, unless it is over."""
        if self._claim.acquire(blocking=False):
            try:
                assert self._job is not None, "it is there until the job is claimed"
                self._job()
            except Exception:  # the thread has to stay
                log.exception("a helper failed")
            finally:
                self._over.release()

    def __enter__(self) -> Help:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child has not got the thread that its parent had waited for.
        if not self._claim.acquire(blocking=False) and self._pid == os.getpid():
            self._over.acquire()
        self._job = None  # this may stay in the queue behind a read that hangs, and must not keep a chunk there


class Helpers:
    """The threads of a process, started when they are first asked for, and anew in a forked child.

    Parameters
    ----------
    count
        Threads; 0: every caller works alone.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = num_helpers() if count is None else count
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._jobs: SimpleQueue[Help] = SimpleQueue()
        self._threads = 0

    def help(self, job: Job) -> Help:
        """Ask one helper to run ``job`` beside the caller; leave its context before what the job uses goes away.

        ``job`` must not raise, because nobody would be told, and must not wait for anything but the caller.
        """
        if self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._lock = threading.Lock()
            self._reset()
        help_ = Help(job)
        if self._start() and self._jobs.qsize() < MOST_WAITING:
            self._jobs.put(help_)
        return help_

    def _start(self) -> bool:
        """Start the threads that are missing; ``False`` if there is none."""
        if self._threads < self.count:
            with self._lock:
                while self._threads < self.count:
                    thread = threading.Thread(target=_serve, args=(self._jobs,), name="kvrag-helper", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError:  # too many threads, or the interpreter is about to exit
                        break
                    self._threads += 1
        return self._threads > 0


def _serve(jobs: SimpleQueue[Help]) -> None:
    while True:
        jobs.get().run()


HELPERS = Helpers()
"""Those of this process."""
