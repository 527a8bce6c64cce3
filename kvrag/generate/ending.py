"""Find the tokens that end an answer.

They come from the model's generation config, its tokenizer, and its chat template, which closes an
assistant's message with a token. A fine-tuned base model often keeps the base's config, but was
never trained to write the end token in it: past the end of its message, it would answer itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kvrag.errors import KVRagError
from kvrag.model.lm import LoadedModel
from kvrag.prompt.template import PromptEncoder
from kvrag.prompt.tokenizer import control_tokens
from kvrag.runtime import RUNTIME

logger = logging.getLogger(__name__)

_ANSWER = "The probe's answer."
_TURN = ({"role": "user", "content": "A probe."}, {"role": "assistant", "content": _ANSWER})


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
    found = [text for text in tokens if behind.startswith(text)]
    if found:
        return tokens[max(found, key=len)]
    return None


def _ids_of(given: int | Iterable[int] | None) -> frozenset[int]:
    return frozenset([given] if isinstance(given, int) else given or ())


def _names(tokenizer: Any, ids: Iterable[int]) -> str:
    return ", ".join([repr(tokenizer.convert_ids_to_tokens(each)) for each in sorted(ids)])
