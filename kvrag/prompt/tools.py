"""Check a request's tools and answer form, and show tools where the chat template can't.

Tools, earlier calls and results that a template leaves out are written as text, in the format that
Hermes, Qwen and other models are trained on: ``<tools>``, ``<tool_call>`` and ``<tool_response>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvrag.errors import ConfigError, InputError

JsonObject = Mapping[str, Any]
Message = JsonObject
Tools = tuple[JsonObject, ...]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Form that an answer must have.

    ``schema``: the JSON schema of an answer that calls no tool; without it, any text. ``tools``:
    functions that the answer may call, in OpenAI's format. ``choice``: ``auto``, ``required``, or
    the name of the tool that the answer must call.
    """

    tools: Tools = ()
    choice: str = "auto"
    schema: JsonObject | None = None


TEXT = ResponseFormat()


def answer_form(
    tools: Any = None, tool_choice: Any = None, response_format: Any = None
) -> ResponseFormat:
    """Check a request's options, in OpenAI's format, and return the form of its answer.

    Raises ``ConfigError``. The choice ``none`` leaves the tools out.
    """
    if not isinstance(tools or [], (list, tuple)):
        raise ConfigError(f"tools is of type {type(tools).__name__}; pass a list of tools, or None")
    checked = tuple(map(_checked_tool, tools or ()))
    names = [name_of(tool) for tool in checked]
    choice, allowed = _choice(tool_choice)
    if allowed is not None:
        unknown = [name for name in allowed if name not in names]
        if unknown:
            raise ConfigError(
                f"tool_choice allows {unknown[0]!r}, which is none of the tools; they are {names}"
            )
        checked = tuple([tool for tool in checked if name_of(tool) in allowed])
        names = allowed
    if choice not in (None, "auto", "none"):
        if not names:
            raise ConfigError(
                f"tool_choice is {tool_choice!r}, and there are no tools; pass tools, "
                "or leave it out"
            )
        if choice not in ("required", *names):
            raise ConfigError(
                f"tool_choice is {tool_choice!r}; "
                f"it must be 'auto', 'none', 'required', or one of {names}"
            )
    shown = () if choice == "none" else checked
    return ResponseFormat(
        shown, choice if shown and choice else "auto", _checked_schema(response_format)
    )


def _choice(tool_choice: Any) -> tuple[Any, list[str] | None]:
    """Return a tool choice as a word or tool name, and the names of allowed tools, if listed."""
    if not isinstance(tool_choice, Mapping):
        return tool_choice, None
    kind = tool_choice.get("type")
    if kind in ("auto", "none", "required"):
        return kind, None
    if kind == "allowed_tools":
        held = tool_choice.get("allowed_tools", tool_choice)
        tools = _field(held, "tools")
        if not isinstance(tools, (list, tuple)) or not tools:
            raise ConfigError(
                f"tool_choice is {str(tool_choice)[:200]}; pass {{'type': 'allowed_tools', "
                "'allowed_tools': {'mode': 'auto', 'tools': "
                "[{'type': 'function', 'function': {'name': ...}}]}}"
            )
        return held.get("mode", "auto"), [str(_named(tool)) for tool in tools]
    return _named(tool_choice), None


def _named(tool: Any) -> Any:
    """Return a tool's name, from its function or beside its type; without a name, the tool."""
    if isinstance(tool, Mapping):
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            return function.get("name", tool)
    return tool


def _field(value: Any, name: str) -> Any:
    """Return a field of a mapping; ``None`` of any other value."""
    if isinstance(value, Mapping):
        return value.get(name)
    return None


def name_of(tool: JsonObject) -> str:
    """Return the name of a tool's function."""
    return str(tool["function"]["name"])


def _checked_tool(tool: Any) -> JsonObject:
    function = _field(tool, "function")
    name = _field(function, "name")
    schema = _field(function, "parameters")
    if not re.fullmatch(r"[\w.-]+", str(name or "")) or not isinstance(schema or {}, Mapping):
        raise ConfigError(
            f"tools holds {str(tool)[:200]}; pass dicts {{'type': 'function', 'function': "
            "{'name': ..., 'parameters': JSON schema}}, "
            "with names of letters, digits, '_', '-' and '.'"
        )
    return {"type": "function", **tool}


def _checked_schema(response_format: Any) -> JsonObject | None:
    kind = _field(response_format, "type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = _field(_field(response_format, "json_schema"), "schema")
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise ConfigError(
            f"response_format is {str(response_format)[:200]}; "
            "pass None, {'type': 'json_object'}, or "
            "{'type': 'json_schema', 'json_schema': {'name': ..., 'schema': JSON schema}}"
        )
    return schema


# -- tools as templates show them ------------------------------------------------------------------

_PROBE = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "", "parameters": {}},
}
_CALL = {
    "type": "function",
    "id": "probe0001",
    "function": {"name": "probe_call", "arguments": {"key": "probe_value"}},
}
_ASKED = ({"role": "user", "content": "probe"},)
_CALLED = (
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {
        "role": "tool",
        "name": "probe_call",
        "tool_call_id": "probe0001",
        "content": "probe_result",
    },
)

Render = Callable[[Sequence[Message], Tools], str]


def what_is_shown(render: Render, has_tools: bool) -> tuple[bool, bool]:
    """Return whether a chat template shows tools, and whether it shows calls with results."""
    texts = []
    tools = (_PROBE,) if has_tools else ()
    for messages in (_ASKED, (*_ASKED, *_CALLED)):
        try:
            texts.append(render(messages, tools))
        except InputError:  # the template refuses these messages
            texts.append("")
    return "probe_tool" in texts[0], "probe_value" in texts[1] and "probe_result" in texts[1]


def render_tools(
    render: Render, messages: Sequence[Message], tools: Tools, shown: tuple[bool, bool]
) -> str:
    """Render messages and tools in the best way that a template accepts.

    ``shown`` is the result of :func:`what_is_shown`. If the template refuses every way, its first
    error is raised.
    """
    errors = []
    for way in _ways(messages, tools, *shown):
        try:
            return render(*way)
        except InputError as error:
            errors.append(error)
    raise errors[0]


def _ways(
    messages: Sequence[Message], tools: Tools, shows_tools: bool, shows_calls: bool
) -> Iterator[tuple[Sequence[Message], Tools]]:
    """Yield messages and tools to render, best first.

    A template may show calls but refuse two calls in a message, or refuse system messages.
    """
    plain = messages if shows_calls else written_out(messages)
    if shows_tools or not tools:
        yield from ((plain, tools), (told_apart(plain), tools), (written_out(messages), tools))
        return
    text = described(tools)
    num_system = int(plain[0]["role"] == "system")
    system = "\n\n".join([*[message["content"] for message in plain[:num_system]], text])
    yield [{"role": "system", "content": system}, *plain[num_system:]], ()
    user = next((at for at, message in enumerate(plain) if message["role"] == "user"), len(plain))
    asked = [
        {**message, "content": f"{text}\n\n{message['content']}"}
        for message in plain[user : user + 1]
    ]
    yield [*plain[:user], *asked, *plain[user + 1 :]], ()


def described(tools: Tools) -> str:
    """Describe tools in the words that Hermes and Qwen models are trained on."""
    listed = "\n".join([json.dumps(tool, ensure_ascii=False) for tool in tools])
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments "
        "within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def written_out(messages: Sequence[Message]) -> list[Message]:
    """Write calls into the text of their messages, and results into user messages.

    Consecutive results share a user message.
    """
    out: list[Message] = []
    for before, message in zip([{}, *messages], messages, strict=False):
        content = message["content"]
        if message["role"] == "tool":
            earlier = [out.pop()["content"]] if before.get("role") == "tool" else []
            result = f"<tool_response>\n{content}\n</tool_response>"
            out.append({"role": "user", "content": "\n".join([*earlier, result])})
        elif calls := message.get("tool_calls"):
            asked = [
                {name: call["function"][name] for name in ("name", "arguments")} for call in calls
            ]
            said = [
                f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
                for call in asked
            ]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            out.append({**rest, "content": "\n".join([*filter(None, [content]), *said])})
        else:
            out.append(message)
    return out


def told_apart(messages: Sequence[Message]) -> list[Message]:
    """Move the text of a message that calls tools to its own message: many templates drop it."""
    out: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"].strip():
            out.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": ""}
        out.append(message)
    return out


def calls_with_dicts(message: Message) -> dict[str, Any]:
    """Return a message with its calls' arguments as dicts: chat templates write them as JSON."""
    calls = []
    for call in message["tool_calls"]:
        function = _field(call, "function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(
                f"a message calls a tool by {call!r}; "
                "pass {'function': {'name': ..., 'arguments': ...}}"
            )
        arguments: Any = function.get("arguments") or {}
        with suppress(TypeError, ValueError, RecursionError):  # no JSON is shown unchanged
            arguments = json.loads(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "content": message.get("content"), "tool_calls": calls}
