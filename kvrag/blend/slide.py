"""A window that slides: attention sinks and the latest rows, for prompts and answers that outgrow the model's (arXiv 2309.17453).

The first rows of a prompt draw much of the attention of all others, so they stay when the oldest rows behind them leave (StreamingLLM). The
rest moves down, and its keys are turned with it: positions are places in the window, and the model meets none that it was not made for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import torch

from kvrag.model import CausalLM
from kvrag.model.plain import Extend, PlainLM
from kvrag.model.rows import KVBuffer, Rows

SINKS = 4  # rows that never leave, as published
BLOCKS = 4  # rows leave by a quarter: turning what stays costs little per row, and a key is rounded three times at most


class SlidingWindow:
    """Computes the rows that follow the first ``length`` of a buffer, however many: ``ids (R,) -> logits (R, vocab)``.

    The buffer is the window. When it is full, the oldest quarter behind the first ``sinks`` rows leaves. ``evicted_tokens`` counts rows
    that have left.
    """

    def __init__(
        self, model: CausalLM, kv: KVBuffer, length: int = 0, *, sinks: int = SINKS
    ) -> None:
        self.evicted_tokens = 0
        self._model, self._kv, self._length, self._sinks = model, kv, length, sinks
        self._block = max(1, (kv.capacity - sinks) // BLOCKS)
        self._step: Extend | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute rows, with logits for each."""
        return torch.cat([self._next(piece, len(piece)) for piece in self._pieces(ids)])

    def prefill(self, ids: torch.Tensor, cancel: threading.Event | None = None) -> torch.Tensor:
        """Compute rows and return the logits of the last, ``(vocab,)``; raise ``CancelledError`` if ``cancel`` is set between pieces."""
        left = len(ids)
        for piece in self._pieces(ids):
            if cancel is not None and cancel.is_set():
                raise CancelledError
            left -= len(piece)
            logits = self._next(piece, 0 if left else 1)
        return logits[0]

    def _pieces(self, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """Cut rows into pieces that have room in the window, each as soon as the one before is computed."""
        while len(ids):
            if self._length == self._kv.capacity:
                self._evict()
            room = self._kv.capacity - self._length
            yield ids[:room]
            ids = ids[room:]

    def _next(self, ids: torch.Tensor, logits: int) -> torch.Tensor:
        start, self._length = self._length, self._length + len(ids)
        if len(ids) == logits == 1:  # together with other requests' rows
            self._step = self._step or self._model.extension(self._kv, start)
            return self._step(ids)
        self._step = None
        out, _ = self._model.forward(ids, Rows.span(start, self._length), self._kv, logits=logits)
        return out[0] if logits else out

    @torch.inference_mode()
    def _evict(self) -> None:
        """Let the oldest rows behind the sinks leave, and move the others down; their keys are rounded once, at their new places."""
        old = slice(self._sinks + self._block, self._length)
        new = slice(self._sinks, self._length - self._block)
        for (keys, values), table in zip(
            self._kv.layers, self._model.rotary(self._length), strict=True
        ):
            moved = keys[0, :, old].to(
                torch.float32, copy=True
            )  # not a view: a layer without positions turns nothing
            keys[0, :, new] = table.rotate(table.unrotate(moved, old), new).to(keys.dtype)
            values[0, :, new] = values[0, :, old].clone()
        self._length, self._step = new.stop, None
        self.evicted_tokens += self._block


def cannot_slide(model: CausalLM | PlainLM) -> str | None:
    """Return why a model's window can't slide, or ``None`` where it can."""
    if isinstance(model, PlainLM):
        return f"keys of this model can't be moved: {model.refusal}"
    if model.reuse_window < model.context_window:
        return f"its keys turn by other angles beyond {model.reuse_window} tokens"
    return None
