"""Measure what an estimate needs: plain prefill of the same ids, and the bandwidth of a directory."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

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
    """Prefill a prompt and decode greedily with the model's own attention and cache, nothing of kvrag between.

    Parameters
    ----------
    model
        A causal LM.
    prompt_ids
        The prompt.
    max_new_tokens, eos_ids
        Where the answer ends.
    """
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
    """Return the model's prefill speed at one length: the best of some runs after a warm-up.

    Parameters
    ----------
    model
        A causal LM.
    num_tokens
        Prompt length; cut to the model's context window.
    repeats
        Timed runs.
    """
    text = model.config.get_text_config()
    length = min(num_tokens, int(text.max_position_embeddings) - 1)
    ids = [index % int(text.vocab_size) for index in range(1, length + 1)]
    runs = [full_prefill(model, ids).ttft_ms for _ in range(1 + repeats)]
    return length / (min(runs[1:]) / 1e3)


def disk_bandwidth(directory: Path, *, num_bytes: int = 128 * 2**20) -> tuple[float, float]:
    """Write a file and read it back past the page cache, where the system allows that.

    Parameters
    ----------
    directory
        Where; made if absent. The file is removed.
    num_bytes
        Its size.

    Returns
    -------
    write, read : float
        Bytes per second.

    Raises
    ------
    StoreError
        If the directory can't be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return _write_and_read(file, max(1, num_bytes // _BLOCK))
    except OSError as error:
        raise StoreError(
            f"the directory {str(directory)!r} can't be written to: {error.strerror or error}; choose another --kv-dir"
        ) from error


def _write_and_read(file: IO[bytes], num_blocks: int) -> tuple[float, float]:
    block = os.urandom(_BLOCK)  # not zeros: some file systems don't store those
    start = time.perf_counter()
    for _ in range(num_blocks):
        file.write(block)
    os.fsync(file.fileno())
    written = time.perf_counter()
    forget_cached(file.fileno())
    file.seek(0)
    begin = time.perf_counter()
    while file.read(_BLOCK):
        pass
    end = time.perf_counter()
    return num_blocks * _BLOCK / (written - start), num_blocks * _BLOCK / (end - begin)


def forget_cached(descriptor: int) -> None:
    """Ask the system to drop a file from its page cache; a hint, absent on some systems."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
