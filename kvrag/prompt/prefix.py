"""Derive the prefix, the text before the first chunk, from text, messages or a prompt template.

Chunks are encoded behind the prefix. The first tokens of a chunk that is encoded alone become an
attention sink, which no prompt has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from kvrag.errors import ConfigError
from kvrag.prompt.messages import plain_messages
from kvrag.prompt.template import PromptEncoder
from kvrag.prompt.tools import Message, answer_form

_MARK = "\u2063KVRAG-{}\u2063"
_CONTEXT_NAMES = ("context", "context_str", "documents", "summaries")


@dataclass(frozen=True, slots=True)
class TemplatePrefix:
    """Prompt template of LangChain or LlamaIndex, or chat messages, and the chunks' variable.

    ``variable``: the name of the variable that the chunks go into. ``tools``: OpenAI's tool dicts
    that every prompt shows; they stand before the chunks.
    """

    template: Any
    variable: str = "context"
    tools: Sequence[Message] = ()


# Text, chat messages, a prompt template, or a :class:`TemplatePrefix`.
Prefix = str | Sequence[Message] | TemplatePrefix | Any


def prefix_text(prefix: Prefix | None, encoder: PromptEncoder) -> str:
    """Return the text before the first chunk.

    ``None``: the head of the model's chat template for a single user message (empty without a
    template). Text: used unchanged. Chat messages: the messages before the chunks; the chunks go
    where the text ``{context}`` stands, else at the start of a user message that follows. A prompt
    template: all that it renders before its context variable.

    Raises
    ------
    ConfigError
        If no constant text stands before the chunks.
    """
    mark = _MARK.format("context")
    if isinstance(prefix, TemplatePrefix):
        encoder = copy(encoder)
        encoder.tools = answer_form(prefix.tools).tools
        if isinstance(prefix.template, (list, tuple)):
            prefix = prefix.template
    if isinstance(prefix, str):
        if prefix == "learn":
            raise ConfigError(
                "prefix='learn' is no longer supported; pass the text before the first chunk: "
                "explain() shows it"
            )
        return prefix
    if prefix is None:
        if not encoder.has_chat_template:
            return ""
        return _before(encoder.render([{"role": "user", "content": mark}]), "context")
    if isinstance(prefix, Sequence) and not isinstance(prefix, bytes):
        plain = plain_messages(cast(Sequence[Message], prefix), _no_chunk, encoder.facts.roles)
        marked = [{**m, "content": m["content"].replace("{context}", mark)} for m in plain]
        if not any(mark in message["content"] for message in marked):
            marked.append({"role": "user", "content": mark})
        return _before(encoder.render(marked), "context")
    return _from_template(prefix, encoder)


def _no_chunk(_text: object) -> str:
    raise ConfigError(
        "prefix holds a kvrag.Chunk; a prefix is the text before the first chunk: "
        "write {context} in its place"
    )


def _from_template(prefix: Any, encoder: PromptEncoder) -> str:
    template = prefix.template if isinstance(prefix, TemplatePrefix) else prefix
    names = _variables(template)
    if isinstance(prefix, TemplatePrefix):
        known = [prefix.variable]
    else:
        known = [n for n in _CONTEXT_NAMES if n in names]
    if len(known) != 1:
        raise ConfigError(
            f"can't tell which of the template's variables {sorted(names)} takes the chunks; "
            "pass prefix=kvrag.TemplatePrefix(template, variable=...)"
        )
    (variable,) = known
    if variable not in names:
        raise ConfigError(f"the template has no variable {variable!r}; it has {sorted(names)}")
    head = _before(
        _render(template, {name: _MARK.format(name) for name in names}, encoder), variable
    )
    for name in names:
        if _MARK.format(name) in head:
            raise ConfigError(
                f"{name!r} stands before {variable!r} in the template, so the text before the "
                "chunks changes with every question; put the chunks first, or fill that variable "
                "in (partial)"
            )
    return head


def _variables(template: Any) -> list[str]:
    for attribute in ("input_variables", "template_vars"):
        names = getattr(template, attribute, None)
        if names is not None:
            # LlamaIndex lists partial variables, too
            filled_in = getattr(template, "kwargs", None) or {}
            return [name for name in names if name not in filled_in]
    raise ConfigError(
        f"prefix is of type {type(template).__name__}; pass text, chat messages, or a prompt "
        "template of LangChain or LlamaIndex"
    )


def _render(template: Any, values: dict[str, Any], encoder: PromptEncoder) -> str:
    """Render a framework's template; messages go through the model's chat template."""
    # an adapter's template: it knows the additions of its framework and its LLM
    if hasattr(template, "kvrag_render"):
        return str(template.kvrag_render(values, encoder))
    if hasattr(template, "format_prompt"):  # LangChain
        values = {
            n: v if template.input_types.get(n, str) is str else [] for n, v in values.items()
        }
        value = template.format_prompt(**values)
        if not hasattr(value, "messages"):
            return str(value.to_string())
        # LangChain is there, for the template is its own; its messages keep few-shot calls so.
        from langchain_core.messages import convert_to_openai_messages

        messages = convert_to_openai_messages(value.messages, text_format="block")
    elif hasattr(template, "format_messages") and encoder.has_chat_template:
        # LlamaIndex passes messages to chat models
        messages = [
            {"role": m.role.value, "content": m.content}
            for m in _selected(template, True).format_messages(**values)
        ]
    else:
        return str(_selected(template, False).format(**values))
    return encoder.render(messages)


def _selected(template: Any, is_chat: bool) -> Any:
    """Return the template that a LlamaIndex template selects for a chat or completion model.

    Its conditions ask the LLM for its kind.
    """
    llm = SimpleNamespace(metadata=SimpleNamespace(is_chat_model=is_chat))
    if hasattr(template, "select"):
        return template.select(llm)
    return template


def _before(rendered: str, variable: str) -> str:
    head, mark, _ = rendered.partition(_MARK.format(variable))
    if not mark:
        raise ConfigError(
            f"the rendered prompt does not hold the variable {variable!r}; check the template"
        )
    return head
