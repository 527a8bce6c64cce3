"""Prefill with a model whose chunks are not reused: continue behind an earlier prompt's beginning.

The model reads the prompt in pieces, and a snapshot behind each is kept: behind the prefix, behind
chunks, and where the prompt leaves an earlier one. So a prompt with the same beginning computes the
rest alone, and its rows are those of a full prefill. That this holds is proven once for each model,
because some can't read several tokens behind a state, or keep it where it can't be copied.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from kvrag.blend.prefill import FindHistory, Prefilled, reason_against_reuse
from kvrag.blend.stitch import HistoryMatch
from kvrag.errors import UnsupportedModelError
from kvrag.kv.snapshot import Layers, Snapshot
from kvrag.model import CausalLM
from kvrag.model.forward import evaluating
from kvrag.model.lock import Clock, lock_of
from kvrag.model.plain import HistoryRows, Pieces, PlainLM, Run
from kvrag.model.proof import (
    ATTEMPTS,
    CROSSABLE_WINDOW,
    LIMIT,
    NOISE_FACTOR,
    draw,
    gap,
    moved_embeddings,
)
from kvrag.progress import Progress
from kvrag.prompt.plan import Plan
from kvrag.runtime import Cancel
from kvrag.types import Mode, Sources

logger = logging.getLogger(__name__)

MAX_SNAPSHOTS = 8  # of a request: a snapshot of a large hybrid takes some 75 MB
LEAST_ROWS = 32  # behind fewer, a snapshot takes more than it saves
LEAST_GRID = 256  # tokens between snapshots of a prompt that names no chunk


def reason_against_history(model: CausalLM | PlainLM, total: int, max_bytes: int) -> str | None:
    """Return the reason why a request neither uses nor leaves a history, if any.

    ``total`` is the number of tokens of prompt and answer; ``max_bytes`` bounds a request's
    snapshots.
    """
    if model.refusal is None:
        return reason_against_reuse(model, total)
    if not max_bytes:
        return "history_bytes is 0"
    if total > model.reuse_window:
        return f"its RoPE scaling changes beyond {model.reuse_window} tokens"
    pieces = pieces_of(model)
    if pieces.state_bytes > max_bytes:
        return f"a snapshot takes {pieces.state_bytes:,} bytes, more than half of history_bytes"
    return pieces.reason


def in_words(model: CausalLM | PlainLM, total: int, max_bytes: int) -> list[str]:
    """Say whether exact beginnings are reused where chunks are not, as a note of ``explain``."""
    if model.refusal is None:
        return []
    reason = reason_against_history(model, total, max_bytes)
    if reason is None:
        return ["a prompt that begins like an earlier one computes only its other tokens"]
    return [f"no beginning of an earlier prompt is reused, either: {reason}"]


def pieces_of(model: PlainLM) -> Pieces:
    """Return whether a model can read a prompt in pieces; it is proven at the first call."""
    with lock_of(model.model):
        if model.pieces is None:
            with Progress("proving that this model can read a prompt in pieces, once"):
                model.pieces = _proven(model)
            if model.pieces.reason:
                logger.warning("no beginning of a prompt is reused: %s", model.pieces.reason)
        return model.pieces


def prefill_refused(
    model: PlainLM,
    plan: Plan,
    *,
    mode: Mode,
    max_new_tokens: int,
    clock: Clock,
    max_bytes: int,
    find_history: FindHistory | None,
    cancel: Cancel = None,
) -> Prefilled:
    """Prefill a prompt behind its longest beginning that was kept.

    ``max_bytes`` bounds the snapshots of this request; 0: nothing is reused. Other parameters are
    as for :func:`~kvrag.blend.prefill.prefill`.
    """
    history = None
    stops: Collection[int] = ()
    if mode != "full" and max_bytes and find_history is not None:
        pieces = pieces_of(model)
        # It continues only where a snapshot was taken.
        found = find_history(needs_state=pieces.state_bytes > 0)
        if pieces.state_bytes:
            stops = _stops(plan, found, max_bytes // pieces.state_bytes)
        if found is not None and found.num_rows:
            with clock.stage("history"):
                # without a state, any snapshot fits
                snapshot = cast(Snapshot, found.snapshot or pieces.snapshot)
                history = HistoryRows(snapshot, found.rows(), found.num_rows)
    ids = torch.tensor(plan.token_ids)
    with clock.stage("prefill"):
        run = partial(
            model.prefill,
            ids,
            max_new_tokens=max_new_tokens,
            cancel=cancel,
            max_bytes=max_bytes,
        )
        try:
            logits, extend = run(stops=stops, history=history)
        except UnsupportedModelError as error:  # its settings were changed after the proof
            logger.warning("no beginning of this prompt is reused: %s", error)
            history = None
            logits, extend = run()
        logits = logits.cpu()
    num_history = history.num_rows if history else 0
    sources: Sources = (("computed", len(ids) - num_history),)
    if history:
        sources = (("exact", num_history), *sources)
    return Prefilled(
        extend,
        None,
        logits,
        plan.token_ids,
        model.refusal,
        sources,
        num_history=num_history,
    )


def _stops(plan: Plan, found: HistoryMatch | None, most: int) -> list[int]:
    """Return the numbers of first rows behind which a snapshot is taken, the useful ones first.

    Behind the answer, the request takes another.
    """
    *ends, total = accumulate(len(piece.ids) for piece in plan.pieces)
    named = [
        end for end, piece in zip(ends, plan.pieces, strict=False) if piece.piece.kind == "chunk"
    ]
    if not named:  # wherever documents end: at most four places, which prompts of any length share
        step = max(LEAST_GRID, 2 ** ((total - 1) // 4).bit_length())
        named = [*range(step, total, step)]
    common = [found.num_common] if found else []
    wanted = dict.fromkeys([total, *common, *named[-1:], *ends[:1], *named])
    useful = [stop for stop in wanted if stop == total or stop >= LEAST_ROWS]
    return useful[: max(0, min(MAX_SNAPSHOTS, most) - 1)]


@torch.inference_mode()
def _proven(model: PlainLM) -> Pieces:
    """Prove that a model gives the logits of a full prefill where it reads a prompt in pieces."""
    found = Pieces(None)
    for seed in range(ATTEMPTS):  # in a mixture of experts, a rounding may send a row elsewhere
        try:
            found = _Trial(model, seed).pieces()
        except UnsupportedModelError as error:
            return Pieces(str(error))
        except Exception as error:  # custom code may raise anything
            logger.debug("a prompt could not be read in pieces", exc_info=True)
            return Pieces(
                f"it fails behind a kept beginning ({type(error).__name__}: {str(error)[:200]})"
            )
        if found.reason is None:
            break
    return found


class _Trial:
    """Prompt of random tokens that crosses a short window, and the runs over it."""

    def __init__(self, model: PlainLM, seed: int) -> None:
        self._model = model
        names = ("sliding_window", "attention_chunk_size")
        windows = [getattr(model.config, name, None) or 0 for name in names]
        crossed = [window + 48 for window in windows if window <= CROSSABLE_WINDOW]
        self._total = min(max([96, *crossed]), model.context_window - 2)
        drawn = draw(model, 2 * self._total + 1, seed)
        self._ids = drawn[: self._total]
        self._others = drawn[self._total : -1]
        self._next = drawn[-1:]
        # Pieces shorter than a convolution, a single token, a window, and short ones again.
        cuts = (2, 3, self._total - 40, self._total - 3)
        self._stops = sorted({cut for cut in cuts if 0 < cut < self._total})

    def pieces(self) -> Pieces:
        """Compare runs in pieces, and runs behind each snapshot, with a run in one piece."""
        whole, run = self._run(self._ids)
        cut, kept = self._run(self._ids, self._stops)
        gaps = [gap(cut, whole)]
        for stop in (*self._stops, self._stops[-1]):  # again: no run may change a snapshot
            behind, _ = self._run(self._ids, history=_history(kept, run.rows, stop))
            gaps.append(gap(behind, whole))
        # A planted mistake: the state and rows of other tokens.
        last = self._stops[-1]
        _, other = self._run(self._others, self._stops)
        planted, _ = self._run(self._ids, history=_history(other, other.rows, last))
        worst = float(torch.tensor(gaps, dtype=torch.float64).max())  # NaN if any is, unlike max()
        limit = LIMIT if worst <= LIMIT else max(LIMIT, NOISE_FACTOR * self._noise())
        if not worst <= limit:
            return Pieces(
                "in pieces it reads a prompt otherwise than whole "
                f"(largest difference of logits {worst:.2g}, allowed {limit:.2g})"
            )
        if not gap(planted, whole) > limit:
            return Pieces("a wrong beginning moves its logits no more than a rounding")
        return Pieces(None, kept.snapshots[last])

    def _run(
        self, ids: Tensor, stops: Collection[int] = (), history: HistoryRows | None = None
    ) -> tuple[Tensor, Run]:
        """Run a prompt and a token behind it; return the logits of both, and the run."""
        logits, run = self._model.prefill(ids, max_new_tokens=2, stops=stops, history=history)
        return torch.stack([logits, run(self._next)[0]]).float().cpu(), run

    def _noise(self) -> float:
        """Measure how far a rounding of the embeddings moves the logits.

        Float32 needs no such allowance.
        """
        model = self._model.model
        if self._model.dtype == torch.float32:
            return 0.0
        ids = self._ids[None].to(self._model.device)
        with lock_of(model), evaluating(model):
            one = model(input_ids=ids, use_cache=False).logits[0, -1].float()
            with moved_embeddings(model, 0):
                two = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        return gap(one, two)


def _history(kept: Run, rows: Layers, stop: int) -> HistoryRows:
    head = [(keys[:, :, :stop], values[:, :, :stop]) for keys, values in rows]
    return HistoryRows(kept.snapshots[stop], head, stop)
