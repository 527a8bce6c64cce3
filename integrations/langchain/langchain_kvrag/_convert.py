"""Between LangChain's values and the engine's: messages in, accounting out."""

from __future__ import annotations

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
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.prompts import ChatPromptTemplate, HumanMessagePromptTemplate, StringPromptTemplate

from kvrag import GenerationResult, InputError, TemplatePrefix
from kvrag.prompt.template import Prefix

PROVIDER = "kvrag"

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
    (ToolMessage, "tool"),
    (FunctionMessage, "function"),
)
_THOUGHTS = ("reasoning", "thinking", "redacted_thinking")


def chat_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Turn messages into the dicts that chat templates read; the engine joins text blocks and refuses others.

    Raises
    ------
    InputError
        If a message is of a class that has no role.
    """
    return [_chat_message(message) for message in messages]


def _chat_message(message: BaseMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": _role(message), "content": message.content}
    if isinstance(message.content, list):  # what a model thought in an earlier turn is not shown to the next one
        out["content"] = [b for b in message.content if not (isinstance(b, Mapping) and b.get("type") in _THOUGHTS)]
    if message.name:
        out["name"] = message.name
    if isinstance(message, ToolMessage):
        out["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and message.tool_calls:
        # Arguments stay a dict: chat templates turn them into JSON themselves.
        out["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    return out


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:  # not by message.type, which differs for chunks of a stream
        if isinstance(message, kind):
            return role
    raise InputError(
        f"a message is of type {type(message).__name__}, which has no role; pass system, human, AI, tool or chat "
        "messages"
    )


def engine_prefix(prefix: Any, *, is_chat: bool) -> Prefix | None:
    """Turn LangChain messages, also in their short forms, into dicts, and templates into what the model will be shown.

    Parameters
    ----------
    prefix
        As the user gave it; text and dicts stay as they are.
    is_chat
        Whether the model makes a human message of a string prompt.
    """
    if isinstance(prefix, TemplatePrefix):
        return TemplatePrefix(engine_prefix(prefix.template, is_chat=is_chat), prefix.variable)
    if is_chat and isinstance(prefix, StringPromptTemplate):
        return ChatPromptTemplate.from_messages([HumanMessagePromptTemplate(prompt=prefix)])
    if isinstance(prefix, BaseMessage):
        prefix = [prefix]
    if isinstance(prefix, (list, tuple)) and not all(isinstance(message, Mapping) for message in prefix):
        return chat_messages(convert_to_messages(prefix))
    return prefix


def usage_of(result: GenerationResult) -> UsageMetadata:
    """Count tokens as LangChain does; ``cache_read`` are the rows whose KV was used as stored."""
    num_out = len(result.token_ids)
    return UsageMetadata(
        input_tokens=result.prompt_tokens,
        output_tokens=num_out,
        total_tokens=result.prompt_tokens + num_out,
        input_token_details=InputTokenDetails(cache_read=result.cached_tokens),
    )


def metadata_of(result: GenerationResult, model_name: str) -> dict[str, Any]:
    """Return how an answer was made, as plain JSON values."""
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": result.finish_reason,
        "kvrag": {
            "exactness": result.exactness,
            "cached_tokens": result.cached_tokens,
            "repaired_tokens": result.repaired_tokens,
            "computed_tokens": result.computed_tokens,
            "kv_reuse_ratio": float(result.kv_reuse_ratio),
            "ttft_ms": float(result.ttft_ms),
            "total_ms": float(result.total_ms),
            "tokens_per_s": float(result.tokens_per_s),
            "timings_ms": {stage: float(ms) for stage, ms in result.timings_ms.items()},
            "loaded_bytes": int(result.loaded_bytes),
            "fallback_reason": result.fallback_reason,
            "has_other_prefix": result.has_other_prefix,
            "kv_dtype": result.kv_dtype,
        },
    }
