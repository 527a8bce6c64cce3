"""A small splitter: paragraphs, then sentences, then words, packed to about the size asked for.

Every chunk is a verbatim, stripped substring of its text: a prompt that holds the whole text holds its chunks too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from kvrag.errors import ConfigError

CountTokens = Callable[[str], int]
Range = tuple[int, int]
"""A part of the text, in characters: ``text[start:stop]``."""

_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\s+")
_HEADING = re.compile(r"#{1,6} [^\n]*\Z")


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
