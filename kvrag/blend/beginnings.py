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
            found = _compared(model, seed)
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


def _compared(model: PlainLM, seed: int) -> Pieces:
    """Compare runs in pieces, and runs behind each snapshot, with a run in one piece."""
    total = _num_compared(model)
    prompt, other_prompt, after = draw(model, 2 * total + 1, seed).tensor_split([total, 2 * total])
    # Pieces shorter than a convolution, a single token, a window, and short ones again.
    stops = sorted({cut for cut in (2, 3, total - 40, total - 3) if 0 < cut < total})
    run = partial(_run, model, after)

    def behind(kept: Run, rows: Layers, stop: int) -> Tensor:
        """Return the logits of the prompt behind the first rows of a run."""
        head = [(keys[:, :, :stop], values[:, :, :stop]) for keys, values in rows]
        return run(prompt, history=HistoryRows(kept.snapshots[stop], head, stop))[0]

    whole, own = run(prompt)
    cut, kept = run(prompt, stops)
    last = stops[-1]
    # Behind the last stop twice: no run may change a snapshot.
    again = [behind(kept, own.rows, stop) for stop in (*stops, last)]
    gaps = [gap(each, whole) for each in (cut, *again)]
    # A planted mistake: the state and rows of other tokens.
    _, other = run(other_prompt, stops)
    planted = behind(other, other.rows, last)
    worst = float(torch.tensor(gaps, dtype=torch.float64).max())  # NaN if any is, unlike max()
    limit = LIMIT if worst <= LIMIT else max(LIMIT, NOISE_FACTOR * _noise(model, prompt))
    if not worst <= limit:
        return Pieces(
            "in pieces it reads a prompt otherwise than whole "
            f"(largest difference of logits {worst:.2g}, allowed {limit:.2g})"
        )
    if not gap(planted, whole) > limit:
        return Pieces("a wrong beginning moves its logits no more than a rounding")
    return Pieces(None, kept.snapshots[last])


def _num_compared(model: PlainLM) -> int:
    """Return the tokens of a prompt that crosses a short window."""
    windows = [
        getattr(model.config, name, None) or 0
        for name in ("sliding_window", "attention_chunk_size")
    ]
    crossed = [window + 48 for window in windows if window <= CROSSABLE_WINDOW]
    return min(max([96, *crossed]), model.context_window - 2)


def _run(
    model: PlainLM,
    after: Tensor,
    ids: Tensor,
    stops: Collection[int] = (),
    history: HistoryRows | None = None,
) -> tuple[Tensor, Run]:
    """Run a prompt and the token ``after`` it; return the logits of both, and the run."""
    logits, run = model.prefill(ids, max_new_tokens=2, stops=stops, history=history)
    return torch.stack([logits, run(after)[0]]).float().cpu(), run


def _noise(lm: PlainLM, ids: Tensor) -> float:
    """Measure how far a rounding of the embeddings moves the logits.

    Float32 needs no such allowance.
    """
    model = lm.model
    if lm.dtype == torch.float32:
        return 0.0
    given = {"input_ids": ids[None].to(lm.device), "use_cache": False}
    with lock_of(model), evaluating(model):
        one = model(**given).logits[0, -1].float()
        with moved_embeddings(model, 0):
            two = model(**given).logits[0, -1].float()
    return gap(one, two)
