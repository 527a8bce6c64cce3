"""Compute log-probabilities of answer and prompt tokens."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace

import torch
from torch import Tensor

from kvrag.blend.prefill import Prefilled
from kvrag.types import TokenLogprob

# Bytes of float32 logits that are held at a time.
SLICE_BYTES = 2**26


class Delta(str):
    """Text delta of an answer, with the log-probabilities of the tokens since the last delta.

    A delta of a thought has no text, as that is the answer's.
    """

    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning_content: str = ""


def logprob_of(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return a token's log-probability, and the ``num_top`` largest, from logits ``(vocab,)``."""
    values = torch.log_softmax(logits.float(), dim=-1)
    top = values.topk(min(num_top, len(values)))
    return TokenLogprob(
        token,
        float(values[token]),
        tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )


def read_on(
    done: Prefilled, ids: Sequence[int], num_top: int, cancel: threading.Event
) -> Prefilled:
    """Extend a prefilled prompt by token ids, and score its tokens.

    Returns the longer prompt, with the log-probabilities of all its tokens. The very first has
    ``nan``, as nothing predicts it. Logits are read in slices: the logits of a long prompt over a
    large vocabulary would not fit into memory. Raises ``CancelledError`` if ``cancel`` is set
    before the end.
    """
    told = [TokenLogprob(done.token_ids[0], math.nan)]
    logits = done.logits
    size = max(1, SLICE_BYTES // (4 * len(logits)))
    for start in range(0, len(ids), size):
        if cancel.is_set():
            raise CancelledError
        some = list(ids[start : start + size])
        rows = done.extend(torch.tensor(some)).cpu()
        told += [
            logprob_of(row, token, num_top)
            for row, token in zip([logits, *rows[:-1]], some, strict=True)
        ]
        logits = rows[-1]
    whole = [*done.token_ids, *ids]
    return replace(
        done,
        token_ids=whole,
        logits=logits,
        sources=(("computed", len(whole)),),
        prompt_logprobs=tuple(told),
    )
