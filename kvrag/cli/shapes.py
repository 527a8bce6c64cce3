"""Find a model's shape by the cheapest way: a preset, a config file, a GGUF header, the hub. Never its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrag.errors import ModelError, require
from kvrag.estimate import PRESETS, ModelShape, preset, shape_from_config


def shape_of(model: str) -> ModelShape:
    """Return the shape of a preset, a directory with a ``config.json``, a ``.gguf`` file, or a model of the hub.

    Raises
    ------
    ModelError
        If none of these is found, or its config does not tell.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        return _shape_from_gguf(path)
    if path.is_dir():
        return _shape_from_directory(path)
    return preset(model) or _shape_from_hub(model)


def _shape_from_directory(path: Path) -> ModelShape:
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)!r} holds no readable config.json ({error}); check the path") from error
    return shape_from_config(config)


def _shape_from_gguf(path: Path) -> ModelShape:
    if not path.is_file():
        raise ModelError(f"there is no GGUF file {str(path)!r}; check the path")
    gguf = require("gguf", extra="gguf", purpose="reading GGUF files")
    try:
        fields = gguf.GGUFReader(path).fields
        name = fields["general.architecture"].contents()
        values = {
            key.removeprefix(f"{name}."): field.contents() for key, field in fields.items() if key.startswith(name)
        }
    except Exception as error:  # the reader's errors for damaged files share no base class
        raise ModelError(f"{str(path)!r} is no readable GGUF file ({type(error).__name__}: {error})") from error
    return shape_from_config(_config_of_gguf(values))


def _config_of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename GGUF's keys to those of a ``config.json``."""
    names = {
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "embedding_length": "hidden_size",
    }
    return {new: values[old] for old, new in names.items() if old in values}


def _shape_from_hub(model: str) -> ModelShape:
    transformers = require("transformers", extra="cli", purpose="reading configs of the hub")
    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except Exception as error:  # no such name, no connection, gated: all the same here
        raise ModelError(
            f"{model!r} is no preset ({', '.join(PRESETS)}), directory or .gguf file, and its config can't be had from the hub; "
            f"check the name and the connection ({type(error).__name__})"
        ) from error
    return shape_from_config(config.to_dict())
