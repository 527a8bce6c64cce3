"""LangChain's profile of a local model, read from local files without loading the model."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel, ModelProfile
from transformers import PreTrainedModel
from transformers.utils import cached_file

from kvrag.adapters import EngineFields

_OTHER_KINDS = [
    f"{kind}_{way}" for kind in ("image", "audio", "video") for way in ("inputs", "outputs")
]


def profile_of(llm: EngineFields) -> ModelProfile:
    """Describe a model for LangChain: its context window, and its abilities with its class.

    Nothing is downloaded, and a ``.gguf`` file is not opened, because that takes seconds; unknown
    values are left out.
    """
    profile: ModelProfile = {"text_inputs": True, "text_outputs": True, "temperature": True}
    profile.update(dict.fromkeys(_OTHER_KINDS, False))  # type: ignore[typeddict-item]
    source = llm.source
    window = source.window()
    if window:
        profile["max_input_tokens"] = window
    template = _has_template(source)
    if template is not None:
        calls = template and getattr(type(llm), "bind_tools", None) is not BaseChatModel.bind_tools
        profile["tool_calling"] = calls
        profile["tool_choice"] = calls and find_spec("llguidance") is not None
        # Else agents would bind the schema to every call, which leaves no room for calls of tools;
        # with False, they make the schema a tool.
        profile["structured_output"] = False
    return profile


def _has_template(source: Any) -> bool | None:
    """Whether the tokenizer has a chat template; ``None`` if unknown."""
    given = source.tokenizer
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return bool(getattr(given, "chat_template", None))
    if given is None and (
        isinstance(source.model, PreTrainedModel) or os.fspath(source.model).endswith(".gguf")
    ):
        return None
    home = os.fspath(given or source.directory)
    is_known = False
    options = {**source.hub_options(own_files=given is None), "local_files_only": True}
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        with suppress(OSError, ValueError):
            path = cached_file(home, name, **options)
            is_known = True
            if name.endswith(".jinja") or json.loads(Path(str(path)).read_text()).get(
                "chat_template"
            ):
                return True
    if is_known:
        return False
    return None
