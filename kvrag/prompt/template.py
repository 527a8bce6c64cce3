"""From what the user passes to pieces of text: rendering, and cutting at chunks.

The concatenation of the pieces' ids *is* the prompt (:mod:`kvrag.prompt.tokenizer`); a comparison with a full prefill is always of the same
ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from kvrag.errors import InputError
from kvrag.prompt.tokenizer import Piece, SegmentTokenizer, check_encodable
from kvrag.prompt.tools import Tools, calls_with_dicts, render_tools, what_is_shown
from kvrag.types import Chunk, Span

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[str | Chunk]
"""A rendered prompt, chat messages (``role`` and ``content``), or explicit segments (live text and :class:`~kvrag.types.Chunk`)."""


class PromptEncoder(SegmentTokenizer):
    """Renders prompts, and tokenises them segment by segment. ``tools``: what is shown in all of them."""

    tools: Tools = ()

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._shown = lru_cache(maxsize=8)(lambda _template, has_tools: what_is_shown(self._applied, has_tools))

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

    def render(
        self, messages: Sequence[Mapping[str, Any]] | str, *, tools: Tools = (), add_generation_prompt: bool = True
    ) -> str:
        """Render chat messages, and OpenAI's tool dicts, with the model's chat template; what it leaves out of tools is written as text.

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
        if isinstance(messages, str):
            raise InputError(
                "tools need a prompt of chat messages, and this one is text; pass messages, or leave tools out"
            )
        plain, tools = [plain_message(message) for message in messages], tools or self.tools
        if not tools and not any([m["role"] == "tool" or m.get("tool_calls") for m in plain]):
            return self._applied(plain, add_generation_prompt=add_generation_prompt)
        render = partial(self._applied, add_generation_prompt=add_generation_prompt)
        return render_tools(render, plain, tools, self._shown(str(self.tokenizer.chat_template), bool(tools)))

    def _applied(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> str:
        render, more = self.tokenizer.apply_chat_template, {"tools": list(tools)} if tools else {}
        try:
            return str(render(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **more))
        except Exception as error:  # jinja's errors share no useful base class
            roles = [message["role"] for message in messages]
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
    if message.get("tool_calls"):
        message = calls_with_dicts(message)
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
