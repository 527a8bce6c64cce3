"""Prompts from files: plain text, or JSON in the forms that the engine accepts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.demo.documents import read_text
from kvrag.errors import InputError

if TYPE_CHECKING:
    from kvrag.prompt.template import Prompt

STDIN = Path("-")


def read_prompt(file: Path) -> Prompt:
    """Read one prompt; ``-`` is standard input.

    A text that is a JSON list is chat messages, or segments (strings and ``{"chunk": text}``). Everything else is taken as it is.
    """
    text = sys.stdin.read() if file == STDIN else read_text(file)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return _prompt(value, str(file)) if isinstance(value, list) else text


def read_prompts(files: list[Path]) -> list[Prompt]:
    """Read many prompts: one per line of a ``.jsonl`` file, one per other file.

    Raises
    ------
    InputError
        If a line is no JSON prompt, or there is none.
    """
    prompts: list[Prompt] = []
    for file in files:
        if file.suffix != ".jsonl":
            prompts.append(read_prompt(file))
            continue
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            if line.strip():
                prompts.append(_parse(line, f"line {number} of {str(file)!r}"))
    if not prompts:
        raise InputError("there is no prompt in these files; write one JSON prompt per line of a .jsonl file")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        return _prompt(json.loads(line), where)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is no JSON ({error}); write one JSON prompt per line") from None


def _prompt(value: Any, where: str) -> Prompt:
    from kvrag.types import Chunk

    if isinstance(value, str):
        return value
    is_segments = isinstance(value, list) and all(
        isinstance(v, str) or (isinstance(v, dict) and "chunk" in v) for v in value
    )
    if is_segments:
        return [v if isinstance(v, str) else Chunk(v["chunk"]) for v in value]
    if isinstance(value, list) and all(isinstance(v, dict) for v in value):
        return value
    raise InputError(
        f'{where} is no prompt: write a string, a list of chat messages, or of strings and {{"chunk": text}}'
    )
