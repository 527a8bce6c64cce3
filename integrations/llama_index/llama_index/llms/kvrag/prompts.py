"""Turn LlamaIndex's prompts into the text that the model reads, and into the prefix of chunks."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import IOBase
from typing import Any

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import LLM, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.tools import BaseTool

from kvrag import InputError, TemplatePrefix
from kvrag.adapters import PromptEncoder

_SYSTEM = ("system", "developer")

_HINTS = (CacheControl, CachePoint)
"""Blocks for other providers; the model need not read them."""

_BESIDE = ("name", "tool_call_id", "function_call", "refusal", "reasoning_content")
"""Fields of OpenAI's messages that LlamaIndex keeps in ``additional_kwargs``."""

Message = dict[str, Any]


def is_chat(llm: LLM, encoder: PromptEncoder) -> bool:
    """Return whether prompts are chat messages.

    The user's setting decides; without a setting, whether the model has a chat template.
    """
    given: bool | None = getattr(llm, "is_chat_model", None)
    if given is None:
        return encoder.has_chat_template
    return given


def completion_text(llm: LLM, prompt: str, encoder: PromptEncoder) -> str | list[Message]:
    """Render a raw prompt: for chat models as a user message, unless the user wraps prompts."""
    wrap = llm.completion_to_prompt or default_completion_to_prompt
    has_own_wrapping = (
        wrap is not default_completion_to_prompt or llm.query_wrapper_prompt is not None
    )
    if is_chat(llm, encoder) and encoder.has_chat_template and not has_own_wrapping:
        asked = llm._extend_messages([ChatMessage(role="user", content=prompt)])
        plain = _accepted(asked, encoder)
        return plain if encoder.thought_tags else encoder.render(plain)
    return llm._extend_prompt(wrap(prompt))


def chat_text(llm: LLM, messages: Sequence[ChatMessage], encoder: PromptEncoder) -> str:
    """Render messages with the user's function, else the model's chat template, else as lines."""
    prompt = chat_prompt(llm, messages, encoder, ())
    if isinstance(prompt, str):
        return prompt
    return encoder.render(prompt)


def _own_text(llm: LLM, messages: Sequence[ChatMessage]) -> str:
    """Render messages with the user's own function, else as plain lines."""
    render = llm.messages_to_prompt or generic_messages_to_prompt
    if render is generic_messages_to_prompt and any(
        ["tool_calls" in plain_message(message) for message in messages]
    ):
        raise InputError(
            "a message calls tools, which a model without chat template can't be shown; leave it "
            "out"
        )
    return render(messages)


def tool_dicts(tools: Sequence[Any]) -> list[Any]:
    """Return tools as OpenAI's dicts, which the engine accepts."""
    return [
        t.metadata.to_openai_tool(skip_length_check=True) if isinstance(t, BaseTool) else t
        for t in tools
    ]


def chat_prompt(
    llm: LLM,
    messages: Sequence[ChatMessage],
    encoder: PromptEncoder,
    tools: Sequence[Any],
    *,
    continues: bool = False,
) -> str | list[Message]:
    """Return messages for the engine: as rendered text, or as dicts for the model's chat template.

    They stay dicts if the engine needs them: with tools, with a continued message, with documents,
    and for answers with thoughts.
    """
    if calls_tools(llm, encoder):
        plain = _accepted(messages, encoder, tools)
        has_documents = any(
            [isinstance(part, dict) for message in plain for part in message["content"]]
        )
        if tools or continues or has_documents or encoder.thought_tags:
            return plain
        return encoder.render(plain)
    if tools:
        raise InputError(
            "tools need the model's chat template; leave messages_to_prompt out, or use a model "
            "that has one"
        )
    return _own_text(llm, messages)


def calls_tools(llm: LLM, encoder: PromptEncoder) -> bool:
    """Return whether the model's own chat template can show tools."""
    own = (None, generic_messages_to_prompt)
    return encoder.has_chat_template and llm.messages_to_prompt in own


def plain_message(message: ChatMessage) -> Message:
    """Return a message as an OpenAI dict: role, content, tool calls and further fields.

    Citable blocks become documents, which the engine makes chunks; blank ones are left out.

    Raises
    ------
    InputError
        If the message holds an image, audio, or anything else that is no text.
    """
    role = message.role.value
    more = message.additional_kwargs
    parts = [part for block in message.blocks for part in _parts(block, role)]
    thoughts = [
        block.content
        for block in message.blocks
        if isinstance(block, ThinkingBlock) and block.content
    ]
    content = "\n".join(parts) if all([isinstance(part, str) for part in parts]) else _joined(parts)
    plain: Message = {"role": role, "content": content}
    plain |= {name: more[name] for name in _BESIDE if more.get(name)}
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    calls = _calls_in(message)
    if calls:
        plain["tool_calls"] = calls
    return plain


def _parts(block: Any, role: str) -> list[Any]:
    """Return a block's texts and documents."""
    if isinstance(block, TextBlock):
        return [block.text]
    if isinstance(block, CitableBlock):
        parts = [p for inner in block.content for p in _parts(inner, role) if str(p).strip()]
        return parts and [{"type": "document", "title": block.title, "content": parts}]
    if isinstance(block, CitationBlock) and isinstance(block.cited_content, TextBlock):
        return [block.title, block.source, block.cited_content.text]
    if isinstance(block, DocumentBlock) and (text := _document_text(block)):
        return [{"type": "document", "title": block.title, "content": text}]
    if isinstance(block, (*_HINTS, ThinkingBlock, ToolCallBlock)):
        return []
    raise InputError(
        f"a {role} message holds a {block.block_type} block; kvrag reads text only, remove the "
        "block"
    )


def _document_text(block: DocumentBlock) -> str | None:
    """Return a document's text if it holds its bytes, and they are text; no file is opened."""
    data = block.data or b""
    given = data.read() if isinstance(data, IOBase) else base64.b64decode(data)
    try:
        text = bytes(given).decode()
    except UnicodeDecodeError:
        return None
    return text if text.strip() and "\0" not in text and not text.startswith("%PDF") else None


def _joined(parts: Sequence[Any]) -> list[Any]:
    """Put line breaks between parts; a document ends with its own."""
    pairs = zip([{}, *parts], parts, strict=False)
    return [each for last, part in pairs for each in ("\n", part)[isinstance(last, dict) :]]


def _calls_in(message: ChatMessage) -> list[Any]:
    """Return a message's calls in OpenAI's form; other LLMs' memories keep them beside blocks."""
    calls = [
        {
            "id": block.tool_call_id or "",
            "type": "function",
            "function": {"name": block.tool_name, "arguments": block.tool_kwargs},
        }
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]
    beside = message.additional_kwargs.get("tool_calls") or ()
    return calls or [call if isinstance(call, Mapping) else call.model_dump() for call in beside]


def _accepted(
    messages: Sequence[ChatMessage], encoder: PromptEncoder, tools: Sequence[Any] = ()
) -> list[Message]:
    """Return the messages in a form that the model's chat template accepts.

    LlamaIndex's default prompts hold a system message, and ``LLM.system_prompt`` adds another. Many
    templates refuse the second; some (Gemma's) refuse any. The system message then goes into the
    first user message.
    """
    plain = _with_one_system([plain_message(message) for message in messages])
    if len(plain) < 2 or plain[0]["role"] not in _SYSTEM or plain[1]["role"] != "user":
        return plain
    try:
        encoder.render(plain, tools=tuple(tools))
    except InputError:
        return [{"role": "user", "content": _contents(plain[:2])}, *plain[2:]]
    return plain


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages at the start."""
    count = next(
        (i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages)
    )
    if count < 2:
        return list(messages)
    return [
        {"role": messages[0]["role"], "content": _contents(messages[:count])},
        *messages[count:],
    ]


def _contents(messages: Sequence[Message]) -> list[Any]:
    """Join the contents of messages."""
    parts: list[Any] = []
    for message in messages:
        content = message["content"]
        parts += ["\n\n", content] if isinstance(content, str) else ["\n\n", *content]
    return parts[1:]


@dataclass(frozen=True)
class LLMTemplate:
    """LlamaIndex prompt template as an LLM renders it, for :mod:`kvrag.prompt.template`.

    Its ``repr`` names all that decides the rendering, because engines are shared by it.
    """

    template: BasePromptTemplate
    llm: LLM = field(repr=False)
    rendering: tuple[object, ...]

    @property
    def template_vars(self) -> list[str]:
        """Variables under the names that callers use, without variables that are filled in."""
        names = {
            inner: outer for outer, inner in (self.template.template_var_mappings or {}).items()
        }
        filled_in = self.template.kwargs or {}
        return [
            names.get(name, name) for name in self.template.template_vars if name not in filled_in
        ]

    def kvrag_render(self, values: Mapping[str, Any], encoder: PromptEncoder) -> str:
        """Render as ``LLM.predict`` does."""
        if is_chat(self.llm, encoder):
            return chat_text(self.llm, self.llm._get_messages(self.template, **values), encoder)
        return self.llm._get_prompt(self.template, **values)


def engine_prefix(prefix: Any, llm: LLM) -> Any:
    """Translate a user's ``prefix`` for the engine.

    Parameters
    ----------
    prefix
        ``None``: LlamaIndex's default question-answering template. A prompt template, a
        :class:`~kvrag.prompt.prefix.TemplatePrefix`, chat messages (LlamaIndex's or dicts), or
        text.
    llm
        Renders templates; its system prompt and its functions take part.
    """
    if prefix is None:
        prefix = TemplatePrefix(DEFAULT_TEXT_QA_PROMPT_SEL, "context_str")
    if isinstance(prefix, TemplatePrefix):
        return TemplatePrefix(
            _of_llm(prefix.template, llm), prefix.variable, tool_dicts(prefix.tools)
        )
    if isinstance(prefix, Sequence) and not isinstance(prefix, str):
        return [plain_message(m) if isinstance(m, ChatMessage) else m for m in prefix]
    return _of_llm(prefix, llm)


def _of_llm(template: Any, llm: LLM) -> Any:
    if not isinstance(template, BasePromptTemplate):
        return template
    return LLMTemplate(
        template,
        llm,
        rendering=(
            llm.system_prompt,
            llm.messages_to_prompt,
            llm.completion_to_prompt,
            llm.query_wrapper_prompt,
            llm.output_parser,
            getattr(llm, "is_chat_model", None),
        ),
    )
