"""What clients send: OpenAI's fields that kvrag honours; one that it doesn't is refused unless it says nothing."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrag.config import RepairConfig, as_config
from kvrag.types import MaxContext, Mode

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "parallel_tool_calls": (None, True, False),
    "store": (None, False),
}
"""Fields of OpenAI's that are not honoured, and the values that ask for nothing."""
_IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that change no answer."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Document(_Body):
    """A chunk of a prompt, as it was precomputed."""

    text: str


class Reuse(_Body):
    """kvrag's own options, in the field ``kvrag``: how KV is reused, and documents that go before the last user message."""

    mode: Mode = "auto"
    repair: dict[str, Any] | None = None
    max_context: MaxContext = "raise"
    documents: list[Document] = Field(default_factory=list)

    @property
    def config(self) -> RepairConfig | None:
        """The repair that was asked for."""
        return as_config(RepairConfig, self.repair, option="repair")


class StreamOptions(_Body):
    """Whether the last event of a stream has the usage."""

    include_usage: bool = False


class Completion(_Body):
    """What ``/v1/chat/completions`` and ``/v1/completions`` have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=0)
    n: int = Field(default=1, ge=1, le=8)
    kvrag: Reuse = Field(default_factory=Reuse)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        """Take fields that ask for nothing, and refuse those that ask for what is not there."""
        if not isinstance(data, dict):
            return data
        for name, neutral in _NEUTRAL.items():
            if name in data and data[name] not in neutral:
                raise ValueError(f"{name} is not supported; leave it out")
        return {name: value for name, value in data.items() if name not in _NEUTRAL and name not in _IGNORED}


class Message(BaseModel):
    """A chat message, as the engine takes it; what it holds besides role and content goes to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Completion):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


class TextRequest(Completion):
    """Body of ``/v1/completions``."""

    prompt: str | list[str]


class KVDocument(_Body):
    """A chunk that is stored."""

    id: str | None = None
    text: str


class PrecomputeRequest(_Body):
    """Body of ``/v1/kv/precompute``."""

    documents: list[KVDocument] = Field(min_length=1)
    collection: str | None = None


class ExplainRequest(_Body):
    """Body of ``/v1/kv/explain``: a prompt of either kind."""

    messages: list[Message] | None = None
    prompt: str | None = None
    kvrag: Reuse = Field(default_factory=Reuse)


class DeleteRequest(_Body):
    """Body of ``/v1/kv/delete``: documents by id, or a collection."""

    ids: list[str] | None = None
    collection: str | None = None

    @model_validator(mode="after")
    def _check(self) -> DeleteRequest:
        if self.ids is None and self.collection is None:
            raise ValueError("pass ids, a collection, or both")
        return self
