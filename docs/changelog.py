"""Move the fragments of docs/changes/ into CHANGELOG.md: each becomes a line of the present version's section, under its kind.

A fragment is ``NAME.KIND.md``. The section is begun where there is none; what stands in it already is left as it is, so this may run again.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

KINDS = {
    "feature": "Added",
    "perf": "Faster",
    "format": "Stored bytes",
    "fix": "Fixed",
    "removal": "Gone",
    "doc": "Documentation",
}
"""Kinds of fragments and their headings, in their order in a section."""


def merge(section: str, heading: str, entry: str) -> str:
    """Add an entry under a heading of a version's section, which is made where it is missing."""
    found = re.search(rf"^### {heading}\n\n(?:(?!^### ).*\n?)*", section, re.MULTILINE)
    if found:
        return (
            section[: found.start()] + found[0].rstrip() + f"\n{entry}\n\n" + section[found.end() :]
        )
    later = list(KINDS.values())[list(KINDS.values()).index(heading) + 1 :]
    at = min(
        (section.find(f"### {each}\n") for each in later if f"### {each}\n" in section),
        default=len(section),
    )
    return section[:at].rstrip() + f"\n\n### {heading}\n\n{entry}\n\n" + section[at:]


def main(root: Path) -> int:
    """Write the changelog, and remove the fragments that went in."""
    file, init = root / "CHANGELOG.md", (root / "kvrag" / "__init__.py").read_text("utf-8")
    version = re.findall(r'__version__ = "(.+)"', init)[0]
    title = f"## {version}\n"
    before, _, rest = file.read_text("utf-8").partition("\n## ")
    rest = f"## {rest}" if rest else ""
    if not rest.startswith(title):
        rest = f"{title}\n\n{rest}"
    end = rest.find("\n## ", 1) + 1 or len(rest)
    section, older = rest[:end], rest[end:]
    fragments = sorted((root / "docs" / "changes").glob("*.*.md"))
    for fragment in fragments:
        words = " ".join(fragment.read_text("utf-8").split())
        kind = fragment.name.split(".")[-2]
        if kind not in KINDS:
            raise SystemExit(
                f"{fragment.name}: a fragment is NAME.KIND.md, and a kind is one of {', '.join(KINDS)}"
            )
        entry = textwrap.fill(
            words, 150, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False
        )
        section = merge(section, KINDS[kind], entry)
    file.write_text(f"{before}\n{section.rstrip()}\n" + (f"\n{older}" if older else ""), "utf-8")
    for fragment in fragments:
        fragment.unlink()
    print(f"{len(fragments)} fragments went into {file.name}, {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
