"""How commands write: tables for people on a terminal of any width, JSON for programs, progress apart from results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 110
"""Columns where the output is not a terminal; rich's own guess of 80 breaks tables."""


def console(*, err: bool = False) -> Console:
    """Return a console on the stream that is standard output (or error) now."""
    out = Console(stderr=err)
    return out if out.is_terminal else Console(stderr=err, width=WIDTH)


def progress(text: str) -> AbstractContextManager[Any]:
    """Show progress on standard error, so that results can be piped."""
    return console(err=True).status(text)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def facts(title: str, rows: Mapping[str, object]) -> Table:
    """Make a table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    return table


def grid(title: str, columns: Mapping[str, bool], rows: Iterable[Iterable[object]]) -> Table:
    """Make a table.

    Parameters
    ----------
    title
        Above it.
    columns
        Name → whether it holds numbers, which stand to the right.
    rows
        Cells; turned into plain text, because document text may look like rich's markup.
    """
    table = Table(title=title, title_justify="left")
    for name, is_number in columns.items():
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table
