"""How commands write: tables for people on a terminal of any width, JSON for programs, progress on standard error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 110  # columns where the output is not a terminal; rich's own guess of 80 breaks tables


def console(*, err: bool = False) -> Console:
    """Return a console on the stream that is standard output (or error) now."""
    out = Console(stderr=err)
    return out if out.is_terminal else Console(stderr=err, width=WIDTH)


def progress(text: str) -> AbstractContextManager[Any]:
    """Show progress on standard error, so that results can be piped."""
    return console(err=True).status(text)


def show(value: Any, *tables: Table | str, as_json: bool, ok: bool = True) -> None:
    """Print a result, as JSON or as tables and lines; exit with status 1 if it is not ``ok``."""
    if as_json:
        typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))
    else:
        console().print(*tables, sep="\n", markup=False, highlight=False)
    if not ok:
        raise typer.Exit(1)


def fail(message: str) -> NoReturn:
    """Print a message on standard error and exit with status 1."""
    typer.echo(f"kvrag: {message}", err=True)
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
    """Make a table; ``columns`` are names parted by ``|``, ``>`` before those of numbers, which stand to the right."""
    table = Table(title=title, title_justify="left")
    for name in columns.split("|"):
        is_number = name.startswith(">")
        justify: Any = "right" if is_number else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))  # document text may look like rich's markup
    return table
