"""Sliding window for prompts and answers that exceed the context window (StreamingLLM).

The buffer keeps the attention sinks and the latest rows (arXiv 2309.17453). The first rows of a
prompt draw much of the attention of all later rows, so they stay when the oldest rows behind them
are evicted. The remaining rows move down, and their keys are rotated to the new positions.
Positions are places in the window, so they never exceed the model's range.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError

import torch
from torch import Tensor

from kvrag.model import CausalLM
from kvrag.model.plain import Extend, PlainLM
from kvrag.model.rows import KVBuffer, Rows
from kvrag.runtime import Cancel

SINKS = 4  # rows that are never evicted, as published
# A quarter of the rows is evicted at a time. So rotating the rest costs little per row, and a key
# is rounded at most three times.
BLOCKS = 4


class SlidingWindow:
    """Compute any number of rows behind the first ``length`` of a buffer, evicting old rows.

    Called with ``ids (R,)``, it returns logits ``(R, vocab)``. The buffer is the window. When it is
    full, the oldest quarter behind the first ``sinks`` rows is evicted. ``evicted_tokens`` counts
    the evicted rows.
    """

    def __init__(
        self, model: CausalLM, kv: KVBuffer, length: int = 0, *, sinks: int = SINKS
    ) -> None:
        self.evicted_tokens = 0
        self._model = model
        self._kv = kv
        self._length = length
        self._sinks = sinks
        self._block = max(1, (kv.capacity - sinks) // BLOCKS)
        self._step: Extend | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """Compute rows and return logits for all of them, ``(R, vocab)``."""
        return torch.cat([self._next(piece, len(piece)) for piece in self._pieces(ids)])

    def prefill(self, ids: Tensor, cancel: Cancel = None) -> Tensor:
        """Compute rows and return the logits of the last row, ``(vocab,)``.

        Raises ``CancelledError`` if ``cancel`` is set between pieces.
        """
        left = len(ids)
        for piece in self._pieces(ids):
            if cancel is not None and cancel.is_set():
                raise CancelledError
            left -= len(piece)
            logits = self._next(piece, 0 if left else 1)
        return logits[0]

    def _pieces(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield pieces of ``ids`` that fit the window. Evicts rows before a piece if it is full."""
        while len(ids):
            if self._length == self._kv.capacity:
                self._evict()
            room = self._kv.capacity - self._length
            yield ids[:room]
            ids = ids[room:]

    def _next(self, ids: Tensor, logits: int) -> Tensor:
        start = self._length
        self._length += len(ids)
        if len(ids) == logits == 1:  # a decode step, batched with those of other requests
            # An extension goes on behind the rows that it has computed, so any other forward ends
            # it.
            self._step = self._step or self._model.extension(self._kv, start)
            return self._step(ids)
        self._step = None
        out, _ = self._model.forward(ids, Rows.span(start, self._length), self._kv, logits=logits)
        if logits:
            return out[0]
        return out

    @torch.inference_mode()
    def _evict(self) -> None:
        """Evict the oldest rows behind the sinks and move the rest down.

        Keys are rotated in float32 and rounded once, at their new positions.
        """
        old = slice(self._sinks + self._block, self._length)
        new = slice(self._sinks, self._length - self._block)
        for (keys, values), table in zip(
            self._kv.layers, self._model.rotary(self._length), strict=True
        ):
            # A copy, because old and new rows overlap, and a layer without rotation returns a view.
            moved = keys[0, :, old].to(torch.float32, copy=True)
            keys[0, :, new] = table.rotate(table.unrotate(moved, old), new).to(keys.dtype)
            values[0, :, new] = values[0, :, old].clone()
        self._length = new.stop
        self._step = None
        self.evicted_tokens += self._block


def cannot_slide(model: CausalLM | PlainLM) -> str | None:
    """Return the reason why a model's window can't slide, if any."""
    if model.refusal is not None:
        return f"keys of this model can't be moved: {model.refusal}"
    if model.reuse_window < model.context_window:
        return f"its RoPE scaling changes beyond {model.reuse_window} tokens"
    return None
