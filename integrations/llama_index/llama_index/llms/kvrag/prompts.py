"""From LlamaIndex's prompts to the text that the model reads, and to the prefix before the first chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import CacheControl, CachePoint, ChatMessage, TextBlock, ThinkingBlock
from llama_index.core.llms.llm import LLM, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

from kvrag import InputError, TemplatePrefix
from kvrag.prompt.template import PromptEncoder

_ROLES = {"developer": "system", "chatbot": "assistant", "model": "assistant", "function": "tool"}
"""Roles of other providers, as chat templates call them."""

_HINTS = (CacheControl, CachePoint, ThinkingBlock)
"""Blocks meant for other providers; they hold nothing that the model must read."""

Message = dict[str, str]


def is_chat(encoder: PromptEncoder) -> bool:
    """Return whether the model has a chat template."""
    return bool(getattr(encoder.tokenizer, "chat_template", None))


def completion_text(llm: LLM, prompt: str, encoder: PromptEncoder) -> str:
    """Render a raw prompt: one user message for chat models, unless the user brought a wrapping of their own."""
    wrap = llm.completion_to_prompt or default_completion_to_prompt
    has_own_wrapping = wrap is not default_completion_to_prompt or llm.query_wrapper_prompt is not None
    if is_chat(encoder) and not has_own_wrapping:
        return _render(llm._extend_messages([ChatMessage(role="user", content=prompt)]), encoder)
    return llm._extend_prompt(wrap(prompt))


def chat_text(llm: LLM, messages: Sequence[ChatMessage], encoder: PromptEncoder) -> str:
    """Render messages: with the user's own function, else with the model's chat template, else as plain lines."""
    render = llm.messages_to_prompt or generic_messages_to_prompt
    if render is generic_messages_to_prompt and is_chat(encoder):
        return _render(messages, encoder)
    return render(messages)


def plain_message(message: ChatMessage) -> Message:
    """Return a message as role and text.

    Raises
    ------
    InputError
        If it holds an image, audio, or anything else that is not text.
    """
    role = message.role.value
    texts: list[str] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif not isinstance(block, _HINTS):
            raise InputError(
                f"a {role} message holds a {block.block_type} block; kvrag reads text only, remove the block"
            )
    return {"role": _ROLES.get(role, role), "content": "\n".join(texts)}


def _render(messages: Sequence[ChatMessage], encoder: PromptEncoder) -> str:
    """Render with the model's chat template; where it refuses a system message, that goes into the first user message.

    LlamaIndex's default prompts hold a system message and ``LLM.system_prompt`` adds another: many templates refuse the
    second, and some (Gemma's) refuse any.
    """
    plain = _with_one_system([plain_message(message) for message in messages])
    try:
        return encoder.render(plain)
    except InputError:
        if len(plain) < 2 or (plain[0]["role"], plain[1]["role"]) != ("system", "user"):
            raise
        first = {"role": "user", "content": f"{plain[0]['content']}\n\n{plain[1]['content']}"}
        return encoder.render([first, *plain[2:]])


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages at the head."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return list(messages)
    joined = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": joined}, *messages[count:]]


@dataclass(frozen=True)
class LLMTemplate:
    """A prompt template of LlamaIndex as one LLM shows it to its model, in the form that :mod:`kvrag.prompt.template` reads.

    Its ``repr`` names everything that decides the rendering: engines are shared by it.
    """

    template: BasePromptTemplate
    llm: LLM = field(repr=False)
    rendering: tuple[object, ...]

    @property
    def template_vars(self) -> list[str]:
        """Variables under the names that callers use, without those that are filled in."""
        names = {inner: outer for outer, inner in (self.template.template_var_mappings or {}).items()}
        filled_in = self.template.kwargs or {}
        return [names.get(name, name) for name in self.template.template_vars if name not in filled_in]

    def kvrag_render(self, values: Mapping[str, Any], encoder: PromptEncoder) -> str:
        """Render as ``LLM.predict`` does."""
        if is_chat(encoder):
            return chat_text(self.llm, self.llm._get_messages(self.template, **values), encoder)
        return self.llm._get_prompt(self.template, **values)


def engine_prefix(prefix: Any, llm: LLM) -> Any:
    """Translate what a user passes as ``prefix`` for the engine.

    Parameters
    ----------
    prefix
        ``None``: LlamaIndex's default question-answering template. A prompt template, a
        :class:`~kvrag.prompt.template.TemplatePrefix`, chat messages (LlamaIndex's or dicts), or text.
    llm
        Renders templates; its system prompt and its functions take part.
    """
    if prefix is None:
        prefix = TemplatePrefix(DEFAULT_TEXT_QA_PROMPT_SEL, "context_str")
    if isinstance(prefix, TemplatePrefix):
        return TemplatePrefix(_of_llm(prefix.template, llm), prefix.variable)
    if isinstance(prefix, Sequence) and not isinstance(prefix, str):
        return [plain_message(m) if isinstance(m, ChatMessage) else m for m in prefix]
    return _of_llm(prefix, llm)


def _of_llm(template: Any, llm: LLM) -> Any:
    if not isinstance(template, BasePromptTemplate):
        return template
    rendering = (
        llm.system_prompt,
        llm.messages_to_prompt,
        llm.completion_to_prompt,
        llm.query_wrapper_prompt,
        llm.output_parser,
    )
    return LLMTemplate(template, llm, rendering)
