"""The other side of the comparison: transformers alone, without kvrag."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class FullPrefill:
    """A prompt answered by transformers alone: milliseconds to the first token, and the greedy answer's ids."""

    ttft_ms: float
    token_ids: list[int]


def full_prefill(
    model: PreTrainedModel, prompt_ids: Sequence[int], *, max_new_tokens: int = 1, eos_ids: frozenset[int] = frozenset()
) -> FullPrefill:
    """Prefill a prompt and decode greedily with the model's own attention and cache."""
    start = time.perf_counter()
    with torch.inference_mode():
        ids = torch.tensor([list(prompt_ids)], device=model.device)
        # Only the last row's logits: a matrix of (tokens × vocabulary) would make the baseline look slower than it is.
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        answer = [int(out.logits[0, -1].argmax())]
        ttft_ms = (time.perf_counter() - start) * 1e3
        while len(answer) < max_new_tokens and answer[-1] not in eos_ids:
            last = torch.tensor([answer[-1:]], device=model.device)
            out = model(input_ids=last, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            answer.append(int(out.logits[0, -1].argmax()))
    return FullPrefill(ttft_ms, answer)
