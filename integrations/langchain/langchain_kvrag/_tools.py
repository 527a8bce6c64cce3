"""Tools and structured output: LangChain's forms of tools and schemas to the engine's, and calls back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from kvrag import ConfigError, GenerationResult

Method = Literal["json_schema", "function_calling", "json_mode"]
Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool

_BROKEN = re.compile(r"<tool_call>.*?(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)


def tool_dicts(tools: Sequence[Tool], strict: bool | None = None) -> list[dict[str, Any]]:
    """Turn tools of any of LangChain's forms into OpenAI's dicts."""
    return [convert_to_openai_tool(tool, strict=strict) for tool in tools]


def choice_of(tool_choice: Any) -> Any:
    """Turn a choice of LangChain's forms into the engine's: ``any`` and ``True`` are ``required``, ``False`` is no choice."""
    return "required" if tool_choice is True or tool_choice == "any" else tool_choice or None


def broken_calls(result: GenerationResult, options: Mapping[str, Any]) -> list[str]:
    """Return what begins like a call of a tool and can't be read; it stays in the text too."""
    return _BROKEN.findall(result.text) if options.get("tools") else []


def calls_of(result: GenerationResult, broken: Sequence[str]) -> dict[str, Any]:
    """Return an answer's calls as fields of ``AIMessage``."""
    return {
        "tool_calls": [tool_call(name=c.name, args=c.arguments, id=c.id) for c in result.tool_calls],
        "invalid_tool_calls": [invalid_tool_call(args=text, error="this is not a call in JSON") for text in broken],
    }


def call_chunks(result: GenerationResult, broken: Sequence[str]) -> dict[str, Any]:
    """Return an answer's calls as a field of ``AIMessageChunk``; each is whole, as calls are read when the answer has ended."""
    calls = [(c.name, json.dumps(c.arguments, ensure_ascii=False), c.id) for c in result.tool_calls]
    all_calls = [*calls, *((None, text, None) for text in broken)]
    chunks = [tool_call_chunk(name=n, args=args, id=i, index=at) for at, (n, args, i) in enumerate(all_calls)]
    return {"tool_call_chunks": chunks}


def structured(
    llm: BaseChatModel, schema: Any, method: Method, *, include_raw: bool, strict: bool | None
) -> Runnable[LanguageModelInput, Any]:
    """Return a chain of the model and a parser of its answers; see :meth:`langchain_kvrag.ChatKVRag.with_structured_output`."""
    about = {"ls_structured_output_format": {"kwargs": {"method": method, "strict": strict}, "schema": schema}}
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if schema is None and method != "json_mode":
        raise ConfigError(f"with_structured_output(method={method!r}) needs a schema; pass a class or a dict")
    parser: BaseOutputParser[Any] | Any
    if method == "function_calling":
        (tool,) = tool_dicts([schema], strict)
        name = tool["function"]["name"]
        asking = llm.bind_tools([tool], tool_choice=name, **about)
        by_name = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        parser = PydanticToolsParser(tools=[schema], first_tool_only=True) if is_class else by_name
    elif method in ("json_schema", "json_mode"):
        wanted = _json_schema(schema, strict) if method == "json_schema" else None
        named = {"name": str(wanted.get("title", "answer")), "schema": wanted} if wanted else None
        asked = {"type": "json_schema", "json_schema": named} if wanted else {"type": "json_object"}
        asking = llm.bind(response_format=asked, **about)
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    else:
        raise ConfigError(f"method is {method!r}; it must be 'json_schema', 'function_calling' or 'json_mode'")
    if not include_raw:
        return asking | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=asking) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _json_schema(schema: Any, strict: bool | None) -> dict[str, Any]:
    """Return the JSON schema of any of LangChain's forms of one; a class says all that it takes, a schema may leave things open."""
    if isinstance(schema, dict) and not {"function", "parameters"} & set(schema):
        return schema
    found = convert_to_json_schema(schema, strict=strict)
    return found if isinstance(schema, dict) or strict is False else _closed(found)


def _closed(schema: Any) -> Any:
    """Allow no properties but those that are named, where nothing is said about others."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _closed(value) for key, value in schema.items()}
    is_object = out.get("type") == "object" and isinstance(out.get("properties"), dict)
    return {"additionalProperties": False, **out} if is_object else out
