"""Key of LangChain's response cache: everything that changes an answer.

LangChain's own key lacks the options of an LLM's call, hides the model's stop strings behind the
call's, and tells objects apart by their addresses, which recur.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from pydantic import BaseModel

from kvrag import InputError, KVRagEngine
from langchain_kvrag._spellings import Options, named

LEFT_OUT = frozenset(
    {
        "cache",
        "callbacks",
        "custom_get_token_ids",
        "disable_streaming",
        "metadata",
        "name",
        "profile",
        "rate_limiter",
        "streaming",
        "tags",
        "timeout",
        "verbose",
    }
)
"""Fields that change no answer."""

LIVE = frozenset({"model", "prefix", "tokenizer"})
"""Fields that :func:`_live` reads from the loaded model: by their content, as it is now."""

_OF_CALL = ("ls_structured_output_format", "run_id", "run_name", "structured_output_format")
"""Options of a call that LangChain keeps for itself."""

_OF_STORE = ("encryption_key", "event_log", "on_event")
"""Options of the store without an effect on answers, and its key, which :func:`_live` covers."""


class KeyedCache(BaseCache):
    """A response cache that is read and written under a key of its own."""

    def __init__(self, inner: BaseCache, key: str) -> None:
        self._inner = inner
        self._key = key

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """Return the kept answer of a prompt, if any."""
        return self._inner.lookup(prompt, self._key)

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """Keep the answer of a prompt."""
        self._inner.update(prompt, self._key, return_val)

    async def alookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """Return the kept answer of a prompt, if any."""
        return await self._inner.alookup(prompt, self._key)

    async def aupdate(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """Keep the answer of a prompt."""
        await self._inner.aupdate(prompt, self._key, return_val)

    def clear(self, **kwargs: Any) -> None:
        """Clear the cache."""
        self._inner.clear(**kwargs)


def key_of(llm: BaseModel, engine: KVRagEngine, options: Options) -> str:
    """Return the key of a call: a digest of the model's fields, its state, and the call's options.

    A new field is part of it unless :data:`LEFT_OUT` names it. Loads the model.

    Raises
    ------
    InputError
        If the content of an option can't be told.
    """
    shape = [type(llm).__module__, type(llm).__qualname__]
    own = {name: getattr(llm, name) for name in type(llm).model_fields.keys() - LEFT_OUT - LIVE}
    of_call = {
        name: value
        for name, value in options.items()
        if name not in LEFT_OUT and name not in _OF_CALL and named({name: value}, "model") is None
    }
    parts = _content([shape, own, _live(engine), of_call])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def hidden(value: Any) -> str:
    """Return a digest of a value's repr, for values that may be secret."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _live(engine: KVRagEngine) -> list[Any]:
    """Return the content of the loaded model and its tokenizer, which may have been changed."""
    loaded = engine.loaded
    tokenizer = engine.tokenizer
    return [
        engine.source.name,
        loaded.fingerprint,
        loaded.lm.device.type,
        loaded.lm.model.generation_config,
        getattr(tokenizer, "chat_template", None),
        tokenizer.special_tokens_map,
        len(tokenizer),
        engine.repair,
        engine.prefix_text,
        engine.store.names.namespace(engine.namespace),
    ]


def _content(value: Any) -> Any:
    """Return a value as JSON that is equal for equal contents only, in every process.

    Raises :class:`~kvrag.InputError` for objects of other classes: their repr may be an address.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Mapping):
        return {"pairs": sorted(map(_content, value.items()), key=json.dumps)}
    if isinstance(value, Sequence):
        return [_content(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(_content, value), key=json.dumps)}
    kind = type(value).__qualname__
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name not in _OF_STORE]
        return {kind: [[name, _content(getattr(value, name))] for name in names]}
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return {kind: _content(value.to_dict())}
    raise InputError(f"it has an object of type {kind}, whose content can't be told")
