"""Retry a prefill that runs out of memory, without reuse."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from kvrag.blend.prefill import Prefilled
from kvrag.errors import OutOfMemoryError, is_out_of_memory
from kvrag.types import Mode

logger = logging.getLogger(__name__)


def retry_without_reuse(
    attempt: Callable[..., Prefilled], mode: Mode, release: Callable[[], int]
) -> Prefilled:
    """Run a prefill; if memory runs out, free memory by ``release`` and retry without reuse.

    A full prefill is retried only if ``release`` freed anything.
    """
    done, reason = _attempt(attempt, mode)
    if done is not None:
        return done
    if release() or mode != "full":
        logger.warning("out of memory with reuse (%s); trying once more without", reason)
        gc.collect()  # the failed attempt's buffers go before the next one allocates
        torch.cuda.empty_cache()
        done, reason = _attempt(attempt, "full")
    if done is None:
        raise OutOfMemoryError(
            "the prompt's KV and activations don't fit into memory, with or without reuse; "
            "retrieve fewer chunks, lower max_new_tokens, "
            f"or use a smaller model or dtype ({reason})"
        )
    if mode == "full":
        return done
    return replace(done, fallback_reason="memory ran out with reuse")


def _attempt(attempt: Callable[..., Prefilled], mode: Mode) -> tuple[Prefilled | None, str]:
    """Return the result and an empty message, or no result and the error's message.

    The exception is not kept: it would keep the attempt's tensors alive.
    """
    try:
        return attempt(mode=mode), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)
