"""Converts LangChain's messages to the engine's, and results to LangChain's accounting."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.prompts import (
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    StringPromptTemplate,
)
from langchain_core.utils.function_calling import convert_to_openai_tool

from kvrag import GenerationResult, InputError, TemplatePrefix

PROVIDER = "kvrag"

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
    (ToolMessage, "tool"),
    (FunctionMessage, "function"),
)
_THOUGHTS = ("reasoning", "thinking", "redacted_thinking")
_CALLS = ("tool_call", "tool_use", "tool_call_chunk", "invalid_tool_call", "function_call")
_BESIDE = ("refusal", "function_call", "reasoning_content")
"""Fields of OpenAI's messages that LangChain keeps in ``additional_kwargs``."""
_TOLD = (
    "exactness",
    "cached_tokens",
    "history_tokens",
    "repaired_tokens",
    "computed_tokens",
    "kv_reuse_ratio",
    "ttft_ms",
    "total_ms",
    "tokens_per_s",
    "timings_ms",
    "loaded_bytes",
    "fallback_reason",
    "has_other_prefix",
    "evicted_tokens",
    "kv_dtype",
)
"""Fields of a result that its record shows."""


def chat_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Turn messages into the dicts that the engine reads.

    The engine joins text blocks, makes documents chunks, and refuses other blocks.

    Raises
    ------
    InputError
        If the class of a message has no role.
    """
    return [_chat_message(message) for message in messages]


def _chat_message(message: BaseMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": _role(message), "content": message.content}
    if isinstance(message.content, list):
        out["content"] = [block for block in message.content if not _is_left_out(block, message)]
    if message.name:
        out["name"] = message.name
    if isinstance(message, ToolMessage):
        out["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        beside = message.additional_kwargs
        out |= {name: beside[name] for name in _BESIDE if beside.get(name)}
        thoughts = _thoughts(message)
        if thoughts:
            out["reasoning_content"] = thoughts
        _add_calls(out, message)
    return out


def _add_calls(out: dict[str, Any], message: AIMessage) -> None:
    """Add a message's calls, including calls that could not be parsed.

    A call without a name is shown as its original text.
    """
    unread = message.invalid_tool_calls
    # Arguments stay a dict, because chat templates turn them into JSON.
    calls = [
        {
            "type": "function",
            "id": call["id"],
            "function": {"name": call["name"], "arguments": call["args"] or ""},
        }
        for call in (*message.tool_calls, *unread)
        if call["name"]
    ]
    if calls:
        out["tool_calls"] = calls
        out.pop("function_call", None)
    lost = [
        call["args"]
        for call in unread
        if not call["name"] and call["args"] and call["args"] not in message.text
    ]
    if lost:
        content = out["content"] if isinstance(out["content"], list) else [out["content"]]
        out["content"] = [*content, *lost]


def _thoughts(message: AIMessage) -> str:
    """Return the thoughts in a message's blocks.

    The chat template decides whether a later turn sees them.
    """
    texts = [
        block.get("reasoning") or block.get("thinking")
        for block in message.content
        if isinstance(block, Mapping) and block.get("type") in _THOUGHTS
    ]
    return "\n".join([text for text in texts if isinstance(text, str)])


def _is_left_out(block: Any, message: BaseMessage) -> bool:
    """Whether a block is a thought, or a blank document, or repeats a call of the message."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(message, AIMessage):
        calls = (*message.tool_calls, *message.invalid_tool_calls)
    else:
        calls = ()
    repeated = {call["id"] for call in calls}
    if kind == "text-plain" and isinstance(block.get("text"), str):
        return not block["text"].strip()
    return kind in _THOUGHTS or (
        kind in _CALLS and (block.get("call_id") or block.get("id")) in repeated
    )


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:  # not by message.type, which differs for chunks of a stream
        if isinstance(message, kind):
            return role
    raise InputError(
        f"a message is of type {type(message).__name__}, which has no role; pass system, human, "
        "AI, tool or chat "
        "messages"
    )


def engine_prefix(prefix: Any, *, is_chat: bool) -> Any:
    """Convert a user's prefix: messages to dicts, templates to the form that the model is shown.

    Accepts LangChain's short forms of messages, too.

    Parameters
    ----------
    prefix
        As the user gave it. Text and dicts stay as they are.
    is_chat
        Whether the model turns a string prompt into a human message.
    """
    if isinstance(prefix, TemplatePrefix):
        return TemplatePrefix(
            engine_prefix(prefix.template, is_chat=is_chat),
            prefix.variable,
            [convert_to_openai_tool(tool) for tool in prefix.tools],
        )
    if is_chat and isinstance(prefix, StringPromptTemplate):
        return ChatPromptTemplate.from_messages([HumanMessagePromptTemplate(prompt=prefix)])
    if isinstance(prefix, BaseMessage):
        prefix = [prefix]
    if isinstance(prefix, (list, tuple)) and not all(
        isinstance(message, Mapping) for message in prefix
    ):
        return chat_messages(convert_to_messages(prefix))
    return prefix


def usage_of(result: GenerationResult) -> UsageMetadata:
    """Count tokens as LangChain does; ``cache_read`` counts rows that used stored KV unchanged."""
    num_out = len(result.token_ids)
    usage = UsageMetadata(
        input_tokens=result.prompt_tokens,
        output_tokens=num_out,
        total_tokens=result.prompt_tokens + num_out,
        input_token_details=InputTokenDetails(cache_read=result.cached_tokens),
    )
    if result.reasoning_tokens:
        usage["output_token_details"] = OutputTokenDetails(reasoning=result.reasoning_tokens)
    return usage


def short_name(name: str) -> str:
    """Return a hub id unchanged, and the last part of a path."""
    if os.path.exists(name):
        return os.path.basename(os.path.abspath(name))
    return name


def llm_output(results: Sequence[GenerationResult], model_name: str) -> dict[str, Any]:
    """Return the ``llm_output`` of an ``LLMResult``: model name and token usage of all answers."""
    num_in = sum(r.prompt_tokens for r in results)
    num_out = sum(len(r.token_ids) for r in results)
    usage = {
        "prompt_tokens": num_in,
        "completion_tokens": num_out,
        "total_tokens": num_in + num_out,
        "cached_tokens": sum(r.cached_tokens for r in results),
    }
    return {"model_name": short_name(model_name), "token_usage": usage}


def metadata_of(result: GenerationResult, model_name: str) -> dict[str, Any]:
    """Return the record of how an answer was made, as plain JSON values."""
    return {
        "model_name": short_name(model_name),
        "model_provider": PROVIDER,
        "finish_reason": result.finish_reason,
        "kvrag": {name: getattr(result, name) for name in _TOLD}
        | {"timings_ms": dict(result.timings_ms)},
    }
