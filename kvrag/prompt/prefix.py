"""What stands before the first chunk of a rendered prompt, from whatever the user has at hand.

Chunks are encoded behind this text: encoded alone, a chunk's first tokens become an attention sink that no prompt has there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from kvrag.errors import ConfigError
from kvrag.prompt.template import PromptEncoder, plain_message

_MARK = "\u2063KVRAG-{}\u2063"
_ROLES = {"human": "user", "ai": "assistant"}
_CONTEXT_NAMES = ("context", "context_str", "documents", "summaries")


@dataclass(frozen=True, slots=True)
class TemplatePrefix:
    """A prompt template of LangChain or LlamaIndex and the variable that the chunks go into.

    Parameters
    ----------
    template
        ``ChatPromptTemplate``, ``PromptTemplate``, or LlamaIndex's prompt templates.
    variable
        Name of the context variable.
    """

    template: Any
    variable: str = "context"


Prefix = str | Sequence[Mapping[str, Any]] | TemplatePrefix | Any
"""Text, chat messages, a prompt template, or a :class:`TemplatePrefix`."""


def prefix_text(prefix: Prefix | None, encoder: PromptEncoder) -> str:
    """Return the text before the first chunk.

    Parameters
    ----------
    prefix
        ``None``: the head of the model's chat template for a single user message (empty without a template). Text: taken as it is.
        Chat messages: those before the chunks; the chunks go where the text ``{context}`` stands, else at the start of a user message
        that follows. A prompt template: everything that it renders before its context variable.
    encoder
        Renders messages.

    Raises
    ------
    ConfigError
        If no constant text stands before the chunks.
    """
    if prefix is None:
        if not getattr(encoder.tokenizer, "chat_template", None):
            return ""
        return _before(encoder.render([{"role": "user", "content": _MARK.format("context")}]), "context")
    if isinstance(prefix, str):
        return prefix
    if isinstance(prefix, Sequence) and not isinstance(prefix, bytes):
        return _from_messages(cast(Sequence[Mapping[str, Any]], prefix), encoder)
    if not isinstance(prefix, TemplatePrefix):
        prefix = TemplatePrefix(prefix, _guess_variable(prefix))
    return _from_template(prefix, encoder)


def _from_messages(messages: Sequence[Mapping[str, Any]], encoder: PromptEncoder) -> str:
    mark = _MARK.format("context")
    plain = [plain_message(message) for message in messages]
    marked = [{**m, "content": m["content"].replace("{context}", mark)} for m in plain]
    if not any(mark in message["content"] for message in marked):
        marked.append({"role": "user", "content": mark})
    return _before(encoder.render(marked), "context")


def _guess_variable(template: Any) -> str:
    names = _variables(template)
    known = [name for name in _CONTEXT_NAMES if name in names]
    if len(known) != 1:
        raise ConfigError(
            f"can't tell which of the template's variables {sorted(names)} takes the chunks; pass "
            "prefix=kvrag.TemplatePrefix(template, variable=...)"
        )
    return known[0]


def _variables(template: Any) -> list[str]:
    for attribute in ("input_variables", "template_vars"):
        names = getattr(template, attribute, None)
        if names is not None:
            filled_in = getattr(template, "kwargs", None) or {}  # LlamaIndex lists partial variables, too
            return [name for name in names if name not in filled_in]
    raise ConfigError(
        f"prefix is of type {type(template).__name__}; pass text, chat messages, or a prompt template of LangChain or LlamaIndex"
    )


def _from_template(prefix: TemplatePrefix, encoder: PromptEncoder) -> str:
    names = _variables(prefix.template)
    if prefix.variable not in names:
        raise ConfigError(f"the template has no variable {prefix.variable!r}; it has {sorted(names)}")
    rendered = _render(prefix.template, {name: _MARK.format(name) for name in names}, encoder)
    head = _before(rendered, prefix.variable)
    for name in names:
        if _MARK.format(name) in head:
            raise ConfigError(
                f"the variable {name!r} stands before {prefix.variable!r} in the template, so the text before the chunks changes with "
                "every question; put the chunks first, or fill that variable in (partial)"
            )
    return head


def _render(template: Any, values: dict[str, Any], encoder: PromptEncoder) -> str:
    """Render a template of either framework; chat templates go through the model's chat template."""
    if hasattr(template, "kvrag_render"):  # an adapter's: it knows what its framework and its LLM add
        return str(template.kvrag_render(values, encoder))
    if hasattr(template, "format_prompt"):  # LangChain
        list_types = getattr(template, "input_types", {}) or {}
        values = {n: ([] if n in list_types and list_types[n] is not str else v) for n, v in values.items()}
        value = template.format_prompt(**values)
        if hasattr(value, "messages"):
            roles = [(_ROLES.get(m.type, m.type), m.content) for m in value.to_messages()]
            return encoder.render([{"role": role, "content": content} for role, content in roles])
        return str(value.to_string())
    if hasattr(template, "format_messages"):
        return _render_llama_index(template, values, encoder)
    return str(template.format(**values))


def _render_llama_index(template: Any, values: dict[str, Any], encoder: PromptEncoder) -> str:
    """Render as LlamaIndex does: chat models are shown messages, whatever the kind of the template, and others text."""
    is_chat = bool(getattr(encoder.tokenizer, "chat_template", None))
    if hasattr(template, "select"):  # its conditions ask an LLM what it is
        template = template.select(SimpleNamespace(metadata=SimpleNamespace(is_chat_model=is_chat)))
    if not is_chat:
        return str(template.format(**values))
    messages = template.format_messages(**values)
    return encoder.render([{"role": m.role.value, "content": m.content or ""} for m in messages])


def _before(rendered: str, variable: str) -> str:
    mark = _MARK.format(variable)
    if mark not in rendered:
        raise ConfigError(f"the rendered prompt does not hold the variable {variable!r}; check the template")
    return rendered[: rendered.index(mark)]
