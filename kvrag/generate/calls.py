"""Find tool calls in an answer while it streams, and keep them out of the shown text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from kvrag.generate.thoughts import (
    Decode,
    decoder_of,
    num_sure,
)
from kvrag.prompt.tokenizer import SegmentTokenizer
from kvrag.prompt.tools import ResponseFormat, Tools, name_of
from kvrag.types import ToolCall

_OPEN = "<tool_call>"
_CALL = re.compile(r"\s*<tool_call>\s*(.*?)\s*(?:</tool_call>|(?=<tool_call>)|$)\s*", re.DOTALL)
# text that may become an object, or a list of objects
_JSON = re.compile(r"\s*(`{1,2}|```[a-z]*\s*)?(\[\s*)?(\{.*)?", re.DOTALL)
# as Qwen's models for code write it
_FENCED = re.compile(r"\s*```[a-z]*\s*(.*?)\s*```\s*", re.DOTALL)


class TextCalls:
    """Parser of calls in Hermes' format, or in an answer of nothing but JSON, fenced or not.

    Text that was held back and turns out to be no call is shown in the end.
    """

    def __init__(self, tools: Tools) -> None:
        self.found: tuple[ToolCall, ...] = ()
        self._names = {name_of(tool) for tool in tools}
        self._held = ""
        self._is_json = True

    def push(self, text: str, whole: str, *, is_last: bool = False) -> str:
        """Add text, and return the text that may be shown now; at the end, read the calls.

        ``whole``: the same with any thought before it, and its tags. Calls inside a thought are
        none.
        """
        self._held += text
        self._is_json = self._is_json and _JSON.fullmatch(self._held) is not None
        if is_last:
            return self._read()
        if self._is_json:
            return ""
        at = self._held.find(_OPEN)
        if at < 0:
            at = num_sure(self._held, (_OPEN,))
        at = len(self._held[:at].rstrip())  # white space before a call belongs to it
        shown = self._held[:at]
        self._held = self._held[at:]
        return shown

    def _read(self) -> str:
        value = None
        if self._is_json:
            fenced = _FENCED.fullmatch(self._held)
            value = _loaded(fenced[1] if fenced else self._held)
        calls = [as_call(each) for each in (value if isinstance(value, list) else [value])]
        known = tuple([call for call in calls if call and call.name in self._names])
        if len(known) == len(calls):
            self.found = known
            return ""
        return _CALL.sub(self._call_in, self._held)

    def _call_in(self, found: re.Match[str]) -> str:
        call = as_call(_loaded(found[1]))
        if call:
            self.found += (call,)
            return ""
        return found[0]


class ParsedCalls:
    """Parser of calls by transformers' ``parser`` and the tokenizer's response template.

    The template also decides which other text is shown.
    """

    def __init__(self, parser: Any) -> None:
        self.found: tuple[ToolCall, ...] = ()
        self._parser = parser
        self._text = ""
        self._num_shown = 0

    def push(self, text: str, whole: str, *, is_last: bool = False) -> str:
        """Add text with its control tokens, and return the text that may be shown now.

        At the end, read the calls. The parser reads the ``whole``, with any thought.
        """
        self._text += text
        try:
            events = self._parser.feed(whole)
            message = {}
            if is_last:
                message, more = self._parser.finalize()
                events += more
            calls = [as_call(value) for value in message.get("tool_calls") or ()]
            self.found = tuple(filter(None, calls))
            if len(calls) > len(self.found):
                raise ValueError("a call without a name")
        except Exception:  # the parser failed, now or earlier: text that was held back is shown
            self._parser = None
            self.found = ()
            return self._shown(self._text[self._num_shown :])
        return "".join(
            [
                self._shown(e["text"])
                for e in events
                if e["type"] == "region_chunk" and e["field"] == "content"
            ]
        )

    def _shown(self, text: str) -> str:
        self._num_shown = self._text.find(text, self._num_shown) + len(text)
        return text


Calls = TextCalls | ParsedCalls


def calls_in(
    form: ResponseFormat,
    encoder: SegmentTokenizer,
    prompt_ids: Sequence[int],
    eos_ids: frozenset[int],
) -> tuple[Decode, Calls]:
    """Return the decoder of an answer with tools, and the parser of its calls.

    Constrained answers are always JSON.
    """
    tokenizer = encoder.tokenizer
    if (
        form.choice != "auto"
        or form.schema is not None
        or not getattr(tokenizer, "response_template", None)
    ):
        return encoder.decode, TextCalls(form.tools)
    decode = decoder_of(tokenizer, eos_ids)  # with the control tokens that are a parser's marks
    parser = tokenizer.get_response_parser(prefix=decode(prompt_ids), tools=list(form.tools))
    return decode, ParsedCalls(parser)


def as_call(value: Any) -> ToolCall | None:
    """Return the call that a JSON value holds in a usual shape, if any."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    call = inner if isinstance(inner, dict) else value
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    # Mistral's templates accept only ids of nine characters
    return ToolCall(uuid4().hex[:9], name, arguments)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter from deep nesting
        return None
