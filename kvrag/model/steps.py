"""Forwards that requests share: recorded over a pool of slots on CUDA, decode steps elsewhere.

The host then launches a single graph instead of hundreds of kernels. A recording holds addresses
and shapes: it computes a fixed number of rows of any requests, whose ids, slots, positions and
first visible slots are read from the same tensors every time, over all slots of the pool. Spare
rows fill a spare slot that no request reads.
"""

from __future__ import annotations

# ruff: noqa: D102  (CausalLM documents the members of Steps)
import logging
import os
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from kvrag.errors import ConfigError
from kvrag.model.attention import fused_attention, ragged_attention
from kvrag.model.forward import Attentions, BeforeWrite, Forward, Pair
from kvrag.model.lock import ModelLock
from kvrag.model.rows import EVERYTHING, KVBuffer, LayerShape, Limits, Rows

logger = logging.getLogger(__name__)
Out = TypeVar("Out")

MAX_TOGETHER = 64  # requests with next rows in the same forward, at most
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows that forwards are recorded for."""
MAX_ROWS = BUCKETS[-1]
LONGEST = MAX_ROWS - MAX_TOGETHER  # rows of a prompt in a forward: next rows of others still fit
OUTPUTS = (0, 1, 16, 64, 256, MAX_ROWS)  # numbers of rows with logits, likewise
MAX_OBSERVED = 1024  # rows that a shift observes
ALIGNED = 128  # slots: no tile of the kernels' keys holds rows of two requests

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


def pool_share() -> float:
    """Return the share of a device's free memory that a pool takes: ``KVRAG_POOL_SHARE``.

    Raises ``ConfigError`` if it is no number from 0 to 1.
    """
    given = os.environ.get("KVRAG_POOL_SHARE", "0.5")
    with suppress(ValueError):
        if 0 <= (share := float(given)) <= 1:
            return share
    raise ConfigError(
        f"KVRAG_POOL_SHARE is {given!r}; set it to a number from 0 (no pool) to 1, the share of the "
        "device's free memory that holds the KV of running requests"
    )


class KVPool:
    """KV of all running requests on a device: slots of all layers, allocated once.

    A request holds a run of neighbouring slots. The slot behind the last is spare.

    Parameters
    ----------
    shapes
        Shape of the KV per layer.
    num_slots
        Slots for requests.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        sides = [
            (1, s.num_heads, num_slots + 1, dim) for s in shapes for dim in (s.key_dim, s.value_dim)
        ]
        self._stacks = {
            side: torch.zeros((sides.count(side), *side), dtype=dtype, device=device)
            for side in set(sides)
        }
        each = {side: iter(stack) for side, stack in self._stacks.items()}
        tensors = [next(each[side]) for side in sides]
        self.kv = KVBuffer(list(zip(tensors[::2], tensors[1::2], strict=True)))
        self.events: Sequence[torch.cuda.Event] = ()
        if device.type == "cuda":
            self.events = [
                torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
                for _ in shapes
            ]
        self._lent: KVBuffer | None = None
        self._guard = threading.Lock()
        self._runs = list[tuple[int, int]]()

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's memory."""
        return sum([stack.nbytes for stack in self._stacks.values()])

    @property
    def num_taken(self) -> int:
        """Number of slots that requests hold."""
        with self._guard:
            return sum([stop - start for start, stop in self._runs])

    def take(self, count: int) -> range | None:
        """Take a run of at least ``count`` free slots; ``None`` if no free run is as long."""
        size = -(-count // ALIGNED) * ALIGNED
        start = 0
        with self._guard:
            for begin, stop in [*self._runs, (self.num_slots, self.num_slots)]:
                if begin - start >= size:
                    insort(self._runs, (start, start + size))
                    return range(start, start + size)
                start = stop
        return None

    def give_back(self, run: range) -> None:
        """Free the slots of a run."""
        with self._guard:
            self._runs.remove((run.start, run.stop))
            if self._lent is not None and self._lent.start == run.start:
                self._lent = None

    def buffer(self, run: range, capacity: int) -> KVBuffer:
        """Return the first ``capacity`` slots of a run as the buffer of a request.

        A hidden key weighs nothing only if it is finite, so rows of earlier requests are cleared.
        """
        own = slice(run.start, run.start + capacity)
        for stack in self._stacks.values():
            stack[..., own, :] = 0
        pairs = [(keys[:, :, own], values[:, :, own]) for keys, values in self.kv.layers]
        kv = KVBuffer(pairs, None, run.start)
        # Recordings wait for these events, so they must not be recorded anew before a replay ends.
        with self._guard:
            if self._lent is None or not self._lent.events:
                self._lent = kv
                kv.events = self.events
        return kv


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
    def step(self, rows: Sequence[NextRow]) -> Sequence[torch.Tensor]: ...
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
        recording.inputs.copy_(_inputs(shape, pieces, places, spare), non_blocking=True)
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
        kv = KVBuffer(self.pool.kv.layers)
        kv.arrivals = self.pool.events if shape.waits else ()
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


class NextRow(NamedTuple):
    """Next row of a request: its token, int64 ``(1,)``, its buffer and its position.

    ``alone`` computes its logits without other requests.
    """

    token_id: torch.Tensor
    kv: KVBuffer
    position: int
    alone: Callable[[], torch.Tensor]


class NextRows(Forward):
    """Decode step of several requests: row ``i`` is the next row of request ``i``.

    Every request has a buffer of its own, and a row sees only its request's rows. So the attention
    of a layer is computed request by request; everything else is a single pass over the weights.

    Parameters
    ----------
    requests
        Buffer and position of every row.
    attentions
        Attention modules of the model.
    """

    def __init__(self, requests: Sequence[tuple[KVBuffer, int]], attentions: Attentions) -> None:
        first, position = requests[0]
        super().__init__(
            Rows.span(position, position + 1), first, attentions, outputs=len(requests)
        )
        self.requests = requests
        self.positions = torch.tensor(
            [position for _, position in requests], device=attentions.device
        )
        self._each = [
            Limits(torch.tensor([p], device=attentions.device), p + 1) for _, p in requests
        ]
        self._layer = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write every fresh row into its request's buffer, where :meth:`attend` reads it."""
        self._layer = layer_idx
        pair = self._attentions.in_order(layer_idx, (key_states, value_states))
        for side, fresh in enumerate(pair):
            for (kv, position), row in zip(self.requests, fresh.unbind(2), strict=True):
                kv.layers[layer_idx][side].select(2, position).copy_(row)
        if layer_idx not in self._attentions.latent:
            return key_states, value_states
        # The module makes keys and values of the latents of all requests at once.
        keys, values = (
            torch.cat(side, dim=2) for side in zip(*self._cached(layer_idx), strict=True)
        )
        return self._attentions.in_order(layer_idx, (keys, values))

    def _cached(self, layer: int) -> list[Pair]:
        """Return the keys and values of every request in a layer."""
        found = []
        for kv, position in self.requests:
            keys, values = kv.layers[layer]
            found.append((keys[:, :, : position + 1], values[:, :, : position + 1]))
        return found

    def attend(
        self,
        module: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attend request by request.

        In memory, the outputs lie row by row, as the model reads them.
        """
        reach = self.reach.get(module, EVERYTHING)
        layer = self.reads.get(module, self._layer)
        outs = []
        is_plain = scores["softcap"] is None and scores["sinks"] is None
        own = self._cached(layer)
        if layer in self._attentions.latent:
            sizes = [limits.num_keys for limits in self._each]
            split = (torch.split(x, sizes, dim=2) for x in (keys, values))
            own = list(zip(*split, strict=True))
        for (own_keys, own_values), limits, row in zip(
            own, self._each, query.unsqueeze(3).unbind(2), strict=True
        ):
            if is_plain and reach.is_whole(limits.num_keys):
                out = fused_attention(row, own_keys, own_values, scores["scale"])
            else:
                out = ragged_attention(row, own_keys, own_values, limits, reach=reach, **scores)
            outs.append(out.transpose(1, 2))
        return torch.cat(outs, dim=1).transpose(1, 2)


class Extension:
    """Extension of a buffer behind its first ``length`` rows: ``ids (R,) -> logits (R, vocab)``."""

    def __init__(self, model: Steps, kv: KVBuffer, length: int) -> None:
        self._model = model
        self._kv = kv
        self._length = length

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute rows.

        A single row is computed together with rows of other requests, where the model can.
        """
        rows = Rows.span(self._length, self._length + len(ids))
        self._length = rows.stop

        def alone() -> torch.Tensor:
            return self._model.forward(ids, rows, self._kv, logits=len(ids))[0][0]

        if len(ids) > 1 or self._kv.start is not None:
            return alone()
        row = NextRow(ids, self._kv, rows.stop - 1, alone)
        limit = MAX_TOGETHER if self._model.can_share_forwards else 1
        return self._model.lock.step(row, self._model.step, limit=limit)
