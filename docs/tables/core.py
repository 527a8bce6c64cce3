"""Parts of tables: rows in Markdown, and the source of figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "Not measured yet.\n"

Result = dict[str, Any]
Tables = dict[str, tuple[str, Callable[[Result], str]]]
"""Name of a table → file of its result, none for arithmetic, and the function that makes the table."""


def read(file: str) -> Result:
    """Read a result."""
    return dict(json.loads((RESULTS / file).read_text()))


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def source(result: Result, file: str, kept: str = "all repeats") -> str:
    """Say where figures come from."""
    m = result["machine"]
    device = m["gpu"] or f"{m['cpu']}, {m['threads']} thread(s)"
    versions = ", ".join(
        f"{name} {version}" for name, version in m["versions"].items() if name != "kvrag"
    )
    return f"\n{result['model']}; {device}; {versions}; commit {m['commit'][:10]}; {kept} in `benchmarks/results/{file}`.\n"


def same_run(*results: Result) -> None:
    """Refuse to join rows of different runs.

    Raises
    ------
    ValueError
        If results differ in model, machine, versions or commit.
    """
    runs = {json.dumps([r.get("model"), r["machine"]], sort_keys=True) for r in results}
    if len(runs) > 1:
        raise ValueError(
            f"rows of different runs stand in one table: {', '.join(sorted(runs))}; make a table of each"
        )


def machine_of(result: Result, file: str) -> str:
    """Say where figures come from that need no model; scenarios were run at commits of their own."""
    m = result["machine"]
    ran = {
        row["commit"][:10] for row in result.get("scenarios", {}).values() if "commit" in row
    } or {m["commit"][:10]}
    at = f"commit{'s' if ran - {min(ran)} else ''} {', '.join(sorted(ran))}"
    return f"\n{m['cpu']}, {m['cores']} cores; {at}; everything in `benchmarks/results/{file}`.\n"
