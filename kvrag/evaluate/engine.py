"""The part of an engine that evaluation asks for."""

from __future__ import annotations

# ruff: noqa: D102  (KVRagEngine documents the members)
from typing import Any, Protocol

from kvrag.config import StoreConfig
from kvrag.model.lm import LoadedModel
from kvrag.model.source import ModelSource
from kvrag.prompt.template import PromptEncoder
from kvrag.types import (
    Explanation,
    GenerationResult,
    PrefillResult,
    ScoreResult,
)


class Engine(Protocol):
    """An engine; :class:`kvrag.KVRagEngine` documents the members."""

    source: ModelSource
    store_config: StoreConfig
    profile: tuple[str, Any]

    @property
    def loaded(self) -> LoadedModel: ...
    @property
    def encoder(self) -> PromptEncoder: ...
    @property
    def prefix_text(self) -> str: ...
    @property
    def context_digest(self) -> str: ...
    def in_memory(self) -> Any: ...
    def generate(self, *args: Any, **kwargs: Any) -> GenerationResult: ...
    def prefill(self, *args: Any, **kwargs: Any) -> PrefillResult: ...
    def score(self, *args: Any, **kwargs: Any) -> ScoreResult: ...
    def explain(self, *args: Any, **kwargs: Any) -> Explanation: ...
