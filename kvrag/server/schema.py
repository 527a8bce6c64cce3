"""What clients send: OpenAI's fields that kvrag honours; one that it doesn't is refused unless it says nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrag.config import RepairConfig, as_config
from kvrag.prompt.tokenizer import check_encodable
from kvrag.types import MaxContext, Mode

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "parallel_tool_calls": (None, True, False),
    "store": (None, False),
}
"""Fields of OpenAI's that are not honoured, and the values that ask for nothing."""
_IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that change no answer."""


MAX_DEPTH = 64
"""Of lists and objects inside each other, in a body: schemas of tools need a dozen, and what reads them recursively has an end."""


MAX_CHOICES = 32
"""Answers to one request, which has one place in the queue."""

Stop = Annotated[str, Field(max_length=1000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_all(cls, data: Any) -> Any:
        level, depth = [data], 0
        while level := [inner for each in level for inner in _inside(each)]:
            if (depth := depth + 1) > MAX_DEPTH:
                raise ValueError(f"it nests deeper than {MAX_DEPTH} levels; make it flatter")
            for text in level:
                if isinstance(text, str) and not text.isascii():
                    check_encodable(text)
        return data


def _inside(value: Any) -> Iterable[Any]:
    return (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()


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


class Making(Reuse):
    """The field ``kvrag`` of what is answered: with ``trace``, its account names each token of the prompt and where its KV came from."""

    trace: bool = False


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
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = Field(default=None, max_length=1024)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(default=None, ge=0)
    n: int = Field(default=1, ge=1, le=8)
    kvrag: Making = Field(default_factory=Making)

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
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens' log-probabilities are wanted beside the chosen one's; ``None``: none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class TextRequest(Completion):
    """Body of ``/v1/completions``."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def num_logprobs(self) -> int | None:
        """As :attr:`ChatRequest.num_logprobs`."""
        return self.logprobs

    @model_validator(mode="after")
    def _check(self) -> TextRequest:
        if isinstance(self.prompt, list) and len(self.prompt) * self.n > MAX_CHOICES:
            raise ValueError(f"n choices of each prompt are more than {MAX_CHOICES}; send several requests")
        return self


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
