"""The questions that are asked about a corpus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvrag.cli.documents import read_text
from kvrag.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and words that its answer should hold, where they are known."""

    text: str
    hint: str | None = None

    def is_met_by(self, answer: str) -> bool:
        """Whether an answer holds the hint, case aside."""
        return self.hint is not None and self.hint.casefold() in answer.casefold()


def read_questions(corpus: Path) -> list[Question]:
    """Return the questions of a corpus folder, from its ``questions.json``; none if it has no such file.

    Raises
    ------
    InputError
        If the file is damaged.
    """
    file = corpus / "questions.json"
    if not file.is_file():
        return []
    try:
        return [
            Question(str(row["question"]), row.get("answer_hint"))
            for row in json.loads(read_text(file))
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f'{str(file)!r} must hold a JSON list of {{"question": ...}} ({error})'
        ) from error


def spread(items: Sequence[T], count: int) -> list[T]:
    """Take ``count`` items evenly over a list, so that few questions still touch all of a corpus."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
