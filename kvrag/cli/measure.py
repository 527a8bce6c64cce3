"""Measurements for an estimate: plain prefill of the same ids, and the bandwidth of a directory."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.errors import StoreError

if TYPE_CHECKING:  # torch takes seconds to import, and the bandwidth of a disk needs none of it
    from collections.abc import Sequence

    from transformers import PreTrainedModel

_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class FullPrefill:
    """A prompt answered by transformers alone: milliseconds to the first token, and the greedy answer's ids."""

    ttft_ms: float
    token_ids: list[int]


def full_prefill(
    model: PreTrainedModel, prompt_ids: Sequence[int], *, max_new_tokens: int = 1, eos_ids: frozenset[int] = frozenset()
) -> FullPrefill:
    """Prefill a prompt and decode greedily with the model's own attention and cache, without kvrag."""
    import torch

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


def prefill_tokens_per_s(model: PreTrainedModel, *, num_tokens: int = 1024, repeats: int = 2) -> float:
    """Return the speed of prefilling ``num_tokens`` (or the context window): the best of ``repeats`` runs after a warm-up."""
    text = model.config.get_text_config()
    length = min(num_tokens, int(text.max_position_embeddings) - 1)
    ids = [index % int(text.vocab_size) for index in range(1, length + 1)]
    runs = [full_prefill(model, ids).ttft_ms for _ in range(1 + repeats)]
    return length / (min(runs[1:]) / 1e3)


def read_bandwidth(directory: Path, *, num_bytes: int = 128 * 2**20) -> float:
    """Write a file and read it back past the page cache, where the system allows that; return bytes read per second.

    Raises
    ------
    StoreError
        If the directory, which is made if absent, can't be written to.
    """
    block, count = os.urandom(_BLOCK), max(1, num_bytes // _BLOCK)  # not zeros: some file systems don't store those
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            for _ in range(count):
                file.write(block)
            os.fsync(file.fileno())
            forget_cached(file.fileno())
            file.seek(0)
            begin = time.perf_counter()
            while file.read(_BLOCK):
                pass
            return count * _BLOCK / (time.perf_counter() - begin)
    except OSError as error:
        raise StoreError(
            f"the directory {str(directory)!r} can't be written to: {error.strerror or error}; choose another --kv-dir"
        ) from error


def forget_cached(descriptor: int) -> None:
    """Ask the system to drop a file from its page cache; a hint, absent on some systems."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
