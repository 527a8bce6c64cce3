"""What the peers are asked: prompts as segments, made from a seed, MuSiQue questions and the sources of Python's standard library.

Segments touch at single line breaks, so that the ids of the segments, joined, are those of the whole text, and everyone gets the same ids.
Chunks come first in the first user message, as retrieval chains write them: what stands before them is the head of the chat template.
"""

from __future__ import annotations

import ast
import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTRUCTION = "Answer the question after reading the passages, within 5 words."
MODULES = (
    *(
        "bisect",
        "calendar",
        "colorsys",
        "csv",
        "difflib",
        "fileinput",
        "fnmatch",
        "fractions",
        "gettext",
        "glob",
    ),
    *(
        "heapq",
        "mimetypes",
        "netrc",
        "posixpath",
        "pprint",
        "quopri",
        "random",
        "reprlib",
        "sched",
        "shlex",
        "shutil",
    ),
    *("statistics", "string", "tarfile", "textwrap", "tokenize", "zipfile"),
)


@dataclass(frozen=True)
class Segment:
    """A run of text: a chunk that an index holds, or live text."""

    text: str
    is_chunk: bool


@dataclass(frozen=True)
class Prompt:
    """Segments, and gold answers where there are any."""

    segments: tuple[Segment, ...]
    golds: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(segment.text for segment in self.segments)

    @property
    def chunks(self) -> list[str]:
        """Texts of its chunks."""
        return [segment.text for segment in self.segments if segment.is_chunk]


@dataclass(frozen=True)
class Workload:
    """Prompts in the order in which they come, and every chunk that the application's index holds."""

    name: str
    prompts: list[Prompt]
    pool: list[str]

    @property
    def used(self) -> list[str]:
        """Chunks of the pool that the prompts use, in order of first use."""
        return list(dict.fromkeys(chunk for prompt in self.prompts for chunk in prompt.chunks))


@dataclass(frozen=True)
class Words:
    """The model's tokenizer and chat template: ``render`` writes messages, ``ids`` and ``text`` go between text and token ids."""

    ids: Callable[[str], list[int]]
    text: Callable[[list[int]], str]
    render: Callable[[list[dict[str, str]]], str]

    def around(self, passage: str, answer: str, tokens: int) -> str:
        """Return so many tokens of a passage, those around an answer that it holds, else the first."""
        place = passage.lower().find(answer.lower())
        start = len(self.ids(passage[:place])) - tokens // 2 if place >= 0 else 0
        ids = self.ids(passage)
        start = max(0, min(start, len(ids) - tokens))
        return self.text(ids[start : start + tokens]).strip()

    def prompt(
        self, messages: list[dict[str, str]], chunks: Sequence[str], golds: Sequence[str] = ()
    ) -> Prompt:
        """Render messages and cut the text at the chunks, which stand in it in this order."""
        segments, rest = [], self.render(messages)
        for chunk in chunks:
            before, _, rest = rest.partition(chunk)
            segments += [Segment(before, False), Segment(chunk, True)]
        return Prompt(tuple(s for s in (*segments, Segment(rest, False)) if s.text), tuple(golds))


def zipf(pool: Sequence[Any], count: int, rng: random.Random) -> list[Any]:
    """Draw ``count`` different items, the n-th of the pool with a weight of 1/n."""
    left, drawn = list(enumerate(pool, 1)), list[Any]()
    for _ in range(count):
        pick = rng.choices(range(len(left)), [1 / rank for rank, _ in left])[0]
        drawn.append(left.pop(pick)[1])
    return drawn


def gold(row: dict[str, Any]) -> str:
    """A question's first gold answer."""
    return str(row["answers"][0])


def reordered_rag(
    data: list[dict[str, Any]], words: Words, count: int, seed: int, chunks_each: int
) -> Workload:
    """Passages of 250 tokens out of 200, by popularity (zipf), in random order, two of the question's own among them."""
    rng, rows = random.Random(seed), data[::2]
    own = [[words.around(c["text"], gold(row), 250) for c in row["ctxs"][:10]] for row in rows]
    pool = list(dict.fromkeys(chunk for chunks in own for chunk in chunks))[:200]
    rng.shuffle(pool)
    prompts = []
    for index in range(count):
        row, mine = rows[index % len(rows)], own[index % len(rows)]
        best = sorted(mine, key=lambda chunk, row=row: gold(row).lower() not in chunk.lower())[:2]
        chunks = (
            best
            + [chunk for chunk in zipf(pool, chunks_each, rng) if chunk not in best][
                : chunks_each - 2
            ]
        )
        rng.shuffle(chunks)
        content = "\n".join(chunks) + f"\n{INSTRUCTION}\nQuestion: {row['question']}"
        prompts.append(words.prompt([{"role": "user", "content": content}], chunks, row["answers"]))
    return Workload("reordered RAG", prompts, pool)


def growing_chat(data: list[dict[str, Any]], words: Words, count: int, seed: int) -> Workload:
    """One conversation: each turn brings two passages and a question, behind all turns before, with their gold answers."""
    rng, messages, chunks, prompts = random.Random(seed), list[dict[str, str]](), list[str](), []
    for row in rng.sample(data[1::2], count):
        new = [words.around(c["text"], gold(row), 250) for c in row["ctxs"][:2]]
        content = "\n".join(new) + f"\n{INSTRUCTION}\nQuestion: {row['question']}"
        messages, chunks = [*messages, {"role": "user", "content": content}], chunks + new
        prompts.append(words.prompt(messages, chunks, row["answers"]))
        messages = [*messages, {"role": "assistant", "content": gold(row)}]
    return Workload("growing chat", prompts, list(dict.fromkeys(chunks)))


def few_shot(
    data: list[dict[str, Any]], words: Words, count: int, seed: int, chunks_each: int
) -> Workload:
    """Solved examples out of some twenty, another choice and order for each question, then a passage and its question."""
    rng, shots = random.Random(seed), []
    for row in data:
        holding = [c["text"] for c in row["ctxs"] if gold(row).lower() in c["text"].lower()]
        if holding:
            passage = words.around(holding[0], gold(row), 120)
            shots.append(
                (f"Passage: {passage}\nQuestion: {row['question']}\nAnswer:", row["answers"])
            )
    pool = [f"{task} {answers[0]}" for task, answers in shots[count:]]
    prompts = []
    for task, answers in shots[:count]:
        chunks = zipf(pool, chunks_each, rng)
        content = "\n".join([*chunks, task])
        prompts.append(words.prompt([{"role": "user", "content": content}], chunks, answers))
    return Workload("few-shot", prompts, pool)


def code(words: Words, count: int, seed: int, chunks_each: int) -> Workload:
    """Functions of Python's standard library out of some eighty, by popularity, in random order, and the first half of another."""
    rng = random.Random(seed)
    found = [text for text in functions() if 100 <= len(words.ids(text)) <= 350]
    rng.shuffle(found)
    tasks, pool, prompts = found[:count], found[count:], []
    for task in tasks:
        chunks = zipf(pool, chunks_each, rng)
        lines = task.splitlines()
        half = "\n".join(lines[: len(lines) // 2])
        content = (
            "\n".join(chunks) + f"\nComplete this function in the style of the code above:\n{half}"
        )
        prompts.append(words.prompt([{"role": "user", "content": content}], chunks))
    return Workload("code", prompts, pool)


def functions() -> list[str]:
    """Sources of the functions at the top of some modules, in order."""
    texts = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            continue
        source = Path(spec.origin).read_text("utf-8")
        defined = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        texts += [(ast.get_source_segment(source, node) or "").strip() for node in defined]
    return texts


def all_workloads(
    data: list[dict[str, Any]],
    words: Words,
    counts: dict[str, int],
    seed: int,
    *,
    is_short: bool = False,
) -> list[Workload]:
    """Make the workloads of ``counts``, with so many prompts each; short ones have three chunks each, and measure nothing."""
    rag, shots, functions_each = (3, 3, 3) if is_short else (7, 10, 8)
    made = {
        "rag": lambda count: reordered_rag(data, words, count, seed, rag),
        "chat": lambda count: growing_chat(data, words, count, seed),
        "shots": lambda count: few_shot(data, words, count, seed, shots),
        "code": lambda count: code(words, count, seed, functions_each),
    }
    return [made[name](count) for name, count in counts.items()]
