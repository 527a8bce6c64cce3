"""Text files, their chunks, and the questions that are asked about them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvrag.demo.splitting import CountTokens, split_text
from kvrag.errors import InputError

T = TypeVar("T")

SUFFIXES = (".md", ".markdown", ".rst", ".txt")
"""Files taken from a folder; a file given by name may have any."""


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """A chunk of a file. ``id`` is ``path#n``, counted from 0; ``num_tokens`` is its size for the model at hand."""

    id: str
    text: str
    num_tokens: int


def read_documents(paths: Iterable[Path]) -> dict[str, str]:
    """Read text files, and those of folders, below them too.

    Returns
    -------
    dict
        Path as given (and what it led to) → text; empty files are left out.

    Raises
    ------
    InputError
        If a path does not exist, is no UTF-8 text, or nothing was found.
    """
    texts: dict[str, str] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no file or folder {str(path)!r}; check the path")
        for file in _files(path):
            text = read_text(file)
            if text.strip():
                texts[file.as_posix()] = text
    if not texts:
        raise InputError(f"no text was found; name files, or folders with files that end in {', '.join(SUFFIXES)}")
    return texts


def read_text(file: Path) -> str:
    """Read one file as UTF-8 text.

    Raises
    ------
    InputError
        If that is not possible.
    """
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{str(file)!r} is no UTF-8 text; convert it, or leave it out") from None
    except OSError as error:
        raise InputError(f"{str(file)!r} can't be read: {error.strerror or error}; check the path") from error


def split_documents(
    documents: dict[str, str], count_tokens: CountTokens, *, chunk_tokens: int, min_tokens: int = 0
) -> list[DocumentChunk]:
    """Split documents into chunks; those of fewer than ``min_tokens`` tokens are left out."""
    chunks = []
    for path, text in documents.items():
        for number, body in enumerate(split_text(text, count_tokens, chunk_tokens=chunk_tokens)):
            chunk = DocumentChunk(f"{path}#{number}", body, count_tokens(body))
            if chunk.num_tokens >= min_tokens:
                chunks.append(chunk)
    return chunks


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
        return [Question(str(row["question"]), row.get("answer_hint")) for row in json.loads(read_text(file))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f'{str(file)!r} must hold a JSON list of {{"question": ...}} ({error})') from error


def spread(items: Sequence[T], count: int) -> list[T]:
    """Take ``count`` items evenly over a list, so that few questions still touch all of a corpus."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
