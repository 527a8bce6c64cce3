"""State that a process has once: threads, and values that go with a model or a tokenizer.

This is the only module that starts threads: pools of daemon threads, and deadlines for their
results. A read that hangs does not keep the process alive, as it would in a pool of the standard
library. A daemon inside torch at interpreter exit would abort the process, so all actions are
cancelled and joined first, and forwards end at their next layer (:func:`leave_at_exit`).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

# Set to end an action early; ``None``: nobody will.
Cancel = threading.Event | None

MAX_IDLE = 4  # idle threads that a pool keeps for the next action
EXIT_WAIT_S = 10.0  # longest wait for running actions at process exit

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# Set when the interpreter exits.
EXITING = threading.Event()
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_threaded = weakref.WeakSet[Any]()
_forking: weakref.WeakSet[Forking] = weakref.WeakSet()


def at_thread_end(thing: Any) -> None:
    """Register ``thing.at_thread_end()`` to run in every pool thread before it ends.

    It releases the state that ``thing`` holds for the thread.
    """
    _threaded.add(thing)


def snapshot(things: weakref.WeakSet[T]) -> list[T]:
    """Return the things, to which other threads may add more meanwhile."""
    while True:
        with suppress(RuntimeError):  # the set changed
            return list(things)


class Forking:
    """Thing that every fork of this process concerns, once :func:`at_fork` has made it known."""

    def before_fork(self) -> None:
        """Prepare for a fork, which waits for this."""

    def after_fork(self, *, in_child: bool) -> None:
        """Go on after a fork, in the parent and in the child."""


def at_fork(thing: Forking) -> None:
    """Run the methods of ``thing`` around every fork from now on, as long as it lives."""
    _forking.add(thing)


def _before_fork() -> None:
    for thing in snapshot(_forking):
        thing.before_fork()


def _after_fork(*, in_child: bool) -> None:
    if in_child:
        _late.clear()
    for thing in snapshot(_forking):
        thing.after_fork(in_child=in_child)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, in_child=False),
    after_in_child=functools.partial(_after_fork, in_child=True),
)


def host_memory() -> int:
    """Return the machine's memory in bytes, or the limit of this process's cgroup if lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            total = min(total, int(Path(path).read_text()))
    return total


AUTOCASTING = "cpu", "cuda", "mps", "xpu", "hpu", "privateuseone"  # types of devices


def own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function compute as if its caller had set no modes in this thread.

    Autocast would change the numbers that are stored and answered, and a default device the place
    of new tensors. Switches of the whole process, which other threads need, are part of the model's
    identity. At its end the thread leaves the cores to others (:func:`end_team`).
    """

    @functools.wraps(function)
    def run(*values: P.args, **options: P.kwargs) -> T:
        import torch  # commands that need no model start without it

        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, AUTOCASTING):
                stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            found = function(*values, **options)
        # Not after an error: a child of a fork would wait for its parent's threads for good.
        end_team()
        return found

    return run


def end_team() -> None:
    """End this thread's OpenMP team, unless a GPU computes; the next loop makes a new one.

    A team idles as long as its thread lives. While all teams have more threads than there are
    cores, their threads sleep after each loop, and are woken for the next.
    """
    import torch

    computes_here = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if computes_here and torch.get_num_threads() > 1:
        with suppress(OSError, AttributeError):  # it is another OpenMP
            ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(1)


class Runtime:
    """Values that all engines of this process share, each with its owner: a model, a tokenizer.

    A value is made once, and goes with its owner.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # By the owner's id: a config has no hash.
        self._values: dict[tuple[int, Callable[[], Any]], Any] = {}

    def of(self, owner: object, make: Callable[[], T]) -> T:
        """Return the value that ``make`` made for an owner; make it at the first call."""
        key = id(owner), make
        with self._lock:
            if key not in self._values:
                weakref.finalize(owner, self._values.pop, key, None).atexit = False
                self._values[key] = make()
            value: T = self._values[key]
            return value


RUNTIME = Runtime()


class _Job(NamedTuple):
    action: Callable[[], Any]
    future: Future[Any]
    cancel: Cancel


class Pool(Forking):
    """Pool of daemon threads that run actions.

    A forked child begins with an empty pool. At interpreter exit its actions are cancelled and
    joined, within a time limit. At most ``max_threads`` actions run at the same time, and more
    wait. ``None``: actions run at once, in an idle thread or else a new thread.
    """

    def __init__(self, name: str, max_threads: int | None = None) -> None:
        self._name = name
        self._max_threads = max_threads
        self._begin()
        _pools.add(self)
        at_fork(self)

    def after_fork(self, *, in_child: bool) -> None:
        """Begin anew in a child: the threads stayed in the parent."""
        if in_child:
            self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._jobs: deque[_Job] = deque()
        self._threads: dict[threading.Thread, _Job | None] = {}
        self._num_idle = 0  # threads that wait for a job, or are about to
        self._is_over = False

    def submit(self, action: Callable[[], T], *, cancel: Cancel = None) -> Future[T]:
        """Run an action in another thread.

        ``cancel`` is set at interpreter exit, so that an action that checks the event can stop.

        Raises
        ------
        RuntimeError
            If no thread can be started: too many run, or the interpreter is about to exit.
        """
        job = _Job(action, Future(), cancel)
        with self._changed:
            if self._is_over:
                raise RuntimeError("the interpreter is about to exit")
            if len(self._jobs) < self._num_idle:
                self._changed.notify()
            elif self._max_threads is None or len(self._threads) < self._max_threads:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._threads[thread] = None
                self._num_idle += 1
            self._jobs.append(job)
        return job.future

    def ahead(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Map items in a background thread and yield results in order.

        The consumer helps while it waits.
        """
        left = deque((item, Future[R]()) for item in items)
        futures = deque(future for _, future in left)

        def step() -> bool:
            try:
                item, future = left.popleft()
            except IndexError:
                return False
            try:
                future.set_result(work(item))
            except BaseException as error:
                future.set_exception(error)
            return True

        def results() -> Iterator[R]:
            try:
                while futures:
                    while not futures[0].done() and step():
                        pass
                    yield futures.popleft().result()
            finally:
                left.clear()

        if len(left) > 1:
            with suppress(RuntimeError):  # no thread can be started
                self.submit(lambda: all(iter(step, False)))
        return results()

    def _work(self) -> None:
        thread = threading.current_thread()
        while (job := self._next(thread)) is not None:
            result = error = None
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.action()
                except BaseException as raised:
                    error = raised
            # Before the result is set, so that an immediate next submit finds this thread idle.
            with self._changed:
                self._num_idle += 1
                self._threads[thread] = None
            if error is not None:
                job.future.set_exception(error)
            elif not job.future.cancelled():
                job.future.set_result(result)
            del job, result, error  # they may hold chunks, and the next job may come much later
        for each in list(_threaded):
            each.at_thread_end()

    def _next(self, thread: threading.Thread) -> _Job | None:
        """Wait for a job; return ``None`` if the thread is no longer needed."""
        with self._changed:
            while not self._jobs and not self._is_over and self._num_idle <= MAX_IDLE:
                self._changed.wait()
            self._num_idle -= 1
            if not self._jobs:
                del self._threads[thread]
                return None
            self._threads[thread] = job = self._jobs.popleft()
            return job

    def end(self) -> list[threading.Thread]:
        """Refuse new jobs and cancel all jobs; return the threads."""
        with self._changed:
            self._is_over = True
            threads = list(self._threads)
            jobs = [*self._jobs, *filter(None, self._threads.values())]
            self._jobs.clear()
            self._changed.notify_all()
        for job in jobs:
            job.future.cancel()  # if it has not begun
            if job.cancel is not None:
                job.cancel.set()
        return threads


@atexit.register
def _end_all() -> None:
    """Cancel all actions and join their threads."""
    EXITING.set()
    end = time.monotonic() + EXIT_WAIT_S
    for thread in [thread for pool in list(_pools) for thread in pool.end()]:
        thread.join(max(0.0, end - time.monotonic()))


def leave_at_exit() -> None:
    """Raise ``SystemExit`` in a daemon thread once the interpreter exits; work may end here."""
    if EXITING.is_set() and threading.current_thread().daemon:
        raise SystemExit


# Shared by all of kvrag: a thread per running action, and a few idle threads.
POOL = Pool("kvrag")


LATE_AT_ONCE = 8  # late actions that end all asking for RETRY_S seconds
RETRY_S = 60.0
MAX_LATE = 64  # threads that late actions may hold

_late: dict[Future[Any], float] = {}  # late actions that have not ended, and when they were late


def _is_stuck() -> bool:
    """Whether so many actions hang that another would only leave one more thread behind."""
    latest = time.monotonic() - RETRY_S
    recent = sum([since > latest for since in list(_late.values())])
    return recent >= LATE_AT_ONCE or len(_late) >= MAX_LATE


class Deadline:
    """Time budget in seconds for several results.

    After a late result or a failure, all further results are their defaults, at once.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # Seconds left of the budget; only waiting counts.
        self.left_s = float(seconds)
        # Description of the first failure, if any; from then on only defaults are returned.
        self.fault: str | None = None

    def ask(self, action: Callable[[], T], default: T, *, what: str) -> T:
        """Run an action in another thread and return its result.

        Return the default if the result is late, the action raises, or no thread can be started; at
        once while many actions that were late before have not ended.
        """
        if self.fault is not None:
            return default
        if _is_stuck():
            self.fault = f"the store has not answered {len(_late)} earlier requests"
            return default
        try:
            future = POOL.submit(action)
        except RuntimeError as error:
            self._give_up(what, f"could not be asked ({error})")
            return default
        return self.result(future, default, what=what)

    def result(self, future: Future[T], default: T, *, what: str) -> T:
        """Return a future's result if it comes in time.

        Otherwise log the reason, set ``fault``, and return the default. The future's thread keeps
        running.
        """
        start = time.monotonic()
        try:
            return future.result(0 if self.fault else min(self.left_s, threading.TIMEOUT_MAX))
        except (Exception, SystemExit) as error:
            if future.done():
                self._give_up(what, f"failed ({error})")
            elif isinstance(error, TimeoutError):
                self.left_s = 0.0
                _late[future] = time.monotonic()
                future.add_done_callback(lambda ended: _late.pop(ended, None))
                self._give_up(what, f"did not answer within {self.seconds:g} s")
            else:
                raise
            return default
        finally:
            self.left_s = max(0.0, self.left_s - (time.monotonic() - start))

    def _give_up(self, what: str, how: str) -> None:
        logger.warning("%s %s; computing instead", what, how)
        self.fault = self.fault or f"the store {how}"
