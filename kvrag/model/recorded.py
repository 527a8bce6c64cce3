"""Decode steps that are recorded once and replayed: on a CUDA device the host asks for one graph, not for hundreds of launches.

A recording holds addresses and shapes, so a step's inputs are written to the same tensors each time, and it attends to a fixed number of
slots, of which a mask hides those after its row. It is made anew where an answer outgrows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from kvrag.model.rows import KVBuffer, Rows

if TYPE_CHECKING:
    from kvrag.model.lm import CausalLM


EAGER_STEPS = 4  # before the first recording, which takes as long as some steps: many answers are short
BUCKET = 256  # slots by which a recording reaches beyond its first step's row, at most

Step = Callable[[], torch.Tensor]
Record = Callable[[Step], Step]
"""From a step to what repeats it, with what its input tensors hold by then."""


def by_graph(step: Step) -> Step:
    """Record a step as a CUDA graph, after a run on another stream: what libraries allocate at first use must not be part of it."""
    current, beside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        step()
    current.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may allocate meanwhile
        logits = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay


class RecordedSteps:
    """The decode steps of one request.

    Parameters
    ----------
    model, kv
        What computes, and the request's KV.
    length
        Rows of the prompt; the slots after them are set to zero, for a hidden key weighs nothing only if it is finite.
    record
        How to record.
    """

    def __init__(self, model: CausalLM, kv: KVBuffer, length: int, record: Record = by_graph) -> None:
        self._model, self._kv, self._record = model, kv, record
        self._ids, self._at = (torch.zeros(1, dtype=torch.int64, device=model.device) for _ in range(2))
        self._stop, self._replay = 0, cast(Step | None, None)
        for keys, values in kv.layers:
            keys[:, :, length:], values[:, :, length:] = 0, 0

    def __call__(self, token_id: torch.Tensor, at: int) -> torch.Tensor:
        """Compute the row of a token, int64 ``(1,)``, at a position: its logits ``(1, vocab)``, valid until the next step."""
        self._ids.copy_(token_id, non_blocking=True)
        self._at.fill_(at)
        if self._replay is None or at >= self._stop:
            self._stop = min(at + BUCKET, self._kv.capacity)
            self._replay = self._record(self._step)
        return self._replay()

    def _step(self) -> torch.Tensor:
        rows = Rows(self._at, self._stop, is_fixed=True)
        return self._model.forward(self._ids, rows, self._kv)[0][0]
