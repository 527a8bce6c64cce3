"""Files that commands read: prompts, and texts with a small splitter (applications have their own).

The splitter cuts at paragraphs, then sentences, then words, and packs the parts to about the size asked for. Every chunk is a verbatim,
stripped substring of its text, so a prompt that holds the whole text holds its chunks too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.errors import ConfigError, InputError

if TYPE_CHECKING:
    from kvrag.prompt.template import Prompt

STDIN = Path("-")

CountTokens = Callable[[str], int]
Range = tuple[int, int]
"""A part of the text, in characters: ``text[start:stop]``."""

SUFFIXES = (".md", ".markdown", ".rst", ".txt")
"""Files taken from a folder; a file given by name may have any."""

_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\s+")
_HEADING = re.compile(r"#{1,6} [^\n]*\Z")


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
        If a path does not exist, is not UTF-8 text, or nothing was found.
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
        raise InputError(f"{str(file)!r} is not UTF-8 text; convert it, or leave it out") from None
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


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())


def split_text(text: str, count_tokens: CountTokens, *, chunk_tokens: int = 250) -> list[str]:
    """Cut a text into chunks of about ``chunk_tokens`` tokens, between paragraphs where possible.

    Parameters
    ----------
    text
        Plain text or markdown.
    count_tokens
        Tells how many tokens a part has.
    chunk_tokens
        Size aimed for. Only a paragraph of more than one and a half times as many is cut inside.

    Returns
    -------
    list of str
        Chunks in order, none empty.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}; it must be a whole number of at least 1")
    sized = [(part, count_tokens(text[slice(*part)])) for part in _parts(text, count_tokens, chunk_tokens)]
    return [text[start:stop] for start, stop in _pack(sized, chunk_tokens)]


def _pack(sized: list[tuple[Range, int]], target: int) -> Iterator[Range]:
    """Join neighbours for as long as that brings the chunk's size nearer to the target."""
    start, stop, size = 0, 0, 0
    for part, tokens in sized:
        if size and abs(size + tokens - target) > abs(target - size):
            yield start, stop
            size = 0
        start, stop, size = (start if size else part[0]), part[1], size + tokens
    if size:
        yield start, stop


def _parts(text: str, count_tokens: CountTokens, target: int) -> Iterator[Range]:
    """Paragraphs with the headings above them; long ones by sentences, long sentences by words."""
    limit = target + target // 2

    def is_long(part: Range) -> bool:
        return count_tokens(text[slice(*part)]) > limit

    for paragraph in _with_headings(text, _cut(text, (0, len(text)), _PARAGRAPH)):
        if not is_long(paragraph):
            yield paragraph
            continue
        for sentence in _cut(text, paragraph, _SENTENCE):
            yield from _cut(text, sentence, _WORD) if is_long(sentence) else (sentence,)


def _with_headings(text: str, paragraphs: Iterator[Range]) -> Iterator[Range]:
    """Keep a heading with the paragraph below it: alone at a chunk's end it would say nothing."""
    held: int | None = None
    last: Range | None = None
    for start, stop in paragraphs:
        if _HEADING.match(text, start, stop):
            held, last = (start if held is None else held), (start, stop)
            continue
        yield (start if held is None else held), stop
        held = None
    if held is not None and last is not None:
        yield held, last[1]


def _cut(text: str, part: Range, border: re.Pattern[str]) -> Iterator[Range]:
    """Cut a part at its borders, white space at the ends left out, empty pieces too."""
    start, end = part
    borders = [match.span() for match in border.finditer(text, start, end)]
    for stop, after in [*borders, (end, end)]:
        piece = text[start:stop]
        body = piece.strip()
        if body:
            begin = start + piece.index(body)
            yield begin, begin + len(body)
        start = after


# -- prompts from files ------------------------------------------------------------------------------------------------


def read_prompt(file: Path) -> Prompt:
    """Read one prompt; ``-`` is standard input. A JSON list is messages or segments, everything else is text."""
    text = sys.stdin.read() if file == STDIN else read_text(file)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return _prompt(value, str(file)) if isinstance(value, list) else text


def read_prompts(files: list[Path]) -> list[Prompt]:
    """Read many prompts: one per line of a ``.jsonl`` file, one per other file; raises :class:`InputError` if there is none."""
    prompts: list[Prompt] = []
    for file in files:
        if file.suffix != ".jsonl":
            prompts.append(read_prompt(file))
            continue
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            where = f"line {number} of {str(file)!r}"
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise InputError(f"{where} is not JSON ({error}); write one JSON prompt per line") from None
            prompts.append(_prompt(value, where))
    if not prompts:
        raise InputError("these files hold no prompt; write one JSON prompt per line of a .jsonl file")
    return prompts


def _prompt(value: Any, where: str) -> Prompt:
    from kvrag.types import Chunk

    if isinstance(value, str):
        return value
    items: list[Any] = value if isinstance(value, list) else [None]
    if all(isinstance(v, str) or (isinstance(v, dict) and "chunk" in v) for v in items):
        return [v if isinstance(v, str) else Chunk(v["chunk"]) for v in items]
    if all(isinstance(v, dict) for v in items):
        return items
    raise InputError(
        f'{where} is not a prompt: write a string, a list of chat messages, or of strings and {{"chunk": text}}'
    )
