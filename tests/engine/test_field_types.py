"""Fields of every type that pydantic writes a JSON schema for, through both adapters: as answers and as arguments of tools."""

import collections
import datetime
import enum
import ipaddress
import os
import pathlib
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated as A
from typing import Any, Literal, NamedTuple, NotRequired, Optional

import pydantic
import pytest
from kit import scripted
from langchain_core.exceptions import OutputParserException
from llama_index.core import PromptTemplate
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model
from schemas_kit import constraint, said, wanted
from typing_extensions import TypedDict

from langchain_kvrag import ChatKVRag
from llama_index.llms.kvrag import KVRagLLM


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Inner(BaseModel):
    x: int
    y: str | None = None


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]
    age: int


class Tree(BaseModel):
    """A tree."""

    leaf: bool
    branches: list["Tree"] = Field(default=[], max_length=1)


@dataclass
class Point:
    a: int
    b: bool = True


class Pair(NamedTuple):
    a: int
    b: bool


class Mapped(TypedDict):
    a: int
    b: NotRequired[bool]


PARSED: dict[str, Any] = {
    "int": int,
    "float": A[float, Field(ge=0, le=1)],
    "bool": bool,
    "str": str,
    "None": None,
    "Any": Any,
    "bytes": bytes,
    "list": A[list[int], Field(min_length=1, max_length=2)],
    "set": set[int],
    "frozenset": frozenset[bool],
    "conset": A[set[bool], Field(min_length=1)],
    "tuple": tuple[int, bool],
    "tuple of any length": tuple[int, ...],
    "deque": collections.deque[int],
    "Sequence": Sequence[int],
    "Iterable": Iterable[int],
    "dict": dict[str, int],
    "dict of Enum": dict[Color, int],
    "dict of Literal": dict[Literal["a", "b"], int],
    "dict of pattern": dict[A[str, StringConstraints(pattern="^[a-z]+$")], int],
    "dict of size": A[dict[str, int], Field(min_length=1, max_length=2)],
    "Mapping": Mapping[str, int],
    "defaultdict": collections.defaultdict[str, int],
    "Counter": collections.Counter[str],
    "OrderedDict": collections.OrderedDict[str, int],
    "Enum": Color,
    "IntEnum": Number,
    "Literal": Literal["a", 1, True, None],
    "Optional": Optional[int],  # noqa: UP045 - as people write it
    "Union": int | bool | list[int],
    "date": datetime.date,
    "UUID": uuid.UUID,
    "UUID1": pydantic.UUID1,
    "UUID4": pydantic.UUID4,
    "UUID7": pydantic.UUID7,
    "Path": pathlib.Path,
    "PurePath": pathlib.PurePath,
    "SecretStr": pydantic.SecretStr,
    "SecretBytes": pydantic.SecretBytes,
    "Secret": pydantic.Secret[int],
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "ByteSize": pydantic.ByteSize,
    "conint": A[int, Field(gt=1, lt=9, multiple_of=2)],
    "constr": A[str, StringConstraints(min_length=1, max_length=3, pattern="^[a-z]+$")],
    "PositiveInt": pydantic.PositiveInt,
    "StrictInt": pydantic.StrictInt,
    "model": Inner,
    "discriminated": A[Cat | Dog, Field(discriminator="kind")],
    "models": Cat | Dog,
    "itself": Tree,
    "dataclass": Point,
    "NamedTuple": Pair,
    "TypedDict": Mapped,
    "alias": A[int, Field(alias="the alias")],
    "described": A[
        int, Field(description="d", examples=[1], deprecated=True, json_schema_extra={"x-own": 1})
    ],
    "JsonValue": pydantic.JsonValue,
}
"""Whatever a model says under their schema is an object of the class."""

CHECKED: dict[str, Any] = {
    "Decimal": Decimal,
    "condecimal": A[Decimal, Field(max_digits=5, decimal_places=2)],
    "complex": complex,
    "Fraction": Fraction,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "PastDate": pydantic.PastDate,
    "NaiveDatetime": pydantic.NaiveDatetime,
    "FilePath": pydantic.FilePath,
    "DirectoryPath": pydantic.DirectoryPath,
    "Json": pydantic.Json[list[int]],
    "dict of int": dict[int, str],
    "dict of UUID": dict[uuid.UUID, int],
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Interface": ipaddress.IPv6Interface,
    "HttpUrl": pydantic.HttpUrl,
    "AnyUrl": pydantic.AnyUrl,
    "PostgresDsn": pydantic.PostgresDsn,
    "Pattern": re.Pattern,
    "ImportString": pydantic.ImportString,
    "AfterValidator": A[int, pydantic.AfterValidator(lambda value: value)],
}
"""Their schema says less than the class, or more than can be enforced: the class has the last word."""


def class_of(kind: Any) -> type[BaseModel]:
    return create_model("Made", __doc__="A thing.", v=(kind, ...))


@pytest.fixture
def chat(tiny_dir):
    return ChatKVRag(model=tiny_dir, max_tokens=120)


@pytest.fixture
def llm(tiny_dir):
    return KVRagLLM(model=tiny_dir, max_new_tokens=120)


def schemas(cls: type[BaseModel], chat: ChatKVRag, llm: KVRagLLM) -> list[dict[str, Any]]:
    """What the adapters ask the engine for: LangChain by two methods, and LlamaIndex."""
    forms = [
        chat.with_structured_output(cls).first.kwargs["response_format"],
        llm._program(cls, PromptTemplate("?"), None)[1]["response_format"],
    ]
    (tool,) = chat.with_structured_output(cls, method="function_calling").first.kwargs["tools"]
    return [*(form["json_schema"]["schema"] for form in forms), tool["function"]["parameters"]]


@pytest.mark.parametrize("name", PARSED)
def test_an_answer_is_an_object_of_the_class(name, chat, llm, caplog):
    cls = class_of(PARSED[name])
    for schema in schemas(cls, chat, llm):
        for seed in range(2):
            cls.model_validate(said(schema, seed))
    assert caplog.records == [], "nothing is said of what can't be broken"


@pytest.mark.parametrize("name", CHECKED)
def test_what_only_the_class_can_check_is_compiled(name, chat, llm):
    cls = class_of(CHECKED[name])
    for schema in (
        *schemas(cls, chat, llm),
        chat.bind_tools([cls]).kwargs["tools"][0]["function"]["parameters"],
    ):
        constraint(schema)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_class_has_the_last_word_on_an_answer(method, chat, monkeypatch):
    answer = '{"v": "no number"}'
    call = f'{{"name": "Made", "arguments": {answer}}}'
    scripted(monkeypatch, chat.engine, answer if method == "json_schema" else call)
    asking = chat.with_structured_output(class_of(complex), method=method, include_raw=True)
    done = asking.invoke("?")
    assert done["parsed"] is None
    assert "valid complex" in str(done["parsing_error"])
    assert done["raw"].response_metadata["finish_reason"] == (
        "stop" if method == "json_schema" else "tool_calls"
    )
    with pytest.raises(
        OutputParserException, match=r"(?s)no number.*does not fit Made.*valid complex"
    ):
        chat.with_structured_output(class_of(complex), method=method).invoke("?")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_schema_has_the_last_word_on_an_answer(method, chat, monkeypatch):
    schema = {"title": "Made", "description": "A thing.", "type": "object", "required": ["v"]}
    schema["properties"] = {
        "v": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    }
    for answer, fits in (('{"v": [1, 2]}', True), ('{"v": [1, 1]}', False)):
        call = f'{{"name": "Made", "arguments": {answer}}}'
        scripted(monkeypatch, chat.engine, answer if method == "json_schema" else call)
        asking = chat.with_structured_output(schema, method=method)
        if fits:
            assert asking.invoke("?") == {"v": [1, 2]}
            continue
        with pytest.raises(
            OutputParserException, match=r"does not fit the schema: .*non-unique.*'uniqueItems'"
        ):
            asking.invoke("?")
        assert list(asking.stream("?"))[-1] == {"v": [1, 1]}, "pieces are not checked"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_strict_classes_take_what_json_can_say(method, chat, monkeypatch):
    class Made(BaseModel):
        """A thing."""

        model_config = ConfigDict(strict=True)
        day: datetime.date
        tags: set[str]
        color: Color

    answer = '{"day": "2024-02-29", "tags": ["a"], "color": "red"}'
    scripted(
        monkeypatch,
        chat.engine,
        answer if method == "json_schema" else f'{{"name": "Made", "arguments": {answer}}}',
    )
    made = chat.with_structured_output(Made, method=method).invoke("?")
    assert made == Made(day=datetime.date(2024, 2, 29), tags={"a"}, color=Color.RED)


def test_every_adapter_gives_an_object_of_a_class_of_many_kinds(chat, llm):
    class Made(BaseModel):
        """A thing."""

        model_config = ConfigDict(extra="forbid")
        scores: dict[Color, Number]
        tags: frozenset[Color]
        id: pydantic.UUID4

    options = {"temperature": 2.0, "seed": 3, "max_tokens": 400}
    assert isinstance(chat.with_structured_output(Made).invoke("?", **options), Made)
    assert isinstance(llm.structured_predict(Made, PromptTemplate("?"), llm_kwargs=options), Made)
    schema = Made.model_json_schema()
    result = chat.engine.generate(
        "?", response_format=wanted(schema), max_new_tokens=400, temperature=2.0, seed=3
    )
    Made.model_validate_json(result.text)


MODEL = pathlib.Path(os.environ.get("KVRAG_EVAL_MODELS", "."), "qwen2.5-coder-0.5b")


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.skipif(
    not MODEL.exists(), reason="no qwen2.5-coder-0.5b in the directory that KVRAG_EVAL_MODELS names"
)
def test_a_real_model_answers_in_classes_of_many_kinds():
    class Visit(BaseModel):
        """A visit of an archive."""

        file: pathlib.Path
        day: datetime.date
        lamps: dict[Color, int]
        tags: set[str] = Field(max_length=3)

    said = "On 2024-02-29 Ida read the file notes/harbour.txt by two red lamps and one blue lamp. Tags: harbour, ledger. Answer in JSON."
    chat, llm = (
        ChatKVRag(model=str(MODEL), max_tokens=150),
        KVRagLLM(str(MODEL), max_new_tokens=150),
    )
    answers = [
        chat.with_structured_output(Visit, method=method).invoke(said)
        for method in ("json_schema", "function_calling")
    ]
    answers.append(llm.structured_predict(Visit, PromptTemplate("{said}"), said=said))
    for visit in answers:
        assert visit.day == datetime.date(2024, 2, 29)
        assert visit.file.name == "harbour.txt"
