"""Admit requests, and run as many as their KV has room for, first come, first served.

Before it computes anything, a request reserves the KV of its prompt and of its longest possible
answer. So a running request never runs out of room, and no request is preempted. Running requests
share the model: see :mod:`kvrag.model.lock`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvrag.blend.prefill import FindHistory, capacity_of, reason_against_reuse
from kvrag.blend.slide import cannot_slide
from kvrag.config import DEFAULT_MAX_NEW_TOKENS
from kvrag.errors import ContextLengthError
from kvrag.generate.request import Request
from kvrag.kv.pool import KVPool
from kvrag.model import CausalLM
from kvrag.model.lm import LoadedModel
from kvrag.model.plain import PlainLM
from kvrag.model.steps import pool_of
from kvrag.prompt.plan import Plan
from kvrag.runtime import Cancel, host_memory
from kvrag.types import Missed, Mode

MAX_RUNNING = 64  # running requests on a device; as many decode in a forward
SHARE = 0.5  # of a device's memory, less the weights, for the KV of running requests
UNKNOWN = 0.125  # of that share, for a request of a model that keeps its KV in its own cache
# Without max_new_tokens, an answer is cut so that prompt and answer stay within the reuse window
# (longrope), if at least this many tokens are left for it.
WORTH_REUSE = 256
CANCEL_POLL_S = 0.1  # interval at which a waiting thread checks its cancel event


@dataclass(frozen=True, slots=True)
class Admitted:
    """A planned request that may run, and what it may use.

    Attributes
    ----------
    plan
        Its plan, without reuse if prompt and answer rule it out.
    max_new_tokens, num_tokens
        Most tokens of the answer, and the number of tokens of the prompt.
    slides
        Whether rows leave the context window.
    reason
        Why no rows of earlier requests are used, if so.
    find_history
        Finds the rows of earlier requests that the prompt begins with; ``None``: none are kept.
    missed
        Chunks without KV, to be stored after the answer.
    space, erasures
        Key of the radix tree that may keep this KV, if any, and the number of erasures before.
    """

    request: Request
    plan: Plan
    max_new_tokens: int
    num_tokens: int
    slides: bool
    reason: str | None
    find_history: FindHistory | None
    missed: Missed | None
    space: Hashable
    erasures: int

    @property
    def mode(self) -> Mode:
        """Mode of reuse that is left."""
        return "full" if self.reason else self.request.mode


def length_of(lm: CausalLM | PlainLM, num_tokens: int, given: int | None, *, slides: bool) -> int:
    """Return the token limit of an answer: ``given``, else the model's default up to a cap.

    The cap is the context window, or the reuse window where it leaves :data:`WORTH_REUSE`
    tokens. A window that slides sets no cap. Raises ``ContextLengthError`` if prompt and answer
    exceed a window that doesn't slide.
    """
    window = lm.context_window
    reason = cannot_slide(lm) if slides else ""
    limit = given
    if limit is None:
        limit = int(lm.model.generation_config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS)
        cap = window
        if lm.refusal is None and num_tokens + WORTH_REUSE <= lm.reuse_window:
            cap = lm.reuse_window
        if reason is not None:
            limit = max(1, min(limit, cap - num_tokens))
    if num_tokens + limit > window and reason is not None:
        shown = f" and can't slide ({reason})" if reason else ""
        error = ContextLengthError(
            f"the prompt has {num_tokens} tokens and the answer may take {limit}, "
            f"which exceeds the model's context window of {window}{shown}; "
            "retrieve fewer chunks, or allow the answer fewer tokens"
        )
        error.room = max(0, window - num_tokens)
        raise error
    return limit


def fitted(lm: CausalLM | PlainLM, plan: Plan, request: Request, total: int) -> tuple[Plan, bool]:
    """Return the plan, and whether the window slides.

    The plan has no reuse if prompt and answer, ``total`` tokens together, rule it out.
    """
    window = lm.context_window
    slides = request.slides and total > window and cannot_slide(lm) is None
    reason = None
    if slides and (num_tokens := len(plan.token_ids)) > window:
        reason = f"the prompt's {num_tokens} tokens exceed the context window of {window}"
    elif request.mode != "full":
        reason = reason_against_reuse(lm, min(total, window) if slides else total)
    return plan if reason is None else plan.without_reuse(reason), slides


def missed_of(request: Request, plan: Plan, erasures: int) -> Missed | None:
    """Return the registered and explicit chunks of a prompt without KV; never live text."""
    if request.mode == "full" or not plan.missed:
        return None
    # Chunks are encoded behind a prefix of the application, never behind a question.
    head = plan.pieces[0].ids
    known = (text for text in request.prefixes if plan.encoder.head_ids(text) == head)
    return Missed(tuple(plan.missed), next(known, request.prefixes[0]), request.namespace, erasures)


class Load(NamedTuple):
    """Numbers of running and waiting requests, and the bytes reserved by running requests."""

    running: int
    waiting: int
    kv_bytes: int


class Scheduler:
    """Scheduler of a device's requests.

    At most ``max_running`` requests run, and their KV takes at most ``max_bytes`` together, or what
    a pool holds. A request that needs more waits until no other runs.
    """

    def __init__(self, max_running: int, max_bytes: int) -> None:
        self._max_running = max_running
        self.max_bytes = max_bytes
        self._changed = threading.Condition(threading.Lock())
        self._waiting = deque[object]()
        self._running = dict[object, int]()

    @property
    def load(self) -> Load:
        """Load of the device now."""
        with self._changed:
            return Load(len(self._running), len(self._waiting), sum(self._running.values()))

    @contextmanager
    def reservation(
        self,
        num_bytes: int,
        cancel: Cancel = None,
        *,
        pool: KVPool | None = None,
        slots: int = 0,
    ) -> Iterator[range | None]:
        """Reserve ``num_bytes`` until the context ends; wait for room first.

        With a ``pool``, so many of its ``slots`` are taken instead. Returns the run, or ``None``
        for a request that starts alone because the pool is smaller. Raises ``CancelledError`` if
        ``cancel`` is set during the wait.
        """
        mine = object()
        run: range | None = None

        def is_next() -> bool:
            nonlocal run
            if self._waiting[0] is not mine or len(self._running) >= self._max_running:
                return False
            if pool is None:
                fits = sum(self._running.values()) + num_bytes <= self.max_bytes
            else:
                run = pool.take(slots)
                fits = run is not None
            return fits or not self._running

        try:
            with self._changed:
                self._waiting.append(mine)
                try:
                    while not self._changed.wait_for(is_next, CANCEL_POLL_S):
                        if cancel is not None and cancel.is_set():
                            raise CancelledError
                    self._running[mine] = num_bytes
                finally:
                    self._waiting.remove(mine)
                    self._changed.notify_all()
            yield run
        finally:
            with self._changed:
                if pool is not None and run is not None:
                    pool.give_back(run)
                self._running.pop(mine, None)
                self._changed.notify_all()


_schedulers = dict[torch.device, Scheduler]()
_weights = WeakKeyDictionary[PreTrainedModel, tuple[torch.device, int]]()
_guard = threading.RLock()


def scheduler_of(loaded: LoadedModel) -> Scheduler:
    """Return the scheduler of a model's device, shared by all engines of this process."""
    device = loaded.lm.device
    model = loaded.lm.model
    with _guard:
        if model not in _weights or device not in _schedulers:
            _weights[model] = device, model.get_memory_footprint()
            room = _room(device, sum(size for where, size in _weights.values() if where == device))
            _schedulers.setdefault(device, Scheduler(MAX_RUNNING, room)).max_bytes = room
        return _schedulers[device]


def room_for(
    loaded: LoadedModel, admitted: Admitted, cancel: Cancel
) -> AbstractContextManager[range | None]:
    """Reserve the KV of a request: its bytes, and slots of the pool if there is one."""
    lm = loaded.lm
    size = admitted.num_tokens, admitted.max_new_tokens
    pool = None
    if lm.refusal is None and (lm.recorded or lm.device.type == "cuda"):
        pool = pool_of(lm)
        if lm.recorded is not None:  # the plan has just looked at the weights
            lm.recorded.hold_for((loaded.identity.portable, loaded.identity.seen.notes))
    return scheduler_of(loaded).reservation(
        kv_bytes(loaded, min(sum(size), lm.context_window)),
        cancel,
        pool=pool,
        slots=capacity_of(lm, *size, admitted.slides),
    )


def pool_stats(loaded: LoadedModel | None) -> dict[str, dict[str, int]]:
    """Return the statistics of a model's pool, as ``pool``, if forwards are recorded."""
    recorded = getattr(loaded and loaded.lm, "recorded", None)
    return {"pool": recorded.stats()} if recorded else {}


def kv_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Return the bytes to reserve for a request of ``num_tokens``, prompt and answer."""
    num_bytes = loaded.lm.kv_bytes_per_token
    if num_bytes is None:
        return int(UNKNOWN * scheduler_of(loaded).max_bytes)
    return num_tokens * num_bytes


def _room(device: torch.device, taken: int) -> int:
    """Return the bytes of a device's memory that KV may take, ``taken`` by weights excluded.

    For a device other than CUDA, the host's memory counts.
    """
    is_cuda = device.type == "cuda"
    total: int = torch.cuda.get_device_properties(device).total_memory if is_cuda else host_memory()
    return int(SHARE * max(0, total - taken))
