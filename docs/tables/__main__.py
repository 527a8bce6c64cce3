"""Replace the blocks of all documents, or compare them with ``--check``."""

from __future__ import annotations

import json
import re
import sys

from . import (
    facts,
    faults,
    gpu,
    hybrids,
    memory,
    peers,
    prompts,
    ray,
    rounded,
    scale,
    server,
    store,
    support,
    ttft,
    vllm,
)
from .core import NOT_MEASURED, RESULTS, ROOT

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
TOPICS = (
    ttft,
    facts,
    peers,
    server,
    store,
    faults,
    ray,
    gpu,
    scale,
    support,
    rounded,
    prompts,
    hybrids,
    vllm,
    memory,
)
TABLES = {name: made for topic in TOPICS for name, made in topic.TABLES.items()}


def render(text: str) -> str:
    """Replace every block of a document."""

    def block(match: re.Match[str]) -> str:
        file, make = TABLES[match[2]]
        path = RESULTS / file
        if not file:  # arithmetic
            body = make({})
        else:
            body = make(json.loads(path.read_text())) if path.exists() else NOT_MEASURED
        return f"{match[1]}{body}{match[4]}"

    return BLOCK.sub(block, text)


def main() -> int:
    """Write, or check with ``--check``."""
    stale = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = document.read_text()
        after = render(before)
        if after != before:
            stale.append(document.name)
            if "--check" not in sys.argv:
                document.write_text(after)
    print("stale: " + ", ".join(stale) if stale else "tables are in step")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
