"""Tools and structured output: converts LangChain's tools and schemas to the engine's, and back."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Literal

import pydantic
import pydantic.v1
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from kvrag import ConfigError, GenerationResult, require
from langchain_kvrag._spellings import Options

logger = logging.getLogger(__name__)

JsonDict = dict[str, Any]
Method = Literal["json_schema", "function_calling", "json_mode"]
Tool = JsonDict | type | Callable[..., Any] | BaseTool

_BROKEN = re.compile(r"<tool_call>.*?(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)


def tool_dicts(tools: Sequence[Tool], strict: bool | None = None) -> list[JsonDict]:
    """Turn tools in any form of LangChain into OpenAI's dicts."""
    return [_tool_dict(tool, strict) for tool in tools]


def _tool_dict(tool: Tool, strict: bool | None) -> JsonDict:
    made = convert_to_openai_tool(tool, strict=strict)
    schema = _recursive(getattr(tool, "tool_call_schema", tool))
    if schema:
        made["function"]["parameters"] = {
            key: part for key, part in schema.items() if key not in ("title", "description")
        }
    return made


def choice_of(tool_choice: Any) -> Any:
    """Turn LangChain's tool choice into the engine's.

    ``any`` and ``True`` become ``required``; ``False`` means no choice.
    """
    if tool_choice is True or tool_choice == "any":
        return "required"
    return tool_choice or None


def with_allowed_calls(result: GenerationResult, options: Options) -> GenerationResult:
    """Return a result with only its first call if the options forbid parallel calls."""
    if options.get("parallel_tool_calls") is not False or len(result.tool_calls) < 2:
        return result
    logger.warning(
        "the answer calls %d tools; parallel calls are not allowed, so the first is kept",
        len(result.tool_calls),
    )
    return replace(result, tool_calls=result.tool_calls[:1])


def broken_calls(result: GenerationResult, options: Options) -> list[str]:
    """Return text that begins like a tool call and can't be parsed; it stays in the answer, too."""
    if options.get("tools"):
        return _BROKEN.findall(result.text)
    return []


def calls_of(result: GenerationResult, broken: Sequence[str]) -> JsonDict:
    """Return an answer's calls as fields of ``AIMessage``."""
    return {
        "tool_calls": [
            tool_call(name=c.name, args=c.arguments, id=c.id) for c in result.tool_calls
        ],
        "invalid_tool_calls": [
            invalid_tool_call(args=text, error="this is not a call in JSON") for text in broken
        ],
    }


def call_chunks(result: GenerationResult, broken: Sequence[str]) -> JsonDict:
    """Return an answer's calls as a field of ``AIMessageChunk``.

    Calls are whole, because they are parsed when the answer has ended.
    """
    all_calls = [
        *((c.name, json.dumps(c.arguments, ensure_ascii=False), c.id) for c in result.tool_calls),
        *((None, text, None) for text in broken),
    ]
    return {
        "tool_call_chunks": [
            tool_call_chunk(name=n, args=args, id=i, index=at)
            for at, (n, args, i) in enumerate(all_calls)
        ]
    }


class _AnswerParser(JsonOutputParser):
    """Parses and validates a whole answer: decoding can't enforce every keyword of a schema.

    Pieces of a stream are not validated.
    """

    shape: Any
    """Pydantic class or JSON schema."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_whole(result[0].text)
        return _checked(super().parse_result(result, partial=partial), self.shape, partial=partial)


class _CallParser(JsonOutputKeyToolsParser):
    """Parses and validates the arguments of a call, as :class:`_AnswerParser` does answers."""

    shape: Any

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        found = super().parse_result(result, partial=partial)
        if found is not None:
            return _checked(found, self.shape, partial=partial)
        if not partial:
            _check_whole(result[0].text)
        return None


def _check_whole(text: str) -> None:
    """Refuse an answer that was cut; LangChain would read ``12`` for ``1234``, and say nothing."""
    try:
        json.loads(text)
    except ValueError as error:
        raise OutputParserException(
            "the answer ends before its JSON does; raise max_tokens, or change stop",
            llm_output=text,
        ) from error


def _checked(value: Any, shape: Any, *, partial: bool) -> Any:
    """Return a value as an object of a class, or unchanged if it fits a JSON schema.

    A partial value that does not fit the class yet gives ``None``.
    """
    if isinstance(shape, dict):
        if partial:
            return value
        return _validated(value, shape)
    try:
        if issubclass(shape, pydantic.BaseModel):
            # Through JSON, because strict classes accept fewer Python values.
            return shape.model_validate_json(json.dumps(value))
        return shape.parse_obj(value)
    except (pydantic.ValidationError, pydantic.v1.ValidationError) as error:
        if partial:
            return None
        raise _unfit(value, shape.__name__, str(error)) from error


def _validated(value: Any, schema: JsonDict) -> Any:
    library = require("jsonschema", extra="structured", purpose="answers of a JSON schema")
    kind = library.validators.validator_for(schema, default=library.Draft202012Validator)
    fault = library.exceptions.best_match(
        kind(schema, registry=library.validators.SPECIFICATIONS).iter_errors(value)
    )
    if fault is not None:
        raise _unfit(
            value, "the schema", f"{fault.message} (at {fault.json_path}, {fault.validator!r})"
        )
    return value


def _unfit(value: Any, name: str, fault: str) -> OutputParserException:
    text = json.dumps(value, ensure_ascii=False)
    return OutputParserException(f"the answer {text} does not fit {name}: {fault}", llm_output=text)


def structured(
    llm: BaseChatModel, schema: Any, method: Method, *, include_raw: bool, strict: bool | None
) -> Runnable[LanguageModelInput, Any]:
    """Return a chain of the model and a parser of its answers.

    See :meth:`langchain_kvrag.ChatKVRag.with_structured_output`.
    """
    about = {
        "ls_structured_output_format": {
            "kwargs": {"method": method, "strict": strict},
            "schema": schema,
        }
    }
    is_class = is_basemodel_subclass(schema)
    if schema is None and method != "json_mode":
        raise ConfigError(
            f"with_structured_output(method={method!r}) needs a schema; pass a class or a dict"
        )
    parser: _CallParser | _AnswerParser
    if method == "function_calling":
        (tool,) = tool_dicts([schema], strict)
        function = tool["function"]
        if not isinstance(schema, dict) and strict is not False:
            function["parameters"] = _rewritten(function["parameters"], _closed)
        if is_class:
            function["parameters"] = _rewritten(function["parameters"], _with_twins)
        asking = llm.bind_tools([tool], tool_choice=function["name"], **about)
        parser = _CallParser(
            key_name=function["name"],
            first_tool_only=True,
            shape=schema if is_class else function["parameters"],
        )
    elif method in ("json_schema", "json_mode"):
        wanted = _json_schema(schema, strict) if method == "json_schema" else None
        if is_class:
            wanted = _rewritten(wanted, _with_twins)
        asked: JsonDict = {"type": "json_object"}
        if wanted:
            asked = {
                "type": "json_schema",
                "json_schema": {"name": str(wanted.get("title", "answer")), "schema": wanted},
            }
        asking = llm.bind(response_format=asked, **about)
        parser = _AnswerParser(shape=schema if is_class else wanted or {})
    else:
        raise ConfigError(
            f"method is {method!r}; it must be 'json_schema', 'function_calling' or 'json_mode'"
        )
    if not include_raw:
        return asking | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    return RunnableMap(raw=asking) | parsed.with_fallbacks(
        [RunnablePassthrough.assign(parsed=lambda _: None)], exception_key="parsing_error"
    )


def _json_schema(schema: Any, strict: bool | None) -> JsonDict:
    """Return the JSON schema of a schema in any form of LangChain.

    Classes list all their properties, so other properties are forbidden; a JSON schema may stay
    open.
    """
    if isinstance(schema, dict) and not {"function", "parameters"} & set(schema):
        return schema
    found = _recursive(schema) or convert_to_json_schema(schema, strict=strict)
    return found if isinstance(schema, dict) or strict is False else _rewritten(found, _closed)


def _recursive(schema: Any) -> JsonDict | None:
    """Return the JSON schema of a class that contains objects of its own class, else ``None``.

    LangChain would write such a schema as empty.
    """
    if not (isinstance(schema, type) and issubclass(schema, pydantic.BaseModel)):
        return None
    found = schema.model_json_schema()
    parts = found.get("$defs", {})
    refs = {
        name: set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(part)))
        for name, part in parts.items()
    }
    while ends := [name for name in refs if not refs[name] & refs.keys()]:
        for name in ends:
            del refs[name]
    if not refs:
        return None
    root = found.pop("$ref", "").rpartition("/")[2]
    return {**parts.get(root, {}), **found}


def _rewritten(schema: Any, rewrite: Callable[[JsonDict], JsonDict]) -> Any:
    """Return a schema in which all objects are rewritten."""
    if isinstance(schema, list):
        return [_rewritten(each, rewrite) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return rewrite({key: _rewritten(value, rewrite) for key, value in schema.items()})


def _closed(schema: JsonDict) -> JsonDict:
    """Forbid properties without a name in the schema, unless it says otherwise."""
    names = (schema.get("properties"), schema.get("patternProperties"))
    if schema.get("type") == "object" and any(isinstance(each, dict) for each in names):
        return {"additionalProperties": False, **schema}
    return schema


def _with_twins(schema: JsonDict) -> JsonDict:
    """Allow duplicate items: a class's sets drop them, and decoding can't prevent them."""
    return {key: value for key, value in schema.items() if (key, value) != ("uniqueItems", True)}
