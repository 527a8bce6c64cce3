"""Output of commands.

Tables for people on a terminal of any width, JSON for programs, progress on standard error.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 110  # columns where the output is not a terminal; rich's own guess of 80 breaks tables
PAGE_WIDTH = 160


def write_anything() -> None:
    """Make standard output and error accept every text, regardless of their encoding.

    A terminal or pipe may support no more than ASCII; other characters become question marks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def console(*, err: bool = False) -> Console:
    """Return a console on the current standard output (or error)."""
    out = Console(stderr=err)
    if out.is_terminal:
        return out
    return Console(stderr=err, width=WIDTH)


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Write a line to standard output or error.

    typer's own function would write UTF-8 where the encoding is ASCII.
    """
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{text}{end}")
    stream.flush()


def progress(text: str) -> AbstractContextManager[Any]:
    """Show progress on standard error, so that results can be piped."""
    return console(err=True).status(text, spinner="line")


def show(value: Any, *tables: Table | str, as_json: bool, ok: bool = True) -> None:
    """Print a result, as JSON or as tables and lines; exit with status 1 if it is not ``ok``."""
    if as_json:
        is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
        say(json.dumps(value, indent=2, ensure_ascii=not is_unicode, default=str))
    else:
        console().print(*tables, sep="\n", markup=False, highlight=False)
    if not ok:
        raise typer.Exit(1)


def write_page(file: Path, *tables: Table) -> None:
    """Write tables as a page of HTML that needs no other file."""
    page = Console(record=True, width=PAGE_WIDTH, file=io.StringIO())
    page.print(*tables, sep="\n")
    page.save_html(str(file))


def fail(message: str) -> NoReturn:
    """Print a message on standard error and exit with status 1."""
    say(f"kvrag: {message}", err=True)
    raise typer.Exit(1)


def facts(title: str, rows: Mapping[str, object]) -> Table:
    """Make a table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    return table


def grid(title: str, columns: str, rows: Iterable[Iterable[object]]) -> Table:
    """Make a table.

    ``columns`` are names separated by ``|``. ``>`` marks columns of numbers, which are
    right-aligned.
    """
    table = Table(title=title, title_justify="left")
    for name in columns.split("|"):
        is_number = name.startswith(">")
        justify: Any = "right" if is_number else "left"
        table.add_column(
            name.removeprefix(">"), justify=justify, no_wrap=is_number, overflow="fold"
        )
    for row in rows:
        # Plain text, because document text may look like rich's markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    return table
