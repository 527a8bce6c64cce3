"""What is added to logits before a token is chosen: OpenAI's penalties and biases."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from kvrag.config import SamplingConfig
from kvrag.errors import ConfigError


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """``logit - count * frequency_penalty - (count > 0) * presence_penalty + bias``; the prompt's ``num_prompt`` tokens don't count."""

    def __init__(self, config: SamplingConfig, num_prompt: int) -> None:
        self._frequency, self._presence = float(config.frequency_penalty), float(config.presence_penalty)
        self._start, self._bias = num_prompt, dict(config.logit_bias)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return other scores ``(1, vocab)``."""
        size = scores.shape[-1]
        if over := [token for token in self._bias if token >= size]:
            raise ConfigError(f"SamplingConfig.logit_bias names token {over[0]}; this model's ids are below {size}")
        counts = torch.bincount(input_ids[0, self._start :], minlength=size)
        scores = scores - self._frequency * counts - self._presence * (counts > 0)
        if self._bias:
            scores[0, list(self._bias)] += torch.tensor([*self._bias.values()], device=scores.device)
        return scores
