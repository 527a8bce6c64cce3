"""The kernels' source text: one flat text per kernel file, so that a compiler needs no include path."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

CSRC = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^#include "(?!emu\.h)([a-z_0-9]+\.cuh)"$', re.MULTILINE)


@cache
def flat(name: str) -> str:
    """Return a file of ``csrc`` with each of our includes put in once, where it is first named."""
    seen: set[str] = set()

    def put_in(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return expand((CSRC / match[1]).read_text())

    def expand(text: str) -> str:
        return _INCLUDE.sub(put_in, text.replace("#pragma once\n", ""))

    return expand((CSRC / name).read_text())
