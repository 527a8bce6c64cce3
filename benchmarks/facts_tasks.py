"""Questions whose answers are known: needles in passages, multi-hop corpora, examples, code, and a summary. No model."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, cycle
from pathlib import Path
from typing import Any

WITHIN = "Answer with a few words and nothing else."
FIRST = (
    "Amber",
    "Birch",
    "Cobalt",
    "Dune",
    "Ember",
    "Falcon",
    "Granite",
    "Harbor",
    "Indigo",
    "Juniper",
    "Kestrel",
    "Lunar",
)
SECOND = (
    "archive",
    "bridge",
    "clinic",
    "depot",
    "foundry",
    "gallery",
    "hangar",
    "library",
    "museum",
    "nursery",
    "orchard",
    "station",
)
PEOPLE = (
    "Alva Brandt",
    "Bruno Castel",
    "Clara Dietz",
    "Dario Enns",
    "Edith Falk",
    "Felix Grau",
    "Greta Holm",
    "Henrik Isler",
    "Ines Jansen",
    "Jonas Keller",
)
CITIES = (
    "Aarhus",
    "Bergen",
    "Coimbra",
    "Delft",
    "Evora",
    "Fulda",
    "Girona",
    "Halmstad",
    "Innsbruck",
    "Jena",
    "Kaunas",
    "Lucca",
)
WORDS = (
    "amber",
    "basil",
    "cedar",
    "delta",
    "ebony",
    "fjord",
    "gecko",
    "helix",
    "ivory",
    "jolly",
    "koala",
    "lotus",
    "mango",
    "nylon",
    "onyx",
    "pearl",
)
MODULES = (
    "argparse",
    "configparser",
    "csv",
    "fractions",
    "heapq",
    "shlex",
    "statistics",
    "string",
    "textwrap",
    "zipfile",
)
MORE_MODULES = ("calendar", "difflib", "gettext", "mailbox", "pprint", "tarfile")


@dataclass(frozen=True)
class Question:
    """One prompt: chunks in order, the text behind them, and what a right answer holds.

    ``golds`` are alternatives, unless ``needs_all``. ``metric`` names how an answer is scored: ``holds`` (1 where it has a gold one, or the
    share of all golds), ``f1`` (the same, else its words' F1), ``line`` (whether its first line is the right one), ``rouge`` (Rouge-L
    with the full prefill's own answer); of forms, ``exact`` (whether it holds a gold one, in any script), ``choice`` (whether the first
    of ``options`` in it is the right one), ``number`` (whether its first number is). ``facts``: name, field and value of what is asked.
    """

    task: str
    number: int
    chunks: tuple[str, ...]
    tail: str
    golds: tuple[str, ...]
    metric: str = "holds"
    needs_all: bool = False
    is_multi_hop: bool = False
    max_tokens: int = 24
    separator: str = "\n\n"
    form: str = ""
    options: tuple[str, ...] = ()
    facts: tuple[tuple[str, str, str], ...] = ()


Cut = Callable[[str, int], str]
"""Cuts a text to so many tokens, at the end of a word."""


def data(name: str) -> list[dict[str, Any]]:
    """A file of ``$KVRAG_EVAL_DATA``, or exit with the reason."""
    folder = os.environ.get("KVRAG_EVAL_DATA")
    path = Path(folder or ".") / f"{name}.json"
    if not folder or not path.is_file():
        sys.exit(
            f"evaluation data is missing: set KVRAG_EVAL_DATA to the folder that holds {path.name}"
        )
    return list(json.loads(path.read_text()))


@cache
def passages() -> tuple[str, ...]:
    """Passages that no question of ours is about, as hay."""
    return tuple(
        p["text"] for row in data("musique_whole") for p in row["passages"] if not p["gold"]
    )


def hay(
    draw: random.Random, cut: Cut, chunks: int, tokens: int, needles: dict[int, list[str]]
) -> tuple[str, ...]:
    """Chunks of passages of about so many tokens, with sentences put between those of a chunk."""
    texts, found = cycle(draw.sample(passages(), len(passages()))), []
    for index in range(chunks):
        own = needles.get(index, [])
        room, text = tokens - len(" ".join(own)) // 3, next(texts)
        while len(text) < 8 * room:
            text = f"{text} {next(texts)}"
        sentences = re.split(r"(?<=[.!?]) ", cut(text, room))
        for needle in own:
            sentences.insert(draw.randint(0, len(sentences) - 1), needle)
        found.append(" ".join(sentences))
    return tuple(found)


def _value(draw: random.Random, kind: int) -> str:
    """A code of one of five kinds: digits, digits in groups, words, mixed, a date."""
    return (
        str(draw.randint(10_000, 9_999_999)),
        f"{draw.randint(100, 999)}-{draw.randint(1000, 9999)}",
        f"{draw.choice(WORDS)}-{draw.choice(WORDS)}-{draw.choice(WORDS)}",
        f"{draw.choice('ABCDEFGHKLMNP')}{draw.randint(10, 99)}{draw.choice('QRSTUVWXYZ')}{draw.randint(100, 999)}",
        f"{draw.randint(1, 28)} {draw.choice(('March', 'June', 'October'))} {draw.randint(1700, 1990)}",
    )[kind % 5]


def _places(draw: random.Random, number: int) -> list[str]:
    return [
        f"{a} {b}"
        for a, b in zip(draw.sample(FIRST, number), draw.sample(SECOND, number), strict=True)
    ]


def needle(
    draw: random.Random, cut: Cut, chunks: int, tokens: int, number: int
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """One of many keys: each chunk has a code of its own."""
    places, kinds = _places(draw, min(chunks, 12)), number
    values = [_value(draw, kinds) for _ in places]
    needles = {
        i: [f"The access code of the {p} is {v}."]
        for i, (p, v) in enumerate(zip(places, values, strict=True))
    }
    at = draw.randrange(len(places))
    tail = f"{WITHIN}\nQuestion: What is the access code of the {places[at]}?"
    return hay(draw, cut, chunks, tokens, needles), tail, (values[at],)


def values(
    draw: random.Random, cut: Cut, chunks: int, tokens: int, number: int
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Several values of one key, in different chunks, among those of others."""
    mine, *others = _places(draw, 4)
    found = [_value(draw, number) for _ in range(3)]
    homes = draw.sample(range(chunks), min(chunks, 3 + len(others)))
    needles = {
        i: [f"One of the access codes of the {mine} is {v}."]
        for i, v in zip(homes, found, strict=False)
    }
    for i, other in zip(homes[3:], others, strict=False):
        needles.setdefault(i, []).append(
            f"One of the access codes of the {other} is {_value(draw, number)}."
        )
    tail = f"Answer with a list and nothing else.\nQuestion: What are all three access codes of the {mine}?"
    return hay(draw, cut, chunks, tokens, needles), tail, tuple(found)


def hops(
    draw: random.Random, cut: Cut, chunks: int, tokens: int, number: int
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Two hops over two chunks: who works where, and the code of that place."""
    size = max(2, min(chunks // 2, 5))
    people, places = draw.sample(PEOPLE, size), draw.sample(CITIES, size)
    codes = [_value(draw, number) for _ in places]
    told = [
        f"{who} works in the office in {where}." for who, where in zip(people, places, strict=True)
    ]
    told += [
        f"The door code of the office in {where} is {code}."
        for where, code in zip(places, codes, strict=True)
    ]
    homes = draw.sample(range(chunks), min(chunks, len(told)))
    needles: dict[int, list[str]] = {}
    for home, sentence in zip(cycle(homes), told, strict=False):
        needles.setdefault(home, []).append(sentence)
    at = draw.randrange(size)
    tail = f"{WITHIN}\nQuestion: What is the door code of the office in which {people[at]} works?"
    return hay(draw, cut, chunks, tokens, needles), tail, (codes[at],)


def tracking(
    draw: random.Random, cut: Cut, chunks: int, tokens: int, number: int
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Follow a variable over two assignments in two chunks, beside another such chain."""
    names = draw.sample([f"{a}{b}" for a in "ABCDEFGH" for b in "KLMNPQRS"], 4)
    numbers = [str(draw.randint(10_000, 99_999)) for _ in range(2)]
    told = [f"VAR {names[0]} = {numbers[0]}.", f"VAR {names[1]} = VAR {names[0]}."]
    told += [f"VAR {names[2]} = {numbers[1]}.", f"VAR {names[3]} = VAR {names[2]}."]
    needles: dict[int, list[str]] = {}
    for home, sentence in zip(
        cycle(sorted(draw.sample(range(chunks), min(chunks, 4)))), told, strict=False
    ):
        needles.setdefault(home, []).append(sentence)
    tail = f"Answer with a number and nothing else.\nQuestion: What is the numeric value of VAR {names[1]}?"
    return hay(draw, cut, chunks, tokens, needles), tail, (numbers[0],)


def tally(
    draw: random.Random, cut: Cut, chunks: int, tokens: int, number: int
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Count over chunks: how many of the places are closed."""
    places = _places(draw, min(chunks, 8))
    closed = draw.sample(range(len(places)), draw.randint(1, min(5, len(places) - 1)))
    needles = {
        i: [f"Today the {p} is {'closed' if i in closed else 'open'}."]
        for i, p in enumerate(places)
    }
    tail = f"Answer with a number and nothing else.\nQuestion: Of these, how many are closed today: the {', the '.join(places)}?"
    return hay(draw, cut, chunks, tokens, needles), tail, (str(len(closed)),)


SHAPES = ((8, 128), (4, 250), (14, 64), (10, 250), (5, 500), (12, 500))
"""Chunks and their tokens: prompts of about 1,000, 2,500 and 6,000 tokens."""
NEEDLES = {"needle": needle, "values": values, "hops": hops, "tracking": tracking, "tally": tally}


def needle_questions(cut: Cut, shapes: tuple[tuple[int, int], ...]) -> Iterator[Question]:
    """Questions without end, of each kind in turn; of single needles twice as many."""
    kinds = ("needle", "values", "hops", "needle", "tracking", "tally")
    for number in count():
        kind, (chunks, tokens) = (
            kinds[number % len(kinds)],
            shapes[number // len(kinds) % len(shapes)],
        )
        texts, tail, golds = NEEDLES[kind](
            random.Random(f"{kind} {number}"), cut, chunks, tokens, number // len(kinds)
        )
        yield Question(
            kind,
            number,
            texts,
            tail,
            golds,
            needs_all=kind == "values",
            is_multi_hop=kind in ("hops", "tracking", "tally"),
            max_tokens=48 if kind == "values" else 24,
        )


def corpus(name: str) -> Iterator[Question]:
    """Questions over whole passages, in random order."""
    file = {"hotpotqa": "hotpotqa", "musique": "musique_whole"}[name]
    for number, row in enumerate(data(file)):
        found = [f"{p['title']}\n{p['text']}" for p in row["passages"]]
        random.Random(number).shuffle(found)
        tail = f"{WITHIN}\nQuestion: {row['question']}"
        yield Question(
            name, number, tuple(found), tail, tuple(row["answers"]), "f1", is_multi_hop=True
        )


def examples() -> Iterator[Question]:
    """Few-shot: chunks are examples of a rule that the last line asks for."""
    for number in range(40):
        draw = random.Random(f"examples {number}")
        names = {"city": CITIES, "person": PEOPLE, "word": WORDS, "place": SECOND}
        marks = dict(zip(names, draw.sample(("ZUK", "MIP", "TAV", "ROL", "BEX"), 4), strict=True))
        kinds = [draw.choice(list(names)) for _ in range(24)]
        lines = [
            f"Input: {draw.choice(names[kind])} {draw.randint(2, 99)}\nLabel: {marks[kind]}"
            for kind in kinds
        ]
        chunks = tuple("\n\n".join(lines[start : start + 4]) for start in range(0, 24, 4))
        kind = draw.choice(kinds)
        asked = f"Input: {draw.choice(names[kind])} {draw.randint(2, 99)}"
        tail = f"Give the label of this input as in the examples, nothing else.\n{asked}\nLabel:"
        yield Question(
            "examples", number, chunks, tail, (marks[kind],), is_multi_hop=True, max_tokens=8
        )


def code(cut: Cut) -> Iterator[Question]:
    """Code completion: the functions of a module of Python's library, and the first lines of one of them to go on with."""
    for number, name in enumerate(name for name in (*MODULES, *MORE_MODULES) for _ in range(2)):
        source = inspect.getsource(importlib.import_module(name))
        tree, lines = ast.parse(source), source.splitlines()
        nodes = [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.FunctionDef) and 8 <= (n.end_lineno or 0) - n.lineno <= 60
        ]
        if len(nodes) < 8:
            continue
        draw = random.Random(f"code {number}")
        chosen = draw.sample(nodes, 7)
        texts = [cut("\n".join(lines[n.lineno - 1 : n.end_lineno]), 250) for n in chosen]
        body = lines[chosen[0].lineno - 1 : chosen[0].end_lineno]
        at = draw.randint(3, len(body) - 3)
        while not body[at].strip():
            at -= 1
        wanted = body[at].strip()
        order = texts[:]
        draw.shuffle(order)
        tail = (
            "Write the next line of this function of the file above, and nothing else:\n\n"
            + "\n".join(body[:at])
        )
        yield Question("code", number, tuple(order), tail, (wanted,), "line", max_tokens=32)


def summaries() -> Iterator[Question]:
    """A long answer over a whole document's passages."""
    for number, row in enumerate(data("hotpotqa")[:30]):
        found = tuple(f"{p['title']}\n{p['text']}" for p in row["passages"][:8])
        yield Question(
            "summary",
            number,
            found,
            "Summarise the passages above in one paragraph.",
            (),
            "rouge",
            max_tokens=96,
        )
