"""The other side of the comparison: transformers alone, without kvrag."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class FullPrefill:
    """A prompt answered by transformers alone.

    Parameters
    ----------
    ttft_ms, num_busy
        Milliseconds to the first token, and how many of the process's threads computed then, in the mean.
    token_ids, is_cut
        The greedy answer, and whether it ran into the limit of tokens.
    """

    ttft_ms: float
    num_busy: float
    token_ids: list[int]
    is_cut: bool


def full_prefill(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 1,
    eos_ids: frozenset[int] = frozenset(),
) -> FullPrefill:
    """Prefill a prompt and decode greedily with the model's own attention and cache."""
    start = time.perf_counter()
    cpu = time.process_time()
    with torch.inference_mode():
        ids = torch.tensor([list(prompt_ids)], device=model.device)
        # Only the last row's logits: a matrix of (tokens × vocabulary) would make the baseline look slower than it is.
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        answer = [int(out.logits[0, -1].argmax())]
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        while len(answer) < max_new_tokens and answer[-1] not in eos_ids:
            last = torch.tensor([answer[-1:]], device=model.device)
            out = model(
                input_ids=last,
                past_key_values=out.past_key_values,
                use_cache=True,
                logits_to_keep=1,
            )
            answer.append(int(out.logits[0, -1].argmax()))
    return FullPrefill(seconds * 1e3, cpu / seconds, answer, answer[-1] not in eos_ids)
