"""Questions about documents with known answers: the caller's, or facts planted in chunks.

A planted fact is the access code of a place. It stands in a single chunk, in the form of its text.
"""

from __future__ import annotations

import json
import math
import random
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvrag.errors import InputError
from kvrag.evaluate.engine import Engine
from kvrag.types import Chunk

IS_RIGHT = 0.5  # minimum score of an answer that counts as right
# Distinct chunks precomputed per prompt; with more chunks per prompt, they recur among prompts.
CHUNKS_PER_PROMPT = 2
INSTRUCTION = "Answer with a few words and nothing else."
NAMES = (
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
)
PLACES = (
    "archive",
    "bridge",
    "clinic",
    "depot",
    "foundry",
    "gallery",
    "hangar",
    "library",
    "museum",
    "orchard",
)

_UNSPACED = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SENTENCE = re.compile(r"(?<=[.!?])\s")
_SPACE = re.compile(r"(?<=\w)\s(?=\w)")
_RULE = re.compile(r"\s*\|?[\s|:-]*-[\s|:-]*")  # between the head of a Markdown table and its body
_STAMP = re.compile(
    r"\s*\[?\d{2,4}[-/:]\d\d[-/:]\d\d([T ]\d\d:\d\d\S*)?\S?\s+(\[?[A-Z]{4,8}\b\S?\s+)?(?=\S)"
)
_FIELD = re.compile(r'(\s*)"[^"]+":\s.*?(,?)')  # of a JSON object over several lines
_KEY = re.compile(r"(\s*)[\w.-]+(?: [\w.-]+){0,3}(\s*(?::\s+|=(?!=)\s*))(?:\S.{0,60})?[^\s.!?={,]")
_MARK = re.compile(r"\s*(?:#|//|--|[*-])\s+")  # of a comment, a title, or an item of a list
_PUNCTUATION = str.maketrans(
    "", "", f"{string.punctuation}‘’“”„«»…"
)  # left out, so that half a code is no word


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the chunks of its prompt, in order, and its right answers."""

    text: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]


def prompt_of(engine: Engine, question: Question) -> Any:
    """Turn a question into a prompt: a chat message if the model has a chat template."""
    parts = [part for text in question.chunks for part in (Chunk(text), "\n\n")]
    asked = f"{INSTRUCTION}\nQuestion: {question.text}"
    if engine.encoder.has_chat_template:
        return [{"role": "user", "content": [*parts, asked]}]
    return [engine.prefix_text, *parts, f"{asked}\nAnswer:"]


def planted(
    engine: Engine, chunks: Sequence[str], count: int, chunks_per_prompt: int, seed: int
) -> list[Question]:
    """Plant facts in chunks, and draw prompts of such chunks that ask for a fact.

    A chunk holds a single fact. Chunks come in random order.
    """
    encoder = engine.encoder
    least = engine.store_config.min_chunk_tokens
    draw = random.Random(seed)
    texts = [
        text
        for text in dict.fromkeys(chunk.strip() for chunk in chunks)
        if len(encoder.chunk_ids(text)) >= least
    ]
    places = [f"{name} {place}" for name, place in product(NAMES, PLACES)]
    if not 1 <= chunks_per_prompt <= min(len(texts), len(places)) or count < 2:
        raise InputError(
            f"{count} prompts of {chunks_per_prompt} chunks can't be made of {len(texts)} chunks "
            f"of at least {least} tokens; pass more "
            f"text, and ask for at least 2 prompts of 1 to {len(places)} chunks"
        )
    pool = draw.sample(
        texts, min(len(texts), len(places), CHUNKS_PER_PROMPT * max(count, chunks_per_prompt))
    )
    found: list[Question] = []
    while len(found) < count:
        facts = [(place, _code(draw)) for place in draw.sample(places, len(pool))]
        found.extend(_ask_all(pool, facts, chunks_per_prompt, draw))
    return found[:count]


def _ask_all(
    pool: Sequence[str],
    facts: Sequence[tuple[str, str]],
    chunks_per_prompt: int,
    draw: random.Random,
) -> list[Question]:
    """Ask for every fact once: an interval takes questions as independent."""
    told = [
        with_fact(text, f"access code of the {place}", code, draw)
        for text, (place, code) in zip(pool, facts, strict=True)
    ]
    found = []
    for home in draw.sample(range(len(pool)), len(pool)):
        drawn = draw.sample([i for i in range(len(pool)) if i != home], chunks_per_prompt - 1)
        drawn.insert(draw.randint(0, len(drawn)), home)
        place, code = facts[home]
        asked = f"What is the access code of the {place}?"
        found.append(Question(asked, tuple(told[i] for i in drawn), (code,)))
    return found


def _code(draw: random.Random) -> str:
    """Draw a code: digits, groups of digits, or letters and digits."""
    number = draw.randint(10_000, 9_999_999)
    letters = "".join(draw.sample("ABCDEFGHKLMNPRSTUVWXYZ", 2))
    return draw.choice(
        (
            f"{number}",
            f"{number % 900 + 100}-{number // 7 + 1000}",
            f"{letters}{number % 90 + 10}-{number // 9}",
        )
    )


def with_fact(text: str, what: str, code: str, draw: random.Random) -> str:
    """Tell a fact in a text as the text tells its own: in a line like one of its lines, or prose.

    In prose it stands between two sentences or inside one.
    """
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.split(end)
    at = draw.choice([n for n, line in enumerate(lines) if line.strip()] or [0])
    line = _line_like(lines[at], what, code)
    if line is None:
        lines[at] = _prose_with(lines[at], f"{what} is {code}", draw)
        return end.join(lines)
    while at + 1 < len(lines) and _RULE.fullmatch(lines[at + 1]):
        at += 1  # a table's head stays one
    return end.join([*lines[: at + 1], line, *lines[at + 1 :]])


def _prose_with(line: str, fact: str, draw: random.Random) -> str:
    """Tell a fact between two sentences of a line or inside one."""
    ends, spaces = (
        [found.start() for found in kind.finditer(line)] for kind in (_SENTENCE, _SPACE)
    )
    if not spaces or (ends and draw.random() < 0.5):
        at = draw.choice(ends or [len(line)])
        return f"{line[:at]} The {fact}.{line[at:]}"
    at = draw.choice(spaces)
    return f"{line[:at]} (the {fact}){line[at:]}"


def _line_like(line: str, what: str, code: str) -> str | None:
    """Return a line that tells a fact in the form of another; ``None`` if that one is prose."""
    bare = line.strip()
    indent = line[: len(line) - len(line.lstrip())]
    if bare.startswith('{"') and bare.endswith(("}", "},")):
        return indent + json.dumps({what: code}) + bare[bare.rindex("}") + 1 :]
    if (num_cells := bare.strip("|").count("|") + 1) > 1:
        cells = " | ".join([what, code, *["–"] * (num_cells - 2)])
        return f"{indent}| {cells} |" if bare.startswith("|") else indent + cells
    if ", " not in bare and (num_cells := bare.count(",") + 1) > 2:
        return indent + ",".join([what, code, *[""] * (num_cells - 2)])
    if found := _STAMP.match(line):
        return f"{found[0]}{what}: {code}"
    if found := _KEY.fullmatch(line):
        return f"{found[1]}{what}{found[2]}{code}"
    if found := _FIELD.fullmatch(line):
        return f"{found[1]}{json.dumps(what)}: {json.dumps(code)}{found[2]}"
    if found := _MARK.match(line):
        return f"{found[0]}The {what} is {code}."
    return None


def read_question(
    given: Mapping[str, Any], chunks: Sequence[str], chunks_per_prompt: int
) -> Question:
    """Read a question that the caller passed as a mapping."""
    text = given.get("question")
    answers = given.get("answers", given.get("answer"))
    if isinstance(answers, str):
        answers = [answers]
    own = given.get("chunks") or []
    if not (
        isinstance(text, str)
        and answers
        and _are_texts(answers)
        and _are_texts(own)
        and [] not in map(normalised, answers)
    ):
        raise InputError(
            f"a question is {dict(given)!r:.200}; it needs 'question', a text, and 'answers', a "
            "list of texts that say more than an article (a, an, the) or signs, and may have "
            "'chunks', too"
        )
    return Question(
        text, tuple(own or best_chunks(text, chunks, chunks_per_prompt)), tuple(answers)
    )


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


def best_chunks(question: str, chunks: Sequence[str], count: int) -> list[str]:
    """Return the ``count`` chunks that share most rare words with a question, the best first."""
    words = {text: Counter(normalised(text)) for text in chunks}
    known = Counter(word for own in words.values() for word in own)
    rare = {
        word: math.log(1 + len(words) / known[word])
        for word in set(normalised(question))
        if known[word]
    }

    def worth(text: str) -> float:
        own = words[text]
        return sum(rare[word] for word in rare if word in own) / (1 + math.log(1 + own.total()))

    return sorted(words, key=worth, reverse=True)[:count]


def normalised(text: str) -> list[str]:
    """Return the words of a text as in SQuAD: lower case, without punctuation and articles.

    A Chinese or Japanese character is a word, as these scripts have no spaces.
    """
    spaced = _UNSPACED.sub(r" \g<0> ", text.lower().translate(_PUNCTUATION))
    return _ARTICLES.sub(" ", spaced).split()


def score(answer: str, right: Sequence[str]) -> float:
    """Return 1 if an answer contains a right answer, else its largest word F1 with any of them."""
    words = normalised(answer)
    return max((_score(words, normalised(each)) for each in right), default=0.0)


def _score(words: list[str], right: list[str]) -> float:
    if f" {' '.join(right)} " in f" {' '.join(words)} ":
        return 1.0
    same = (Counter(words) & Counter(right)).total()
    return 2 * same / (len(words) + len(right))
