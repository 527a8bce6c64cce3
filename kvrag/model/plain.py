"""A causal LM whose KV kvrag does not reuse: transformers' own forward, attention and cache, one token after the other.

Whatever ``generate`` can run is answered: learned positions, ALiBi, state space models, hybrids. ``generate`` itself prepares the first
call (``custom_generate`` is its documented way in), so cache, mask and positions are those of this version of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvrag.errors import ModelError
from kvrag.model.forward import evaluating, lock_of

Extend = Callable[[torch.Tensor], torch.Tensor]
"""``ids (R,) int64 -> logits (R, vocab)``: computes the rows that follow what was computed before, and remembers them."""

NO_LIMIT = 2**31 - 1
"""Context window of models whose config names none (state space models, ALiBi)."""

_WINDOW_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


class PlainLM:
    """A loaded model that answers without reuse.

    Parameters
    ----------
    model
        Any model that ``AutoModelForCausalLM`` gives.
    refusal
        Why its KV is not reused, as a sentence.
    """

    def __init__(self, model: PreTrainedModel, refusal: str) -> None:
        self.model = model
        self.refusal = refusal
        self.config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype

    @property
    def context_window(self) -> int:
        """Largest number of tokens of prompt and answer together; :data:`NO_LIMIT` where the config names none."""
        found = (getattr(self.config, name, None) or 0 for name in _WINDOW_NAMES)
        window = next((int(length) for length in found if length > 0), NO_LIMIT)  # XLNet writes -1
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "dynamic":  # stretches its angles beyond the length that it was trained at
            return int(window * float(rope.get("factor", 1.0)))
        return window

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.config.vocab_size)

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor, *, max_new_tokens: int) -> tuple[torch.Tensor, Extend]:
        """Run a prompt.

        Parameters
        ----------
        token_ids
            Ids of the prompt, ``(N,)``, int64.
        max_new_tokens
            Room for the answer.

        Returns
        -------
        logits : torch.Tensor
            ``(vocab,)`` of the prompt's last row, in the model's dtype.
        extend : Extend
            Goes on from there.
        """
        run = _Run(self, token_ids.to(self.device)[None], max_new_tokens)
        logits = run.forward()
        return logits, run.extend


class _Run:
    """One prompt and what follows it: the ids so far, and the arguments that carry the model's cache."""

    def __init__(self, lm: PlainLM, ids: torch.Tensor, max_new_tokens: int) -> None:
        self._lm, self._ids = lm, ids
        self._is_first = True
        self._kwargs = _prepared(lm.model, ids, max_new_tokens)

    def forward(self) -> torch.Tensor:
        """Compute the rows that have not been computed; returns the last one's logits ``(vocab,)``."""
        model = self._lm.model
        with lock_of(model), evaluating(model):
            is_step = self._kwargs.get("use_cache") and not self._is_first
            inputs = model.prepare_inputs_for_generation(
                self._ids,
                next_sequence_length=1 if is_step else None,
                is_first_iteration=self._is_first,
                **self._kwargs,
            )
            out = model(**inputs, return_dict=True)
        self._kwargs = model._update_model_kwargs_for_generation(out, self._kwargs)
        self._is_first = False
        return cast(torch.Tensor, out.logits[0, -1].clone())  # a view would keep the logits of every row

    @torch.inference_mode()
    def extend(self, ids: torch.Tensor) -> torch.Tensor:
        """Append tokens one by one, as ``generate`` does: not every cache takes several at a time."""
        rows = []
        for token in ids.to(self._ids.device):
            self._ids = torch.cat([self._ids, token.reshape(1, 1)], dim=1)
            rows.append(self.forward())
        return torch.stack(rows)


def _prepared(model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int) -> dict[str, Any]:
    """Return the arguments that ``generate`` would start its loop with."""
    found: dict[str, Any] = {}

    def take(_: PreTrainedModel, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        loop = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
        found.update({name: value for name, value in arguments.items() if name not in loop})
        return input_ids

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        custom_generate=take,
    )
    return found


def check_generates(model_or_config: Any) -> None:
    """Raise :class:`ModelError` unless a model, or the model of a config, is a causal LM: no reuse is asked for, only answers.

    Parameters
    ----------
    model_or_config
        A ``PreTrainedModel`` or a ``PretrainedConfig``.
    """
    is_model = isinstance(model_or_config, PreTrainedModel)
    config = model_or_config.config if is_model else model_or_config
    remedy = "load a model that AutoModelForCausalLM takes"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{config.model_type!r} is an encoder-decoder, and kvrag answers with causal LMs; {remedy}")
    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if is_model:
        if not model_or_config.can_generate():
            raise ModelError(f"{type(model_or_config).__name__} has no language model's head to answer with; {remedy}")
    elif not has_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"transformers has no causal LM for {config.model_type!r} (it may need images or sound, or answer by an encoder); {remedy}"
        )
