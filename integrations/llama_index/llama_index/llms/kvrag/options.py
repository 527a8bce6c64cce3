"""Translation of option names and values of other LlamaIndex LLMs into kvrag's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from llama_index.core.prompts import PromptTemplate

from kvrag import ConfigError, StoreConfig
from kvrag.adapters import EngineFields

ALIASES = {
    "model_name": "model",
    "model_id": "model",
    "tokenizer_name": "tokenizer",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stopping_ids": "stop_token_ids",
}
"""Aliases of options."""

_SPLITTING = ("balanced", "balanced_low_0", "sequential")
"""Values of ``device_map`` that name no device."""

_UNUSED = ("max_retries", "api_key", "reuse_client", "default_headers")
"""Options of LLMs behind a service that have no effect on a model in this process.

No request is sent, so it can't get lost.
"""

_LOCAL = "the model runs in this process, and no service is asked; leave it out"
_REFUSED = {
    "api_base": _LOCAL,
    "base_url": _LOCAL,
    "timeout": "use asyncio.wait_for(llm.acomplete(...), seconds), which stops the decoding",
}

OWNER = "KVRagLLM"

Options = dict[str, Any]
"""Options by name."""


def constructor_options(options: Mapping[str, Any], cls: type[EngineFields]) -> Options:
    """Return the options of a new LLM under their own names.

    Parameters
    ----------
    options
        As the user wrote them. Options of ``HuggingFaceLLM`` are understood. ``device_map`` is
        taken as ``device`` where it names a device, and handed on where it splits the model.
    cls
        Class of the LLM, whose fields are the options.

    Raises
    ------
    ConfigError
        If an option does not exist or was given twice, or if no model was given.
    """
    out = _renamed({name: value for name, value in options.items() if name not in _UNUSED})
    for name, remedy in _REFUSED.items():
        if out.pop(name, None) is not None:
            raise ConfigError(f"{OWNER} takes no {name}: {remedy}")
    _take_device(out)
    more = out.pop("additional_kwargs", None)
    if more:
        out["generate_kwargs"] = {**(out.get("generate_kwargs") or {}), **more}
    out.pop("tokenizer_outputs_to_remove", None)  # the model receives token ids only
    if out.pop("tokenizer_kwargs", None):
        raise ConfigError(
            f"{OWNER} loads tokenizers without tokenizer_kwargs; leave it out (nothing is "
            "truncated, so max_length has no effect), or "
            "pass tokenizer=AutoTokenizer.from_pretrained(...) with them"
        )
    wrapper = out.get("query_wrapper_prompt")
    if isinstance(wrapper, str):
        wrapper = PromptTemplate(wrapper)
    # HuggingFaceLLM's default wraps nothing, and would replace the chat template.
    if wrapper is not None:
        out["query_wrapper_prompt"] = None if wrapper.get_template() == "{query_str}" else wrapper
    _take_store_config(out)
    for fault in cls.unknown_options(out, more=("device_map",), misspelt=False):
        raise ConfigError(re.sub(r"\bgenerate\b", "complete", str(fault)))
    if out.get("model") is None:
        raise ConfigError(
            "KVRagLLM has no model; pass model= a hub id, a local directory, a .gguf file or a "
            "loaded model"
        )
    return out


def _take_device(out: Options) -> None:
    """Interpret ``device_map``: a device, a way to split the model, or transformers' own choice."""
    device_map = out.pop("device_map", None)
    if device_map is None or device_map == "auto":
        return
    if not isinstance(device_map, str) or device_map in _SPLITTING:
        out["model_kwargs"] = {**(out.get("model_kwargs") or {}), "device_map": device_map}
    elif out.get("device") not in (None, device_map):
        raise ConfigError(
            f"device is {out['device']!r}, and device_map is {device_map!r}; pass device alone"
        )
    else:
        out["device"] = device_map


def _take_store_config(out: Options) -> None:
    """Take the store's config from ``model_kwargs``, which may hold it, too."""
    given = dict(out.get("model_kwargs") or {})
    if "store_config" in given:
        if out.get("store_config") is not None:
            raise ConfigError("store_config was given twice, once in model_kwargs; pass it once")
        out["store_config"] = given.pop("store_config")
        out["model_kwargs"] = given


def portable(config: StoreConfig) -> Options:
    """Return the values of a store's config that differ from the default, for a serialised form.

    Raises
    ------
    ConfigError
        If the config holds a function, which can't be serialised.
    """
    given = {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if getattr(config, f.name) != f.default
    }
    for name, value in given.items():
        if callable(value):
            if name == "encryption_key":
                remedy = "use 'env:NAME' instead"
            else:
                remedy = "use event_log instead, or"
            raise ConfigError(
                f"the store_config of this {OWNER} has a function for {name}, so it can't be "
                f"serialised or pickled; {remedy} create the "
                f"{OWNER} again where it is needed"
            )
    return given


def request_options(*layers: Mapping[str, Any]) -> Options:
    """Merge the options of a request, later layers over earlier layers; ``None`` means "not given".

    ``do_sample`` of ``transformers`` becomes a temperature: 0 if it is false, 1 if it is true and
    no temperature was given.
    """
    out: Options = {}
    for layer in layers:
        given = {name: value for name, value in _renamed(layer).items() if value is not None}
        is_sampling = given.pop("do_sample", None)
        if is_sampling is False:
            given["temperature"] = 0.0
        elif is_sampling and not given.get("temperature", out.get("temperature")):
            given["temperature"] = 1.0
        out.update(given)
    return out


def _renamed(options: Mapping[str, Any]) -> Options:
    out: Options = {}
    for name, value in options.items():
        target = ALIASES.get(name, name)
        if target in out and value is not None and out[target] is not None:
            raise ConfigError(f"{target} was given twice, once as {name!r}; pass it once")
        if value is not None or target not in out:
            out[target] = value
    return out


def short_name(value: Any) -> str:
    """Return a short name of a model, a tokenizer, a path or a dtype."""
    config = getattr(value, "config", None)
    name = getattr(config, "_name_or_path", None) or getattr(value, "name_or_path", None)
    return str(name or (value if config is None else type(value).__name__))
