"""Request fields of other servers and clients that the API does not implement.

A field that no schema knows is accepted where it asks for nothing: at ``null``, ``false``, ``0`` or
an empty value, at its neutral value, or as a member of :data:`HINTS`. Any other field would change
the answer, so it is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

JsonObject = dict[str, Any]

HINTS = (
    # The caller, and accounting.
    "user",
    "user_id",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "request_id",
    "priority",
    "session_id",
    "chat_id",
    "conversation_id",
    "message_id",
    "prompt_cache_key",
    "prompt_cache_retention",
    "api_type",
    "api_server",
    "legacy_api",
    # How a server uses its memory and its machine.
    "keep_alive",
    "cache_prompt",
    "id_slot",
    "slot_id",
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "low_vram",
    "use_mmap",
    "use_mlock",
    "truncation_length",
    "prediction",
    "speculative_ngram",
    # Reasoning and verbosity of other vendors' models.
    "verbosity",
    "include_reasoning",
    # In which order methods of sampling follow each other: kvrag has its own.
    "samplers",
    "sampler_order",
    "sampler_priority",
    "temperature_last",
    # More about an answer, which kvrag reports in its own field.
    "timings_per_token",
    "return_progress",
    # How special tokens, which no answer shows, are spelt.
    "spaces_between_special_tokens",
    # Options of a method that is off, and is refused where it is on.
    "mirostat_tau",
    "mirostat_eta",
    "dry_base",
    "dry_allowed_length",
    "dry_sequence_breakers",
    "dry_penalty_last_n",
    "xtc_threshold",
    "smoothing_curve",
    "dynatemp_low",
    "dynatemp_high",
    "dynatemp_min",
    "dynatemp_max",
    "dynatemp_exponent",
    "adaptive_decay",
    "negative_prompt",
    "length_penalty",
    "early_stopping",
)
"""Fields that change no answer at any value."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "adaptive_target": (-0.01, -1, 0),
    "add_bos_token": (True,),
    "audio": (False, {}),
    "cfg_scale": (1, 0),
    "detokenize": (True,),
    "encoder_repetition_penalty": (1, 0),
    "function_call": ("auto", "none"),
    "guidance_scale": (1, 0),
    "mirostat": (0, False),
    "modalities": (["text"], []),
    "skip_special_tokens": (True,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "nsigma": (-1, 0),
    "num_beams": (1, 0),
    "response_format": ({"type": "text"}, {}, ""),
    "tool_choice": ("auto", "none", {}, ""),
    "truncate_prompt_tokens": (-1,),
    "typical": (1,),
    "typical_p": (1,),
    "web_search_options": (False,),
}
"""Further values at which fields ask for nothing, beside ``null``, ``false``, ``0`` and empty."""

OF_PENALTY = (
    "rep_pen_range",
    "repetition_penalty_range",
    "repeat_last_n",
    "rep_pen_slope",
    "repetition_decay",
)
"""Fields that have no effect as long as ``repetition_penalty`` is neutral (1)."""

ALIASES: dict[str, str] = {
    "rep_pen": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "stopping_strings": "stop",
    "think": "enable_thinking",
}
"""Names that other servers use for fields of the API."""

_CHAT = "send chat messages to /v1/chat/completions"
REMEDIES: dict[str, str] = {
    "add_special_tokens": "send true with text prompts, false with chat messages, or leave it out",
    "cache_salt": "give each tenant a key of its own, which keeps their KV apart",
    "chat_template": "set it on the tokenizer that is served",
    "documents": "send them as kvrag.documents",
    "do_sample": "send temperature, which is 0 where nothing is sampled",
    "function_call": "send chat messages with tool_choice",
    "functions": "send them as tools, with chat messages",
    **dict.fromkeys(
        (
            "grammar",
            "grammar_string",
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "json_schema",
            "structured_outputs",
        ),
        "send chat messages with response_format and a JSON schema",
    ),
    "modalities": "answers are text; send ['text'], or leave it out",
    "prompt_logprobs": "send a text completion with echo and logprobs",
    "response_format": _CHAT,
    "skip_special_tokens": "answers have no control tokens; send true, or leave it out",
    "suffix": "put the model's own tokens for filling in the middle into the prompt",
    "thinking": (
        "send chat_template_kwargs with what the model's template knows, such as enable_thinking"
    ),
    "tool_choice": _CHAT,
    "tools": _CHAT,
}
"""Remedies for fields that are refused."""

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def asks_for_nothing(value: Any) -> bool:
    """Whether a value is null, false, zero or empty."""
    return value in _NOTHING


def understood(data: Mapping[str, Any], known: Collection[str], *, is_foreign: bool) -> JsonObject:
    """Return the fields of a body that a schema knows, without nulls.

    Raises ``PydanticCustomError`` for another field; of another vendor's API, only if it asks for
    something.
    """
    given = {name: value for name, value in data.items() if value is not None}
    for alias, name in ALIASES.items():
        if alias in given and name in known:
            _rename(given, alias, name)
    for name in [name for name in given if name not in known]:
        if not (is_foreign and _is_neutral(name, given)):
            raise _refusal(name, known)
        del given[name]
    return given


def _rename(given: JsonObject, alias: str, name: str) -> None:
    value = given.pop(alias)
    is_off = value is False and alias == "think"  # it switches a default of the model off
    is_unlimited = value == -1 and name == "max_tokens"
    if (asks_for_nothing(value) and not is_off) or is_unlimited or given.get(name) == value:
        return
    if name in given:
        raise fault("unsupported_parameter", f"{alias} and {name} differ; send {name} alone", alias)
    given[name] = value


def _is_neutral(name: str, given: Mapping[str, Any]) -> bool:
    value = given[name]
    if name in HINTS:
        return True
    if name in OF_PENALTY and given.get("repetition_penalty", 1) == 1:
        return True
    if name == "do_sample":
        return isinstance(value, bool) and (value or not given.get("temperature"))
    if name == "add_special_tokens":  # chat templates add their own special tokens
        return value is ("prompt" in given)
    if name == "best_of":
        return value in (0, 1, given.get("n", 1))
    if name in NEUTRAL:
        return value in NEUTRAL[name]
    return asks_for_nothing(value)


def _refusal(name: str, known: Collection[str]) -> PydanticCustomError:
    if name in REMEDIES or name in NEUTRAL:
        remedy = REMEDIES.get(name, "leave it out")
        return fault(
            "unsupported_parameter", f"{name} is not supported with this value; {remedy}", name
        )
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]!r}?" if near else "leave it out"
    return fault("unknown_parameter", f"unknown parameter {name!r}; {hint}", name)


def fault(code: str, sentence: str, name: str) -> PydanticCustomError:
    """Build a pydantic error that names its field."""
    # Half of a surrogate pair is no text for pydantic.
    return PydanticCustomError(code, sentence, {"field": name.encode("utf-8", "replace").decode()})
