"""Recorded forwards over a pool of slots, which requests share.

The host then launches a single graph instead of hundreds of kernels. A recording holds addresses
and shapes: it computes a fixed number of rows of any requests, whose ids, slots, positions and
first visible slots are read from the same tensors every time, over all slots of the pool. Spare
rows fill a spare slot that no request reads.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from kvrag.errors import is_out_of_memory
from kvrag.kv.buffers import pinned
from kvrag.kv.pool import ALIGNED, KVPool, pool_share
from kvrag.model.rows import KVBuffer, Rows
from kvrag.model.shared import MAX_ROWS, Form, Found, Portion, inputs_of, placed

if TYPE_CHECKING:
    from kvrag.model.lm import CausalLM

logger = logging.getLogger(__name__)
MOST = 64  # recordings that are kept: each has tensors of its own for its inputs
LEAST = 4096  # slots of a pool
Out = TypeVar("Out")

# Records a function, and returns one that replays it on its input tensors' current values.
Recorder = Callable[[Callable[[], Any]], Callable[[], Any]]


_capturing = threading.Lock()  # torch allows one capture in the process


class Graphs:
    """Recorder of CUDA graphs on a device.

    Its graphs share their memory, so a result is valid until the next replay of any of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.cuda.MemPool | None = None

    def __call__(self, compute: Callable[[], Out]) -> Callable[[], Out]:
        """Record a function after a run, which keeps what libraries allocate first out of it.

        Raises ``RuntimeError`` if an operation can't be recorded.
        """
        with _capturing, torch.cuda.device(self._device):
            memory = self._memory = self._memory or torch.cuda.MemPool()
            beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            collects = gc.isenabled()
            try:
                # Within the stream: a failed capture leaves torch's own streams switched.
                with torch.cuda.stream(beside):
                    compute()
                    gc.disable()  # a finalizer may ask the driver for what a capture forbids
                    with torch.cuda.graph(
                        graph,
                        pool=cast(Any, memory.id),
                        stream=beside,
                        capture_error_mode="thread_local",  # other threads may allocate meanwhile
                    ):
                        found = compute()
            except BaseException:
                with suppress(Exception):
                    torch._C._cuda_endAllocateToPool(self._device.index or 0, memory.id)
                self._memory = None
                raise
            finally:
                if collects:
                    gc.enable()
                torch.cuda.current_stream().wait_stream(beside)

        def replay() -> Out:
            with torch.cuda.device(self._device):
                graph.replay()
            return found

        return replay


class _Recording(NamedTuple):
    """A recorded forward: its input tensors, its shift if any, and its replay."""

    inputs: Tensor
    shifts: list[Any]
    replay: Callable[[], Found]


class Recordings:
    """Recorded forwards of a model over a pool of slots, made at first use: one per shape.

    Parameters
    ----------
    model, num_slots
        Model, and the number of slots for the KV of its requests.
    record
        Recorder of functions, by default :class:`Graphs`.
    """

    def __init__(self, model: CausalLM, num_slots: int, record: Recorder | None = None) -> None:
        self.pool = KVPool(model.shapes, num_slots, dtype=model.dtype, device=model.device)
        model.rotary(min(num_slots, model.reuse_window))  # the tables that recordings read
        self.seconds = 0.0
        self._model = model
        self._record = record or Graphs(model.device)
        self._made = dict[Form, _Recording]()
        self._functions = dict[object, tuple[list[Tensor], Callable[[], Tensor]]]()
        self._refused = set[tuple[Any, ...]]()
        self._overlaps = True
        self._weights: object = None
        self._guard = threading.Lock()
        self._lent: Callable[[], KVBuffer | None] = lambda: None
        self._events: Sequence[torch.cuda.Event] = ()
        if model.device.type == "cuda":
            self._events = [
                torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
                for _ in model.shapes
            ]

    def stats(self) -> dict[str, int]:
        """Return the sizes of the pool, and the number and milliseconds of recordings."""
        pool = self.pool
        return {
            "slots": pool.num_slots,
            "taken": pool.num_taken,
            "bytes": pool.num_bytes,
            "recordings": len(self._made),
            "recording_ms": round(1e3 * self.seconds),
        }

    def buffer(self, run: range, capacity: int) -> KVBuffer:
        """Return the first ``capacity`` slots of a run as the buffer of a request."""
        kv = KVBuffer(self.pool.cleared(run, capacity), start=run.start)
        with self._guard:
            lent = self._lent()
            # An event must not be recorded anew while a replay may wait for it.
            if lent is None or not lent.events:
                self._lent = weakref.ref(kv)
                kv.events = self._events
        return kv

    def hold_for(self, weights: object) -> None:
        """Drop all recordings unless they were made with weights of this content and place."""
        if weights != self._weights:
            with self._model.lock:
                self._made.clear()
                self._functions.clear()
                self._weights = weights

    def forward(self, whole: Portion) -> Found:
        """Compute rows of a request, together with rows of other requests."""
        for piece in whole.cut():
            found = self._model.lock.step(piece, self.compute, limit=MAX_ROWS, size=piece.size)
        return found

    def compute(self, given: Sequence[Portion]) -> list[Found]:
        """Compute the rows of several requests in a single replay."""
        # Neighbours in the pool come together, so that a tile of rows reads few slots.
        pieces = sorted(given, key=attrgetter("start"))
        shape, places = placed(pieces, self._wait(pieces))
        spare = self.pool.num_slots
        shifts = [
            partial(piece.shift.fixed, piece.start, place, shape.observed, shape.shifted, spare)
            for piece, place in zip(pieces, places, strict=True)
            if piece.shift is not None
        ]
        recording = self._recording(shape, shifts)
        inputs = inputs_of(shape, pieces, places, spare)
        recording.inputs.copy_(pinned(inputs, self._model.device), non_blocking=True)
        for shift, new in zip(recording.shifts, shifts, strict=True):
            for own, x in zip(shift.tensors(), new().tensors(), strict=True):
                own.copy_(x)
        logits, mass = recording.replay()
        counts = [each.logits for each in pieces]
        if shape.logits:
            logits = logits[0, shape.logits - sum(counts) :].clone()
        if mass is not None:  # of a single piece
            mass = mass[pieces[0].start :][: pieces[0].rows.stop].clone()
        found = dict(zip(map(id, pieces), torch.split(logits, counts), strict=True))
        return [(found[id(piece)][None], mass) for piece in given]

    def _wait(self, pieces: Sequence[Portion]) -> bool:
        """Return whether the recording itself can wait for stored KV; otherwise wait for it."""
        arriving = [piece.kv for piece in pieces if piece.kv.arrivals]
        if arriving and self._overlaps and all(kv.events for kv in arriving):
            return True
        for kv in arriving:
            kv.wait_for(-1)
        return False

    def _recording(self, shape: Form, makes: Sequence[Callable[[], Any]]) -> _Recording:
        """Return the recording of a form, and keep it as the latest of the :data:`MOST` latest."""
        known = self._made.pop(shape, None) or self._recorded(shape, makes)
        self._made[shape] = known
        if len(self._made) > MOST:
            del self._made[next(iter(self._made))]
        return known

    def _recorded(self, shape: Form, makes: Sequence[Callable[[], Any]]) -> _Recording:
        """Record a form, with rows of no request and shifts by nothing."""
        shifts = [make() for make in makes]
        inputs = inputs_of(shape, (), (), self.pool.num_slots).to(self._model.device)
        kv = KVBuffer(self.pool.layers, start=0)
        kv.arrivals = self._events if shape.waits else ()
        for shift in shifts:
            shift.clear()

        def compute() -> Found:
            ids, slots, positions, first = inputs
            return self._model.launch(
                Portion(
                    ids,
                    Rows(slots, self.pool.num_slots + 1, positions, first, is_fixed=True),
                    kv,
                    shape.logits,
                    shape.mass_rows,
                    shape.mass_layers,
                    next(iter(shifts), None),
                )
            )

        kind = shape.waits, shape.mass_rows > 0, shape.shifted > 0
        return _Recording(inputs, shifts, self._replay_of(compute, kind))

    def run(self, function: Callable[..., Tensor], *given: Tensor, **constants: int) -> Tensor:
        """Call a function by a recording of it, made for tensors of these shapes and constants.

        The function must compute the same operations for any values, and may change its arguments.
        """
        key = function, *constants.values(), *[x.shape for x in given]
        with self._model.lock:
            if key not in self._functions:
                inputs = [x.clone() for x in given]
                compute = partial(function, *inputs, **constants)
                self._functions[key] = inputs, self._replay_of(compute, key)
            inputs, replay = self._functions[key]
            for own, x in zip(inputs, given, strict=True):
                own.copy_(x)
            return replay().clone()

    def _replay_of(self, compute: Callable[[], Out], kind: tuple[Any, ...]) -> Callable[[], Out]:
        """Record a function; if that fails, return it, which is then launched.

        Its kind isn't tried again, unless memory was short.
        """
        start = time.perf_counter()
        try:
            if kind not in self._refused:
                return self._record(compute)
        except RuntimeError as error:
            logger.warning(
                "a forward of this model can't be recorded (%s); it is launched, kernel by kernel",
                error,
            )
            if not is_out_of_memory(error):
                self._refused.add(kind)
                self._overlaps &= kind[0] is not True
        finally:
            self.seconds += time.perf_counter() - start
        return compute


def pool_of(model: CausalLM) -> KVPool | None:
    """Return the pool of a model whose forwards are recorded; it is allocated at the first call.

    Raises ``ConfigError`` if ``KVRAG_POOL_SHARE`` is no share.
    """
    if model.records is None:
        with model.lock:
            if model.records is None:  # still
                model.records = _can_record(model) and _is_recorded(model)
    return None if model.recorded is None else model.recorded.pool


def _is_recorded(model: CausalLM) -> bool:
    """Record a model's forwards from now on, if there is memory; return whether there is."""
    torch.cuda.empty_cache()  # what torch keeps for itself counts as taken
    free, _ = torch.cuda.mem_get_info(model.device)
    num_slots = int(pool_share() * free) // model.kv_bytes_per_token // ALIGNED * ALIGNED
    try:
        if num_slots < LEAST:
            raise RuntimeError(f"there is room for {num_slots:,} tokens")
        model.record(num_slots)
    except RuntimeError as error:
        logger.warning("no pool of KV can be allocated (%s)", error)
    return model.recorded is not None


def _can_record(model: CausalLM) -> bool:
    """Whether forwards may be recorded: on CUDA, where a kernel attends in all layers."""
    if model.device.type != "cuda" or not model.can_share_forwards or not pool_share():
        return False
    import kvrag_kernels

    return all(
        not trait.is_latent
        and trait.attended.key_dim == trait.attended.value_dim
        and kvrag_kernels.tier(trait.attended.key_dim, model.dtype, model.device) != "torch"
        for trait in model.traits
    )


@contextmanager
def scratch(model: CausalLM, capacity: int) -> Iterator[KVBuffer]:
    """Lend KV for forwards that belong to no request: in the pool, if it has room."""
    pool = pool_of(model)
    run = None if pool is None else pool.take(capacity)
    try:
        yield model.buffer(capacity, run=run)
    finally:
        if pool is not None and run is not None:
            pool.give_back(run)
