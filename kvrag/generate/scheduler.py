"""Which requests run: as many as their KV has room for, first come, first served.

A request reserves the KV of its prompt and of the longest answer that it may give before it computes anything, so nothing that runs is ever
out of room, and nothing has to be preempted. Those that run share the model: see :mod:`kvrag.model.turns`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvrag.model.lm import LoadedModel
from kvrag.model.plain import PlainLM
from kvrag.store import host_memory
from kvrag.threads import fork_lock, renew_after_fork

MAX_RUNNING = 64  # requests on a device; as many decode in one forward
SHARE = 0.5  # of a device's memory beside the weights that KV of running requests may take
UNKNOWN = 0.125  # of that, for a request of a model that keeps its KV in a cache of its own
CANCEL_POLL_S = 0.1  # between two looks at the cancel event of a thread that waits


class Load(NamedTuple):
    """Requests that run and wait, and bytes that those that run have reserved."""

    running: int
    waiting: int
    kv_bytes: int


class Scheduler:
    """Lets requests of a device run as long as ``max_bytes`` are enough for their KV together, and at most ``max_running``.

    One that needs more than ``max_bytes`` runs alone.
    """

    def __init__(self, max_running: int, max_bytes: int) -> None:
        self._max_running, self.max_bytes = max_running, max_bytes
        self._at_fork_reinit()
        renew_after_fork(self)

    def _at_fork_reinit(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._waiting, self._running = deque[object](), dict[object, int]()

    @property
    def load(self) -> Load:
        """What runs and waits."""
        with self._changed:
            return Load(len(self._running), len(self._waiting), sum(self._running.values()))

    @property
    def is_idle(self) -> bool:
        """Whether no request runs."""
        return not self._running

    @contextmanager
    def turn(self, num_bytes: int, cancel: threading.Event | None = None) -> Iterator[None]:
        """Wait for room for so many bytes, and keep it until the context ends; raises ``CancelledError`` if ``cancel`` is set before."""
        changed, waiting, running, mine = (
            self._changed,
            self._waiting,
            self._running,
            object(),
        )  # a fork replaces them

        def is_next() -> bool:
            used = sum(running.values())
            fits = len(running) < self._max_running and used + num_bytes <= self.max_bytes
            return waiting[0] is mine and (fits or not running)

        try:
            with changed:
                waiting.append(mine)
                try:
                    while not changed.wait_for(is_next, CANCEL_POLL_S):
                        if cancel is not None and cancel.is_set():
                            raise CancelledError
                    running[mine] = num_bytes
                finally:
                    waiting.remove(mine)
                    changed.notify_all()
            yield
        finally:
            with changed:
                running.pop(mine, None)
                changed.notify_all()


_schedulers: dict[torch.device, Scheduler] = {}
_weights: WeakKeyDictionary[PreTrainedModel, tuple[torch.device, int]] = WeakKeyDictionary()
_guard = fork_lock()


def scheduler_of(loaded: LoadedModel) -> Scheduler:
    """Return the scheduler of a model's device, which all engines of this process share."""
    device, model = loaded.lm.device, loaded.lm.model
    with _guard:
        if model not in _weights or device not in _schedulers:
            _weights[model] = device, model.get_memory_footprint()
            room = _room(device, sum(size for where, size in _weights.values() if where == device))
            _schedulers.setdefault(device, Scheduler(MAX_RUNNING, room)).max_bytes = room
        return _schedulers[device]


def kv_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Return what a request of so many tokens, prompt and answer, has to reserve."""
    if isinstance(loaded.lm, PlainLM):
        return int(UNKNOWN * scheduler_of(loaded).max_bytes)
    num_bytes: int = num_tokens * loaded.lm.kv_bytes_per_token
    return num_bytes


def _room(device: torch.device, taken: int) -> int:
    """Return the bytes of a device's memory that KV may take; where nobody knows how much it has, those of the host's."""
    is_cuda = device.type == "cuda"
    total: int = torch.cuda.get_device_properties(device).total_memory if is_cuda else host_memory()
    return int(SHARE * max(0, total - taken))
