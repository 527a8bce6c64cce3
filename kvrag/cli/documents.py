"""Files that commands read: prompts, and texts with a small splitter (applications have their own).

The splitter cuts at paragraphs, then sentences, then words, and packs the parts to about the
requested size. Every chunk is a verbatim substring of its text, so a prompt with the whole text
contains its chunks, too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.errors import ConfigError, InputError

if TYPE_CHECKING:
    from kvrag.prompt.template import Prompt

STDIN = Path("-")

CountTokens = Callable[[str], int]
Range = tuple[int, int]
"""Part of a text, in characters: ``text[start:stop]``."""

# Suffixes of files taken from a folder; a file given by name may have any suffix.
SUFFIXES = (".md", ".markdown", ".rst", ".txt")

_PARTS = (
    re.compile(r"(?:#{1,6} .*\n\s*\n)*\S.*(?:\n[ \t]*\S.*)*"),  # a paragraph with its headings
    re.compile(r"(?=\S).*?(?:[.!?](?=\s)|\Z)", re.DOTALL),  # a sentence
    re.compile(r"\S+"),
)


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """A chunk of a file.

    ``id`` is ``path#n``, counted from 0; ``num_tokens`` is its size by the model's tokenizer.
    """

    id: str
    text: str
    num_tokens: int


def read_documents(paths: Iterable[Path], errors: str = "strict") -> dict[str, str]:
    """Read text files, and the files in folders and their subfolders: path → text.

    Empty files are left out.

    Raises
    ------
    InputError
        If a path does not exist, a file is not UTF-8 text, or no text was found.
    """
    texts: dict[str, str] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no file or folder {str(path)!r}; check the path")
        inside = (
            file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()
        )
        for file in sorted(inside) if path.is_dir() else [path]:
            text = read_text(file, errors)
            if text.strip():
                texts[file.as_posix()] = text
    if not texts:
        raise InputError(
            "no text was found; name files, or folders with files that end in "
            f"{', '.join(SUFFIXES)}"
        )
    return texts


def example(name: str, *, otherwise: str) -> Path:
    """Return a file or folder of ``examples/``.

    Looks in kvrag's checkout and in the working directory; the wheel has no examples.
    """
    for base in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (found := base / "examples" / name).exists():
            return found
    raise InputError(
        f"this needs examples/{name} of kvrag's source, which is not in the package; {otherwise}"
    )


def read_text(file: Path, errors: str = "strict") -> str:
    """Read a file as UTF-8 text; raise :class:`InputError` if that is not possible."""
    try:
        return file.read_text("utf-8-sig", errors)  # Windows begins files with a byte order mark
    except UnicodeDecodeError:
        raise InputError(f"{str(file)!r} is not UTF-8 text; convert it, or leave it out") from None
    except OSError as error:
        raise InputError(
            f"{str(file)!r} can't be read: {error.strerror or error}; check the path"
        ) from error


def split_documents(
    documents: dict[str, str], count_tokens: CountTokens, *, chunk_tokens: int
) -> list[DocumentChunk]:
    """Split documents into chunks of about ``chunk_tokens`` tokens."""
    return [
        DocumentChunk(f"{path}#{number}", body, count_tokens(body))
        for path, text in documents.items()
        for number, body in enumerate(split_text(text, count_tokens, chunk_tokens=chunk_tokens))
    ]


def split_text(text: str, count_tokens: CountTokens, *, chunk_tokens: int = 250) -> list[str]:
    """Cut a text into chunks of about ``chunk_tokens`` tokens, between paragraphs where possible.

    ``count_tokens`` measures sizes. Only a paragraph longer than 1.5 times ``chunk_tokens`` is cut
    inside.
    """
    if chunk_tokens < 1:
        raise ConfigError(
            f"chunk_tokens is {chunk_tokens}; it must be a whole number of at least 1"
        )
    chunks: list[str] = []
    start = stop = size = 0
    for part in _parts(
        text, (0, len(text)), _PARTS, lambda part: count_tokens(part) > chunk_tokens * 3 // 2
    ):
        tokens = count_tokens(text[slice(*part)])
        # Join neighbours as long as that brings the chunk's size nearer to the target.
        if size and abs(size + tokens - chunk_tokens) > abs(chunk_tokens - size):
            chunks.append(text[start:stop])
            size = 0
        if not size:
            start = part[0]
        stop = part[1]
        size += tokens
    return [chunk.strip() for chunk in (*chunks, text[start:stop]) if chunk.strip()]


def _parts(
    text: str, within: Range, patterns: Sequence[re.Pattern[str]], is_long: Callable[[str], bool]
) -> Iterator[Range]:
    """Cut a part by the first pattern, and parts that are still too long by the next patterns."""
    for match in patterns[0].finditer(text, *within):
        if patterns[1:] and is_long(match[0]):
            yield from _parts(text, match.span(), patterns[1:], is_long)
        else:
            yield match.span()


# -- prompts from files ----------------------------------------------------------------------------


def read_prompt(file: Path) -> Prompt:
    """Read a prompt; ``-`` is standard input.

    A JSON list holds messages or segments; everything else is text.
    """
    text = _read_stdin() if file == STDIN else read_text(file)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, list):
        return _prompt(value, str(file))
    return text


def _read_stdin() -> str:
    """Read standard input as UTF-8, regardless of the terminal's encoding.

    Raises :class:`InputError` if it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("standard input is not UTF-8 text; convert it") from None


def read_prompts(files: list[Path]) -> list[Prompt]:
    """Read prompts: a prompt per line of a ``.jsonl`` file, and a prompt per other file.

    Raises :class:`InputError` if the files hold no prompt.
    """
    prompts: list[Prompt] = []
    for file in files:
        if file.suffix == ".jsonl":
            prompts += [_prompt(value, where) for where, value in read_lines(file, "prompt")]
        else:
            prompts.append(read_prompt(file))
    if not prompts:
        raise InputError(
            "these files hold no prompt; write one JSON prompt per line of a .jsonl file"
        )
    return prompts


def read_lines(file: Path, what: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file with a JSON value per line.

    Also yields the place of every value, for messages. Empty lines are left out.
    """
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        where = f"line {number} of {str(file)!r}"
        if line.strip():
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{where} is not JSON ({error}); write one JSON {what} per line"
                ) from None


def read_questions(file: Path) -> list[dict[str, Any]]:
    """Read questions, a JSON object per line; raise :class:`InputError` for any other value."""
    found = []
    for where, value in read_lines(file, "question"):
        if not isinstance(value, dict):
            raise InputError(f'{where} is no question; write {{"question": ..., "answers": [...]}}')
        found.append(value)
    return found


def _prompt(value: Any, where: str) -> Prompt:
    from kvrag.types import Chunk

    items: list[Any] = value if isinstance(value, list) else [None]
    if isinstance(value, str) or all(isinstance(v, dict) and "chunk" not in v for v in items):
        return value  # type: ignore[no-any-return]
    if all(isinstance(v, str) or (isinstance(v, dict) and "chunk" in v) for v in items):
        return [v if isinstance(v, str) else Chunk(v["chunk"]) for v in items]
    raise InputError(
        f"{where} is not a prompt: write a string, a list of chat messages, or of strings and "
        '{"chunk": text}'
    )
