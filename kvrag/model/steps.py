"""Recorded forwards over a pool of slots, which requests share.

The host then launches a single graph instead of hundreds of kernels. A recording holds addresses
and shapes: it computes a fixed number of rows of any requests, whose ids, slots, positions and
first visible slots are read from the same tensors every time, over all slots of the pool. Spare
rows fill a spare slot that no request reads.
"""

from __future__ import annotations

# ruff: noqa: D102  (CausalLM documents the members of Steps)
import logging
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from kvrag.kv.buffers import pinned
from kvrag.kv.pool import KVPool
from kvrag.model.forward import BeforeWrite
from kvrag.model.lock import ModelLock
from kvrag.model.rows import KVBuffer, Rows

logger = logging.getLogger(__name__)
Out = TypeVar("Out")

MAX_TOGETHER = 64  # requests with next rows in the same forward, at most
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows that forwards are recorded for."""
MAX_ROWS = BUCKETS[-1]
LONGEST = MAX_ROWS - MAX_TOGETHER  # rows of a prompt in a forward: next rows of others still fit
OUTPUTS = (0, 1, 16, 64, 256, MAX_ROWS)  # numbers of rows with logits, likewise
MAX_OBSERVED = 1024  # rows that a shift observes

Recorder = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Records a function, and returns one that replays it on its input tensors' current values."""


def by_graph(compute: Callable[[], Out]) -> Callable[[], Out]:
    """Record a function as a CUDA graph, after a run on another stream.

    That run keeps allocations that libraries make at first use out of the graph. All graphs share
    their memory, so a result is valid until the next replay.
    """
    current, beside = (
        torch.cuda.current_stream(),
        torch.cuda.Stream(),  # type: ignore[no-untyped-call]
    )
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        compute()
    current.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate meanwhile.
    with torch.cuda.graph(graph, pool=_memory(), capture_error_mode="thread_local"):
        found = compute()

    def replay() -> Out:
        graph.replay()
        return found

    return replay


_memory = cache(torch.cuda.graph_pool_handle)


@runtime_checkable
class Shift(Protocol):
    """Change of a buffer's rows that can be recorded; ``ResidualShift`` documents the members."""

    @property
    def num_shifted(self) -> int: ...
    def fixed(self, start: int, places: torch.Tensor, *sizes: int) -> Shift: ...
    def tensors(self) -> Sequence[torch.Tensor]: ...
    def clear(self) -> None: ...
    def __call__(self, *given: Any) -> None: ...


class Piece(NamedTuple):
    """Rows of a request in a forward, with the outputs that they need.

    The fields are parameters of :meth:`CausalLM.forward`.
    """

    token_ids: torch.Tensor
    rows: Rows
    kv: KVBuffer
    logits: int = 0
    mass_rows: int = 0
    mass_layers: range | None = None
    before_write: BeforeWrite | None = None

    @property
    def shift(self) -> Shift | None:
        """The change of the buffer, if it can be recorded."""
        return self.before_write if isinstance(self.before_write, Shift) else None

    @property
    def is_recordable(self) -> bool:
        """Whether a recorded forward may compute these rows, in pieces if nothing prevents it."""
        is_single = self.mass_rows > 0 or self.before_write is not None
        return (
            self.kv.start is not None
            and self.before_write is self.shift
            and self.logits <= MAX_TOGETHER
            and not (is_single and len(self.token_ids) > LONGEST)
        )

    @property
    def start(self) -> int:
        """First slot of its request."""
        return self.kv.start or 0

    @property
    def size(self) -> int:
        """Share of a forward: mass takes one alone, and two shifts don't fit into one."""
        if self.mass_rows:
            return MAX_ROWS
        return max(len(self.token_ids), 0 if self.shift is None else MAX_ROWS // 2 + 1)

    def cut(self) -> list[Piece]:
        """Cut the rows into pieces that a recorded forward takes; the last has all outputs."""
        slots = self.rows.indices(torch.device("cpu"))
        stops = [*range((len(slots) - 1) % LONGEST + 1, len(slots) + 1, LONGEST)]
        runs = [slice(max(0, stop - LONGEST), stop) for stop in stops]
        pieces = [Piece(self.token_ids[run], Rows.at(slots[run]), self.kv) for run in runs[:-1]]
        last = self._replace(token_ids=self.token_ids[runs[-1]], rows=Rows.at(slots[runs[-1]]))
        return [*pieces, last]


class _Shape(NamedTuple):
    """Shape of a recording: numbers of rows, and what it computes.

    With ``waits``, every layer waits until the stored KV of its layer is stitched.
    """

    waits: bool
    rows: int
    logits: int
    mass_rows: int
    mass_layers: range | None
    observed: int
    shifted: int


Found = tuple[torch.Tensor, torch.Tensor | None]
"""Logits and mass, as :meth:`CausalLM.forward` returns them."""


class Steps(Protocol):
    """A model, as shared forwards use it; :class:`kvrag.model.lm.CausalLM` documents the members."""

    @property
    def device(self) -> torch.device: ...
    @property
    def lock(self) -> ModelLock: ...
    @property
    def can_share_forwards(self) -> bool: ...
    def step(self, rows: Sequence[Any]) -> Sequence[torch.Tensor]: ...
    def forward(self, *args: Any, **kwargs: Any) -> Found: ...
    def launch(self, piece: Piece) -> Found: ...


class _Recording(NamedTuple):
    """A recorded forward: its input tensors, its shift if any, and its replay."""

    inputs: torch.Tensor
    shifts: list[Shift]
    replay: Callable[[], Found]


class Recordings:
    """Recorded forwards of a model over a pool of slots, made at first use: one per shape.

    Parameters
    ----------
    model, pool
        Model, and the KV of its requests.
    record
        Function that records a forward.
    """

    def __init__(self, model: Steps, pool: KVPool, record: Recorder = by_graph) -> None:
        self.pool = pool
        self.seconds = 0.0
        self._model = model
        self._record = record
        self._made = dict[_Shape, _Recording]()
        self._functions = dict[object, tuple[list[torch.Tensor], Callable[[], torch.Tensor]]]()
        self._overlaps = True
        self._weights: object = None
        self._guard = threading.Lock()
        self._lent: weakref.ref[KVBuffer] | None = None
        self._events: Sequence[torch.cuda.Event] = ()
        if model.device.type == "cuda":
            self._events = [
                torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
                for _ in pool.layers
            ]

    def __len__(self) -> int:
        return len(self._made)

    def stats(self) -> dict[str, Any]:
        """Return the sizes of the pool, and the number and seconds of recordings."""
        pool = self.pool
        return {
            "slots": pool.num_slots,
            "taken": pool.num_taken,
            "bytes": pool.num_bytes,
            "recordings": len(self),
            "recording_s": self.seconds,
        }

    def buffer(self, run: range, capacity: int) -> KVBuffer:
        """Return the first ``capacity`` slots of a run as the buffer of a request."""
        kv = KVBuffer(self.pool.cleared(run, capacity), start=run.start)
        with self._guard:
            lent = None if self._lent is None else self._lent()
            # An event must not be recorded anew while a replay may wait for it.
            if lent is None or not lent.events:
                self._lent = weakref.ref(kv)
                kv.events = self._events
        return kv

    def hold_for(self, weights: object) -> None:
        """Drop all recordings unless they were made with these weights (a fingerprint)."""
        if weights != self._weights:
            with self._model.lock:
                self._made.clear()
                self._weights = weights

    def forward(self, whole: Piece) -> Found:
        """Compute rows of a request, together with rows of other requests."""
        for piece in whole.cut():
            found = self._model.lock.step(piece, self.compute, limit=MAX_ROWS, size=piece.size)
        return found

    def compute(self, pieces: Sequence[Piece]) -> list[Found]:
        """Compute the rows of several requests in a single replay."""
        arriving = [piece.kv for piece in pieces if piece.kv.arrivals]
        waits = self._overlaps and bool(arriving) and all(kv.events for kv in arriving)
        for kv in () if waits else arriving:
            kv.wait_for(-1)
        shape, places = _placed(pieces, waits)
        spare = self.pool.num_slots
        shifts = [
            partial(piece.shift.fixed, piece.start, place, shape.observed, shape.shifted, spare)
            for piece, place in zip(pieces, places, strict=True)
            if piece.shift is not None
        ]
        if shape not in self._made:
            self._made[shape] = self._recorded(shape, [make() for make in shifts])
        recording = self._made[shape]
        inputs = pinned(_inputs(shape, pieces, places, spare), self._model.device)
        recording.inputs.copy_(inputs, non_blocking=True)
        for shift, new in zip(recording.shifts, shifts, strict=True):
            for own, given in zip(shift.tensors(), new().tensors(), strict=True):
                own.copy_(given)
        logits, mass = recording.replay()
        counts = [piece.logits for piece in pieces]
        if shape.logits:
            logits = logits[0, shape.logits - sum(counts) :].clone()
        if mass is not None:  # of a single piece
            mass = mass[pieces[0].start :][: pieces[0].rows.stop].clone()
        return [(own[None], mass) for own in torch.split(logits, counts)]

    def _recorded(self, shape: _Shape, shifts: list[Shift]) -> _Recording:
        """Record a shape, with rows of no request and shifts by nothing."""
        stop = self.pool.num_slots + 1
        inputs = _inputs(shape, (), (), self.pool.num_slots).to(self._model.device)
        kv = KVBuffer(self.pool.layers)
        kv.arrivals = self._events if shape.waits else ()
        for shift in shifts:
            shift.clear()

        def compute() -> Found:
            ids, slots, positions, first = inputs
            rows = Rows(slots, stop, positions, first, is_fixed=True)
            outputs = shape.logits, shape.mass_rows, shape.mass_layers
            return self._model.launch(Piece(ids, rows, kv, *outputs, next(iter(shifts), None)))

        return _Recording(inputs, shifts, self._replay_of(compute, waits=shape.waits))

    def run(self, function: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        """Call a function by a recording of it, which is made for given tensors of the same shapes.

        The function must compute the same operations for any values, and may change its arguments.
        """
        key = function, *[x.shape for x in given]
        with self._model.lock:
            if key not in self._functions:
                inputs = [x.clone() for x in given]
                self._functions[key] = inputs, self._replay_of(partial(function, *inputs))
            inputs, replay = self._functions[key]
            for own, x in zip(inputs, given, strict=True):
                own.copy_(x)
            return replay().clone()

    def _replay_of(self, compute: Callable[[], Out], *, waits: bool = False) -> Callable[[], Out]:
        """Record a function; if that fails, return the function, which is then launched."""
        start = time.perf_counter()
        try:
            return self._record(compute)
        except RuntimeError as error:  # an operation can't be recorded, or memory is short
            logger.warning(
                "a forward of this model can't be recorded (%s); it is launched, kernel by kernel",
                error,
            )
            self._overlaps = self._overlaps and not waits
            return compute
        finally:
            self.seconds += time.perf_counter() - start


def _at_least(count: int, sizes: Sequence[int] = BUCKETS) -> int:
    return sizes[bisect_left(sizes, count)]


def _placed(pieces: Sequence[Piece], waits: bool) -> tuple[_Shape, list[torch.Tensor]]:
    """Return the shape of a forward of these pieces, and the place of every row in it.

    Rows with outputs come last, and spare rows before them: they add no mass.
    """
    shift = next((piece.shift for piece in pieces if piece.shift is not None), None)
    last = [max(piece.logits, piece.mass_rows) for piece in pieces]
    first = [len(piece.token_ids) - count for piece, count in zip(pieces, last, strict=True)]
    mass_rows = sum([piece.mass_rows for piece in pieces])
    mass_rows = mass_rows and min(_at_least(mass_rows), MAX_ROWS - sum(first))
    logits = _at_least(sum([piece.logits for piece in pieces]), OUTPUTS)
    rows = _at_least(max(sum(first) + max(sum(last), mass_rows), logits))
    shape = _Shape(
        waits,
        rows,
        logits,
        mass_rows,
        pieces[0].mass_layers,
        min(rows, MAX_OBSERVED) if shift else 0,
        1 << max(10, (shift.num_shifted - 1).bit_length()) if shift else 0,
    )
    places = list[torch.Tensor]()
    front, back = 0, rows - sum(last)
    for num_first, num_last in zip(first, last, strict=True):
        places.append(
            torch.cat([torch.arange(front, front + num_first), torch.arange(back, back + num_last)])
        )
        front += num_first
        back += num_last
    return shape, places


def _inputs(
    shape: _Shape, pieces: Sequence[Piece], places: Sequence[torch.Tensor], spare: int
) -> torch.Tensor:
    """Return ids, slots, positions and first visible slots, int64 ``(4, rows)``, on the host.

    A spare row is in the slot ``spare`` and sees it alone.
    """
    inputs = torch.tensor([[0], [spare], [0], [spare]]).repeat(1, shape.rows)
    for piece, place in zip(pieces, places, strict=True):
        positions = piece.rows.indices(inputs.device)
        start = torch.tensor(piece.start).expand(len(place))
        own = [piece.token_ids.cpu(), positions + start, positions, start]
        inputs[:, place] = torch.stack(own)
    return inputs
