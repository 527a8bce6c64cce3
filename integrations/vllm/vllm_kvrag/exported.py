"""File that describes a model to vLLM: fingerprint of its KV, weights, and key rotations."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvrag import ConfigError, KVRagEngine, UnsupportedModelError
from kvrag.adapters import RotaryTable, describe, rope_text, source_identity

TESTED = (
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Types of models with which vLLM gave the same answers with and without stored KV.

``tests/vllm_connector/test_vllm.py`` tests them.
"""
FORMAT = "kvrag-vllm-1"
NO_ROTATION = -1
SNAPSHOT = re.compile(r"[0-9a-f]{40}")  # the folder of a hub commit in the hub's cache


@dataclass(frozen=True, slots=True)
class Exported:
    """Description of a model as kvrag's store knows it.

    ``weights`` names their source (:func:`weights_of`), and ``rope`` holds the RoPE parameters as
    JSON. ``kinds`` has the number of every layer's rotation, or :data:`NO_ROTATION`; ``neighbours``
    says for every rotation whether it rotates pairs of neighbours instead of halves.
    """

    fingerprint: str
    model_type: str
    dtype: str
    weights: str
    rope: str
    kinds: tuple[int, ...]
    neighbours: tuple[bool, ...]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Exported:
        """Read a file of :func:`export_model`, not its tables; raise ``ConfigError`` otherwise."""
        try:
            with safe_open(path, "pt") as file:
                found = json.loads((file.metadata() or {})[FORMAT])
        except Exception as error:
            raise ConfigError(
                f"{path} is not a file of vllm_kvrag.export_model ({error}); write it again"
            ) from error
        return cls(
            **{**found, "kinds": tuple(found["kinds"]), "neighbours": tuple(found["neighbours"])}
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """A rotation: cosine and sine of all pairs, float32 ``(positions, pairs)``."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_neighbours: bool

    def rotate(self, keys: torch.Tensor, positions: slice) -> torch.Tensor:
        """Rotate position-free keys ``(H, T, D)`` to these positions.

        Computes in float32 and casts back at the end.
        """
        cos = self.cos[positions]
        sin = self.sin[positions]
        width = 2 * self.cos.shape[1]
        found = keys[..., :width].float()
        first, second = (
            (found[..., 0::2], found[..., 1::2]) if self.is_neighbours else found.chunk(2, dim=-1)
        )
        turned = first * cos - second * sin, second * cos + first * sin
        if self.is_neighbours:
            out = torch.stack(turned, dim=-1).flatten(-2)
        else:
            out = torch.cat(turned, dim=-1)
        return torch.cat([out.to(keys.dtype), keys[..., width:]], dim=-1)


def read_turns(path: str | os.PathLike[str], device: torch.device) -> list[Turn | None]:
    """Return the rotation of every layer, ``None`` for a layer without rotation."""
    exported = Exported.read(path)
    with safe_open(path, "pt", device=str(device)) as file:
        turns = [
            Turn(file.get_tensor(f"cos.{kind}"), file.get_tensor(f"sin.{kind}"), is_neighbours)
            for kind, is_neighbours in enumerate(exported.neighbours)
        ]
    return [None if kind == NO_ROTATION else turns[kind] for kind in exported.kinds]


def export_model(engine: KVRagEngine, path: str | os.PathLike[str]) -> None:
    """Write the description of an engine's model for vLLM; it holds no text and no KV.

    Raises
    ------
    ConfigError
        If vLLM can't load the model from the same source: a model object that was handed in, a
        changed model, or a model with adapters. Also if the engine encodes chunks behind a context:
        no chunk would be exact.
    UnsupportedModelError
        If the model's KV is not reused, has other rotations than vLLM's layers, depends on the
        prompt's length, or is a latent and a rotary key.
    """
    loaded = engine.loaded
    source = engine.source
    if engine.context is not None:
        raise ConfigError(
            "this engine encodes chunks behind a context, so vLLM would load none of them; pass "
            "context=None"
        )
    lm = loaded.reusable
    if lm.reuse_window < lm.context_window:
        raise UnsupportedModelError(
            "this model's keys depend on the prompt's length, so there is no one table of them"
        )
    if any(trait.is_latent for trait in lm.traits):
        raise UnsupportedModelError(
            "this model has latent attention, and vLLM keeps its latent and rotary key in one "
            "tensor per layer; the connector loads keys and values per head only, so serve the "
            "model without it"
        )
    weights = _origin(source.model, lm.model.config, source.hf_kwargs)
    identity = describe(lm.model, engine.tokenizer, weights or "", extra_keys=source.extra_keys)
    if identity.fingerprint != loaded.fingerprint or identity.adapters or identity.quantisation:
        raise ConfigError(
            "only a plain model, loaded by its name or directory, without adapters, can be exported"
        )
    rotations = lm.rotary(lm.reuse_window)
    tables = {id(table): table for table in rotations if table.width}
    turns = [_turn(table) for table in tables.values()]
    numbers = {name: number for number, name in enumerate(tables)}
    config = lm.model.config.get_text_config()
    kinds = tuple(numbers.get(id(table), NO_ROTATION) for table in rotations)
    about = loaded.fingerprint, config.model_type, str(lm.dtype), weights or "", rope_text(config)
    exported = Exported(*about, kinds, tuple(turn.is_neighbours for turn in turns))
    tensors = {
        f"{name}.{kind}": getattr(turn, name)
        for kind, turn in enumerate(turns)
        for name in ("cos", "sin")
    }
    save_file(tensors, path, metadata={FORMAT: json.dumps(asdict(exported))})


def _turn(table: RotaryTable) -> Turn:
    pairs = table.pairs()
    if pairs is None:
        raise UnsupportedModelError(
            "this model's keys rotate neither in halves nor in pairs of neighbours"
        )
    cos, sin, is_neighbours = pairs
    return Turn(cos.cpu(), sin.cpu(), is_neighbours)


def weights_of(model: str, config: Any) -> set[str]:
    """Return the possible names of the weights of a model loaded from a directory or the hub."""
    folder = Path(model)
    found = {_origin(model, config, {})}
    if folder.parent.name == "snapshots" and SNAPSHOT.fullmatch(folder.name):
        # The hub's cache: the folder's name is the commit.
        found.add(source_identity("", commit=folder.name, options={}))
    return {name for name in found if name is not None}


def _origin(model: object, config: Any, options: Mapping[str, Any]) -> str | None:
    if not isinstance(model, (str, os.PathLike)):
        return None
    return source_identity(
        os.fspath(model), commit=getattr(config, "_commit_hash", None), options=options
    )
