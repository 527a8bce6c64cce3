"""Read a chat template's source: its roles, the names that it reads, and its tags of thoughts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

_CLOSING = re.compile(
    r"</(\w+:)?(think|thinking|thought|thoughts|reasoning)>|\[/THINK\]|<\|END_THINKING\|>"
)


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
    thought: tuple[str, str] | None = None


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


def _thought_in(source: str) -> tuple[str, str] | None:
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
