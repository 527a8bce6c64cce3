"""Schemas of request bodies: the fields of OpenAI's and vLLM's APIs that kvrag honours.

:mod:`kvrag_server.fields` treats the other fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvrag import MaxContext, Mode, RepairConfig
from kvrag.adapters import check_encodable
from kvrag.config import as_config
from kvrag_server.fields import JsonObject, fault, understood

MAX_DEPTH = 64
"""Limit of nesting of lists and objects in a body.

Schemas of tools need about a dozen levels; recursive readers of a body need a limit.
"""


MAX_CHOICES = 32
"""Most answers to a request, which takes a single slot of the queue."""

MAX_BIASES = 1024

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""List that is checked up to its first fault: a body has room for a million faults."""

Stop = Annotated[str, Field(max_length=1000)]
Token = Annotated[int, Field(ge=0, lt=2**31)]


class _Body(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)
    checks_text: ClassVar[bool] = True
    is_foreign: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _check_all(cls, data: Any) -> Any:
        """Refuse bodies that nest too deep or hold invalid text, and drop null fields.

        Clients send null for fields that are not given.
        """
        level = [data]
        depth = 0
        while level := [inner for each in level for inner in _inside(each)]:
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"it nests deeper than {MAX_DEPTH} levels; make it flatter")
            for text in level:
                if cls.checks_text and isinstance(text, str) and not text.isascii():
                    check_encodable(text)
        if isinstance(data, dict):
            return understood(data, cls.model_fields, is_foreign=cls.is_foreign)
        return data


class _Foreign(_Body):
    """Body of another vendor's API, with fields that kvrag does not know."""

    is_foreign = True


def without_nulls(value: Any, levels: int) -> Any:
    """Return a value without the null fields of its objects, down to ``levels`` levels.

    Deeper objects may be JSON schemas or arguments of calls, where null has a meaning.
    """
    if isinstance(value, list):
        return [without_nulls(each, levels) for each in value]
    if not isinstance(value, dict) or not levels:
        return value
    return {
        name: without_nulls(each, levels - 1) for name, each in value.items() if each is not None
    }


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list) else ()


class Document(_Body):
    """Document of a prompt: a chunk, with the text that was precomputed."""

    text: str


class Reuse(_Body):
    """Field ``kvrag``: options of reuse, and documents before the last user message."""

    mode: Mode = "auto"
    repair: Annotated[JsonObject, Field(max_length=64)] | str | None = None
    max_context: MaxContext = "raise"
    documents: Items[Document] = Field(default_factory=list)

    @property
    def config(self) -> RepairConfig | None:
        """Repair that the request asks for."""
        return as_config(RepairConfig, self.repair, option="repair")


class AnswerOptions(Reuse):
    """Field ``kvrag`` of requests that are answered.

    With ``trace``, the accounting names every token of the prompt and the source of its KV.
    """

    trace: bool = False


class StreamOptions(_Foreign):
    """Options of a stream: whether its last event has the usage."""

    include_usage: bool = False


def _or_none(*nothing: Any) -> BeforeValidator:
    """Return a validator that maps values at which a field asks for nothing to ``None``."""
    return BeforeValidator(
        lambda value: None if value in nothing and not isinstance(value, bool) else value
    )


_cut = BeforeValidator(
    lambda value: dict(islice(value.items(), MAX_BIASES + 1)) if isinstance(value, dict) else value
)
"""Validator that makes a long object just too long: each of its entries may be a fault."""

_shallow = BeforeValidator(lambda value: without_nulls(value, levels=2))
"""Validator that drops nulls outside JSON schemas."""

Tools = Annotated[Items[JsonObject] | None, _shallow]
Limit = Annotated[int | None, Field(ge=0), _or_none(-1)]


class Completion(_Foreign):
    """Fields that ``/v1/chat/completions`` and ``/v1/completions`` share."""

    model: Annotated[str | None, _or_none("")] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Annotated[int | None, Field(ge=1), _or_none(0, -1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1), _or_none(0)] = None
    repetition_penalty: float | None = Field(default=None, gt=0)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[
        dict[int, float] | None, Field(max_length=MAX_BIASES), _or_none([]), _cut
    ] = None
    stop: Annotated[Stop | Annotated[list[Stop], Field(max_length=16)] | None, _or_none("")] = None
    stop_token_ids: Annotated[list[Token] | None, Field(max_length=64)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64), _or_none(-1)] = None
    n: int = Field(default=1, ge=1, le=8)
    kvrag: AnswerOptions = Field(default_factory=AnswerOptions)

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; by default as many as there is room for."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        return self.max_completion_tokens


def _no_tokens(body: Completion) -> PydanticCustomError:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return fault(
        "invalid_value", f"{name} is 0, and an answer has a token at least; send 1 or more", name
    )


class Message(BaseModel):
    """Chat message for the engine; fields besides role and content go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Items[JsonObject | str | None] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return without_nulls(data, levels=3)


Messages = Items[Message]


class ChatRequest(Completion):
    """Body of ``/v1/chat/completions``."""

    messages: Messages = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Tools = None
    tool_choice: Annotated[str | JsonObject | None, _shallow, _or_none("", {})] = None
    parallel_tool_calls: bool = True
    response_format: Annotated[JsonObject | None, _shallow, _or_none("", {})] = None
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str | None, _or_none("")] = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    @property
    def variables(self) -> JsonObject:
        """Variables of the chat template.

        ``enable_thinking`` and ``reasoning_effort`` are the template's own names.
        """
        named = self.model_dump(include={"enable_thinking", "reasoning_effort"}, exclude_none=True)
        return named | self.chat_template_kwargs

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to return log-probabilities for, beside the chosen token's.

        ``None``: return no log-probabilities.
        """
        if self.logprobs:
            return self.top_logprobs or 0
        return None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise fault("invalid_value", "top_logprobs needs logprobs to be true", "top_logprobs")
        if self.limit == 0:
            raise _no_tokens(self)
        if not (self.add_generation_prompt or self.continue_final_message):
            raise fault(
                "unsupported_parameter",
                "add_generation_prompt is false, so nothing would be answered; send "
                "continue_final_message with it",
                "add_generation_prompt",
            )
        return self


Tokens = Annotated[Items[Token], Field(min_length=1)]


class TextRequest(Completion):
    """Body of ``/v1/completions``."""

    prompt: str | Annotated[Items[str] | Items[Token] | Items[Tokens], Field(min_length=1)]
    echo: bool = False
    logprobs: Annotated[
        int | None, Field(ge=0, le=20), BeforeValidator(lambda v: None if v is False else v)
    ] = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities, as :attr:`ChatRequest.num_logprobs`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Prompts, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @model_validator(mode="after")
    def _check(self) -> TextRequest:
        if self.limit == 0 and not self.echo:
            raise _no_tokens(self)
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise fault(
                "invalid_value",
                f"n choices of each prompt are more than {MAX_CHOICES}; send several requests",
                "n",
            )
        return self


class KVDocument(_Body):
    """Document to store as a chunk.

    If UTF-8 can't encode one, it is reported, and the others are stored.
    """

    checks_text = False
    id: InstanceOf[str] | None = None
    text: InstanceOf[str]


class PrecomputeRequest(_Body):
    """Body of ``/v1/kv/precompute``."""

    checks_text = False
    documents: Items[KVDocument] = Field(min_length=1)
    collection: str | None = None


class ExplainRequest(_Body):
    """Body of ``/v1/kv/explain``: a prompt of either kind, and variables for rendering messages."""

    messages: Messages | None = None
    prompt: str | Tokens | None = None
    tools: Tools = None
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    continue_final_message: bool = False
    kvrag: Reuse = Field(default_factory=Reuse)


class DeleteRequest(_Body):
    """Body of ``/v1/kv/delete``: documents by id, or a collection."""

    ids: Items[str] | None = None
    collection: str | None = None

    @model_validator(mode="after")
    def _check(self) -> DeleteRequest:
        if self.ids is None and self.collection is None:
            raise ValueError("pass ids, a collection, or both")
        return self
