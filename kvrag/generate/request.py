"""Request to an engine, and the retry of its prefill without reuse where memory runs out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvrag.blend.prefill import Prefilled
from kvrag.config import RepairConfig, as_config, check_mode
from kvrag.errors import OutOfMemoryError, is_out_of_memory
from kvrag.prompt.template import Chat, Prompt
from kvrag.prompt.tools import TEXT, ResponseFormat
from kvrag.types import Mode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its options.

    ``namespace`` is a digest; ``prefixes`` are texts that the prompt may start with; ``form`` is
    the form of the answer; ``slides``: whether rows may leave the context window; ``variables``:
    for the chat template; ``continues``: whether the answer continues the last message.
    """

    prompt: Prompt
    mode: Mode
    repair: RepairConfig
    namespace: str
    prefixes: tuple[str, ...]
    form: ResponseFormat = TEXT
    slides: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False

    @property
    def chat(self) -> Chat:
        """Options for rendering chat messages."""
        return Chat(self.form.tools, self.variables, self.continues)


def check_options(mode: Mode, repair: object, max_context: str = "raise") -> RepairConfig | None:
    """Return the repair as a config; raise ``ConfigError`` for a wrong mode or ``max_context``."""
    check_mode(mode, max_context)
    if repair is None:
        return None
    return as_config(RepairConfig, repair, option="repair")


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
            "retrieve fewer chunks, allow the answer fewer tokens, "
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
