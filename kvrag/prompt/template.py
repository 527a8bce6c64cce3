"""From what the user passes to pieces of text: rendering, cutting at chunks, and the prefix before the first chunk.

The concatenation of the pieces' ids *is* the prompt (:mod:`kvrag.prompt.tokenizer`); a comparison with a full prefill is always of the same
ids. Chunks are encoded behind the prefix: encoded alone, a chunk's first tokens become an attention sink that no prompt has there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

from kvrag.errors import ConfigError, InputError
from kvrag.prompt.tokenizer import Piece, SegmentTokenizer, check_encodable
from kvrag.types import Chunk, Span

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[str | Chunk]
"""A rendered prompt, chat messages (``role`` and ``content``), or explicit segments (live text and :class:`~kvrag.types.Chunk`)."""

_MARK = "\u2063KVRAG-{}\u2063"
_ROLES = {"human": "user", "ai": "assistant"}
_CONTEXT_NAMES = ("context", "context_str", "documents", "summaries")


class PromptEncoder(SegmentTokenizer):
    """Renders prompts, and tokenises them segment by segment."""

    def pieces(self, prompt: Prompt) -> list[Piece]:
        """Render a prompt to pieces; chunks are known only where they were given explicitly.

        Raises
        ------
        InputError
            If the prompt is empty or is none of the accepted forms.
        """
        if isinstance(prompt, str):
            pieces = [Piece(prompt)]
        elif isinstance(prompt, Sequence) and prompt and all([isinstance(m, Mapping) for m in prompt]):
            pieces = [Piece(self.render(prompt))]  # type: ignore[arg-type]
        elif isinstance(prompt, Sequence) and all([isinstance(s, (str, Chunk)) for s in prompt]):
            pieces = list(_given(prompt))  # type: ignore[arg-type]
        else:
            raise InputError(
                f"a prompt can't be {_describe(prompt)}; pass a string, a list of chat messages (dicts with 'role' and 'content'), "
                "or a list of strings and kvrag.Chunk"
            )
        for piece in pieces:
            check_encodable(piece.text)
        if not any([piece.text.strip() for piece in pieces]):
            raise InputError("the prompt is empty; pass some text, messages or segments")
        return pieces

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Render chat messages with the model's chat template.

        Raises
        ------
        InputError
            If a message is malformed or the tokenizer has no chat template.
        """
        if not self.has_chat_template:
            raise InputError(
                "this tokenizer has no chat template, so chat messages can't be rendered; pass the prompt as a string, or set "
                "tokenizer.chat_template"
            )
        plain = [plain_message(message) for message in messages]
        render = self.tokenizer.apply_chat_template
        try:
            return str(render(plain, tokenize=False, add_generation_prompt=add_generation_prompt))
        except Exception as error:  # jinja's errors share no useful base class
            roles = [message["role"] for message in plain]
            raise InputError(f"the model's chat template refuses messages with roles {roles}: {error}") from error

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return bool(getattr(self.tokenizer, "chat_template", None))


def cut(pieces: Iterable[Piece], spans_of: Mapping[int, Sequence[Span]]) -> list[Piece]:
    """Cut live pieces at the spans found in them, which ``spans_of`` holds by index of the piece, ascending, without overlap."""
    out: list[Piece] = []
    for index, piece in enumerate(pieces):
        at = 0
        for span in spans_of.get(index, ()):
            chunk = Piece(piece.text[span.start : span.stop], "chunk", digest=span.digest)
            out += [Piece(piece.text[at : span.start]), chunk]
            at = span.stop
        out.append(replace(piece, text=piece.text[at:]) if at else piece)
    return merge_live(out)


def merge_live(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring live pieces and drop empty ones."""
    out: list[Piece] = []
    for piece in pieces:
        if out and piece.text and out[-1].kind == piece.kind == "live":
            out[-1] = Piece(out[-1].text + piece.text)
        elif piece.text:
            out.append(piece)
    return out


def _given(prompt: Sequence[str | Chunk]) -> Iterable[Piece]:
    """Yield explicit segments; white space at a chunk's ends moves to the live text around it."""
    for segment in prompt:
        if isinstance(segment, str):
            yield Piece(segment)
            continue
        text = check_chunk_text(segment.text)
        before, body, after = text.partition(text.strip())
        yield from (Piece(before), Piece(body, "chunk", is_given=True), Piece(after))


def chunks_in_messages(prompt: Prompt) -> list[str]:
    """Return the texts of the explicit chunks in the contents of chat messages, which rendering turns into plain text."""
    contents = [] if isinstance(prompt, str) else [m.get("content") for m in prompt if isinstance(m, Mapping)]
    parts = [part for content in contents if isinstance(content, Sequence) for part in content]
    return [part.text.strip() for part in parts if isinstance(part, Chunk)]


def check_chunk_text(text: object) -> str:
    """Return the text of a chunk, or raise :class:`InputError` if it is not a string, or only white space."""
    if not isinstance(text, str):
        raise InputError(f"a chunk's text is {_describe(text)}; it must be a string")
    check_encodable(text)
    if not text.strip():
        raise InputError("a chunk's text is empty or white space only; leave it out")
    return text


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its content as one string; refuse what would otherwise be dropped."""
    if not isinstance(message, Mapping):
        raise InputError(f"a chat message is {_describe(message)}; pass a dict with 'role' and 'content'")
    if "role" not in message or "content" not in message:
        raise InputError(f"a chat message has the keys {list(message)}; it needs 'role' and 'content'")
    if not isinstance(message["role"], str):
        raise InputError(f"the role of a chat message is {message['role']!r}; pass a string such as 'user'")
    content = "" if message["content"] is None else message["content"]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InputError(f"the content of a {message['role']} message is {_describe(content)}; pass a string")
    return {**message, "content": content if isinstance(content, str) else "".join(map(_part_text, content))}


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Chunk):
        return check_chunk_text(part.text)
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InputError(f"a message holds a content part of type {kind!r}; kvrag reads text only, remove the part")


def _describe(value: object) -> str:
    if isinstance(value, Sequence) and not value:
        return f"an empty {type(value).__name__}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {' and '.join(sorted({type(item).__name__ for item in value}))}"
    return f"of type {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class TemplatePrefix:
    """A prompt template of LangChain or LlamaIndex, and the name of the variable that the chunks go into."""

    template: Any
    variable: str = "context"


Prefix = str | Sequence[Mapping[str, Any]] | TemplatePrefix | Any
"""Text, chat messages, a prompt template, or a :class:`TemplatePrefix`."""


def prefix_text(prefix: Prefix | None, encoder: PromptEncoder) -> str:
    """Return the text before the first chunk.

    ``None``: the head of the model's chat template for a single user message (empty without a template). Text: taken as it is. Chat
    messages: those before the chunks; the chunks go where the text ``{context}`` stands, else at the start of a user message that
    follows. A prompt template: everything that it renders before its context variable.

    Raises
    ------
    ConfigError
        If no constant text stands before the chunks.
    """
    mark = _MARK.format("context")
    if isinstance(prefix, str):
        return prefix
    if prefix is None:
        only = [{"role": "user", "content": mark}]
        return _before(encoder.render(only), "context") if encoder.has_chat_template else ""
    if isinstance(prefix, Sequence) and not isinstance(prefix, bytes):
        plain = [plain_message(message) for message in cast(Sequence[Mapping[str, Any]], prefix)]
        marked = [{**m, "content": m["content"].replace("{context}", mark)} for m in plain]
        if not any(mark in message["content"] for message in marked):
            marked.append({"role": "user", "content": mark})
        return _before(encoder.render(marked), "context")
    return _from_template(prefix, encoder)


def _from_template(prefix: Any, encoder: PromptEncoder) -> str:
    template = prefix.template if isinstance(prefix, TemplatePrefix) else prefix
    names = _variables(template)
    known = [prefix.variable] if isinstance(prefix, TemplatePrefix) else [n for n in _CONTEXT_NAMES if n in names]
    if len(known) != 1:
        raise ConfigError(
            f"can't tell which of the template's variables {sorted(names)} takes the chunks; pass "
            "prefix=kvrag.TemplatePrefix(template, variable=...)"
        )
    (variable,) = known
    if variable not in names:
        raise ConfigError(f"the template has no variable {variable!r}; it has {sorted(names)}")
    head = _before(_render(template, {name: _MARK.format(name) for name in names}, encoder), variable)
    for name in names:
        if _MARK.format(name) in head:
            raise ConfigError(
                f"{name!r} stands before {variable!r} in the template, so the text before the chunks changes with every question; "
                "put the chunks first, or fill that variable in (partial)"
            )
    return head


def _variables(template: Any) -> list[str]:
    for attribute in ("input_variables", "template_vars"):
        names = getattr(template, attribute, None)
        if names is not None:
            filled_in = getattr(template, "kwargs", None) or {}  # LlamaIndex lists partial variables, too
            return [name for name in names if name not in filled_in]
    raise ConfigError(
        f"prefix is of type {type(template).__name__}; pass text, chat messages, or a prompt template of LangChain or LlamaIndex"
    )


def _render(template: Any, values: dict[str, Any], encoder: PromptEncoder) -> str:
    """Render a template of either framework; chat templates go through the model's chat template."""
    if hasattr(template, "kvrag_render"):  # an adapter's: it knows what its framework and its LLM add
        return str(template.kvrag_render(values, encoder))
    if hasattr(template, "format_prompt"):  # LangChain
        list_types = getattr(template, "input_types", {}) or {}
        values = {n: ([] if n in list_types and list_types[n] is not str else v) for n, v in values.items()}
        value = template.format_prompt(**values)
        if not hasattr(value, "messages"):
            return str(value.to_string())
        messages = [(_ROLES.get(m.type, m.type), m.content) for m in value.to_messages()]
    elif hasattr(template, "format_messages") and encoder.has_chat_template:  # LlamaIndex shows chat models messages
        messages = [(m.role.value, m.content or "") for m in _selected(template, True).format_messages(**values)]
    else:
        return str(_selected(template, False).format(**values))
    return encoder.render([{"role": role, "content": content} for role, content in messages])


def _selected(template: Any, is_chat: bool) -> Any:
    """Return the template that one of LlamaIndex's selects for an LLM of this kind: its conditions ask the LLM what it is."""
    llm = SimpleNamespace(metadata=SimpleNamespace(is_chat_model=is_chat))
    return template.select(llm) if hasattr(template, "select") else template


def _before(rendered: str, variable: str) -> str:
    head, mark, _ = rendered.partition(_MARK.format(variable))
    if not mark:
        raise ConfigError(f"the rendered prompt does not hold the variable {variable!r}; check the template")
    return head
