"""Decode steps: concurrent requests share a forward; on CUDA, a lone request replays a recording.

The host then launches a single graph instead of hundreds of kernels. A recording holds addresses
and shapes. So the inputs of a step are written to the same tensors every time, and it attends to a
fixed number of slots, where a mask hides the slots after its row. Where an answer outgrows the
recording, a new recording is made.
"""

from __future__ import annotations

# ruff: noqa: D102  (CausalLM documents the members of Steps)
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch

from kvrag.model.attention import fused_attention, ragged_attention
from kvrag.model.forward import Attentions, Forward, Pair
from kvrag.model.lock import ModelLock
from kvrag.model.rows import EVERYTHING, KVBuffer, Limits, Rows

logger = logging.getLogger(__name__)

MAX_TOGETHER = 64  # requests with next rows in the same forward, at most
# Steps before the first recording, which takes as long as some steps: many answers are short.
EAGER_STEPS = 4
BUCKET = 256  # slots that a recording reaches beyond its first step's row, at most

Step = Callable[[], torch.Tensor]
Recorder = Callable[[Step], Step]
"""Records a step, and returns a function that replays it on its input tensors' current values."""


def by_graph(step: Step) -> Step:
    """Record a step as a CUDA graph, after a run on another stream.

    That run keeps allocations that libraries make at first use out of the graph.
    """
    current, beside = (
        torch.cuda.current_stream(),
        torch.cuda.Stream(),  # type: ignore[no-untyped-call]
    )
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        step()
    current.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay


class Steps(Protocol):
    """A model, as decode steps use it; :class:`kvrag.model.lm.CausalLM` documents the members."""

    records: bool

    @property
    def device(self) -> torch.device: ...
    @property
    def lock(self) -> ModelLock: ...
    @property
    def can_share_forwards(self) -> bool: ...
    def step(self, rows: Sequence[NextRow]) -> Sequence[torch.Tensor]: ...
    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]: ...


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
        self._steps = cast(RecordedSteps | None, None)
        self._num_steps = 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute rows.

        A single row is computed together with rows of other requests, where the model can.
        """
        start = self._length
        self._length += len(ids)
        if len(ids) > 1:
            return self._model.forward(
                ids, Rows.span(start, self._length), self._kv, logits=len(ids)
            )[0][0]
        row = NextRow(ids, self._kv, start, lambda: self._alone(ids, start))
        limit = MAX_TOGETHER if self._model.can_share_forwards else 1
        return self._model.lock.step(row, self._model.step, limit=limit)

    def _alone(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Compute a row, by a recording once ``EAGER_STEPS`` steps have been launched."""
        model = self._model
        self._num_steps += 1
        if self._num_steps > EAGER_STEPS and model.records and self._kv.token_ids is None:
            try:
                self._steps = self._steps or RecordedSteps(model, self._kv, position)
                return self._steps(ids, position)
            except RuntimeError as error:  # an operation can't be recorded, or memory is short
                model.records = False
                logger.warning(
                    "decode steps of this model can't be recorded (%s); "
                    "they are launched one by one",
                    error,
                )
        return model.forward(ids, Rows.span(position, position + 1), self._kv)[0][0]


class RecordedSteps:
    """Recorded decode steps of a request.

    Parameters
    ----------
    model, kv
        Model, and the request's KV.
    length
        Rows so far. The slots after them are set to zero: a hidden key weighs nothing only if it is
        finite.
    record
        Function that records a step.
    """

    def __init__(
        self, model: Steps, kv: KVBuffer, length: int, record: Recorder = by_graph
    ) -> None:
        self._model = model
        self._kv = kv
        self._record = record
        self._ids, self._at = (
            torch.zeros(1, dtype=torch.int64, device=model.device) for _ in range(2)
        )
        self._stop = 0
        self._replay = cast(Step | None, None)
        for keys, values in kv.layers:
            keys[:, :, length:], values[:, :, length:] = 0, 0

    def __call__(self, token_id: torch.Tensor, at: int) -> torch.Tensor:
        """Compute the row of a token, int64 ``(1,)``, at a position.

        Returns its logits ``(1, vocab)``, valid until the next step.
        """
        self._ids.copy_(token_id, non_blocking=True)
        self._at.fill_(at)
        if self._replay is None or at >= self._stop:
            self._stop = min(at + BUCKET, self._kv.capacity)
            self._replay = self._record(self._step)
        return self._replay()

    def _step(self) -> torch.Tensor:
        rows = Rows(self._at, self._stop, is_fixed=True)
        return self._model.forward(self._ids, rows, self._kv)[0][0]
