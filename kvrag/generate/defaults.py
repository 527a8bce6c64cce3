"""Read what the files of a model say of its answers: logits processors, and the tokens that end it.

transformers makes the processors as for ``generate``, in the same order, from the model's
generation config and the request's values. So an answer without any reuse equals the answer of
``generate``, token for token.

The tokens that end an answer come from the generation config, the tokenizer, and the chat template,
which closes an assistant's message with a token. A fine-tuned base model often keeps the base's
config, but was never trained to write the end token in it: past the end of its message, it would
answer itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    WatermarkingConfig,
)

from kvrag.config import SamplingConfig
from kvrag.errors import ConfigError, KVRagError
from kvrag.model.lm import LoadedModel
from kvrag.model.plain import loop_arguments
from kvrag.prompt.template import PromptEncoder
from kvrag.prompt.tokenizer import control_tokens
from kvrag.runtime import RUNTIME

logger = logging.getLogger(__name__)

# Options of a generation config that would change an answer and are not followed, with their
# neutral values besides ``None``: a single answer is decoded, by a forward per token.
NOT_DONE = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "guidance_scale": 1.0,
    "token_healing": False,
    "num_return_sequences": 1,
    "max_time": None,
}

_ANSWER = "The probe's answer."
_TURN = ({"role": "user", "content": "A probe."}, {"role": "assistant", "content": _ANSWER})


class _Warned(set[str]):
    """Options of a model that a warning has named."""


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Penalties for repeated tokens, and biases.

    ``logit - count * frequency_penalty - (count > 0) * presence_penalty + bias``, where the
    prompt's ``num_prompt`` tokens don't count.
    """

    def __init__(self, config: SamplingConfig, num_prompt: int) -> None:
        self._frequency = float(config.frequency_penalty)
        self._presence = float(config.presence_penalty)
        self._start = num_prompt
        self._bias = dict(config.logit_bias or ())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed scores ``(1, vocab)``."""
        size = scores.shape[-1]
        over = [token for token in self._bias if token >= size]
        if over:
            raise ConfigError(
                f"logit_bias names token {over[0]}; this model's ids are below {size}"
            )
        counts = torch.bincount(input_ids[0, self._start :], minlength=size)
        scores = scores - self._frequency * counts - self._presence * (counts > 0)
        if self._bias:
            scores[0, list(self._bias)] += torch.tensor(
                [*self._bias.values()], dtype=torch.float32, device=scores.device
            )
        return scores


def processors_of(
    model: PreTrainedModel,
    config: SamplingConfig,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int] = frozenset(),
) -> LogitsProcessorList:
    """Make the processors of an answer; they work on the model's device.

    The answer has at most ``max_new_tokens`` tokens and ends at ``eos_ids``.
    """
    merged = merged_config(
        model.generation_config, config, len(prompt_ids) + max_new_tokens, eos_ids
    )
    merged._eos_token_tensor = (
        torch.tensor(sorted(eos_ids), device=model.device) if eos_ids else None
    )
    _warn_of_what_is_not_done(model)
    own = LogitsProcessorList()
    if config.frequency_penalty or config.presence_penalty or config.logit_bias:
        own.append(Penalties(config, len(prompt_ids)))
    ids = torch.tensor([[*prompt_ids]], dtype=torch.int64, device=model.device)
    try:
        found = model._get_logits_processor(
            generation_config=merged,
            input_ids_seq_length=len(prompt_ids),
            encoder_input_ids=ids,
            logits_processor=own,
            device=str(model.device),
            model_kwargs={},
        )
    except (AttributeError, TypeError):  # this version of transformers makes them differently
        # The documented way takes ten times as long.
        found = loop_arguments(model, ids, generation_config=merged, logits_processor=own)[
            "logits_processor"
        ]
    return cast(LogitsProcessorList, found)


def merged_config(
    defaults: GenerationConfig, config: SamplingConfig, longest: int, eos_ids: frozenset[int]
) -> GenerationConfig:
    """Return the model's generation config, overridden by the values that the request sets.

    Prompt and answer have at most ``longest`` tokens. The temperature always comes from the
    request: 0 is greedy, even if the model's config samples.
    """
    merged = deepcopy(defaults)
    for name in NOT_DONE:
        setattr(merged, name, None)
    merged.num_beams = 1
    if isinstance(merged.watermarking_config, dict):  # as JSON has it
        merged.watermarking_config = WatermarkingConfig.from_dict(merged.watermarking_config)
    merged.do_sample = not config.is_greedy
    merged.temperature = None if config.is_greedy else float(config.temperature)
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens"):
        given = getattr(config, name)
        if given is not None:
            setattr(merged, name, given)
    merged.top_k = max(0, merged.top_k or 0)  # not generate's default of 50
    merged.top_p = 1.0 if merged.top_p is None else float(merged.top_p)
    merged.min_p = merged.min_p or None
    merged.max_length = longest
    merged.max_new_tokens = None
    merged.eos_token_id = sorted(eos_ids) or None
    return merged


def _warn_of_what_is_not_done(model: PreTrainedModel) -> None:
    """Warn, once per model and option, of generation config options that are not followed."""
    told = RUNTIME.of(model, _Warned)
    for name, neutral in NOT_DONE.items():
        value = getattr(model.generation_config, name, None)
        if value not in (None, neutral) and name not in told:
            told.add(name)
            logger.warning(
                "the generation config of this model says %s=%r, which is not followed: "
                "one answer is decoded, token by token, as long as it takes; "
                "set it to None to lose this warning",
                name,
                value,
            )


class _Found(dict[object, frozenset[int]]):
    """End tokens of a tokenizer by the facts that they follow from."""


def end_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return all token ids that end an answer; log once if ``generate`` would end at fewer."""
    defaults = loaded.lm.model.generation_config
    encoder = loaded.encoder
    tokenizer = encoder.tokenizer
    own = _ids_of(defaults.eos_token_id)
    facts = own, tokenizer.eos_token_id, str(getattr(tokenizer, "chat_template", None))
    found = RUNTIME.of(tokenizer, _Found)
    if facts in found:
        return found[facts]
    ids = own | _ids_of(tokenizer.eos_token_id) | _ids_of(turn_end(encoder))
    found[facts] = ids
    if own and ids > own:
        logger.warning(
            "answers of this model end at %s, too: its tokenizer or chat template ends a turn "
            "there, and its generation config ends at %s alone; set "
            "model.generation_config.eos_token_id to all of them if transformers' generate is to "
            "agree",
            _names(tokenizer, ids - own),
            _names(tokenizer, own),
        )
    return ids


def own_stops(loaded: LoadedModel) -> tuple[str, ...]:
    """Return the stop strings of the model's generation config."""
    found = loaded.lm.model.generation_config.stop_strings or ()
    return (found,) if isinstance(found, str) else tuple(found)


def turn_end(encoder: PromptEncoder) -> int | None:
    """Return the control token that the chat template writes behind an assistant's message, if any.

    Only white space may stand between.
    """
    if not encoder.has_chat_template:
        return None
    try:
        rendered = encoder.render(_TURN, add_generation_prompt=False)
    except KVRagError:  # the template accepts no assistant's message
        return None
    behind = rendered.partition(_ANSWER)[2].lstrip()
    tokens = control_tokens(encoder.tokenizer)
    return tokens.get(max(filter(behind.startswith, tokens), key=len, default=""))


def _ids_of(given: int | Iterable[int] | None) -> frozenset[int]:
    return frozenset([given] if isinstance(given, int) else given or ())


def _names(tokenizer: Any, ids: Iterable[int]) -> str:
    return ", ".join([repr(tokenizer.convert_ids_to_tokens(each)) for each in sorted(ids)])
