"""Lock of a model: a single thread runs it, in order of arrival, and decode steps run together.

The clock of a request tells waiting for the lock, and computing for others, from its own stages.

A forward of many rows pauses between its layers: it computes there, in its own thread, the steps
that decoding requests wait for. So a long prompt delays running answers by a slice
(:data:`SLICE_S`) and a layer at most, and no result depends on the steps in between.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from transformers import PreTrainedModel

from kvrag.runtime import RUNTIME, leave_at_exit
from kvrag.types import Stage

T = TypeVar("T")
R = TypeVar("R")

# Seconds that a forward runs before it pauses; if the last steps took longer, as long as they took,
# times the number of prompts that wait, but not the time that the owner of a step idled in it.
SLICE_S = 0.05
LONG_SLICE_S = 1.0
NOTABLE_S = 0.001  # shorter waits are not counted
PATIENCE_S = 0.003  # seconds that a step waits for the threads of the last two batches


class _Waited(threading.local):
    seconds = 0.0


WAITED = _Waited()
"""Seconds that this thread has waited for a model's lock, or computed steps of other requests."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting:
    """Thread that waits for the model; ``has_model`` once it holds the lock."""

    thread: int = field(default_factory=threading.get_ident)
    has_model: bool = False
    event: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False, kw_only=True)
class _PendingStep(_Waiting, Generic[T, R]):
    """Pending step; once ``is_done``, with its result or its error.

    It came at ``start``, which is moved on by the time that it is computed for.
    """

    item: T
    work: Callable[[list[T]], Sequence[R]]
    limit: int
    size: int
    start: float
    is_done: bool = False
    result: R | None = None
    error: Exception | None = None


class ModelLock:
    """Re-entrant lock in order of arrival; its holder also runs pending steps (:meth:`step`).

    ``pending`` are the pending steps; ``is_stepping`` says whether a batch of steps is running.
    ``num_prompts`` wait for the model: each gets as much of its time as the steps.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._came = threading.Event()
        self._holder = cast(int | None, None)
        self._depth = 0
        self._queue = deque[_Waiting]()
        self.pending = list[_PendingStep[Any, Any]]()
        self._recent = deque[set[int]](maxlen=2)  # threads of the last two batches of steps
        self._expected = 0
        self.is_stepping = False
        self.num_prompts = 1
        self._due = 0.0  # time at which a forward pauses next

    def acquire(self) -> None:
        """Wait for the lock."""
        waiting = _Waiting()
        start = time.perf_counter()
        try:  # an interrupt may come at any moment from here on
            with self._guard:
                if self._holder in (None, waiting.thread):
                    self._holder = waiting.thread
                    self._depth += 1
                    waiting.has_model = True
                    return
                self._queue.append(waiting)
            waiting.event.wait()
        except BaseException:
            if not self._leave(waiting):
                self.release()
            raise
        finally:
            WAITED.seconds += time.perf_counter() - start

    def _leave(self, waiting: _Waiting) -> bool:
        """Stop waiting; return whether the lock was not handed over meanwhile."""
        with self._guard, suppress(ValueError):  # a step that is just done is gone already
            waiters: Any = self.pending if isinstance(waiting, _PendingStep) else self._queue
            waiters.remove(waiting)
        return not waiting.has_model

    def release(self) -> None:
        """Release the lock: to a due step, else to the first waiter, else to any pending step."""
        with self._guard:
            self._depth -= 1
            if self._depth:
                return
            self._holder = None
            are_due = self.pending and (not self._queue or time.perf_counter() >= self._due)
            if are_due:
                heir: _Waiting = self.pending[0]
            elif self._queue:
                heir = self._queue.popleft()
            else:
                return
            self._holder = heir.thread
            self._depth = 1
            heir.has_model = True
            heir.event.set()

    @contextmanager
    def unless(self, cancelled: threading.Event | None, *, holds: bool = True) -> Iterator[None]:
        """Hold the lock; raise ``CancelledError`` if ``cancelled`` is set once it is acquired.

        Without ``holds``, the lock is left to others.
        """
        with self if holds else nullcontext():
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            yield

    def __enter__(self) -> ModelLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def step(
        self, item: T, work: Callable[[list[T]], Sequence[R]], *, limit: int, size: int = 1
    ) -> R:
        """Run a step, in this thread or another, together with other steps.

        Steps with an equal ``work`` run together, if their sizes add up to at most ``limit``: it
        takes their items and returns their results in order. If it fails for several items, it is
        called for every item alone, and an error is raised in the thread that the item came from.
        """
        if self._holder == threading.get_ident():  # no other thread could run it
            return work([item])[0]
        start = time.perf_counter()
        step = _PendingStep[T, R](item=item, work=work, limit=limit, size=size, start=start)
        try:
            with self._guard:
                self.pending.append(step)
                if self._holder is None:
                    self._holder = step.thread
                    self._depth = 1
                    step.has_model = True
                elif len(self.pending) >= self._expected:
                    self._came.set()
            if not step.has_model:
                step.event.wait()
            if step.has_model:
                if limit > 1:
                    self._gather()
                while not step.is_done:  # earlier steps may fill a batch
                    self._serve()
        finally:
            if not step.is_done:  # interrupted
                self._leave(step)
            if step.has_model:
                self.release()
            WAITED.seconds += time.perf_counter() - step.start
        if step.error is not None:
            raise step.error
        return cast(R, step.result)

    def _gather(self) -> None:
        """Wait briefly for the threads of the last two batches.

        Requests that decode come back in short succession.
        """
        with self._guard:
            self._came.clear()
            self._expected = len(set[int]().union(*self._recent))
            if len(self.pending) >= self._expected:
                return
        self._came.wait(PATIENCE_S)

    def give_way(self) -> None:
        """Run pending steps if they are due; the holder calls it where its work can pause.

        At interpreter exit, the work of a pool's thread ends here.
        """
        if self.is_stepping:  # for requests of other threads, too
            return
        leave_at_exit()
        if self.pending and time.perf_counter() >= self._due:
            start = time.perf_counter()
            self._serve()
            WAITED.seconds += time.perf_counter() - start

    def _serve(self) -> None:
        """Run the oldest pending step with its batch; this thread holds the lock."""
        with self._guard:
            first = next(iter(self.pending), None)
            if first is None:
                return
            batch = [first]
            room = first.limit - first.size
            # The smallest first: a next row of an answer delays a piece of a prompt by little.
            for step in sorted(self.pending[1:], key=lambda step: step.size):
                if step.work == first.work and step.size <= room:
                    batch.append(step)
                    room -= step.size
            self._recent.append({step.thread for step in batch})
        start = time.perf_counter()
        self.is_stepping = True
        try:
            _do(batch)
        finally:  # also after an interrupt: unfinished steps wait on
            self.is_stepping = False
            with self._guard:
                self.pending = [step for step in self.pending if not step.is_done]
            end = time.perf_counter()
            self._due = end + max(SLICE_S, min(self.num_prompts * (end - start), LONG_SLICE_S))
            for step in batch:
                step.start += end - start
                if step.is_done:
                    step.event.set()


def _do(batch: Sequence[_PendingStep[Any, Any]]) -> None:
    try:
        results: Any = batch[0].work([step.item for step in batch])
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            batch[0].is_done = True
            return
        results = None  # run again outside: the exception keeps the failed step's tensors alive
    if results is None:
        for step in batch:
            _do([step])
        return
    for step, result in zip(batch, results, strict=True):
        step.result = result
        step.is_done = True


def lock_of(model: PreTrainedModel) -> ModelLock:
    """Return the lock of a model, shared by all engines that use it. It protects the config."""
    return RUNTIME.of(text_config(model), ModelLock)


def text_config(model: PreTrainedModel) -> Any:
    """Return the config of a model's text decoder: a part of the config if the model also sees."""
    return model.config.get_text_config(decoder=True)


def text_parts(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield the parts with the text decoder's config, outermost first."""
    config = text_config(model)
    return (m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config)


def text_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the causal LM that computes text: the model, or a part that is one (Llama 4)."""
    return next((part for part in text_parts(model) if part.can_generate()), model)


@dataclass(slots=True)
class Clock:
    """Measure the stages of a request.

    Attributes
    ----------
    start
        Time of the call, in seconds on ``time.perf_counter``'s clock.
    timings_ms
        Milliseconds per stage. Time spent waiting for other requests, or computing for them, is a
        stage of its own, ``wait``, until the answer is decoded.
    stages
        Names, starts and ends of stages, on the same clock.
    """

    start: float = field(default_factory=lambda: time.perf_counter())
    timings_ms: dict[str, float] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    def begin(self) -> None:
        """Count the time since ``start`` as ``wait``: a thread started, or the caller idled."""
        self._waited_since(self.start)

    @contextmanager
    def stage(self, name: str, *, least_s: float = 0.0) -> Iterator[None]:
        """Add the time spent inside to a stage, if it exceeds ``least_s``."""
        start = time.perf_counter()
        lost = WAITED.seconds
        try:
            yield
        finally:
            end = time.perf_counter()
            # The stages before an answer's ``decode`` add up to the time to the first token.
            lost = (WAITED.seconds - lost) * (name != "decode")
            if end - start > least_s:
                self._add(name, end - start - lost)
                self.stages.append((name, start, end))
            if lost > 0:
                self._add("wait", lost)

    @contextmanager
    def waiting(self, turn: AbstractContextManager[T]) -> Iterator[T]:
        """Enter a context, and count the time until it is entered as ``wait``."""
        start = time.perf_counter()
        with turn as entered:
            self._waited_since(start)
            yield entered

    def _waited_since(self, start: float) -> None:
        waited = time.perf_counter() - start
        if waited > NOTABLE_S:
            self._add("wait", waited)
            self.stages.append(("wait", start, start + waited))

    def _add(self, name: str, seconds: float) -> None:
        self.timings_ms[name] = self.timings_ms.get(name, 0.0) + seconds * 1e3
