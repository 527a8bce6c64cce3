"""Render a prompt to pieces of text, and cut them at chunks.

The concatenated ids of the pieces *are* the prompt (:mod:`kvrag.prompt.tokenizer`). A comparison
with a full prefill always uses the same ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from kvrag.errors import InputError
from kvrag.prompt.marks import (
    Marks,
    Tags,
    TemplateFacts,
    facts_of,
    prove_shown,
    says_name,
    shows_names,
)
from kvrag.prompt.messages import check_chunk_text, describe, plain_messages
from kvrag.prompt.tokenizer import Piece, SegmentTokenizer, check_encodable
from kvrag.prompt.tools import JsonObject, Message, Tools, render_tools, what_is_shown
from kvrag.types import Chunk, Span

# A rendered prompt, chat messages (``role`` and ``content``), explicit segments (live text and
# :class:`~kvrag.types.Chunk`), or token ids, which are used unchanged.
Prompt = str | Sequence[Message] | Sequence[str | Chunk] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Chat:
    """Options for rendering chat messages.

    Parameters
    ----------
    tools
        Functions that the prompt shows, as OpenAI's dicts.
    variables
        Variables for the chat template, besides the messages.
    continues
        Whether the answer continues the last message, which is the assistant's.
    """

    tools: Tools = ()
    variables: JsonObject = field(default_factory=dict)
    continues: bool = False


PLAIN = Chat()
NEAR_SEAM = 64  # characters after a seam whose token ids may depend on the text before it
MAX_PROVEN = 256  # kinds of conversations that are remembered as shown in full
# Message fields that are shown anyway, or that the next turn need not see.
SILENT = (
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "id",
    "type",
    "annotations",
    "reasoning_content",
    "reasoning",
    "thinking",
)


class PromptEncoder(SegmentTokenizer):
    """Prompt renderer, and tokenizer of the segments.

    All prompts are rendered with ``tools`` and ``variables``.
    """

    tools: Tools = ()
    variables = PLAIN.variables

    def __init__(self, tokenizer: Any, model: Any = None) -> None:
        super().__init__(tokenizer, model)
        self._shown = lru_cache(maxsize=8)(
            lambda _source, has_tools: what_is_shown(self._applied, has_tools)
        )
        self._reads_parts = lru_cache(maxsize=8)(lambda _source: self._drops_strings())
        self._proven = set[object]()
        self._warned = set[str]()

    def with_variables(self, variables: JsonObject | None) -> PromptEncoder:
        """Return an encoder whose chat template gets these variables as well."""
        encoder = copy(self)
        encoder.variables = {**self.variables, **(variables or {})}
        return encoder

    def pieces(self, prompt: Prompt, chat: Chat = PLAIN) -> list[Piece]:
        """Render a prompt to pieces; only explicit chunks are known at this stage.

        Raises
        ------
        InputError
            If the prompt is empty or of another type than :data:`Prompt`.
        """
        if isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
            pieces = self.chat_pieces(prompt, chat)  # type: ignore[arg-type]
        else:
            check_plain(prompt, chat)
            pieces = _plain_pieces(prompt)
        for piece in pieces:
            check_encodable(piece.text)
        if not any([piece.text.strip() for piece in pieces]):
            raise InputError("the prompt is empty; pass some text, messages or segments")
        return pieces

    def render(
        self,
        messages: Sequence[Message] | str,
        *,
        tools: Tools = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Render chat messages, and OpenAI's tool dicts, with the model's chat template.

        Tools, calls and results that the template leaves out are written as text.

        Raises
        ------
        InputError
            If a message is malformed or the tokenizer has no chat template; if a chunk holds
            control-token text, which a single string would turn into real control tokens.
        """
        if isinstance(messages, str):
            raise InputError(
                "tools need a prompt of chat messages, and this one is text; pass messages, "
                "or leave tools out"
            )
        pieces = self.chat_pieces(
            messages, Chat(tools), add_generation_prompt=add_generation_prompt
        )
        for piece in pieces:
            at = self.control_text_after(piece.text, 0)
            if piece.kind == "chunk" and at < len(piece.text):
                raise InputError(
                    f"a kvrag.Chunk holds control-token text at its character {at} "
                    f"({piece.text[at : at + 16]!r}), which rendered text can't keep apart from "
                    "the template's own; pass the messages to the engine as they are"
                )
        return "".join([piece.text for piece in pieces])

    def chat_pieces(
        self,
        messages: Sequence[Message],
        chat: Chat = PLAIN,
        *,
        add_generation_prompt: bool = True,
    ) -> list[Piece]:
        """Render chat messages with the model's chat template, chunks as separate pieces.

        Raises
        ------
        InputError
            As for :meth:`render`, but chunks may hold control-token text; if the template leaves
            out a message, or changes a message's text so that its chunk is lost.
        """
        if not self.has_chat_template:
            raise InputError(
                "this tokenizer has no chat template, so chat messages can't be rendered; "
                "pass the prompt as a string, or set tokenizer.chat_template"
            )
        chat = Chat(chat.tools or self.tools, {**self.variables, **chat.variables}, chat.continues)
        source = self.template_source(chat.tools)
        marks = Marks()

        def hold(text: str | Chunk) -> str:
            given = _given([text] if isinstance(text, Chunk) else self.guarded(text))
            return "".join([marks.add(p.text) if p.is_given else p.text for p in given])

        plain = plain_messages(messages, hold, self.facts.roles)
        self._warn_of_unused(plain, chat, facts_of(source))
        if chat.continues:
            _check_last(plain)
        render = partial(self._shown_whole, chat=chat, add_generation_prompt=add_generation_prompt)
        if chat.tools or any([m["role"] == "tool" or m.get("tool_calls") for m in plain]):
            rendered = render_tools(
                render, plain, chat.tools, self._shown(source, bool(chat.tools))
            )
        else:
            rendered = render(plain, ())
        return self._cut_at(marks, rendered)

    @property
    def facts(self) -> TemplateFacts:
        """Facts of the chat template; without one, or if it can't be parsed, none."""
        found = facts_of(self.template_source()) if self.has_chat_template else None
        return found or TemplateFacts()

    @property
    def thought_tags(self) -> Tags | None:
        """Tags that open and close a thought in answers to chats, if the template has any."""
        return self.facts.thought

    @property
    def date_variables(self) -> list[str] | None:
        """Variables that pin the chat template's date; ``None`` if it writes no date."""
        variables = self.facts.variables
        if "strftime_now" not in variables:
            return None
        return sorted([name for name in variables if "date" in name])

    def is_seamless(self, text: str, own: str, head: str) -> bool:
        """Whether a text has the same ids cut behind ``head`` as cut behind ``own`` alone."""
        text = text[: len(head) + NEAR_SEAM]

        def ids(first: str) -> list[int]:
            return [*self.head_ids(first), *self.live_ids(text[len(first) :])]

        return ids(head) == (ids(own) if own else self.live_ids(text, at_start=True))

    def guarded(self, text: str) -> list[str | Chunk]:
        """Split a document's text into live segments, and chunks that hold control-token text.

        Live segments are searched for known chunks; control-token text in a chunk stays text.
        """
        parts: list[str | Chunk] = list(self._control_text.split(text))
        parts[1::2] = [Chunk(str(part)) for part in parts[1::2]]
        return [part for part in parts if part]

    def template_source(self, tools: Tools = ()) -> str:
        """Return the chat template; of several, the template for prompts with or without tools."""
        find = getattr(self.tokenizer, "get_chat_template", None)
        return str(find(tools=list(tools) or None) if find else self.tokenizer.chat_template)

    def _cut_at(self, marks: Marks, rendered: str) -> list[Piece]:
        parts = marks.split(rendered)
        if not marks.are_whole(parts):
            raise InputError(
                "the model's chat template changes the text of a message that holds a kvrag.Chunk, "
                "so that the chunk is lost; put it into a user message, or pass segments "
                "(strings and kvrag.Chunk)"
            )
        pieces = [Piece(part) for part in parts]
        for at in range(1, len(parts), 2):
            pieces[at] = Piece(marks.texts[int(parts[at])], "chunk", is_given=True)
        return merge_live(pieces)

    def _shown_whole(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        chat: Chat,
        add_generation_prompt: bool,
    ) -> str:
        """Render messages, and prove that all are shown; once per sequence of message kinds."""
        render = partial(
            self._applied,
            variables=chat.variables,
            continues=chat.continues,
            add_generation_prompt=add_generation_prompt,
        )
        rendered = render(messages, tools)
        kinds = tuple(
            [
                (m["role"], bool(m["content"].strip()), len(m.get("tool_calls", ())), says_name(m))
                for m in messages
            ]
        )
        options = repr(chat.variables), chat.continues, add_generation_prompt, bool(tools)
        key = self.template_source(tools), kinds, options
        if key not in self._proven:
            again = partial(render, tools=tools)
            prove_shown(messages, again, rendered, facts_of(key[0]))
            if any(map(says_name, messages)) and not shows_names(messages, again):
                self._warn_once("a message has the field 'name'")
            if len(self._proven) >= MAX_PROVEN:
                self._proven.clear()
            self._proven.add(key)
        return rendered

    def _applied(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        variables: JsonObject = PLAIN.variables,
        continues: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        given: dict[str, Any] = {**variables, "tools": list(tools)} if tools else dict(variables)
        given["add_generation_prompt"] = add_generation_prompt and not continues
        if continues:
            given["continue_final_message"] = True
        if self._reads_parts(self.template_source(tools)):
            messages = [{**m, "content": _in_parts(m["content"])} for m in messages]
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **given))
        except Exception as error:  # jinja's errors share no useful base class
            roles = [message["role"] for message in messages]
            raise InputError(
                f"the model's chat template refuses messages with roles {roles}: {error}"
            ) from error

    def _drops_strings(self) -> bool:
        """Whether the chat template shows a content that is a list of parts alone (Llava)."""
        text = "A probe."
        shown = []
        for content in (text, _in_parts(text)):
            message = {"role": "user", "content": content}
            try:
                shown.append(text in self.tokenizer.apply_chat_template([message], tokenize=False))
            except Exception:  # jinja's errors share no useful base class
                shown.append(False)
        return shown == [False, True]

    def _warn_of_unused(
        self, messages: Sequence[Message], chat: Chat, facts: TemplateFacts | None
    ) -> None:
        """Warn once per variable and message field that the template does not read."""
        if facts is None:
            return
        for name in chat.variables:
            if name not in facts.variables:
                self._warn_once(f"chat_template_kwargs has {name!r}")
        for message in messages:
            for name, value in message.items():
                if value and name not in SILENT and name not in facts.names:
                    self._warn_once(f"a message has the field {name!r}")

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            fault = "which the model's chat template does not read: it changes nothing"
            warnings.warn(f"{what}, {fault}", UserWarning, stacklevel=2)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return bool(getattr(self.tokenizer, "chat_template", None))


def _in_parts(text: str) -> list[dict[str, str]]:
    """Return a text as a message's content of a single part."""
    return [{"type": "text", "text": text}]


def cut(pieces: Iterable[Piece], scan: Callable[[str], Iterable[Span]]) -> list[Piece]:
    """Cut live pieces at their spans, which ``scan`` returns, ascending and without overlap."""
    out: list[Piece] = []
    for piece in pieces:
        at = 0
        for span in scan(piece.text) if piece.kind == "live" else ():
            chunk = Piece(piece.text[span.start : span.stop], "chunk")
            out += [Piece(piece.text[at : span.start]), chunk]
            at = span.stop
        out.append(Piece(piece.text[at:]) if at else piece)
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
    """Yield the pieces of explicit segments; white space at a chunk's ends becomes live text."""
    for segment in prompt:
        if isinstance(segment, str):
            yield Piece(segment)
            continue
        text = check_chunk_text(segment.text)
        before, body, after = text.partition(text.strip())
        yield from (Piece(before), Piece(body, "chunk", is_given=True), Piece(after))


def check_plain(prompt: object, chat: Chat) -> None:
    """Raise :class:`InputError` if the options of chats are given for another prompt."""
    if chat.tools or chat.continues:
        what = "tools need" if chat.tools else "continue_final_message needs"
        raise InputError(
            f"{what} a prompt of chat messages, and this one is {describe(prompt)}; pass messages"
        )


def _plain_pieces(prompt: Prompt) -> list[Piece]:
    if isinstance(prompt, str):
        return [Piece(prompt)]
    if isinstance(prompt, Sequence) and all([isinstance(s, (str, Chunk)) for s in prompt]):
        return list(_given(prompt))  # type: ignore[arg-type]
    raise InputError(
        f"a prompt can't be {describe(prompt)}; pass a string, a list of chat messages (dicts with "
        "'role' and 'content'), a list of strings and kvrag.Chunk, or a list of token ids"
    )


def _check_last(messages: Sequence[Message]) -> None:
    """Raise :class:`InputError` if the last message can't be continued."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"].strip():
        raise InputError(
            "continue_final_message goes on with the last message, so that must be an assistant's, "
            "with text and without calls of tools; "
            f"its role is {last['role']!r}: leave the option out"
        )
