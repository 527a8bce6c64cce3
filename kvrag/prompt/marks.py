"""Tell what a chat template shows: by its source, and by marks in place of texts in its output.

Its source tells the roles and names that it reads, and its tags of thoughts.

A mark is a run of random digits. It can't be guessed, and templates that trim, escape or change the
case of a text leave it unchanged. Marks keep a chunk's text apart from the template's own text, and
prove that messages are shown. Many templates silently drop a message with a role that they don't
know; so the same messages are rendered again with marks in place of their texts and of the tools'
names, and all marks must come back. A template may still change a text (trim it, leave out an
earlier answer's thoughts), but no message vanishes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from kvrag.errors import InputError
from kvrag.prompt.tools import Message

_CLOSING = re.compile(
    r"</(\w+:)?(think|thinking|thought|thoughts|reasoning)>|\[/THINK\]|<\|END_THINKING\|>"
)
# Tags that open and close a thought.
Tags = tuple[str, str]
_DIGITS = 30
_COUNT = 6
_REST = 10  # first or last digits of a mark's nonce that reveal a mark that was cut


class _Generation(Extension):
    """Parse ``{% generation %}``, a tag that transformers adds to Jinja, as its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Names in a chat template.

    Parameters
    ----------
    roles
        Texts that it compares a message's role with.
    variables
        Names that it takes from outside, such as ``messages`` and ``enable_thinking``.
    names
        All attributes and string constants in it: other fields of messages are not shown.
    thought
        Tags that open and close a thought before an answer, as ``<think>`` and ``</think>``.
    """

    roles: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    thought: Tags | None = None


@lru_cache(maxsize=32)
def facts_of(source: str) -> TemplateFacts | None:
    """Return the facts of a template, if it can be parsed."""
    environment = Environment(extensions=[loopcontrols, _Generation])
    try:
        tree = environment.parse(source)
    except TemplateError:
        return None
    names = {each.attr for each in tree.find_all(nodes.Getattr)}
    names.update(_texts(tree))
    roles = set[str]()
    for comparison in tree.find_all(nodes.Compare):
        if _reads_role(comparison):
            roles.update(_texts(comparison))
    return TemplateFacts(
        roles=frozenset(roles - {"role"}),
        variables=frozenset(find_undeclared_variables(tree)),
        names=frozenset(names),
        thought=_thought_in(source),
    )


def _thought_in(source: str) -> Tags | None:
    closing = _CLOSING.search(source)
    if closing is None:
        return None
    return closing[0].replace("/", "").replace("END", "START"), closing[0]


def _texts(node: nodes.Node) -> Iterator[str]:
    return (each.value for each in node.find_all(nodes.Const) if isinstance(each.value, str))


def _reads_role(node: nodes.Node) -> bool:
    attributes = (each.attr for each in node.find_all(nodes.Getattr))
    variables = (each.name for each in node.find_all(nodes.Name))
    return "role" in {*attributes, *variables, *_texts(node)}


class Marks:
    """Marks of a rendering, and the texts that they stand for."""

    def __init__(self) -> None:
        self._nonce = str(secrets.randbelow(9 * 10 ** (_DIGITS - 1)) + 10 ** (_DIGITS - 1))
        self.texts: list[str] = []

    def add(self, text: str) -> str:
        """Return the mark of a text."""
        self.texts.append(text)
        return f"{self._nonce}{len(self.texts) - 1:0{_COUNT}}"

    def split(self, rendered: str) -> list[str]:
        """Split a rendering at its marks: the parts at odd indices are numbers of texts."""
        return re.split(f"{self._nonce}([0-9]{{{_COUNT}}})", rendered)

    def are_whole(self, parts: list[str]) -> bool:
        """Whether a rendering's parts hold all marks, and no piece of a mark."""
        found = {int(number) for number in parts[1::2]}
        between = "\0".join(parts[::2])
        is_cut = self._nonce[:_REST] in between or self._nonce[-_REST:] in between
        return found == set(range(len(self.texts))) and not is_cut


def prove_shown(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    rendered: str,
    facts: TemplateFacts | None,
) -> None:
    """Raise :class:`InputError` if the rendering drops a message; name it and the remedy."""
    marks = Marks()
    probe = list[Message]()
    owners = list[int]()
    for index, message in enumerate(messages):
        probe.append(_marked(message, marks))
        owners += [index] * (len(marks.texts) - len(owners))
    try:
        found = [int(number) for number in marks.split(render(probe))[1::2]]
    except InputError:  # the template inspects texts, and refuses marks: look for the texts instead
        found = [
            n
            for n, text in enumerate(marks.texts)
            if "".join(text.split()) in "".join(rendered.split())
        ]
    lost = sorted(set(range(len(owners))) - set(found))
    if lost:
        raise _left_out(messages, owners[lost[0]], facts)


def shows_names(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether a chat template shows the speakers' names."""
    marks = Marks()
    probe = [{**m, "name": marks.add(m["name"])} if says_name(m) else m for m in messages]
    try:
        return marks.are_whole(marks.split(render(probe)))
    except InputError:
        return False


def says_name(message: Message) -> bool:
    """Whether a message names its speaker; the name of a tool's result is the tool's."""
    return bool(message.get("name")) and message["role"] != "tool"


def _marked(message: Message, marks: Marks) -> Message:
    made = dict(message)
    if message["content"].strip():
        made["content"] = marks.add(message["content"])
    calls = message.get("tool_calls")
    if calls:
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "name": marks.add(call["function"]["name"])}}
            for call in calls
        ]
    return made


def _left_out(messages: Sequence[Message], index: int, facts: TemplateFacts | None) -> InputError:
    role = messages[index]["role"]
    known = sorted(facts.roles) if facts else []
    remedy = "put its text into a user message"
    if known and role not in known:
        close = get_close_matches(role.lower(), known, n=1)
        hint = f"use one of them, or {remedy}"
        if close:
            hint = f"did you mean {close[0]!r}?"
        remedy = f"the template knows the roles {', '.join(known)}; {hint}"
    return InputError(
        f"the model's chat template leaves out message {index + 1} of {len(messages)}, "
        f"whose role is {role!r}: {remedy}"
    )
